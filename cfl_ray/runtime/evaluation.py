"""Evaluation of a round: the three protocols, and the agreement of the clusters found with the true groups."""

from dataclasses import dataclass, replace

import numpy as np
from torch import Tensor

from cfl_ray.clustering.agreement import agreement
from cfl_ray.config import EvaluationConfig
from cfl_ray.core.clients import Clients
from cfl_ray.core.local_sgd import LocalSGD
from cfl_ray.core.rng import stream
from cfl_ray.core.serving import Serving
from cfl_ray.core.state import UNASSIGNED, State
from cfl_ray.core.work import Address, Backend, EvaluateClients, EvaluateShared, Rows
from cfl_ray.data.federation import Federation
from cfl_ray.engine.scoring import scores

_EXCHANGE = -1  # of all evaluations: exchanges of training count from 1


@dataclass(frozen=True)
class Scores:
    """Test results of M clients, NaN for a client without test images."""

    ids_M: np.ndarray
    accuracy_M: np.ndarray
    macro_f1_M: np.ndarray
    loss_M: np.ndarray

    @property
    def table_M3(self) -> np.ndarray:
        return np.stack([self.accuracy_M, self.macro_f1_M, self.loss_M], 1)


@dataclass
class Evaluator:
    """Tests the clients of a federation."""

    settings: EvaluationConfig
    federation: Federation
    backend: Backend
    seed: int

    def chosen(self, online: np.ndarray) -> np.ndarray:
        """The clients to evaluate: all that are online, or the same random sample every time."""
        wanted, total = self.settings.clients, self.federation.num_clients
        if wanted is None or len(online) <= wanted:
            return online
        for asked in (2 * wanted, 20 * wanted, total):  # the more are offline, the more have to be drawn
            sample = stream(self.seed, 0, 0, -1, "evaluated").choice(total, min(total, asked), replace=False)
            at = np.minimum(np.searchsorted(online, sample), len(online) - 1)
            found = sample[online[at] == sample][:wanted]
            if len(found) == wanted:
                break
        return np.sort(found)

    def scores(self, serving: Serving, clients: Clients) -> Scores:
        """P-server: each client with the model that it would predict with now; NaN where the method has none for it."""
        known_M = serving.row_M >= 0
        found_M3 = np.full((len(clients), 3), np.nan)
        if known_M.any():
            known, serving = clients.select(known_M), replace(serving, row_M=serving.row_M[known_M])
            personal = serving.is_personal or self.federation.view == "holdout"
            found_M3[known_M] = (self._personal if personal else self._shared)(serving, known).table_M3
        return Scores(clients.ids_M, *found_M3.T)

    def tuned_scores(self, serving: Serving, clients: Clients, local: LocalSGD) -> Scores:
        """P-tune(F): the same after F local epochs; of models that vote, the first alone is tuned and tested."""
        tune = replace(local, epochs=self.settings.tuned_epochs, steps=None)
        return self.scores(replace(serving, vote=False, tune=tune), clients)

    def _personal(self, serving: Serving, clients: Clients) -> Scores:
        """Every client tests a model of its own on its own test data."""
        steps_M = serving.tune.steps_of(clients.num_samples_M) if serving.tune else None
        order = np.argsort(serving.row_M, kind="stable")  # clients that share a model side by side
        work = EvaluateClients(
            Address(self.seed, clients.round, _EXCHANGE),
            clients.ids_M[order],
            _tables(serving),
            start=Rows(0, serving.row_M[order]),
            client_state=serving.client_state,
            frozen_model=_frozen_rows(serving, len(clients)),
            vote=len(serving.models_KP) if serving.vote else 0,
            max_test_samples=None if self.federation.view == "holdout" else self.settings.local_images,
            tune=serving.tune,
            steps_M=None if steps_M is None else steps_M[order],
        )
        found_M3, outcome = np.empty((len(clients), 3)), self.backend.run(work)
        found_M3[order] = outcome.arrays["scores"]
        clients.stats.excluded.update({int(work.ids_M[i]): exclusion for i, exclusion in outcome.excluded.items()})
        return Scores(clients.ids_M, *found_M3.T)

    def _shared(self, serving: Serving, clients: Clients) -> Scores:
        """Clients that share a model and a test set share its confusion counts: each pair is tested once."""
        test_set_M = self.federation.test_set_of(clients.ids_M)
        pairs, pair_M = np.unique(np.stack([serving.row_M, test_set_M], 1), axis=0, return_inverse=True)
        pair_M = pair_M.reshape(-1)
        work = EvaluateShared(
            Address(self.seed, clients.round, _EXCHANGE),
            pairs[:, 1],
            _tables(serving),
            start=Rows(0, pairs[:, 0]),
            frozen_model=_frozen_rows(serving, len(pairs)),
            vote=len(serving.models_KP) if serving.vote else 0,
        )
        outcome = self.backend.run(work)
        confusion, loss = outcome.arrays["confusion"], outcome.arrays["loss"]
        for pair, exclusion in outcome.excluded.items():
            clients.stats.excluded.update({int(client): exclusion for client in clients.ids_M[pair_M == pair]})
        labels_MC = self.federation.labels_of(clients.ids_M)
        if labels_MC is None:
            per_pair = np.array([scores(*counts) for counts in zip(confusion, loss, strict=True)])
            return Scores(clients.ids_M, *per_pair[pair_M].T)
        found = [scores(confusion[i], loss[i], labels_C) for i, labels_C in zip(pair_M, labels_MC, strict=True)]
        return Scores(clients.ids_M, *np.array(found).T)


def _tables(serving: Serving) -> tuple[Tensor, ...]:
    return (serving.models_KP,) if serving.frozen_P is None else (serving.models_KP, serving.frozen_P[None])


def _frozen_rows(serving: Serving, count: int) -> Rows | None:
    return None if serving.frozen_P is None else Rows(1, np.zeros(count, np.int64))


def initial_scores(evaluator: Evaluator, initial_P: Tensor, clients: Clients) -> Scores:
    """Scores of the common initial model, which clients hold that never trained."""
    return evaluator.scores(Serving(initial_P[None], clients.first_row()), clients)


def score_metrics(found: Scores) -> dict[str, float]:
    """Mean over the clients that were tested, and its spread; NaN where none was."""
    tested = ~np.isnan(found.accuracy_M)
    none = np.full(1, np.nan)
    accuracy, macro_f1, loss = (
        values[tested] if tested.any() else none for values in (found.accuracy_M, found.macro_f1_M, found.loss_M)
    )
    return {
        "accuracy": float(accuracy.mean()),
        "accuracy_std": float(accuracy.std()),
        "accuracy_p10": float(np.percentile(accuracy, 10)),
        "macro_f1": float(np.nanmean(macro_f1)),
        "test_loss": float(np.nanmean(loss)),
    }


def cluster_metrics(state: State, online: np.ndarray, group_N: np.ndarray | None) -> dict[str, float]:
    """Number and sizes of the clusters of the clients online, and their agreement with the true groups."""
    assign_M = state.assign_N[online]
    known = assign_M != UNASSIGNED
    if not known.any():
        return {}
    count_K = np.bincount(assign_M[known])
    found = {
        "num_clusters": float((count_K > 0).sum()),
        "largest_cluster_share": float(count_K.max() / known.sum()),
    }
    if group_N is not None:
        known &= group_N[online] >= 0  # newcomers may come without a true group
        found |= agreement(group_N[online][known], assign_M[known]) if known.any() else {}
    return found
