"""Evaluation of a round: the three protocols, and the agreement of the clusters with the true groups."""

from dataclasses import dataclass, replace

import numpy as np
from torch import Tensor

from cfl_ray.clustering.agreement import agreement
from cfl_ray.config import EvaluationConfig
from cfl_ray.core.backend import Backend
from cfl_ray.core.clients import Clients
from cfl_ray.core.local_sgd import LocalSGD
from cfl_ray.core.rng import stream
from cfl_ray.core.serving import Serving
from cfl_ray.core.state import UNASSIGNED, State
from cfl_ray.core.tasks import CLASSIFICATION, Task
from cfl_ray.core.work import Address, EvaluateClients, EvaluateShared, Rows
from cfl_ray.data.federation import Federation
from cfl_ray.engine.scoring import scores

_BLOCK = 1 << 16  # clients counted at a time
_EXCHANGE = -1  # number of every evaluation exchange; training exchanges count from 1


@dataclass(frozen=True)
class Scores:
    """Test results of M clients, NaN for a client without test images."""

    ids_M: np.ndarray
    table_MV: np.ndarray  # the metrics of the task, then the loss; for classes: accuracy, macro-F1, loss

    @property
    def primary_M(self) -> np.ndarray:
        """The first metric of the task; accuracy for classes."""
        return self.table_MV[:, 0]


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

    def scores(self, serving: Serving, clients: Clients) -> Scores:
        """P-server: scores of the model that each client predicts with now; NaN for a client without a model."""
        known_M = serving.row_M >= 0
        table_MV = np.full((len(clients), self._num_scores), np.nan)
        if known_M.any():
            known, serving = clients.select(known_M), serving.select(known_M)
            apart = self.federation.view == "holdout" or self._by_label or clients.replay is not None
            personal = serving.is_personal or apart
            table_MV[known_M] = (self._personal if personal else self._shared)(serving, known).table_MV
        return Scores(clients.ids_M, table_MV)

    @property
    def _num_scores(self) -> int:
        return len(self.task.score_names)

    @property
    def _by_label(self) -> bool:
        """Whether each client needs a test on the images of its labels: for metrics not computed from counts."""
        return self.federation.view == "label" and not self.task.by_confusion

    def tuned_scores(self, serving: Serving, clients: Clients, local: LocalSGD) -> Scores:
        """P-tune(F): the same after F local epochs; of a mixture, only model `row_M` is tuned and tested."""
        tune = replace(local, epochs=self.settings.tuned_epochs, steps=None, examples=None)
        return self.scores(replace(serving, weight_MK=None, tune=tune), clients)

    def _personal(self, serving: Serving, clients: Clients) -> Scores:
        """Scores from a separate test of each client's model on the client's test data."""
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
            max_test_samples=self.settings.local_images
            if (serving.is_personal or clients.replay is not None) and self.federation.view != "holdout"
            else None,
            replay=None if clients.replay is None else clients.replay.take(order),
            num_scores=self._num_scores,
            tune=serving.tune,
            steps_M=None if steps_M is None else steps_M[order],
        )
        table_MV, outcome = np.empty((len(clients), self._num_scores)), self.backend.run(work)
        table_MV[order] = outcome.arrays["scores"]
        clients.stats.excluded.update({int(work.ids_M[i]): exclusion for i, exclusion in outcome.excluded.items()})
        return Scores(clients.ids_M, table_MV)

    def _shared(self, serving: Serving, clients: Clients) -> Scores:
        """Scores from one test of each pair of a test set and a model (or mixture), shared by the pair's clients."""
        test_set_M = self.federation.test_set_of(clients.ids_M)
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
            by_confusion=self.task.by_confusion,
        )
        outcome = self.backend.run(work)
        for pair, exclusion in outcome.excluded.items():
            clients.stats.excluded.update({int(client): exclusion for client in clients.ids_M[pair_M == pair]})
        if not self.task.by_confusion:
            return Scores(clients.ids_M, outcome.arrays["scores"][pair_M])
        confusion, loss = outcome.arrays["confusion"], outcome.arrays["loss"]
        labels_MC = self.federation.labels_of(clients.ids_M)
        if labels_MC is None:
            per_pair = np.array([scores(*counts) for counts in zip(confusion, loss, strict=True)])
            return Scores(clients.ids_M, per_pair[pair_M])
        rows = [scores(confusion[i], loss[i], labels_C) for i, labels_C in zip(pair_M, labels_MC, strict=True)]
        return Scores(clients.ids_M, np.array(rows))


def _tables(serving: Serving) -> tuple[Tensor, ...]:
    return (serving.models_KP,) if serving.frozen_P is None else (serving.models_KP, serving.frozen_P[None])


def _frozen_rows(serving: Serving, count: int) -> Rows | None:
    return None if serving.frozen_P is None else Rows(1, np.zeros(count, np.int64))


def score_metrics(scores: Scores, task: Task = CLASSIFICATION) -> dict[str, float]:
    """Means over the tested clients, and the spread of the first metric; NaN if no client was tested.

    A client whose first metric is undefined counts as not tested; undefined values of other metrics are excluded.
    """
    tested = ~np.isnan(scores.primary_M)
    table_MV = scores.table_MV[tested] if tested.any() else np.full((1, scores.table_MV.shape[1]), np.nan)
    primary, score_M = task.metrics[0], table_MV[:, 0]
    tail = 10 if primary.higher_is_better else 90  # the worst tenth of the clients
    spread = {
        primary.name: float(score_M.mean()),
        f"{primary.name}_std": float(score_M.std()),
        f"{primary.name}_p{tail}": float(np.percentile(score_M, tail)),
    }
    others = {
        name: mean_of_defined(values_M) for name, values_M in zip(task.score_names[1:-1], table_MV.T[1:-1], strict=True)
    }
    return spread | others | {"test_loss": mean_of_defined(table_MV[:, -1])}


def mean_of_defined(values_M: np.ndarray) -> float:
    """Mean of the values that are not NaN; NaN if all are."""
    defined = ~np.isnan(values_M)
    return float(np.nanmean(values_M)) if defined.any() else float("nan")


def cluster_vectors(state: State, online: np.ndarray, scores: Scores) -> tuple[np.ndarray, np.ndarray] | None:
    """(mean first metric of the tested clients, number of online clients) of each cluster, (K,) each.

    The mean is NaN for a cluster without tested clients. None if there are fewer than two clusters.
    """
    count = state.num_clusters
    if count < 2:
        return None
    sizes_K = _sizes(state.assign_N, online, count)
    tested = ~np.isnan(scores.primary_M)
    assign_M = state.assign_N[scores.ids_M][tested] + 1
    total_K = np.bincount(assign_M, scores.primary_M[tested], minlength=count + 1)[1:]
    tested_K = np.bincount(assign_M, minlength=count + 1)[1:]
    return np.divide(total_K, tested_K, out=np.full(count, np.nan), where=tested_K > 0), sizes_K


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
