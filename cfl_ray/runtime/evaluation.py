"""Measuring a round: the three protocols, and how the clusters found agree with the true groups."""

from dataclasses import dataclass, replace

import numpy as np
from torch import Tensor

from cfl_ray.config import Evaluation
from cfl_ray.core.clients import Clients
from cfl_ray.core.grouping import agreement
from cfl_ray.core.local import LocalSGD
from cfl_ray.core.method import Method
from cfl_ray.core.rng import stream
from cfl_ray.core.serving import Serving
from cfl_ray.core.state import UNKNOWN, State
from cfl_ray.core.work import Address, Backend, Rows, TestClients, TestShared
from cfl_ray.data.federation import Federation
from cfl_ray.engine.testing import scores


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

    settings: Evaluation
    federation: Federation
    backend: Backend
    seed: int

    def chosen(self, online: np.ndarray) -> np.ndarray:
        """The clients to evaluate: all that are online, or the same random sample every time."""
        wanted, total = self.settings.clients, self.federation.num_clients
        if wanted is None or len(online) <= wanted:
            return online
        for asked in (2 * wanted, 20 * wanted, total):  # the more are away, the more have to be asked
            sample = stream(self.seed, 0, 0, -1, "evaluated").choice(total, min(total, asked), replace=False)
            at = np.minimum(np.searchsorted(online, sample), len(online) - 1)
            found = sample[online[at] == sample][:wanted]
            if len(found) == wanted:
                break
        return np.sort(found)

    def serving(self, serving: Serving, clients: Clients) -> Scores:
        """P-server: what each client would predict with now; NaN for a client that the method has no model for."""
        known_M = serving.row_M >= 0
        found_M3 = np.full((len(clients), 3), np.nan)
        if known_M.any():
            known, serving = clients.select(known_M), replace(serving, row_M=serving.row_M[known_M])
            alone = serving.alone or self.federation.view == "holdout"
            found_M3[known_M] = (self._own(serving, known, serving.tune) if alone else self._shared(serving, known)).table_M3
        return Scores(clients.ids_M, *found_M3.T)

    def tuned(self, serving: Serving, clients: Clients, local: LocalSGD) -> Scores:
        """P-tune(F): the same after F local epochs; of models that vote, the first alone is tuned and tested."""
        return self.serving(replace(serving, vote=False, tune=replace(local, epochs=self.settings.tuned_epochs, steps=None)), clients)

    def _own(self, serving: Serving, clients: Clients, tune: LocalSGD | None = None) -> Scores:
        """Every client tests a model of its own on its own test data."""
        images = None if self.federation.view == "holdout" else self.settings.local_images
        steps_M = tune.steps_of(clients.size_M) if tune else None
        order = np.argsort(serving.row_M, kind="stable")  # clients that share a model side by side
        work = TestClients(
            Address(self.seed, clients.number, -1),
            clients.ids_M[order],
            _tables(serving),
            start=Rows(0, serving.row_M[order]),
            own=serving.own,
            beside=_beside(serving, len(clients)),
            vote=len(serving.models_KP) if serving.vote else 0,
            images=images,
            tune=tune,
            steps_M=steps_M[order] if tune else None,
        )
        found_M3, outcome = np.empty((len(clients), 3)), self.backend.run(work)
        found_M3[order] = outcome.arrays["scores"]
        clients.books.left_out.update({int(work.ids_M[i]): left for i, left in outcome.left_out.items()})
        return Scores(clients.ids_M, *found_M3.T)

    def _shared(self, serving: Serving, clients: Clients) -> Scores:
        """Clients that share a model and a test set share its confusion counts: each pair is tested once."""
        test_set_M = self.federation.test_set_of(clients.ids_M)
        pairs, which_M = np.unique(np.stack([serving.row_M, test_set_M], 1), axis=0, return_inverse=True)
        work = TestShared(
            Address(self.seed, clients.number, -1),
            pairs[:, 1],
            _tables(serving),
            start=Rows(0, pairs[:, 0]),
            beside=_beside(serving, len(pairs)),
            vote=len(serving.models_KP) if serving.vote else 0,
        )
        outcome = self.backend.run(work)
        arrays = outcome.arrays
        clients.books.left_out.update({int(client): left for pair, left in outcome.left_out.items() for client in clients.ids_M[which_M.reshape(-1) == pair]})
        labels_MC = self.federation.labels_of(clients.ids_M)
        if labels_MC is None:
            per_pair = np.array([scores(c, loss) for c, loss in zip(arrays["confusion"], arrays["loss"])])
            return Scores(clients.ids_M, *per_pair[which_M.reshape(-1)].T)
        found = [scores(arrays["confusion"][pair], arrays["loss"][pair], labels_C) for pair, labels_C in zip(which_M.reshape(-1), labels_MC)]
        return Scores(clients.ids_M, *np.array(found).T)


def _tables(serving: Serving) -> tuple[Tensor, ...]:
    return (serving.models_KP,) if serving.beside_P is None else (serving.models_KP, serving.beside_P[None])


def _beside(serving: Serving, count: int) -> Rows | None:
    return None if serving.beside_P is None else Rows(1, np.zeros(count, np.int64))


def initial_scores(evaluator: Evaluator, initial_P: Tensor, clients: Clients) -> Scores:
    """What clients hold that were never trained: the common initial model."""
    return evaluator.serving(Serving(initial_P[None], clients.first()), clients)


def summarise(found: Scores) -> dict[str, float]:
    """Mean over the clients that were tested, and how it spreads; NaN where none was."""
    tested = ~np.isnan(found.accuracy_M)
    accuracy, macro_f1, loss = (values[tested] if tested.any() else np.full(1, np.nan) for values in (found.accuracy_M, found.macro_f1_M, found.loss_M))
    return {
        "accuracy": float(accuracy.mean()),
        "accuracy_std": float(accuracy.std()),
        "accuracy_p10": float(np.percentile(accuracy, 10)),
        "macro_f1": float(np.nanmean(macro_f1)),
        "test_loss": float(np.nanmean(loss)),
    }


def clustering(method: Method, state: State, online: np.ndarray, group_N: np.ndarray | None) -> dict[str, float]:
    """Number and sizes of the clusters of the clients online that have one, and their agreement with the true groups."""
    assign_M = state.assign_N[online]
    known = assign_M != UNKNOWN
    if not known.any():
        return {}
    count_K = np.bincount(assign_M[known])
    found = {"num_clusters": float((count_K > 0).sum()), "largest_cluster_share": float(count_K.max() / known.sum())}
    if group_N is not None:
        known &= group_N[online] >= 0  # newcomers may come without a truth
        found |= agreement(group_N[online][known], assign_M[known]) if known.any() else {}
    return found
