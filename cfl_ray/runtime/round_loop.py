"""The round loop of a method: `RoundLoop.rounds` is a whole run, read from top to bottom.

Plain Python, so that it runs in this process as well as inside a Ray actor. What a fault loses, whatever line it hits:
nothing. A round is a pure function of the state before it and of (seed, round), a checkpoint is complete or absent, and
a granted request is on disk before it is acknowledged; so the next process begins at the newest checkpoint and repeats
the rounds since then, with the same results. A round that was saved and not yet recorded is reported again.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from cfl_ray.checkpoint.interval import CheckpointInterval
from cfl_ray.checkpoint.store import Checkpoint, CheckpointStore
from cfl_ray.clock.virtual_time import Flights
from cfl_ray.core.checked_method import CheckedMethod
from cfl_ray.core.clients import Clients, RoundStats, Traffic
from cfl_ray.core.events import births_and_deaths, phase_change
from cfl_ray.core.population import Cohort
from cfl_ray.core.rng import Draws
from cfl_ray.core.server_optimizers import ServerMoments
from cfl_ray.core.state import State
from cfl_ray.core.versions import Received
from cfl_ray.core.work import Backend
from cfl_ray.data.replay import distinct_rounds
from cfl_ray.engine.in_process import InProcessBackend
from cfl_ray.engine.reuse import ReusingBackend
from cfl_ray.errors import RunError, RunStopped, UserError
from cfl_ray.nn.network import Network
from cfl_ray.results.trained import TrainedMethod
from cfl_ray.run_directory import RunDirectory
from cfl_ray.runtime.journal import Journal
from cfl_ray.runtime.membership import Membership
from cfl_ray.runtime.private_run import private_run
from cfl_ray.runtime.requests import Requests
from cfl_ray.runtime.round_diagnostics import RoundDiagnostics
from cfl_ray.runtime.round_evaluation import RoundEvaluation
from cfl_ray.runtime.round_report import RoundDraft, RoundReport, Status, listed
from cfl_ray.runtime.snapshot import Snapshot
from cfl_ray.setup.first_models import start_of
from cfl_ray.setup.prepare import Setup
from cfl_ray.tracking import read_records

_NO_LIMIT = 2**62  # test samples of a client that has its own


@dataclass(frozen=True)
class RunPlan:
    """Rounds of a run, and which of them are evaluated and saved whatever else happens."""

    rounds: int
    evaluate_every: int = 1
    checkpoint_every: int | None = 1  # None: as `CheckpointInterval` says

    def evaluates(self, round: int) -> bool:
        """Whether `round` is evaluated; the last one always is."""
        return round % self.evaluate_every == 0 or round == self.rounds

    def saves(self, round: int) -> bool:
        """Whether a checkpoint follows `round`; the last one always has one."""
        return round == self.rounds or (self.checkpoint_every is not None and round % self.checkpoint_every == 0)


class RoundLoop:
    """One method on one federation: as it was after its newest checkpoint, or before round 1.

    session: names the driver's session, which a request to stop ends. Raises RunError for checkpoints that cannot be
    used.
    """

    def __init__(
        self,
        setup: Setup,
        label: str,
        network: Network,
        backend: Backend,
        store: CheckpointStore | None,
        session: str = "",
    ):
        self.setup, self.experiment = setup, (experiment := setup.experiment)
        self.label, self.network, self.store, self.method = label, network, store, setup.methods[label]
        self.steps = CheckedMethod(self.method, network.spec.size)
        self.server = None if (step := self.method.server_step) is None else ServerMoments(step)
        attackers = np.array(sorted(setup.attack.clients), np.int64)
        self.backend = ReusingBackend(backend, setup.federation, attackers)
        self.privacy = setup.privacy.get(label)
        self.private = None if self.privacy is None else private_run(self.privacy, experiment.seed, store)
        self.plan = RunPlan(experiment.rounds, experiment.evaluation.every, experiment.runtime.checkpoint_every)
        self.interval = CheckpointInterval() if store and experiment.runtime.checkpoint_every is None else None
        recorded = max((record.round for record in read_records(store.directory)), default=0) if store else 0
        journal = Journal(store.directory if store else None)
        self.requests = Requests(label, journal, setup.federation, experiment.rounds, session, recorded)
        self.membership = Membership(setup, self.requests)
        if self.private is not None:
            if self.privacy is not None and self.privacy.sampling.kind != "all":
                self.requests.fixed = "the account of privacy assumes cohorts of the clients of the start"
            self.membership.population.cohort_seed = self.private.noise.seed("cohort")
        self.num_scores = len(setup.task.score_names)  # of one client
        self.time = setup.time_of(label, network.spec, lambda ids: self.membership.present.num_samples_N[ids])
        if (time := self.time) is not None:
            self.membership.available = lambda: time.available(setup.availability)
        self.flights = None  # None: rounds are synchronous
        if setup.asynchrony is not None and self.time is not None:
            self.flights = Flights.none(setup.asynchrony, self.time)

        self.fallbacks: set[str] = set()  # why clients were not trained by the chosen engine, as noted so far
        self.status: Status = "starting"
        self.round = 0  # the round at work, or the last one
        checkpoint = store.load(self._decoded) if store else None
        self.saved = checkpoint.round if checkpoint else 0  # the last round with a checkpoint
        self.membership.restore(self.saved)
        self.backend.use(self.membership.federation)
        initial_P = network.new_model(experiment.seed, 0)
        self.evaluation = RoundEvaluation(
            setup, label, self.steps, self.backend, self.membership, self.clients_of, initial_P
        )
        snapshot = self._decoded(checkpoint) if checkpoint else self._first()
        if self.privacy is not None and self.private is not None:
            last = self.privacy.last_round(self.private.releases, self.saved, experiment.rounds)
            self.plan = replace(self.plan, rounds=last)
        self.state, self.traffic, self.local_scores_N2 = snapshot.state, snapshot.traffic, snapshot.local_scores_N2
        self.restored = self._restored(snapshot, checkpoint)
        self.diagnostics = RoundDiagnostics(() if self.restored.diagnostics else snapshot.report.diagnostics)

    # ---- the loop

    def rounds(self) -> Iterator[RoundReport]:
        """The report of the round that is restored (0: none is), then of each round when it is complete.

        Raises what the method raises.
        """
        yield self.restored
        while self.status == "running":
            stats = RoundStats(traffic=self.traffic, diagnostics=self.evaluation.no_diagnostics())
            draft = RoundDraft(self.round, self.state.phase, stats)
            with self._failing():
                self._change_membership(draft)
                cohort, received = self._next_cohort(draft)
                self._train(cohort, received, draft)
                if self.plan.evaluates(draft.round):
                    self._enter("evaluating", draft.round)
                    self.evaluation.add_to(draft, self.state, self.local_scores_N2, self.diagnostics)
                self._save_and_close(draft)
            yield self._report(draft)

    @contextmanager
    def _failing(self) -> Iterator[None]:
        """Context of a round's work: an error that a retry would not cure ends the run."""
        try:
            yield
        except UserError as error:
            self._enter("failed", self.saved)
            if isinstance(error, RunStopped):  # within the round
                self.requests.stopped(self.saved)
            raise

    def _enter(self, status: Status, round: int) -> None:
        self.status, self.round = status, round
        self.requests.set_status(status, round)

    def _close(self, round: int) -> None:
        """Goes on to the round after `round`, which is complete, unless it is the last or a request ends the run."""
        if round >= self.plan.rounds:
            self._enter("finished", round)
        elif self.stops_after(round) and round:
            self._enter("stopped", round)
        else:
            self._enter("running", round + 1)

    def stops_after(self, round: int) -> bool:
        """Whether a request ends the run after this round."""
        return self.requests.stop_after is not None and round >= self.requests.stop_after

    def _report(self, draft: RoundDraft) -> RoundReport:
        reported, stop = self.diagnostics.reported, self.stops_after(draft.round)
        if draft.scores_MV is not None:
            self.diagnostics = RoundDiagnostics()  # they go out with this round
        return draft.report(self.status, stop, reported)

    def trained(self, backend: InProcessBackend) -> TrainedMethod:
        """The trained method: after its last round, or after the last one that was saved."""
        round = self.saved if self.store else self.round
        return TrainedMethod(
            self.label,
            self.membership.federation,
            self.state,
            round,
            self.experiment.seed,
            self.setup.recipe,
            self.network.spec,
            self.network.frozen,
            self.steps,
            lambda ids: self.clients_of(ids, max(round, 1), RoundStats()),
            self.membership.population.online,
            backend,
        )

    # ---- before the first round

    def _first(self) -> Snapshot:
        """The method before round 1."""
        num_clients = self.membership.federation.num_clients
        start = start_of(self.experiment, self.label, self.network, num_clients)
        unknown_N2 = np.full((num_clients, 2), np.nan, np.float32)
        return Snapshot(self.steps.init(start), Traffic(), unknown_N2, {}, RoundReport("starting", 0))

    def _decoded(self, checkpoint: Checkpoint) -> Snapshot:
        snapshot = Snapshot.decoded(checkpoint, self.label, self.method.state_type, self.num_scores, self.private)
        if snapshot.frozen != self.setup.frozen:
            raise RunError(
                f"the model's frozen parameters (digest {self.setup.frozen or 'none'}) are not those of the run "
                f"(digest {snapshot.frozen or 'none'}); its factory and model.weights must be as when the run began"
            )
        return snapshot

    def _restored(self, snapshot: Snapshot, checkpoint: Checkpoint | None) -> RoundReport:
        """Restores what is not in the attributes of this loop, and reports the round again that was saved last."""
        notes: tuple[str, ...] = ()
        if checkpoint is not None:
            if self.server is not None:
                self.server.restore(snapshot.moments)
            if self.time is not None:
                self.time.restore(snapshot.time)
            if self.flights is not None:
                self.flights.restore(snapshot.time)
            self.backend.restore(checkpoint.client_states())
            notes = (*checkpoint.refused, f"goes on after round {self.saved}")
        if (last := self.requests.stop_after) is not None and last > self.saved:
            notes += (f"ends after round {last}, as was asked before the fault",)
        self._close(self.saved)
        evaluated = snapshot.report.scores_MV is not None
        return replace(
            snapshot.report,
            status=self.status,
            notes=notes,
            stop=self.stops_after(self.saved),
            diagnostics=snapshot.report.diagnostics if evaluated else (),
        )

    # ---- the steps of a round

    def _change_membership(self, draft: RoundDraft) -> None:
        """Carries out the schedule and requests: newcomers bring shards, clients leave, join, or get other data."""
        round = draft.round
        if (grown := self.membership.grow(round)) is not None:
            self.backend.use(grown)
            self.state = self.state.grown(grown.num_clients)
            more = np.full((grown.num_clients - len(self.local_scores_N2), 2), np.nan, np.float32)
            self.local_scores_N2 = np.concatenate([self.local_scores_N2, more])
            draft.notes.append(f"the federation grew to {grown.num_clients} clients")
        draft.assign_before_N = self.state.assign_N
        change = self.membership.advance(round)
        if len(change.left):
            before_K, because = self.state.members_K, {"clients_left": len(change.left)}
            self.state = self.steps.leave(self.state, change.left)
            draft.stats.events += births_and_deaths(round, before_K, self.state.members_K, because)
            self.backend.forget(change.left)
            if self.flights is not None:
                self.flights.leave(change.left)
            self._set_local_scores(change.left, np.nan)
            draft.notes.append(f"left: {listed(change.left)}")
            draft.metrics["clients_left"] = float(len(change.left))
        if len(change.joined):
            self.state = self.steps.join(self.state, self.clients_of(change.joined, round, draft.stats))
            draft.notes.append(f"joined: {listed(change.joined)}")
            draft.metrics["clients_joined"] = float(len(change.joined))
        if len(change.data_changed):
            self.state = self.steps.drift(self.state, self.clients_of(change.data_changed, round, draft.stats))
            draft.notes.append(f"data changed: {listed(change.data_changed)}")

    def _next_cohort(self, draft: RoundDraft) -> tuple[Cohort, Received | None]:
        """The clients whose updates the server waits for; of an asynchronous round, also what they have received."""
        membership = self.membership
        if self.flights is None:
            cohort, wanted = membership.cohort(draft.round)
            return (cohort if self.time is None else self.time.wait_for(draft.round, cohort, wanted)), None
        ids, received = self.flights.next_cohort(
            draft.round,
            self.state,
            membership.concurrency,
            membership.population,
            self.setup.availability,
            self.experiment.cohort.dropout,
        )
        if stale := self.flights.stale:
            draft.metrics["updates_stale"] = float(stale)
        if len(ids):
            tau_M = [draft.round - 1 - received.version_of[client] for client in ids.tolist()]
            draft.metrics["staleness"] = float(np.mean(tau_M))
        return Cohort(ids, self.flights.dropped), received

    def _end_time(self, cohort: Cohort, before: State, draft: RoundDraft) -> None:
        """Adds the round to the virtual time. before: the state that its clients received."""
        if self.time is None:
            return
        unused = cohort.past_deadline + cohort.surplus + int(draft.metrics.get("updates_stale", 0))
        self.time.count_unused(unused, draft.stats.traffic)
        self.time.end_round()
        draft.metrics["virtual_seconds"] = self.time.now
        counts = {"clients_past_deadline": cohort.past_deadline, "clients_surplus": cohort.surplus}
        draft.metrics |= {name: float(count) for name, count in counts.items() if count}
        if self.flights is not None:
            self.flights.advance(draft.round, before, self.state)

    def _train(self, cohort: Cohort, received: Received | None, draft: RoundDraft) -> None:
        """The method's round with its cohort."""
        before = self.state
        if self.server is not None:
            self.server.begin()
        if len(cohort.ids_M) or self.private is not None:
            test_locally = self.experiment.evaluation.local
            clients = self.clients_of(cohort.ids_M, draft.round, draft.stats, test_locally=test_locally)
            clients = replace(clients, received=received)
            self.state = self.steps.round(self.state, clients, Draws(self.experiment.seed, draft.round))
            self._charge(draft)
        else:
            late = "finished before the deadline" if cohort.past_deadline else "could be reached"
            draft.notes.append(f"no client {late}: a round without training")
        self._end_time(cohort, before, draft)
        stats = draft.stats
        self._set_local_scores(list(stats.local_scores), list(stats.local_scores.values()))
        if cohort.dropped:
            draft.metrics["clients_dropped"] = float(cohort.dropped)
        draft.exclude(stats)
        draft.metrics |= {"cohort_size": float(len(cohort.ids_M)), "updates_rejected": float(len(stats.rejected))}
        draft.fallbacks = sorted(stats.fallbacks - self.fallbacks)
        draft.notes += draft.fallbacks
        self.fallbacks |= stats.fallbacks
        draft.note_moves(self.state.assign_N)
        stats.events += phase_change(draft.round, draft.phase, self.state.phase)
        if stats.train_loss:
            draft.metrics["train_loss"] = float(np.mean(list(stats.train_loss.values())))
        self.diagnostics.take(draft, stats.diagnostics)
        draft.trained()

    def _charge(self, draft: RoundDraft) -> None:
        """Enters what the round released into the account of a private run. Raises RunError beyond its budget."""
        if self.privacy is None or self.private is None:
            return
        self.private.end_round()
        last = draft.round == self.plan.rounds
        if not (self.plan.evaluates(draft.round) or last):
            return
        epsilon, target = self.privacy.epsilon(self.private.releases), self.privacy.target
        draft.metrics |= {"epsilon": epsilon, "clip_norm": self.private.norm}
        if target is not None and epsilon > target * 1.0001:
            raise RunError(
                f"{self.label} has released more than its plan: epsilon {epsilon:.4g} after round {draft.round}, the "
                f"budget is {target:g}; the round is not saved"
            )
        if last and draft.round < self.experiment.rounds:
            draft.notes.append(f"ends after round {draft.round}: the next one would exceed epsilon {target:g}")

    def _save_and_close(self, draft: RoundDraft) -> None:
        """Saves the round if the plan, the interval or a request to stop says so, and goes on to the next one."""
        round = draft.round
        with self.requests.lock:  # until here a request to stop is granted for this round, from here on for a later one
            is_due = self.interval is not None and self.interval.is_due()
            saves = self.stops_after(round) or is_due or self.plan.saves(round)
            self._enter("saving", round) if saves else self._close(round)
        if saves:
            self._save(draft)
            with self.requests.lock:
                self._close(round)

    def _save(self, draft: RoundDraft) -> None:
        if self.store is None:
            return
        self.diagnostics.resolve()
        moments = {} if self.server is None else self.server.to_tensors()
        report = replace(draft.report("saving", False, ()), diagnostics=self.diagnostics.reported)
        time = {} if self.time is None else self.time.to_tensors()
        time |= {} if self.flights is None else self.flights.to_tensors()
        snapshot = Snapshot(
            self.state, self.traffic, self.local_scores_N2, moments, report, self.setup.frozen, self.private, time
        )
        with nullcontext() if self.interval is None else self.interval.measured():
            RunDirectory(self.store.directory).sync_records()
            tensors, values = snapshot.encoded(self.num_scores)
            if remark := self.store.save(draft.round, tensors, values, self.backend):
                draft.notes.append(remark)
        self.saved = draft.round

    # ---- parts of the steps

    def clients_of(self, ids: np.ndarray, round: int, stats: RoundStats, *, test_locally: bool = False) -> Clients:
        """These clients in this round, as a method works with them. test_locally: whether each tests its model after
        training (P-local).
        """
        experiment, present = self.experiment, self.membership.present
        own_tests = present.view == "holdout"
        test_samples = _NO_LIMIT if own_tests else experiment.evaluation.local_images
        return Clients(
            np.asarray(ids, np.int64),
            present.num_samples_N[ids],
            self.network.spec,
            self.setup.local_of(self.label).in_round(round, experiment.rounds),
            self.backend,
            experiment.seed,
            round,
            stats,
            local_test_samples=test_samples if test_locally else 0,
            reachable=lambda: self._reachable(round),
            history=partial(distinct_rounds, self.membership.federation, round),
            aggregation=self.method.aggregation_rule,
            server=self.server,
            num_scores=self.num_scores,
            private=self.private,
        )

    def _reachable(self, round: int) -> tuple[np.ndarray, np.ndarray]:
        """Ids and sample counts of all clients that can take part in the round; the round waits for them."""
        ids, num_samples = self.membership.reachable(round)
        if self.time is None:
            return ids, num_samples
        in_time = self.time.in_time(round, ids)
        return ids[in_time], num_samples[in_time]

    def _set_local_scores(self, ids: Sequence[int] | np.ndarray, scores: Any) -> None:
        """Makes a new array if any score changes: a checkpoint compares with the array saved last."""
        if len(ids):
            self.local_scores_N2 = self.local_scores_N2.copy()
            self.local_scores_N2[ids] = scores
