"""The round loop of a method; `RoundLoop.rounds` shows a whole run from top to bottom.

Plain Python, so that it runs in this process or inside a Ray actor. A fault at any line loses no results: a round is a
pure function of the previous state, seed and round, a checkpoint is complete or absent, and a granted request is on
disk before it is acknowledged. The next process starts from the newest checkpoint and repeats the later rounds with the
same results. The record of a round that was saved but not recorded is sent again.

The loop knows clients, method, evaluation and checkpoints. All else that an experiment adds to its rounds is a part of
the loop with the hooks of `LoopPart`, which are called where the loop says `self.parts`.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import numpy as np

from cfl_ray.checkpoint.store import CheckpointStore
from cfl_ray.config.client_ids import clients_in_words
from cfl_ray.core.backend import Backend
from cfl_ray.core.checked_method import CheckedMethod
from cfl_ray.core.clients import Clients, RoundStats
from cfl_ray.core.events import births_and_deaths
from cfl_ray.core.rng import Draws
from cfl_ray.core.state import State
from cfl_ray.data.replay import distinct_rounds
from cfl_ray.engine.in_process import InProcessBackend
from cfl_ray.engine.reuse import ReusingBackend
from cfl_ray.errors import RunStopped, UserError
from cfl_ray.nn.network import Network
from cfl_ray.population.population import Cohort
from cfl_ray.results.trained import TrainedMethod
from cfl_ray.runtime.participation import Membership
from cfl_ray.runtime.parts.loop_part import LoopPart
from cfl_ray.runtime.parts.of_experiment import parts_of
from cfl_ray.runtime.requests import Requests
from cfl_ray.runtime.round_evaluation import RoundEvaluation
from cfl_ray.runtime.saved_rounds import CheckpointInMemory, SavedRounds
from cfl_ray.setup.first_models import start_of
from cfl_ray.setup.setup import Setup
from cfl_ray.tracking import RoundRecord
from cfl_ray.tracking.record import Status


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
        at: int | None = None,
        remembered: Mapping[int, CheckpointInMemory] | None = None,
    ):
        """at: the round from which it is restored, to use its models; None: the newest that can be used. remembered:
        rounds in memory, by number, of a run without files.
        """
        self.setup, self.experiment, self.label, self.network = setup, setup.experiment, label, network
        self.checked_method = CheckedMethod(setup.methods[label], network.spec.size)
        self.backend = ReusingBackend(backend, setup.federation, setup.attack.ids)
        requests = Requests.to(setup, label, store.directory if store else None, session)
        self.membership = Membership(setup, requests)
        self.evaluation = RoundEvaluation(
            setup, label, network, self.checked_method, self.backend, self.membership, self.clients_of
        )
        self.parts: list[LoopPart] = [*parts_of(setup, label, network.spec, self.membership, store), self.evaluation]
        self.checkpoints = SavedRounds(setup, label, network.spec.size, store, self.parts, remembered)
        self.status: Status = "starting"
        self.round = 0  # the round in progress, or the last round
        self.state: State  # of the method
        self.last_round: int  # less than `experiment.rounds` if a part permits no more
        self.restored = self._restore(at)

    # ---- the loop

    def rounds(self) -> Iterator[RoundRecord]:
        """Yields the record of the restored round (round 0: none), then of each round when it is complete.

        Errors of the method propagate.
        """
        yield self.restored
        while self.status == "running":
            with self._failing():
                stats = self.evaluation.begin(self.round, self.state.phase, self.round == self.last_round)
                self._change_membership(stats)
                cohort = self._cohort(stats)
                before, self.state = self.state, self._trained(cohort, stats)
                for part in self.parts:
                    part.end_round(stats, cohort, before, self.state)
                if stats.evaluated:
                    self._enter("evaluating", stats.round)
                    self.evaluation.evaluate(stats, self.state)
                    self._end_evaluation(stats)
                self._save_and_close(stats)
                record = self.evaluation.record(stats, unrecorded=False)
            yield replace(
                record, status=self.status, stop=self.stops_after(stats.round), ended=self._why_ended(stats.round)
            )

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

    def stops_after(self, round: int) -> bool:
        """Whether a request ends the run after this round."""
        return self.requests.stop_after is not None and round >= self.requests.stop_after

    @property
    def requests(self) -> Requests:
        """Requests to the live run."""
        return self.membership.requests

    @property
    def saved(self) -> int:
        """The last saved round; 0: none."""
        return self.checkpoints.last

    @property
    def pinned(self) -> frozenset[int]:
        """Rounds whose checkpoints stay."""
        return frozenset[int]().union(*(part.pinned for part in self.parts))

    def kept(self, backend: InProcessBackend) -> TrainedMethod:
        """The trained method after the round whose models it keeps; as `trained` unless a part names a round."""
        round = max(part.kept_round for part in self.parts)
        if round in (0, self._present):
            return self.trained(backend)
        other, store = InProcessBackend(backend.worker), self.checkpoints.store
        memory = self.checkpoints.remembered
        return RoundLoop(self.setup, self.label, self.network, other, store, at=round, remembered=memory).trained(other)

    @property
    def _present(self) -> int:
        """The last saved round; the last round if no files are kept."""
        return self.saved if self.saved or self.checkpoints.keeps_files else self.round

    def trained(self, backend: InProcessBackend) -> TrainedMethod:
        """The trained method after its last saved round; after its last round if no files are kept."""
        round = self._present
        return TrainedMethod(
            self.label,
            self.membership.federation,
            self.state,
            round,
            seed=self.experiment.seed,
            recipe=self.setup.recipe,
            spec=self.network.spec,
            constants=self.network.constants,
            checked_method=self.checked_method,
            clients_of=lambda ids: replace(
                self.clients_of(ids, max(round, 1), RoundStats()),
                evaluated=True,
                choice_samples=self.experiment.evaluation.choice_samples,
            ),
            online=self.membership.population.online,
            backend=backend,
        )

    # ---- before the first round

    def _restore(self, at: int | None) -> RoundRecord:
        """Restores the newest usable checkpoint, or that of a round; otherwise the state before round 1.

        Returns its record.
        """
        found = self.checkpoints.restore(at)
        self.membership.restore(self.saved)
        self.backend.use(self.membership.federation)
        notes: tuple[str, ...] = ()
        if found is None:
            num_clients = self.membership.federation.num_clients
            self.state = self.checked_method.init(start_of(self.experiment, self.label, self.network, num_clients))
            record = RoundRecord(0, {}, 0)
        else:
            checkpoint, self.state, record = found
            self.backend.restore(checkpoint.client_states())
            notes = (*checkpoint.refused, f"goes on after round {self.saved}")
        if (last := self.requests.stop_after) is not None and last > self.saved:
            notes += (f"ends after round {last}, as was asked before the fault",)
        self.last_round = min(part.last_round(self.saved, self.experiment.rounds) for part in self.parts)
        self._close(self.saved)
        record = self.evaluation.resumed(record)
        stop, ended = self.stops_after(self.saved), self._why_ended(self.saved)
        return replace(record, status=self.status, notes=notes, stop=stop, ended=ended)

    # ---- the steps of a round

    def _change_membership(self, stats: RoundStats) -> None:
        """Applies the schedule and the requests: shards of newcomers, clients that leave or join, changes of data."""
        round = stats.round
        if (grown := self.membership.grow(round)) is not None:
            self.backend.use(grown)
            self.state = self.state.grown(grown.num_clients)
            stats.notes.append(f"the federation grew to {grown.num_clients} clients")
        stats.assign_before_N = self.state.assign_N
        change = self.membership.advance(round)
        if len(change.left):
            before_K, because = self.state.members_K, {"clients_left": len(change.left)}
            self.state = self.checked_method.leave(self.state, change.left)
            stats.events += births_and_deaths(round, before_K, self.state.members_K, because)
            self.backend.forget(change.left)
            for part in self.parts:
                part.leave(change.left)
            stats.notes.append(f"left: {clients_in_words(change.left)}")
            stats.metrics["clients_left"] = float(len(change.left))
        if len(change.joined):
            self.state = self.checked_method.join(self.state, self.clients_of(change.joined, round, stats))
            stats.notes.append(f"joined: {clients_in_words(change.joined)}")
            stats.metrics["clients_joined"] = float(len(change.joined))
        if len(change.data_changed):
            clients = self.clients_of(change.data_changed, round, stats).not_drawn()
            self.state = self.checked_method.drift(self.state, clients)
            stats.notes.append(f"data changed: {clients_in_words(change.data_changed)}")

    def _cohort(self, stats: RoundStats) -> Cohort:
        """The clients whose updates the server waits for, after the hooks of all parts."""
        draw = partial(self.membership.cohort, stats.round)
        for part in self.parts:
            draw = partial(part.cohort, stats, self.state, draw)
        return draw()

    def _trained(self, cohort: Cohort, stats: RoundStats) -> State:
        """The state after the method's round with its cohort."""
        if not len(cohort.ids_M) and not any(part.trains_without_clients for part in self.parts):
            stats.notes.append(f"{cohort.why_empty}: a round without training")
            return self.state
        clients = self.clients_of(cohort.ids_M, stats.round, stats, cohort)
        return self.checked_method.round(self.state, clients, Draws(self.experiment.seed, stats.round))

    def _end_evaluation(self, stats: RoundStats) -> None:
        """Ends the method with this evaluated round if a part says so."""
        for part in self.parts:
            part.end_evaluation(stats)
        if (reason := self._why_ended(stats.round)) and stats.round < self.last_round:
            self.last_round = stats.round
            stats.notes.append(reason)

    def _why_ended(self, round: int) -> str:
        """Why the method ends after the complete `round`, before the last one of the experiment; empty: it does not."""
        if not round or round >= self.experiment.rounds:
            return ""
        return next((reason for part in self.parts if (reason := part.ends(round))), "")

    def _save_and_close(self, stats: RoundStats) -> None:
        """Saves the round if it is the last, or interval, state budget, part or request require it; then closes it."""
        round, pinned, states = stats.round, self.pinned, self.backend.client_states
        if pinned and not self.checkpoints.keeps_files:
            record_of = partial(self.evaluation.record, stats, unrecorded=True)
            self.checkpoints.remember(round, self.state, record_of, states, pinned)
        with self.requests.lock:  # a request to stop applies to this round if granted before, else to a later round
            must_be = round == self.last_round or self.stops_after(round) or round in pinned
            if not self.checkpoints.is_due(round, must_be, states.unsaved):
                self._close(round)
                return
            self._enter("saving", round)
        record = self.evaluation.record(stats, unrecorded=True)
        if remark := self.checkpoints.save(self.state, record, states, pinned):
            stats.notes.append(remark)
        with self.requests.lock:
            self._close(round)

    # ---- parts of the steps

    def clients_of(self, ids: np.ndarray, round: int, stats: RoundStats, cohort: Cohort | None = None) -> Clients:
        """The clients in this round, in the form that a method uses.

        cohort: the cohort, if the clients are those that train; then each tests its model after training (P-local).
        """
        experiment, present, method = self.experiment, self.membership.present, self.checked_method.method
        settings = experiment.evaluation
        clients = Clients(
            np.asarray(ids, np.int64),
            present.num_samples_N[ids],
            self.network.spec,
            self.setup.local_of(self.label).in_round(round, experiment.rounds),
            self.backend,
            seed=experiment.seed,
            round=round,
            stats=stats,
            local_test_samples=settings.local_samples if cohort is not None and settings.local else 0,
            local_parts=self.evaluation.parts,
            reachable=lambda waits: self._reachable(round, waits),
            history=partial(distinct_rounds, self.membership.federation, round),
            aggregation=method.aggregation_rule,
            num_scores=len(self.setup.task.score_names),
        )
        for part in self.parts:
            clients = part.clients(clients, cohort)
        return clients

    def _reachable(self, round: int, waits: bool) -> tuple[np.ndarray, np.ndarray]:
        """Ids and sample counts of all clients that can take part in the round. waits: the round waits for them."""
        ids = self.membership.reachable(round)
        for part in self.parts:
            ids = part.reachable(round, ids, waits)
        return ids, self.membership.present.num_samples_N[ids]
