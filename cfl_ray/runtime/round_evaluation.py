"""The metrics of a method's rounds: of the training, and of the evaluation by every protocol; diagnostics."""

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from pydantic import BaseModel, ConfigDict
from torch import Tensor

from cfl_ray.core.backend import Backend
from cfl_ray.core.checked_method import CheckedMethod
from cfl_ray.core.clients import ClientData, Clients, RoundStats, Traffic
from cfl_ray.core.diagnostics import CLIENTS, CLUSTERS, MOST_VALUES, Diagnostics, sample_of
from cfl_ray.core.reported import Diagnostic, ReportedDiagnostic
from cfl_ray.core.serving import Serving
from cfl_ray.core.state import State
from cfl_ray.core.work import TEST, VALIDATION
from cfl_ray.data.federation import Federation
from cfl_ray.data.replay import ReplayedFederation
from cfl_ray.nn.network import Network
from cfl_ray.population.population import Cohort
from cfl_ray.runtime.evaluation import (
    ClassCounts,
    Evaluator,
    cluster_metrics,
    cluster_vectors,
    mean_of_defined,
    score_metrics,
)
from cfl_ray.runtime.participation import Membership
from cfl_ray.runtime.parts.loop_part import LoopPart
from cfl_ray.runtime.round_facts import add_exclusions, end_training, record_of
from cfl_ray.setup.setup import Setup
from cfl_ray.tracking import RoundRecord
from cfl_ray.tracking.record import (
    CONFUSION,
    LABEL_COUNTS,
    PAST_SCORES,
    VALIDATION_CLIENTS,
    VALIDATION_SAMPLES,
    cluster_diagnostics_of,
    of_validation,
    taken_names,
)

# in checkpoints, by the part of the data that P-local is measured on
_LOCAL_SCORES = {TEST: "server.local_scores_N2", VALIDATION: "server.local_validation_scores_N2"}


class RoundDiagnostics:
    """The last array reported under each name, for the report of the next evaluated round.

    A method may report a function instead of an array; `resolve` calls it before a checkpoint is saved or the models
    are freed.
    """

    def __init__(self, restored: tuple[ReportedDiagnostic, ...] = ()):
        self.arrays = {reported.name: reported for reported in restored}
        self._deferred: dict[str, tuple[int, Diagnostics]] = {}  # not computed yet: (round, reported in it)

    def take(self, stats: RoundStats, reported: Diagnostics) -> None:
        """Adds the arrays that were reported in a round; numbers become metrics of the round."""
        stats.metrics |= reported.numbers
        stats.numbers += [name for name in reported.numbers if name not in stats.numbers]
        self._deferred |= dict.fromkeys(reported.names, (stats.round, reported))

    def put(self, name: str, round: int, diagnostic: Diagnostic) -> None:
        """Adds an array that needs no check of its form."""
        self.arrays[name] = ReportedDiagnostic(name, round, diagnostic)

    def resolve(self) -> None:
        """Computes the arrays added since the last call."""
        made = {name: ReportedDiagnostic(name, round, of.array(name)) for name, (round, of) in self._deferred.items()}
        self.arrays, self._deferred = self.arrays | made, {}

    @property
    def reported(self) -> tuple[ReportedDiagnostic, ...]:
        """The computed arrays."""
        return tuple(self.arrays.values())


class _Traffic(BaseModel):
    """`Traffic` in a checkpoint."""

    model_config = ConfigDict(strict=True, extra="forbid")
    down_bits: int
    up_bits: int


class RoundEvaluation(LoopPart):
    """Measures the rounds of one method: their traffic and training, and the models of evaluated rounds.

    clients_of: returns clients with the statistics to which their exchanges add.
    """

    def __init__(
        self,
        setup: Setup,
        label: str,
        network: Network,
        checked_method: CheckedMethod,
        backend: Backend,
        membership: Membership,
        clients_of: Callable[[np.ndarray, int, RoundStats], Clients],
    ):
        experiment, self.task = setup.experiment, setup.task
        self.settings, self.seed, self.label = experiment.evaluation, experiment.seed, label
        self.checked_method, self.clients_of, self.membership = checked_method, clients_of, membership
        self.evaluator = Evaluator(self.settings, setup.federation, backend, self.seed, self.task)
        # of the clients' data, on which models are measured
        self.parts = (TEST,) if setup.federation.validation is None else (TEST, VALIDATION)
        self.primary, self.attackers = self.task.metrics[0].name, setup.attack.ids
        self.initial_P = network.new_model(self.seed, 0)  # held by clients before their first training
        self.taken = taken_names([metric.name for metric in self.task.metrics])
        self.taken |= {CONFUSION} if self.settings.confusion else set()
        self.label_counts = LabelCounts(setup.federation.shape.num_classes)
        self.traffic = Traffic()  # of the run so far
        # float32 (N, 2), by part: P-local of every client after its last training, NaN before its first training
        self.local_scores = {part: np.zeros((0, 2), np.float32) for part in self.parts}
        self.fallbacks: set[str] = set()  # reasons noted so far why the chosen engine did not train clients
        self.diagnostics = RoundDiagnostics()  # not recorded yet

    def begin(self, round: int, phase: str, is_last: bool) -> RoundStats:
        """The statistics of a round that begins in this phase. is_last: of the run, which is always evaluated."""
        evaluated = is_last or round % self.settings.every == 0
        return RoundStats(round, phase, evaluated, self.traffic, diagnostics=self._new_diagnostics())

    def record(self, stats: RoundStats, unrecorded: bool) -> RoundRecord:
        """The record of a round. unrecorded: of a checkpoint, with diagnostics that wait for an evaluated round."""
        if unrecorded:
            self.diagnostics.resolve()
            return record_of(stats, self.diagnostics.reported)
        if stats.scores_MV is None:
            return record_of(stats, ())
        record, self.diagnostics = record_of(stats, self.diagnostics.reported), RoundDiagnostics()
        return record

    def resumed(self, record: RoundRecord) -> RoundRecord:
        """The record in a checkpoint as it was without `unrecorded`."""
        if record.scores_MV is not None:
            return record
        self.diagnostics = RoundDiagnostics(record.diagnostics)
        return replace(record, diagnostics=())

    def _new_diagnostics(self) -> Diagnostics:
        return Diagnostics(self.label, self.taken, self.seed)

    # ---- hooks

    def leave(self, ids: np.ndarray) -> None:
        for part in self.parts:
            self._set_local_scores(part, ids, np.nan)

    def end_round(self, stats: RoundStats, cohort: Cohort, before: State, after: State) -> None:
        for part in self.parts:
            scores = stats.local_scores_on(part)
            self._set_local_scores(part, list(scores), list(scores.values()))
        end_training(stats, cohort, after, self.fallbacks)
        self.fallbacks |= stats.fallbacks
        self.diagnostics.take(stats, stats.diagnostics)

    def to_checkpoint(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        scores = {_LOCAL_SCORES[part]: torch.from_numpy(scores_N2) for part, scores_N2 in self.local_scores.items()}
        return scores, {"traffic": vars(self.traffic)}

    def restore(self, tensors: dict[str, Tensor], values: dict[str, Any], state: State) -> None:
        self.traffic = Traffic(**dict(_Traffic.model_validate(values.pop("traffic"))))
        self.local_scores = {part: tensors.pop(_LOCAL_SCORES[part]).numpy() for part in self.parts}
        for scores_N2 in self.local_scores.values():
            if scores_N2.shape != (count := len(state.assign_N), 2):
                raise ValueError(f"scores of shape {scores_N2.shape} for {count} clients")

    @np.errstate(over="ignore")  # scores beyond float32 are infinite
    def _set_local_scores(self, part: str, ids: Sequence[int] | np.ndarray, scores: Any) -> None:
        """Sets scores in a new array, because a checkpoint compares with the array that was saved last."""
        scores_N2 = self.local_scores[part]
        if (more := self.membership.federation.num_clients - len(scores_N2)) > 0:
            scores_N2 = np.concatenate([scores_N2, np.full((more, 2), np.nan, np.float32)])
        if len(ids):
            scores_N2 = scores_N2.copy()
            scores_N2[ids] = scores
        self.local_scores[part] = scores_N2

    # ---- evaluation

    def evaluate(self, stats: RoundStats, state: State) -> None:
        """Measures the models of `state` on each part of the data of online clients, for the record of the round."""
        online, present, diagnostics = self.membership.population.online, self.membership.present, self.diagnostics
        self.evaluator.federation = present
        tests = RoundStats(diagnostics=self._new_diagnostics())
        clients = replace(
            self.clients_of(self.evaluator.chosen(online), stats.round, tests),
            evaluated=True,
            choice_samples=self.settings.choice_samples,
            tester=lambda those, serving: self.evaluator.scores(serving, those),
        )
        serving = self.checked_method.serve(state, clients)
        counts = ClassCounts(state.assign_N) if self.settings.confusion else None
        tables = self.evaluator.scores_on(self.parts, serving, clients, counts)
        table_MV = tables[TEST]
        stats.scores_MV = np.column_stack([clients.ids_M, table_MV])
        stats.metrics |= self._score_metrics(TEST, table_MV, clients)
        stats.metrics |= cluster_metrics(state, online, present.group_N)
        stats.metrics |= self._protocol_metrics(tables, serving, clients)
        if VALIDATION in tables:
            stats.metrics |= of_validation(self._score_metrics(VALIDATION, tables[VALIDATION], clients))
            stats.metrics |= self._sizes_of_validation(clients)
        if self.settings.reported is not None:
            stats.metrics["reported"] = stats.metrics[self._scored_metric()]
        if self.settings.past:
            diagnostics.take(stats, self._tests_on_past_data(stats, serving, clients))
        self.checked_method.diagnose(state, clients)
        add_exclusions(stats, tests)
        mbit = 1e-6 / present.num_clients  # bits of all clients -> Mbit per client
        stats.metrics |= {
            "clients_online": float(len(online)),
            "mbit_down": stats.traffic.down_bits * mbit,
            "mbit_up": stats.traffic.up_bits * mbit,
        }
        diagnostics.take(stats, tests.diagnostics)
        if state.num_clusters > 1:
            diagnostics.take(stats, self._cluster_diagnostics(state, clients, table_MV[:, 0]))
        diagnostics.resolve()
        if counts is not None:
            diagnostics.put(CONFUSION, stats.round, counts.diagnostic())
        if self.task.targets == "class":
            diagnostics.take(stats, self._labels_of_compared(stats.round, tests))
            diagnostics.resolve()

    def _scored_metric(self) -> str:
        """The metric of the protocol by which the method is scored (`evaluation.reported`)."""
        protocol = self.settings.protocol_of(self.label, self.checked_method.method.name)
        return self.primary if protocol == "server" else f"{self.primary}_{protocol}"

    def _cluster_diagnostics(self, state: State, clients: Clients, score_M: np.ndarray) -> Diagnostics:
        """Mean score and number of the clients of each cluster."""
        diagnostics = Diagnostics(self.label)
        vectors = cluster_vectors(state, self.membership.population.online, clients.ids_M, score_M)
        for name, vector_K in zip(cluster_diagnostics_of(self.primary), vectors, strict=True):
            diagnostics.add(name, _storable(vector_K), (CLUSTERS,), clients.ids_M)
        return diagnostics

    def _score_metrics(self, part: str, table_MV: np.ndarray, clients: Clients) -> dict[str, float]:
        weight_M = self.evaluator.weights(part, clients, table_MV[:, 0])
        return score_metrics(table_MV, self.task, self.settings.over_clients, weight_M)

    def _mean(self, part: str, score_M: np.ndarray, clients: Clients, some: np.ndarray | None = None) -> float:
        """The mean over clients of scores on this part of their data. some: bool (M,) of the clients in it; None: all.

        Weighted as `evaluation.weights` says.
        """
        if some is not None:
            score_M, clients = score_M[some], clients.select(some)
        return mean_of_defined(score_M, self.evaluator.weights(part, clients, score_M))

    def _protocol_metrics(
        self, tables: Mapping[str, np.ndarray], serving: Serving, clients: Clients
    ) -> dict[str, float]:
        """P-local, P-tune, and the means over some clients, on each part of the data."""
        metrics: dict[str, float] = {}
        if self.settings.local:
            for part in self.parts:
                of_part = self._local_metrics(part, clients)
                metrics |= of_part if part == TEST else of_validation(of_part)
            trained = ~np.isnan(self.local_scores[TEST][clients.ids_M, 0])
            metrics["trained_share"] = float(trained.mean())
        tuned = {}
        if self.settings.tuned_epochs:
            tuned = self.evaluator.tuned_scores(self.parts, serving, clients, clients.local)
        for part in self.parts:
            tuned_M = tuned[part][:, 0] if tuned else None
            of_part = self._metrics_of_some(part, tables[part][:, 0], tuned_M, clients)
            metrics |= of_part if part == TEST else of_validation(of_part)
        return metrics

    def _local_metrics(self, part: str, clients: Clients) -> dict[str, float]:
        """P-local over all clients, and over trained clients; untrained clients hold the initial model."""
        score_M = self.local_scores[part][clients.ids_M, 0].astype(np.float64)
        trained = ~np.isnan(score_M)
        metrics = {}
        if trained.any():
            metrics[f"{self.primary}_local_trained"] = self._mean(part, score_M, clients, trained)
        if not trained.all():
            untrained = clients.select(~trained)
            initial = Serving(self.initial_P[None], untrained.first_row())
            score_M[~trained] = self.evaluator.scores_on((part,), initial, untrained)[part][:, 0]
        return metrics | {f"{self.primary}_local": self._mean(part, score_M, clients)}

    def _sizes_of_validation(self, clients: Clients) -> dict[str, float]:
        """Number of the clients with validation data, and of their validation samples."""
        assert (part := self.membership.present.validation) is not None
        num_samples_M = part.num_samples_N[clients.ids_M]
        return {VALIDATION_CLIENTS: float((num_samples_M > 0).sum()), VALIDATION_SAMPLES: float(num_samples_M.sum())}

    def _metrics_of_some(
        self, part: str, score_M: np.ndarray, tuned_M: np.ndarray | None, clients: Clients
    ) -> dict[str, float]:
        """Means over honest clients and over newcomers, and P-tune, whose scores are `tuned_M`."""
        metrics: dict[str, float] = {}
        honest = ~np.isin(clients.ids_M, self.attackers)
        if len(self.attackers) and honest.any():
            metrics[f"{self.primary}_honest"] = self._mean(part, score_M, clients, honest)
        newcomers = np.isin(clients.ids_M, self.membership.population.newcomers)
        if newcomers.any():
            metrics[f"newcomer_{self.primary}"] = self._mean(part, score_M, clients, newcomers)
        if tuned_M is not None:
            metrics[f"{self.primary}_tuned"] = self._mean(part, tuned_M, clients)
            if newcomers.any():
                metrics[f"newcomer_{self.primary}_tuned"] = self._mean(part, tuned_M, clients, newcomers)
        return metrics

    def _tests_on_past_data(self, stats: RoundStats, serving: Serving, clients: Clients) -> Diagnostics:
        """Scores of clients on the data that they had before their last change. Adds the mean to the metrics."""
        diagnostics = Diagnostics(self.label, seed=self.seed)
        federation = self.membership.federation
        changed_N = np.zeros(federation.num_clients, np.int64)  # round of the last change; 0: none
        for round, ids in sorted(federation.changed_in.items()):
            if round <= stats.round:
                changed_N[ids] = round
        chosen_M = changed_N[clients.ids_M] > 0
        if not chosen_M.any():
            return diagnostics
        chosen = clients.select(chosen_M)
        past = chosen.replaying([(int(changed) - 1,) for changed in changed_N[chosen.ids_M]])
        score_M = self.evaluator.scores(serving.select(chosen_M), past)[:, 0]
        diagnostics.add(PAST_SCORES, _storable(score_M), (CLIENTS,), chosen.ids_M)
        tested = self.evaluator
        if past.replay is not None:
            rounds_of = dict(zip(past.ids_M.tolist(), past.replay.rounds_M, strict=True))
            tested = replace(tested, federation=ReplayedFederation(federation, stats.round, rounds_of))
        stats.metrics[f"{self.primary}_past"] = mean_of_defined(score_M, tested.weights(TEST, past, score_M))
        return diagnostics

    def _labels_of_compared(self, round: int, tests: RoundStats) -> Diagnostics:
        """Label counts of the clients in the method's reported matrices, without attackers, which might lie."""
        labels, population = Diagnostics(self.label, seed=self.seed), self.membership.population
        ids = compared_clients(self.diagnostics.reported)
        ids = ids[population.is_online_N[ids] & ~np.isin(ids, self.attackers)]
        ids = self.label_counts.bounded(ids, self.seed)
        clients = replace(self.clients_of(ids, round, tests), evaluated=True)
        counted, counts_MC = self.label_counts.of(clients, self.membership.present)
        if len(counted):
            labels.add(LABEL_COUNTS, counts_MC, (CLIENTS, "classes"), counted)
        return labels


def _storable(score_M: np.ndarray) -> np.ndarray:
    """The scores; NaN for those that a diagnostic cannot hold, such as an infinite loss."""
    return np.where(np.abs(score_M) <= np.finfo(np.float32).max, score_M, np.nan)


@dataclass(frozen=True)
class CountLabels:
    """The number of a client's training samples of each class, (C,)."""

    num_classes: int

    def __call__(self, client: ClientData, anchor_P: Tensor | None) -> Tensor:
        return torch.bincount(client.y, minlength=self.num_classes)


@dataclass
class LabelCounts:
    """Label counts of the clients whose similarity a method has reported, for a comparison in the report.

    A client's labels are counted once, and again when its data have changed.
    """

    num_classes: int
    known: dict[tuple[int, Hashable], Tensor] = field(default_factory=dict)  # by client and version of its data

    def bounded(self, ids: np.ndarray, seed: int) -> np.ndarray:
        """A sample of the clients, small enough that their counts fit into a diagnostic."""
        return ids[sample_of(ids, MOST_VALUES // self.num_classes, seed)]

    def of(self, clients: Clients, federation: Federation) -> tuple[np.ndarray, Tensor]:
        """(ids, label counts (M, C)) of the clients whose data are valid."""
        key_of = {client: (client, federation.data_version(client)) for client in clients.ids_M.tolist()}
        self.known = {key: counts_C for key, counts_C in self.known.items() if key_of.get(key[0], key) == key}
        missing = clients.select(np.array([key not in self.known for key in key_of.values()], bool))
        new_MC, valid_M = missing.describe(CountLabels(self.num_classes))
        for client, counts_C in zip(missing.ids_M[valid_M].tolist(), new_MC[torch.from_numpy(valid_M)], strict=True):
            self.known[key_of[client]] = counts_C
        ids = [client for client, key in key_of.items() if key in self.known]
        counts_MC = torch.stack([self.known[key_of[client]] for client in ids]) if ids else new_MC[:0]
        return np.array(ids, np.int64), counts_MC


def compared_clients(reported: Iterable[ReportedDiagnostic]) -> np.ndarray:
    """Ascending ids of the clients in client-by-client matrices."""
    ids = [matrix.diagnostic.labels[0] for matrix in reported if matrix.diagnostic.axes == (CLIENTS, CLIENTS)]
    return np.unique(np.concatenate(ids)) if ids else np.zeros(0, np.int64)
