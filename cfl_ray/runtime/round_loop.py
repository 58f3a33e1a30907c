"""The round loop of a method; `RoundLoop.rounds` shows a whole run from top to bottom.

Plain Python, so that it runs in this process or inside a Ray actor. A fault at any line loses no results: a round is a
pure function of the previous state, seed and round, a checkpoint is complete or absent, and a granted request is on
disk before it is acknowledged. The next process starts from the newest checkpoint and repeats the later rounds with the
same results. A round that was saved but not recorded is reported again.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from cfl_ray.checkpoint.store import Checkpoint, CheckpointInterval, CheckpointStore
from cfl_ray.config.client_ids import clients_in_words
from cfl_ray.core.backend import Backend
from cfl_ray.core.checked_method import CheckedMethod
from cfl_ray.core.clients import Clients, RoundStats, Traffic
from cfl_ray.core.events import births_and_deaths
from cfl_ray.core.local_sgd import LocalSGD
from cfl_ray.core.privacy import Protection
from cfl_ray.core.rng import Draws
from cfl_ray.core.server_optimizers import ServerMoments
from cfl_ray.core.versions import Received
from cfl_ray.data.replay import distinct_rounds
from cfl_ray.engine.in_process import InProcessBackend
from cfl_ray.engine.reuse import ReusingBackend
from cfl_ray.errors import RunError, RunStopped, UserError
from cfl_ray.nn.held import in_words, is_same
from cfl_ray.nn.network import Network
from cfl_ray.plugins.calling import place_of
from cfl_ray.population.population import Cohort
from cfl_ray.results.trained import TrainedMethod
from cfl_ray.run_directory import RunDirectory
from cfl_ray.runtime.journal import Journal
from cfl_ray.runtime.participation import Membership, Participation
from cfl_ray.runtime.private_run import ClientPrivacy, SamplePrivacy
from cfl_ray.runtime.requests import Requests
from cfl_ray.runtime.round_evaluation import RoundDiagnostics, RoundEvaluation
from cfl_ray.runtime.round_report import RoundDraft, RoundReport, Status
from cfl_ray.runtime.snapshot import Part, Snapshot
from cfl_ray.setup.first_models import start_of
from cfl_ray.setup.protection import check_joining
from cfl_ray.setup.setup import Setup
from cfl_ray.tracking import last_record

_NO_LIMIT = 2**62  # test samples of a client with its own test data


class RoundLoop:
    """One method on one federation, restored from its newest checkpoint, or before round 1.

    session: name of the driver's session, which a request to stop ends. Raises RunError if there are checkpoints but
    none can be used.
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
        self.setup, self.experiment, self.label = setup, (experiment := setup.experiment), label
        self.network, self.store, self.method = network, store, setup.methods[label]
        self.num_scores = len(setup.task.score_names)  # of one client

        # the method
        self.steps = CheckedMethod(self.method, network.spec.size)
        self.server_moments = None if (step := self.method.server_step) is None else ServerMoments(step)
        self.backend = ReusingBackend(backend, setup.federation, setup.attack.ids)
        plan, samples, seed = setup.privacy.get(label), setup.examples.get(label), experiment.seed
        self.client_privacy = None if plan is None else ClientPrivacy(plan, seed, store)
        self.private_run = None if self.client_privacy is None else self.client_privacy.run
        config = experiment.privacy
        self.sample_privacy = None if not (config and samples) else SamplePrivacy(config, samples, seed, store)

        # its clients
        last = last_record(store.directory) if store else None
        recorded = last.round if last else 0
        journal = Journal(store.directory if store else None)
        check = partial(check_joining, setup, label)
        self.requests = Requests(label, journal, setup.federation, check, experiment.rounds, session, recorded)
        self.membership = Membership(setup, self.requests)
        if self.client_privacy is not None:
            self.client_privacy.seed_cohorts(self.membership.population, self.requests)
        self.participation = Participation(setup, label, network.spec, self.membership)
        self.parts: dict[str, Part] = {"server.time.": self.participation}  # in checkpoints
        if self.server_moments is not None:
            self.parts["server.optimizer."] = self.server_moments
        if self.sample_privacy is not None:
            self.parts["server.privacy."] = self.sample_privacy.account
        initial_P = network.new_model(experiment.seed, 0)
        self.evaluation = RoundEvaluation(
            setup, label, self.steps, self.backend, self.membership, self.clients_of, initial_P
        )

        # its rounds
        self.last_round = experiment.rounds  # fewer if they would exceed the privacy budget
        self.interval = CheckpointInterval(experiment.runtime.checkpoint_every)
        self.fallbacks: set[str] = set()  # reasons noted so far why the chosen engine did not train clients
        self.status: Status = "starting"
        self.round = 0  # the round in progress, or the last round
        self.diagnostics = RoundDiagnostics()  # not recorded yet
        self.restored = self._restore()

    # ---- the loop

    def rounds(self) -> Iterator[RoundReport]:
        """Yields the report of the restored round (round 0: none), then of each round when it is complete.

        Errors of the method propagate.
        """
        yield self.restored
        while self.status == "running":
            stats = RoundStats(traffic=self.traffic, diagnostics=self.evaluation.new_diagnostics())
            draft = RoundDraft(self.round, self.state.phase, stats)
            with self._failing():
                self._change_membership(draft)
                cohort, received = self.participation.cohort(draft, self.state)
                self._train(cohort, received, draft)
                if self.evaluates(draft.round):
                    self._enter("evaluating", draft.round)
                    self.evaluation.add_to(draft, self.state, self.local_scores_N2, self.diagnostics)
                self._save_and_close(draft)
            yield self._report(draft)

    @contextmanager
    def _failing(self) -> Iterator[None]:
        """Context of a round's work; a UserError, which a retry would not cure, ends the run."""
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
        """Sets the status after the complete `round`: finished, stopped on request, or running the next round."""
        if round >= self.last_round:
            self._enter("finished", round)
        elif self.stops_after(round) and round:
            self._enter("stopped", round)
        else:
            self._enter("running", round + 1)

    def evaluates(self, round: int) -> bool:
        """Whether this round is evaluated; the last round always is."""
        return round % self.experiment.evaluation.every == 0 or round == self.last_round

    def stops_after(self, round: int) -> bool:
        """Whether a request ends the run after this round."""
        return self.requests.stop_after is not None and round >= self.requests.stop_after

    def _report(self, draft: RoundDraft) -> RoundReport:
        reported, stop = self.diagnostics.reported, self.stops_after(draft.round)
        if draft.scores_MV is not None:
            self.diagnostics = RoundDiagnostics()  # the report of this round has those so far
        return draft.report(self.status, stop, reported)

    def trained(self, backend: InProcessBackend) -> TrainedMethod:
        """The trained method after its last saved round; after its last round if no files are kept."""
        round = self.saved if self.store else self.round
        return TrainedMethod(
            self.label,
            self.membership.federation,
            self.state,
            round,
            seed=self.experiment.seed,
            recipe=self.setup.recipe,
            spec=self.network.spec,
            constants=self.network.constants,
            steps=self.steps,
            clients_of=lambda ids: replace(
                self.clients_of(ids, max(round, 1), RoundStats()),
                evaluated=True,
                choice_samples=self.experiment.evaluation.choice_samples,
            ),
            online=self.membership.population.online,
            backend=backend,
        )

    # ---- before the first round

    def _restore(self) -> RoundReport:
        """Restores the newest usable checkpoint, otherwise the state before round 1. Returns its report."""
        loaded = self.store.load_as(lambda checkpoint: (checkpoint, self._decoded(checkpoint))) if self.store else None
        self.saved = loaded[0].round if loaded else 0  # the last round with a checkpoint
        self.membership.restore(self.saved)
        self.backend.use(self.membership.federation)
        notes: tuple[str, ...] = ()
        if loaded is None:
            snapshot = self._first()
        else:
            checkpoint, snapshot = loaded
            self.backend.restore(checkpoint.client_states())
            notes = (*checkpoint.refused, f"goes on after round {self.saved}")
        self.state, self.traffic, self.local_scores_N2 = snapshot.state, snapshot.traffic, snapshot.local_scores_N2
        if self.client_privacy is not None:
            self.last_round = self.client_privacy.last_round(self.saved, self.experiment.rounds)
        if (last := self.requests.stop_after) is not None and last > self.saved:
            notes += (f"ends after round {last}, as was asked before the fault",)
        self._close(self.saved)
        reported, evaluated = snapshot.report.diagnostics, snapshot.report.scores_MV is not None
        self.diagnostics = RoundDiagnostics(() if evaluated else reported)
        return replace(
            snapshot.report,
            status=self.status,
            notes=notes,
            stop=self.stops_after(self.saved),
            diagnostics=reported if evaluated else (),
        )

    def _first(self) -> Snapshot:
        """The snapshot before round 1."""
        num_clients = self.membership.federation.num_clients
        start = start_of(self.experiment, self.label, self.network, num_clients)
        unknown_N2 = np.full((num_clients, 2), np.nan, np.float32)
        return Snapshot(self.steps.init(start), Traffic(), unknown_N2, RoundReport("starting", 0))

    def _decoded(self, checkpoint: Checkpoint) -> Snapshot:
        """The snapshot in a checkpoint. Raises RunError if it is not one of this method and model."""
        snapshot = Snapshot.decoded(
            checkpoint, self.label, self.method.state_type, self.num_scores, self.parts, self.private_run
        )
        if snapshot.frozen != self.setup.frozen:
            raise RunError(
                f"the model's frozen parameters (digest {self.setup.frozen or 'none'}) are not those of the run "
                f"(digest {snapshot.frozen or 'none'}); its factory and model.weights must be as when the run began"
            )
        if (saved := snapshot.state.models_KP.shape[-1]) != self.network.spec.size:
            raise RunError(
                f"the model {place_of(self.setup.recipe.factory)} has {self.network.spec.size} trained parameters and "
                f"statistics, and the models of the run have {saved}; its code must be as when the run began"
            )
        now, then = self.setup.recipe.constants, snapshot.constants
        for name in sorted(now.keys() | then.keys()) if then else ():
            if not is_same(now.get(name, []), then.get(name, [])):
                raise RunError(
                    f"the model's constant {name} is {in_words(now.get(name))}, but {in_words(then.get(name))} in the "
                    "run; its factory, with the files and modules that it reads, must be as when the run began"
                )
        return snapshot

    # ---- the steps of a round

    def _change_membership(self, draft: RoundDraft) -> None:
        """Applies the schedule and the requests: shards of newcomers, clients that leave or join, changes of data."""
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
            self.participation.leave(change.left)
            self._set_local_scores(change.left, np.nan)
            draft.notes.append(f"left: {clients_in_words(change.left)}")
            draft.metrics["clients_left"] = float(len(change.left))
        if len(change.joined):
            self.state = self.steps.join(self.state, self.clients_of(change.joined, round, draft.stats))
            draft.notes.append(f"joined: {clients_in_words(change.joined)}")
            draft.metrics["clients_joined"] = float(len(change.joined))
        if len(change.data_changed):
            clients = self.clients_of(change.data_changed, round, draft.stats)  # no random cohort
            self.state = self.steps.drift(
                self.state, replace(clients, protection=clients.protection.of_all_reachable())
            )
            draft.notes.append(f"data changed: {clients_in_words(change.data_changed)}")

    def _train(self, cohort: Cohort, received: Received | None, draft: RoundDraft) -> None:
        """Runs the method's round with its cohort."""
        before = self.state
        if self.server_moments is not None:
            self.server_moments.begin()
        if len(cohort.ids_M) or self.client_privacy is not None:
            test_locally = self.experiment.evaluation.local
            clients = self.clients_of(cohort.ids_M, draft.round, draft.stats, test_locally=test_locally)
            clients = replace(clients, received=received, protection=replace(clients.protection, absent=cohort.absent))
            self.state = self.steps.round(self.state, clients, Draws(self.experiment.seed, draft.round))
        else:
            late = "finished before the deadline" if cohort.past_deadline else "could be reached"
            draft.notes.append(f"no client {late}: a round without training")
        evaluated = self.evaluates(draft.round)
        if self.client_privacy is not None:
            self.client_privacy.end_round(draft, evaluated, draft.round == self.last_round < self.experiment.rounds)
        if self.sample_privacy is not None:
            self.sample_privacy.end_round(draft, evaluated)
        self.participation.end_round(cohort, before, self.state, draft)
        stats = draft.stats
        self._set_local_scores(list(stats.local_scores), list(stats.local_scores.values()))
        draft.end_training(len(cohort.ids_M), self.state, self.fallbacks)
        self.fallbacks |= stats.fallbacks
        self.diagnostics.take(draft, stats.diagnostics)

    def _save_and_close(self, draft: RoundDraft) -> None:
        """Closes the round; saves it before if it is the last, or if interval, state budget or a request require it."""
        round = draft.round
        with self.requests.lock:  # a request to stop applies to this round if granted before, else to a later round
            is_due = round == self.last_round or self.stops_after(round) or self.interval.is_due(round)
            is_due |= self.backend.client_states.unsaved > self.experiment.runtime.state_budget
            store = self.store if is_due else None
            if store:
                self._enter("saving", round)
            else:
                self._close(round)
        if store:
            self._save(draft, store)
            with self.requests.lock:
                self._close(round)

    def _save(self, draft: RoundDraft, store: CheckpointStore) -> None:
        self.diagnostics.resolve()
        report = replace(draft.report("saving", False, ()), diagnostics=self.diagnostics.reported)
        snapshot = Snapshot(
            self.state, self.traffic, self.local_scores_N2, report, self.setup.frozen, self.setup.recipe.constants
        )
        with self.interval.measured():
            RunDirectory(store.directory).sync_records()
            tensors, values = snapshot.encoded(self.num_scores, self.parts, self.private_run)
            if remark := store.save(draft.round, tensors, values, self.backend.client_states):
                draft.notes.append(remark)
        self.saved = draft.round

    # ---- parts of the steps

    def clients_of(self, ids: np.ndarray, round: int, stats: RoundStats, *, test_locally: bool = False) -> Clients:
        """The clients in this round, in the form that a method uses.

        test_locally: whether each client tests its model after training (P-local).
        """
        experiment, present = self.experiment, self.membership.present
        own_tests = present.view == "holdout"
        test_samples = _NO_LIMIT if own_tests else experiment.evaluation.local_samples
        return Clients(
            np.asarray(ids, np.int64),
            present.num_samples_N[ids],
            self.network.spec,
            self._local(round),
            self.backend,
            seed=experiment.seed,
            round=round,
            stats=stats,
            local_test_samples=test_samples if test_locally else 0,
            reachable=lambda: self.participation.reachable(round),
            history=partial(distinct_rounds, self.membership.federation, round),
            aggregation=self.method.aggregation_rule,
            server_moments=self.server_moments,
            num_scores=self.num_scores,
            protection=Protection(self.private_run, self.setup.secure),
        )

    def _local(self, round: int) -> LocalSGD:
        """The method's local training in this round."""
        local = self.setup.local_of(self.label).in_round(round, self.experiment.rounds)
        return local if self.sample_privacy is None else replace(local, examples=self.sample_privacy.noise)

    @np.errstate(over="ignore")  # scores beyond float32 are infinite
    def _set_local_scores(self, ids: Sequence[int] | np.ndarray, scores: Any) -> None:
        """Sets scores in a new array, because a checkpoint compares with the array that was saved last."""
        if len(ids):
            self.local_scores_N2 = self.local_scores_N2.copy()
            self.local_scores_N2[ids] = scores
