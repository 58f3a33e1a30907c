"""The round loop of one method. Plain Python, so that it runs in this process as well as inside a Ray actor."""

import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Annotated, Any

import numpy as np
import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from cfl_ray.core.checked_method import CheckedMethod
from cfl_ray.core.clients import Clients, RoundStats, Traffic
from cfl_ray.core.diagnostics import CLIENTS, CLUSTERS, Diagnostic, Diagnostics, ReportedDiagnostic
from cfl_ray.core.method import Start
from cfl_ray.core.population import Population, PopulationChange
from cfl_ray.core.rng import Draws
from cfl_ray.core.server_optimizers import ServerMoments
from cfl_ray.core.serving import Serving
from cfl_ray.core.state import State
from cfl_ray.core.work import Backend
from cfl_ray.data.federation import Federation
from cfl_ray.engine.network import Network
from cfl_ray.engine.reuse import ReusingBackend
from cfl_ray.errors import RunError, RunStopped, UserError
from cfl_ray.runtime.checkpoint.cadence import Cadence
from cfl_ray.runtime.checkpoint.store import Checkpoint, CheckpointStore
from cfl_ray.runtime.evaluation import (
    Evaluator,
    Scores,
    cluster_metrics,
    cluster_vectors,
    initial_scores,
    mean_of_defined,
    score_metrics,
)
from cfl_ray.runtime.journal import Journal
from cfl_ray.runtime.label_counts import LabelCounts, compared_clients
from cfl_ray.runtime.lifecycle import (
    Broken,
    Done,
    Evaluating,
    Finished,
    LifecycleEvent,
    Loaded,
    Running,
    RunPlan,
    RunState,
    Saving,
    Starting,
    Stopped,
    next_state,
)
from cfl_ray.runtime.prepare import Setup
from cfl_ray.runtime.record_files import sync_records
from cfl_ray.runtime.requests import Requests
from cfl_ray.tracking import read_records
from cfl_ray.tracking.record import LABEL_COUNTS, cluster_diagnostics_of, taken_names

_NO_LIMIT = 2**62  # test samples of a client that has its own
_MOMENTS = "server.optimizer."  # first part of the names of the server optimiser's tensors in a checkpoint
_DIAGNOSTICS = "server.diagnostics."  # the same, of the arrays that the method reported
_LISTED = 8  # clients that a note names


@dataclass(frozen=True)
class RoundReport:
    """The state and metrics after a round (or, with round 0, after the loop was loaded)."""

    state: RunState
    round: int
    metrics: dict[str, float] = field(default_factory=dict)
    notes: tuple[str, ...] = ()  # one line each, shown to the user
    moved: tuple[tuple[int, int], ...] = ()  # (client, cluster) of every client whose cluster changed in this round
    scores_M4: np.ndarray | None = None  # float64: client, the task's metrics, loss of each client; None: not evaluated
    time_ms: int = 0
    stop: bool = False  # a request ends the run here
    numbers: tuple[str, ...] = ()  # names in `metrics` of the method's diagnostics
    diagnostics: tuple[ReportedDiagnostic, ...] = ()  # arrays since the evaluated round before; empty: not evaluated

    @property
    def finished(self) -> bool:
        return isinstance(self.state, Finished)


class _SavedTraffic(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")
    down_bits: int
    up_bits: int


class _SavedDiagnostic(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")
    name: str
    round: int
    axes: list[str]


class _SavedReport(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")
    metrics: dict[str, float]
    moved: list[Annotated[list[int], Field(min_length=2, max_length=2)]]  # client, cluster
    time_ms: int
    numbers: list[str] = []
    diagnostics: list[_SavedDiagnostic] = []


class _SavedValues(BaseModel):
    """The JSON values of a checkpoint."""

    model_config = ConfigDict(strict=True, extra="forbid")
    state: dict[str, Any]  # fields of the method's state that are no tensors
    traffic: _SavedTraffic
    report: _SavedReport


@dataclass(frozen=True)
class _Saved:
    """The content of a checkpoint, client states aside."""

    state: State
    traffic: Traffic
    local_scores_N2: np.ndarray
    moments: dict[str, torch.Tensor]  # of the server optimiser
    report: RoundReport


class RoundLoop:
    """One method on one federation. `advance` performs states until a round is complete.

    Raises what the method raises; a checkpoint and the journal hold everything that another process needs to go on.
    session: names the driver's session, which a request to stop ends.
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
        self.experiment, self.federation = setup.experiment, setup.federation
        self.setup, self.availability, self.learning = setup, setup.availability, setup.learning_of(label)
        self.attackers = np.array(sorted(setup.attack.clients), np.int64)
        self.method, self.network, self.store = setup.methods[label], network, store
        self.backend = ReusingBackend(backend, self.federation, self.attackers)
        self.steps = CheckedMethod(self.method, network.spec.size)
        self.aggregation, step = self.method.aggregation_rule, self.method.server_step
        self.server = None if step is None else ServerMoments(step)
        experiment = self.experiment
        self.label = label
        self.plan = RunPlan(experiment.rounds, experiment.evaluation.every, experiment.runtime.checkpoint_every)
        self.cadence = Cadence() if store is not None and experiment.runtime.checkpoint_every is None else None
        self.task, self.primary = setup.task, setup.task.metrics[0].name
        self.evaluator = Evaluator(experiment.evaluation, self.federation, self.backend, experiment.seed, self.task)
        journal = Journal(store.directory if store else None)
        recorded = [record.round for record in read_records(store.directory)] if store else []
        last = max(recorded, default=0)
        self.requests = Requests(label, journal, self.federation, experiment.rounds, session, last)
        self.now: RunState = Starting()
        self.saved = 0  # the last round with a checkpoint
        self.state: State
        self.scores_M4: np.ndarray | None = None  # of the evaluation of this round: see `RoundReport`
        self.taken = taken_names([metric.name for metric in self.task.metrics])
        self.diagnostics: dict[str, ReportedDiagnostic] = {}  # arrays since the evaluated round before, by name
        self.deferred: dict[str, tuple[int, Diagnostics]] = {}  # those that are not made yet: (round, found there)
        self.label_counts = LabelCounts(self.federation.shape.num_classes)
        self.report = RoundReport(self.now, 0)

    # ---- the loop

    @property
    def round(self) -> int:
        """The round at work, or the last one."""
        return getattr(self.now, "round", self.saved)

    def advance(self) -> RoundReport:
        """Goes on until the next round is complete: trained, evaluated and saved as planned.

        The first call restores the newest checkpoint, or makes the first state, and trains nothing.
        """
        if isinstance(self.now, Starting):
            round = self._load()
            self._enter(Loaded(round))
            notes = self.report.notes + ((f"goes on after round {round}",) if round else ())
            if (last := self.requests.stop_after) is not None and last > round:
                notes += (f"ends after round {last}, as was asked before the fault",)
            return replace(self.report, state=self.now, notes=notes, stop=self._stops_after(round))
        while True:
            round = self.round
            try:
                self._perform(self.now)
            except UserError as error:
                self._enter(Broken(str(error), self.saved))
                if isinstance(error, RunStopped):  # within the round
                    self.requests.stopped(self.saved)
                raise
            # a request to stop is taken up before the next round, or answered with a later one
            with self.requests.lock:
                due = self.cadence is not None and self.cadence.is_due()
                self._enter(Done(self._stops_after(round), due))
            if isinstance(self.now, Finished | Stopped) or (isinstance(self.now, Running) and self.now.round > round):
                return self._report(round)

    def _perform(self, now: RunState) -> None:
        match now:
            case Running(round):
                self._run(round)
            case Evaluating(round):
                self._evaluate(round)
            case Saving(round):
                self._save(round)
            case _:
                raise ValueError(f"nothing to perform in {now}")

    def _enter(self, event: LifecycleEvent) -> None:
        self.now = next_state(self.now, event, self.plan)
        self.requests.set_state(self.now)

    def _stops_after(self, round: int) -> bool:
        return self.requests.stop_after is not None and round >= self.requests.stop_after

    def _report(self, round: int) -> RoundReport:
        stop = self._stops_after(round)
        return RoundReport(
            self.now,
            round,
            self.metrics,
            tuple(self.notes),
            tuple(self.moved),
            self.scores_M4,
            self.time_ms,
            stop,
            tuple(self.numbers),
            tuple(self.diagnostics.values()) if self.scores_M4 is not None else (),
        )

    # ---- starting

    def _load(self) -> int:
        """Restores everything as it was after the newest checkpoint, or before round 1. Returns that round."""
        experiment, federation = self.experiment, self.federation
        changes = [
            PopulationChange(event.round, tuple(event.join), tuple(event.leave)) for event in experiment.schedule
        ]
        self.population = Population(federation.num_clients, changes, experiment.seed)
        self.initial_P = self.network.new_model(experiment.seed, 0)
        self.traffic = Traffic()
        # P-local of every client: the first two scores (accuracy and macro-F1 of classes) after its last own training
        self.local_scores_N2 = np.full((federation.num_clients, 2), np.nan, np.float32)
        checkpoint = self.store.load(self._saved) if self.store else None
        round = checkpoint.round if checkpoint else 0
        self.requests.go_on_after(round)
        self._use(self.requests.federation(round))
        self._look_at(round)
        self.requests.set_population(self.population)
        if checkpoint is None:
            self.state = self.steps.init(self._start())
        else:
            self._restore(checkpoint)
        return round

    def _start(self) -> Start:
        def new_model(index: int) -> torch.Tensor:
            return self.network.new_model(self.experiment.seed, index)

        return Start(self.federation.num_clients, self.network.spec, new_model, self.federation.shape.input)

    def _restore(self, checkpoint: Checkpoint) -> None:
        saved, self.saved = self._saved(checkpoint), checkpoint.round
        self.state, self.traffic, self.local_scores_N2 = saved.state, saved.traffic, saved.local_scores_N2
        if self.server is not None:
            self.server.restore(saved.moments)
        for event in self.requests.journal.until(checkpoint.round):
            self.population.add(event.change, self.requests.federation(event.round).num_clients)
        self.population.advance(checkpoint.round)
        self.requests.take_up(checkpoint.round)
        self.requests.set_population(self.population)
        self.backend.restore(checkpoint.client_states())
        self.scores_M4 = saved.report.scores_M4
        self.diagnostics = {one.name: one for one in saved.report.diagnostics}
        self.report = replace(saved.report, state=self.now, notes=checkpoint.refused)
        if self.scores_M4 is None:
            self.report = replace(self.report, diagnostics=())  # they go out with the next evaluated round

    def _saved(self, checkpoint: Checkpoint) -> _Saved:
        """The content of a checkpoint. Raises RunError where that is not what `_save` writes for this method."""
        tensors = dict(checkpoint.tensors)
        try:
            values = _SavedValues.model_validate(checkpoint.values)
            local_scores_N2 = tensors.pop("server.local_scores_N2").numpy()
            scores_M4 = tensors.pop("server.scores_M4").numpy()
            names = [name for name in tensors if name.startswith(_MOMENTS)]
            moments = {name.removeprefix(_MOMENTS): tensors.pop(name) for name in names}
            diagnostics = tuple(_saved_diagnostic(one, tensors) for one in values.report.diagnostics)
            state = self.method.state_type.from_checkpoint(tensors, values.state)
            count = len(state.assign_N)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            reason = str(error).partition("\n")[0] if isinstance(error, TypeError | ValidationError) else repr(error)
            raise RunError(f"it is no checkpoint of {self.label}: {reason}") from error
        if local_scores_N2.shape != (count, 2) or scores_M4.shape[1:] != (1 + len(self.task.score_names),):
            raise RunError(
                f"it is no checkpoint of {self.label}: scores of shape {local_scores_N2.shape} and {scores_M4.shape} "
                f"for {count} clients"
            )
        moved = tuple((client, cluster) for client, cluster in values.report.moved)
        scores = scores_M4 if len(scores_M4) else None
        report = RoundReport(
            Starting(),
            checkpoint.round,
            values.report.metrics,
            moved=moved,
            scores_M4=scores,
            time_ms=values.report.time_ms,
            numbers=tuple(values.report.numbers),
            diagnostics=diagnostics,
        )
        traffic = Traffic(values.traffic.down_bits, values.traffic.up_bits)
        return _Saved(state, traffic, local_scores_N2, moments, report)

    # ---- the effects of the states

    def _run(self, round: int) -> None:
        if self.scores_M4 is not None:
            self.diagnostics = {}  # they went out with the round before
        began, self.notes, self.metrics, self.scores_M4 = time.perf_counter(), [], {}, None
        self.numbers: list[str] = []
        self._take_up_requests(round)
        before_N = self.state.assign_N
        self.stats = RoundStats(traffic=self.traffic, diagnostics=self._no_diagnostics())
        self._come_and_go(round)
        settings = self.experiment.cohort
        cohort = self.population.draw(round, settings.fraction, settings.clients, self.availability, settings.dropout)
        if self.server is not None:
            self.server.begin()
        if len(cohort.ids_M):
            clients = self.clients_of(cohort.ids_M, round, test_locally=self.experiment.evaluation.local)
            self.state = self.steps.round(self.state, clients, Draws(self.experiment.seed, round))
        else:
            self.notes.append("no client could be reached: a round without training")
        self._set_local_scores(list(self.stats.local_scores), list(self.stats.local_scores.values()))
        if cohort.dropped:
            self.metrics["clients_dropped"] = float(cohort.dropped)
        self._note_excluded(self.stats)
        self.moved = _moved(before_N, self.state.assign_N)
        if self.stats.train_loss:
            self.metrics["train_loss"] = float(np.mean(list(self.stats.train_loss.values())))
        self._take_diagnostics(round, self.stats.diagnostics)
        self.metrics["round_seconds"] = time.perf_counter() - began
        self.time_ms = time.time_ns() // 1_000_000

    def _use(self, federation: Federation) -> None:
        """Makes this loop and its backend work on a federation that has grown."""
        self.federation = federation
        self.backend.use(federation)

    def _look_at(self, round: int) -> None:
        """Takes the federation as it is in this round."""
        self.present = self.evaluator.federation = self.federation.at(round)

    def _take_up_requests(self, round: int) -> None:
        """Adds what was requested for this round to its changes, and room for newcomers with new shards."""
        for event in self.requests.take_up(round):
            self.population.add(event.change, self.requests.federation(round).num_clients)
        if (federation := self.requests.federation(round)) is not self.federation:
            self._use(federation)
            self.state = self.state.grown(federation.num_clients)
            more = np.full((federation.num_clients - len(self.local_scores_N2), 2), np.nan, np.float32)
            self.local_scores_N2 = np.concatenate([self.local_scores_N2, more])
            self.notes.append(f"the federation grew to {federation.num_clients} clients")

    def _come_and_go(self, round: int) -> None:
        """Lets clients leave and join, and tells the method whose data changed."""
        self._look_at(round)
        joined, left = self.population.advance(round)
        self.requests.set_population(self.population)
        if len(left):
            self.state = self.steps.leave(self.state, left)
            self.backend.forget(left)
            self._set_local_scores(left, np.nan)
            self.notes.append(f"left: {_listed(left)}")
            self.metrics["clients_left"] = float(len(left))
        if len(joined):
            self.state = self.steps.join(self.state, self.clients_of(joined, round))
            self.notes.append(f"joined: {_listed(joined)}")
            self.metrics["clients_joined"] = float(len(joined))
        changed = self.federation.changed(round)
        changed = changed[self.population.is_online_N[changed]]
        if len(changed):
            self.state = self.steps.drift(self.state, self.clients_of(changed, round))
            self.notes.append(f"data changed: {_listed(changed)}")

    def _set_local_scores(self, ids: Sequence[int] | np.ndarray, scores: Any) -> None:
        """Makes a new array where any score changes: a checkpoint compares with the array saved last."""
        if len(ids):
            self.local_scores_N2 = self.local_scores_N2.copy()
            self.local_scores_N2[ids] = scores

    def _note_excluded(self, stats: RoundStats) -> None:
        """One note for all clients that were excluded for the same reason, once per round."""
        clients_of: dict[str, list[int]] = {}
        for client, exclusion in sorted(stats.excluded.items()):
            if self.stats is stats or self.stats.excluded.get(client) != exclusion:
                clients_of.setdefault(exclusion.reason, []).append(client)
        for reason, clients in clients_of.items():
            who = _listed(np.array(clients)) if clients[1:] else f"client {clients[0]}"
            self.notes.append(f"{who}: {reason}; left out of this round")
        self.stats.excluded.update(stats.excluded)
        counts = {"clients_rejected": len(self.stats.rejected), "clients_late": len(self.stats.late)}
        self.metrics |= {name: float(count) for name, count in counts.items()}

    def _evaluate(self, round: int) -> None:
        settings, online = self.experiment.evaluation, self.population.online
        stats = RoundStats(diagnostics=self._no_diagnostics())
        clients = replace(
            self.clients_of(self.evaluator.chosen(online), round, stats=stats),
            evaluated=True,
            choice_samples=settings.choice_samples,
            tester=self._test,
        )
        serving = self.steps.serve(self.state, clients)
        scores = self.evaluator.scores(serving, clients)
        self.scores_M4 = np.column_stack([scores.ids_M, scores.table_MS])
        self.metrics |= score_metrics(scores, self.task) | cluster_metrics(self.state, online, self.present.group_N)
        if settings.local:
            self.metrics |= self._local_metrics(clients)
        honest = ~np.isin(clients.ids_M, self.attackers)
        if len(self.attackers) and honest.any():
            self.metrics[f"{self.primary}_honest"] = mean_of_defined(scores.primary_M[honest])
        newcomers = np.isin(clients.ids_M, self.population.newcomers)
        if newcomers.any():
            self.metrics[f"newcomer_{self.primary}"] = mean_of_defined(scores.primary_M[newcomers])
        if settings.tuned_epochs:
            tuned_M = self.evaluator.tuned_scores(serving, clients, clients.local).primary_M
            self.metrics[f"{self.primary}_tuned"] = mean_of_defined(tuned_M)
            if newcomers.any():
                self.metrics[f"newcomer_{self.primary}_tuned"] = mean_of_defined(tuned_M[newcomers])
        self.steps.diagnose(self.state, clients)
        self._note_excluded(stats)
        mbit = 1e-6 / self.present.num_clients  # from bits of all clients to Mbit per client of the federation
        self.metrics |= {
            "clients_online": float(len(online)),
            "mbit_down": self.traffic.down_bits * mbit,
            "mbit_up": self.traffic.up_bits * mbit,
        }
        self._take_diagnostics(round, stats.diagnostics)
        self._take_diagnostics(round, self._of_clusters(online, scores))
        self._resolve_diagnostics()
        if self.task.targets == "class":
            self._take_diagnostics(round, self._labels_of_compared(round, stats))
            self._resolve_diagnostics()

    # ---- diagnostics of the method

    def _no_diagnostics(self) -> Diagnostics:
        return Diagnostics(self.label, self.taken, self.experiment.seed)

    def _test(self, clients: Clients, serving: Serving) -> np.ndarray:
        return self.evaluator.scores(serving, clients).table_MS

    def _take_diagnostics(self, round: int, found: Diagnostics) -> None:
        """Numbers are metrics of the round. Of arrays, the last of each name goes out with the next evaluated round."""
        self.metrics |= found.numbers
        self.numbers += [name for name in found.numbers if name not in self.numbers]
        self.deferred |= dict.fromkeys(found.names, (round, found))

    def _resolve_diagnostics(self) -> None:
        """Makes the arrays that were reported since the last time."""
        self.diagnostics = self.diagnostics | {
            name: ReportedDiagnostic(name, round, found.array(name)) for name, (round, found) in self.deferred.items()
        }
        self.deferred = {}

    def _of_clusters(self, online: np.ndarray, scores: Scores) -> Diagnostics:
        """Score and size of every cluster, where there are several."""
        found = Diagnostics(self.label)
        if vectors := cluster_vectors(self.state, online, scores):
            for name, vector_K in zip(cluster_diagnostics_of(self.primary), vectors, strict=True):
                found.add(name, vector_K, (CLUSTERS,), scores.ids_M, 0.0)
        return found

    def _labels_of_compared(self, round: int, stats: RoundStats) -> Diagnostics:
        """Training labels of the clients of whom the method has reported a matrix; attackers might lie about theirs."""
        found = Diagnostics(self.label, seed=self.experiment.seed)
        ids = compared_clients(self.diagnostics.values())
        ids = ids[self.population.is_online_N[ids] & ~np.isin(ids, self.attackers)]
        ids = self.label_counts.bounded(ids, self.experiment.seed)
        clients = replace(self.clients_of(ids, round, stats=stats), evaluated=True)
        counted, counts_MC = self.label_counts.of(clients, self.present)
        if len(counted):
            found.add(LABEL_COUNTS, counts_MC, (CLIENTS, "classes"), counted, 0.0)
        return found

    def _local_metrics(self, clients: Clients) -> dict[str, float]:
        """P-local over all clients, and over those that have trained; the others hold the initial model."""
        score_M = self.local_scores_N2[clients.ids_M, 0].astype(np.float64)
        trained = ~np.isnan(score_M)
        found = {f"{self.primary}_local_trained": float(score_M[trained].mean())} if trained.any() else {}
        if not trained.all():
            untrained = clients.select(~trained)
            score_M[~trained] = initial_scores(self.evaluator, self.initial_P, untrained).primary_M
        return found | {f"{self.primary}_local": mean_of_defined(score_M), "trained_share": float(trained.mean())}

    def _save(self, round: int) -> None:
        if self.store is None:
            return
        self._resolve_diagnostics()
        tensors, scalars = self.state.to_checkpoint()
        if self.server is not None:
            tensors |= {f"{_MOMENTS}{name}": value for name, value in self.server.to_tensors().items()}
        tensors["server.local_scores_N2"] = torch.from_numpy(self.local_scores_N2)
        scores_M4 = np.zeros((0, 1 + len(self.task.score_names))) if self.scores_M4 is None else self.scores_M4
        tensors["server.scores_M4"] = torch.from_numpy(scores_M4)
        # scores and report are for a driver that is killed before it recorded the round
        report = {
            "metrics": self.metrics,
            "moved": self.moved,
            "time_ms": self.time_ms,
            "numbers": self.numbers,
            "diagnostics": [
                {"name": one.name, "round": one.round, "axes": list(one.diagnostic.axes)}
                for one in self.diagnostics.values()
            ],
        }
        for one in self.diagnostics.values():
            tensors |= _diagnostic_tensors(one)
        values = {"state": scalars, "traffic": vars(self.traffic), "report": report}
        with nullcontext() if self.cadence is None else self.cadence.measured():
            sync_records(self.store.directory)
            if remark := self.store.save(round, tensors, values, self.backend):
                self.notes.append(remark)
        self.saved = round

    def clients_of(
        self, ids: np.ndarray, round: int, *, test_locally: bool = False, stats: RoundStats | None = None
    ) -> Clients:
        own_tests = self.present.view == "holdout"
        test_samples = _NO_LIMIT if own_tests else self.experiment.evaluation.local_images
        return Clients(
            np.asarray(ids, np.int64),
            self.present.num_samples_N[ids],
            self.network.spec,
            self.learning.local_in(round, self.experiment.rounds),
            self.backend,
            self.experiment.seed,
            round,
            stats or self.stats,
            local_test_samples=test_samples if test_locally else 0,
            reachable=lambda: self._reachable(round),
            aggregation=self.aggregation,
            server=self.server,
            num_scores=len(self.task.score_names),
        )

    def _reachable(self, round: int) -> tuple[np.ndarray, np.ndarray]:
        """Ids and sample counts of all clients online that are reachable in this round and do not fail in it."""
        ids = self.population.draw(round, 1.0, None, self.availability, self.experiment.cohort.dropout).ids_M
        return ids, self.present.num_samples_N[ids]


def _moved(before_N: np.ndarray, after_N: np.ndarray) -> list[tuple[int, int]]:
    """(client, cluster) of every client whose cluster changed."""
    if before_N is after_N:
        return []
    changed = np.flatnonzero(before_N != after_N)
    return list(zip(changed.tolist(), after_N[changed].tolist(), strict=True))


def _diagnostic_tensors(one: ReportedDiagnostic) -> dict[str, torch.Tensor]:
    """The tensors of a diagnostic in a checkpoint."""
    first, diagnostic = f"{_DIAGNOSTICS}{one.name}.", one.diagnostic
    labels = {f"{first}labels{axis}": torch.from_numpy(label) for axis, label in enumerate(diagnostic.labels)}
    return {f"{first}value": torch.from_numpy(diagnostic.value)} | labels


def _saved_diagnostic(one: _SavedDiagnostic, tensors: dict[str, torch.Tensor]) -> ReportedDiagnostic:
    """The inverse; takes the tensors out of those of a checkpoint."""
    first = f"{_DIAGNOSTICS}{one.name}."
    labels = tuple(tensors.pop(f"{first}labels{axis}").numpy() for axis in range(len(one.axes)))
    value = tensors.pop(f"{first}value").numpy()
    return ReportedDiagnostic(one.name, one.round, Diagnostic(value, tuple(one.axes), labels))


def _listed(ids: np.ndarray) -> str:
    shown = ", ".join(map(str, ids[:_LISTED].tolist()))
    return f"clients {shown}" + (f" and {len(ids) - _LISTED} more" if len(ids) > _LISTED else "")
