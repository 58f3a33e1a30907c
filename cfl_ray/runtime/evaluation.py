"""Evaluation of a round: the three protocols, and the agreement of the clusters with the true groups."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from torch import Tensor

from cfl_ray.clustering.agreement import agreement
from cfl_ray.config import EvaluationConfig
from cfl_ray.core.backend import Backend
from cfl_ray.core.clients import Clients
from cfl_ray.core.diagnostics import CLUSTERS, MOST_VALUES
from cfl_ray.core.local_sgd import LocalSGD
from cfl_ray.core.over_clients import OVER_CLIENTS
from cfl_ray.core.reported import OTHER_CLUSTERS, Diagnostic
from cfl_ray.core.rng import stream
from cfl_ray.core.serving import Serving
from cfl_ray.core.state import UNASSIGNED, State
from cfl_ray.core.tasks import CLASSIFICATION, Task
from cfl_ray.core.work import TEST, Address, EvaluateClients, EvaluateShared, Outcome, Rows, scores_name
from cfl_ray.data.federation import Federation
from cfl_ray.engine.scoring import scores

_BLOCK = 1 << 16  # clients counted at a time
_MOST_COUNTS = 1 << 22  # counts by client, true and predicted class that an exchange returns, 16 MB
_EXCHANGE = -1  # number of every evaluation exchange; training exchanges count from 1


@dataclass
class ClassCounts:
    """Numbers of test samples by true and predicted class, added up over the clients of each cluster.

    A sample of a test set that clients share counts for each of them.
    """

    assign_N: np.ndarray
    of_cluster: dict[int, np.ndarray] = field(default_factory=dict)  # int64 (C, C) by cluster; -1: in no cluster

    def add(
        self, ids_M: np.ndarray, row_M: np.ndarray, counts_UCC: np.ndarray, labels_MC: np.ndarray | None = None
    ) -> None:
        """Adds the clients `ids_M`, whose counts are in these rows.

        labels_MC: the classes whose samples a client is tested on; None: all.
        """
        keys = np.column_stack([self.assign_N[ids_M], row_M])
        if labels_MC is not None:
            keys = np.column_stack([keys, labels_MC])
        for (cluster, row, *labels), times in zip(*np.unique(keys, axis=0, return_counts=True), strict=True):
            counts_CC = counts_UCC[row] if labels_MC is None else counts_UCC[row] * np.array(labels)[:, None]
            total_CC = self.of_cluster.setdefault(int(cluster), np.zeros(counts_CC.shape, np.int64))
            total_CC += times * counts_CC

    def diagnostic(self) -> Diagnostic:
        """The counts of all clusters; if they are too many, of those with the most samples, and of the others."""
        clusters = sorted(self.of_cluster)
        classes = next(iter(self.of_cluster.values()), np.zeros((0, 0))).shape[0]
        most = MOST_VALUES // max(classes, 1) ** 2
        counts = dict(self.of_cluster)
        if len(clusters) > most:
            clusters = sorted(clusters, key=lambda cluster: (-int(counts[cluster].sum()), cluster))
            counts[OTHER_CLUSTERS] = np.sum([counts[cluster] for cluster in clusters[most - 1 :]], 0)
            clusters = [*sorted(clusters[: most - 1]), OTHER_CLUSTERS]
        value = np.array([counts[cluster] for cluster in clusters], np.float32).reshape(-1, classes, classes)
        labels = np.array(clusters, np.int64), np.arange(classes), np.arange(classes)
        return Diagnostic(value, (CLUSTERS, "true", "predicted"), labels)


@dataclass
class Evaluator:
    """Tests the clients of a federation."""

    settings: EvaluationConfig
    federation: Federation
    backend: Backend
    seed: int
    task: Task = CLASSIFICATION

    def chosen(self, online: np.ndarray) -> np.ndarray:
        """The clients to evaluate: all online clients, or the same random sample every time."""
        wanted, total = self.settings.clients, self.federation.num_clients
        if wanted is None or len(online) <= wanted:
            return online
        for asked in (2 * wanted, 20 * wanted, total):  # more draws if too many of the drawn clients are offline
            sample = stream(self.seed, 0, 0, -1, "evaluated").choice(total, min(total, asked), replace=False)
            at = np.minimum(np.searchsorted(online, sample), len(online) - 1)
            chosen = sample[online[at] == sample][:wanted]
            if len(chosen) == wanted:
                break
        return np.sort(chosen)

    def scores(self, serving: Serving, clients: Clients) -> np.ndarray:
        """P-server: scores (M, V) of the model that each client predicts with now: the task's metrics, then the loss.

        NaN for a client without a model, or without test data.
        """
        return self.scores_on((TEST,), serving, clients)[TEST]

    def scores_on(
        self, parts: Sequence[str], serving: Serving, clients: Clients, counts: ClassCounts | None = None
    ) -> dict[str, np.ndarray]:
        """The same on each of these parts of the clients' data.

        counts: receives the numbers of test samples by true and predicted class; None: they are not wanted.
        """
        known_M = serving.row_M >= 0
        tables = {part: np.full((len(clients), self._num_scores), np.nan) for part in parts}
        if known_M.any():
            known, serving = clients.select(known_M), serving.select(known_M)
            shared = [part for part in parts if self._shares_tests(part, serving, known)]
            personal = [part for part in parts if part not in shared]
            measured = self._personal(serving, known, personal, counts) if personal else {}
            measured |= {part: self._shared(serving, known, part, counts if part == TEST else None) for part in shared}
            for part, table_mV in measured.items():
                tables[part][known_M] = table_mV
        return tables

    def weights(self, part: str, clients: Clients, score_M: np.ndarray) -> np.ndarray | None:
        """Weights (M,) of the clients in means of these scores, 0 without a score; None: all alike."""
        if self.settings.weights == "uniform":
            return None
        weight_M, tested = np.zeros(len(clients)), ~np.isnan(score_M)
        if tested.any():
            weight_M[tested] = self._tested_on(part).num_test_samples(clients.ids_M[tested])
        return weight_M

    def _shares_tests(self, part: str, serving: Serving, clients: Clients) -> bool:
        """Whether clients with the same model share its test on a test set."""
        view = self._tested_on(part).view
        if serving.is_personal or clients.replay is not None or view == "holdout":
            return False
        # clients with other labels share the test of a model only if the metrics follow from its confusion matrix
        return view != "label" or self.task.by_confusion

    def _tested_on(self, part: str) -> Federation:
        """The federation whose test data are this part of the clients' data."""
        return self.federation if part == TEST else self.federation.validation or self.federation

    @property
    def _num_scores(self) -> int:
        return len(self.task.score_names)

    def tuned_scores(
        self, parts: Sequence[str], serving: Serving, clients: Clients, local: LocalSGD
    ) -> dict[str, np.ndarray]:
        """P-tune(F): the same after F local epochs; of a mixture, only model `row_M` is tuned and tested."""
        tune = replace(local, epochs=self.settings.tuned_epochs, steps=None, examples=None)
        return self.scores_on(parts, replace(serving, weight_MK=None, tune=tune), clients)

    def _personal(
        self, serving: Serving, clients: Clients, parts: Sequence[str], counts: ClassCounts | None
    ) -> dict[str, np.ndarray]:
        """Scores from a separate test of each client's model on these parts of the client's data."""
        counts = counts if TEST in parts else None
        own = all(self._tested_on(part).view == "holdout" for part in parts)
        steps_M = serving.tune.steps_of(clients.num_samples_M) if serving.tune else None
        order = np.argsort(serving.row_M, kind="stable")  # clients that share a model are adjacent
        work = EvaluateClients(
            Address(self.seed, clients.round, _EXCHANGE),
            clients.ids_M[order],
            _tables(serving),
            start=Rows(0, serving.row_M[order]),
            client_state=serving.client_state,
            frozen_model=_frozen_rows(serving, len(clients)),
            weight_MK=None if serving.weight_MK is None else serving.weight_MK[order],
            max_test_samples=self.settings.local_samples
            if (serving.is_personal or clients.replay is not None) and not own
            else None,
            parts=tuple(parts),
            replay=None if clients.replay is None else clients.replay.take(order),
            num_scores=self._num_scores,
            tune=serving.tune,
            steps_M=None if steps_M is None else steps_M[order],
            counts=counts is not None,
        )
        given_order = np.argsort(order)
        if counts is None:
            outcome = self._carried_out(work, clients)
            return {part: outcome.arrays[scores_name(part)][given_order] for part in parts}
        of_parts: dict[str, list[np.ndarray]] = {part: [] for part in parts}
        block = max(_MOST_COUNTS // self.federation.shape.num_classes**2, 1)
        for start in range(0, len(order), block):
            some = work.take(np.arange(start, min(start + block, len(order))))
            outcome = self._carried_out(replace(some, tables=work.tables), clients)
            counts.add(some.ids_M, np.arange(len(some.ids_M)), outcome.arrays["confusion"])
            for part, scores_of in of_parts.items():
                scores_of.append(outcome.arrays[scores_name(part)])
        return {part: np.concatenate(scores_of)[given_order] for part, scores_of in of_parts.items()}

    def _carried_out(self, work: EvaluateClients, clients: Clients) -> Outcome:
        """The outcome of tests of clients; those that are excluded are noted in the statistics."""
        outcome = self.backend.run(work)
        clients.stats.excluded.update({int(work.ids_M[i]): exclusion for i, exclusion in outcome.excluded.items()})
        return outcome

    def _shared(self, serving: Serving, clients: Clients, part: str, counts: ClassCounts | None) -> np.ndarray:
        """Scores from one test of each pair of a test set and a model (or mixture), shared by the pair's clients."""
        federation = self._tested_on(part)
        test_set_M = federation.test_set_of(clients.ids_M)
        if serving.weight_MK is None:
            pairs, pair_M = np.unique(np.stack([serving.row_M, test_set_M], 1), axis=0, return_inverse=True)
            row_U, test_set_U, weight_UK = *pairs.T, None
        else:  # sorted by test set, so that its pairs share the outputs of the models
            pairs, pair_M = np.unique(np.c_[test_set_M, serving.weight_MK], axis=0, return_inverse=True)
            row_U, test_set_U, weight_UK = np.zeros(len(pairs), np.int64), pairs[:, 0].astype(np.int64), pairs[:, 1:]
        pair_M = pair_M.reshape(-1)
        work = EvaluateShared(
            Address(self.seed, clients.round, _EXCHANGE),
            test_set_U,
            _tables(serving),
            start=Rows(0, row_U),
            frozen_model=_frozen_rows(serving, len(pairs)),
            weight_MK=weight_UK,
            num_scores=self._num_scores,
            part=part,
            by_confusion=self.task.by_confusion,
            counts=counts is not None and not self.task.by_confusion,
        )
        outcome = self.backend.run(work)
        for pair, exclusion in outcome.excluded.items():
            clients.stats.excluded.update({int(client): exclusion for client in clients.ids_M[pair_M == pair]})
        labels_MC = federation.labels_of(clients.ids_M) if self.task.by_confusion else None
        if counts is not None:
            counts.add(clients.ids_M, pair_M, outcome.arrays["confusion"], labels_MC)
        if not self.task.by_confusion:
            return outcome.arrays["scores"][pair_M]
        confusion, loss = outcome.arrays["confusion"], outcome.arrays["loss"]
        if labels_MC is None:
            return np.array([scores(*counts) for counts in zip(confusion, loss, strict=True)])[pair_M]
        rows = zip(pair_M, labels_MC, strict=True)
        return np.array([scores(confusion[i], loss[i], labels_C) for i, labels_C in rows])


def _tables(serving: Serving) -> tuple[Tensor, ...]:
    return (serving.models_KP,) if serving.frozen_P is None else (serving.models_KP, serving.frozen_P[None])


def _frozen_rows(serving: Serving, count: int) -> Rows | None:
    return None if serving.frozen_P is None else Rows(1, np.zeros(count, np.int64))


@np.errstate(over="ignore", invalid="ignore")  # scores of a user's metric may be infinite
def score_metrics(
    table_MV: np.ndarray,
    task: Task = CLASSIFICATION,
    over_clients: Sequence[str] = (),
    weight_M: np.ndarray | None = None,
) -> dict[str, float]:
    """Means over the tested clients, and the spread of the first metric; NaN if no client was tested.

    table_MV: as `Evaluator.scores` returns it. over_clients: further numbers of the first metric, of `OVER_CLIENTS`.
    weight_M: weights of the clients in the means; None: all alike. A client whose first metric is undefined counts as
    not tested; undefined values of other metrics are excluded.
    """
    tested = ~np.isnan(table_MV[:, 0])
    table_MV = table_MV[tested] if tested.any() else np.full((1, table_MV.shape[1]), np.nan)
    weight_M = weight_M[tested] if weight_M is not None and tested.any() else None
    primary, score_M = task.metrics[0], table_MV[:, 0]
    tail = 10 if primary.higher_is_better else 90  # the worst tenth of the clients
    spread = {
        primary.name: float(np.average(score_M, weights=weight_M)),
        f"{primary.name}_std": float(score_M.std()),
        f"{primary.name}_p{tail}": float(np.percentile(score_M, tail)),
    }
    for name in over_clients:
        spread[f"{primary.name}_{name}"] = OVER_CLIENTS[name](score_M, primary.higher_is_better)
    others = {
        name: mean_of_defined(values_M, weight_M)
        for name, values_M in zip(task.score_names[1:-1], table_MV.T[1:-1], strict=True)
    }
    return spread | others | {"test_loss": mean_of_defined(table_MV[:, -1], weight_M)}


def mean_of_defined(values_M: np.ndarray, weight_M: np.ndarray | None = None) -> float:
    """Mean of the values that are not NaN; NaN if all are. weight_M: their weights; None: all alike."""
    defined = ~np.isnan(values_M)
    if not defined.any():
        return float("nan")
    if weight_M is None:
        return float(np.nanmean(values_M))
    return float(np.average(values_M[defined], weights=weight_M[defined]))


def cluster_vectors(
    state: State, online: np.ndarray, ids_M: np.ndarray, score_M: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """(mean score of the tested clients, number of online clients) of each cluster, (K,) each.

    score_M: of the clients `ids_M`, NaN if not tested. The mean is NaN for a cluster without tested clients.
    """
    count, tested = state.num_clusters, ~np.isnan(score_M)
    assign_m = state.assign_N[ids_M[tested]] + 1
    total_K = np.bincount(assign_m, score_M[tested], minlength=count + 1)[1:]
    tested_K = np.bincount(assign_m, minlength=count + 1)[1:]
    mean_K = np.divide(total_K, tested_K, out=np.full(count, np.nan), where=tested_K > 0)
    return mean_K, _sizes(state.assign_N, online, count)


def cluster_metrics(state: State, online: np.ndarray, group_N: np.ndarray | None) -> dict[str, float]:
    """Number and largest share of the online clients' clusters, and their agreement with the true groups."""
    size_K = _sizes(state.assign_N, online, state.num_clusters)
    if not size_K.any():
        return {}
    metrics = {
        "num_clusters": float((size_K > 0).sum()),
        "largest_cluster_share": float(size_K.max() / size_K.sum()),
    }
    if group_N is not None:
        everyone = len(online) == len(group_N)  # avoids copies
        group_M, assign_M = (array_N if everyone else array_N[online] for array_N in (group_N, state.assign_N))
        known_M = (assign_M != UNASSIGNED) & (group_M >= 0)  # newcomers may have no true group
        if not known_M.all():
            group_M, assign_M = group_M[known_M], assign_M[known_M]
        metrics |= agreement(group_M, assign_M) if len(group_M) else {}
    return metrics


def _sizes(assign_N: np.ndarray, online: np.ndarray, count: int) -> np.ndarray:
    """Number of online clients in each cluster, int64 (K,), counted in blocks. count: a lower bound of K."""
    size_K = np.zeros(count + 1, np.int64)
    for at in range(0, len(online), _BLOCK):
        more_K = np.bincount(assign_N[online[at : at + _BLOCK]] + 1, minlength=len(size_K))
        size_K = more_K + np.pad(size_K, (0, len(more_K) - len(size_K)))
    return size_K[1:]  # without unassigned clients
