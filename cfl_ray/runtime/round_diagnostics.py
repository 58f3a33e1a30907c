"""The arrays in the report of an evaluated round: reported by the method, of clusters, and label counts."""

from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from cfl_ray.core.clients import ClientData, Clients
from cfl_ray.core.diagnostics import CLIENTS, CLUSTERS, MOST_VALUES, Diagnostics, ReportedDiagnostic, sample_of
from cfl_ray.core.state import State
from cfl_ray.data.federation import Federation
from cfl_ray.runtime.evaluation import Scores, cluster_vectors
from cfl_ray.runtime.round_report import RoundDraft
from cfl_ray.tracking.record import cluster_diagnostics_of


class RoundDiagnostics:
    """The last array reported under each name, for the report of the next evaluated round.

    A method may report a function instead of an array; `resolve` calls it before a checkpoint is saved or the models
    are freed.
    """

    def __init__(self, restored: tuple[ReportedDiagnostic, ...] = ()):
        self.arrays = {reported.name: reported for reported in restored}
        self._deferred: dict[str, tuple[int, Diagnostics]] = {}  # not computed yet: (round, reported in it)

    def take(self, draft: RoundDraft, reported: Diagnostics) -> None:
        """Adds the arrays that were reported in a round; numbers become metrics of the round."""
        draft.add_numbers(reported)
        self._deferred |= dict.fromkeys(reported.names, (draft.round, reported))

    def resolve(self) -> None:
        """Computes the arrays added since the last call."""
        made = {name: ReportedDiagnostic(name, round, of.array(name)) for name, (round, of) in self._deferred.items()}
        self.arrays, self._deferred = self.arrays | made, {}

    @property
    def reported(self) -> tuple[ReportedDiagnostic, ...]:
        """The computed arrays."""
        return tuple(self.arrays.values())


def of_clusters(label: str, primary: str, state: State, online: np.ndarray, scores: Scores) -> Diagnostics:
    """Score and size of every cluster; empty if there are fewer than two clusters."""
    diagnostics = Diagnostics(label)
    if vectors := cluster_vectors(state, online, scores):
        for name, vector_K in zip(cluster_diagnostics_of(primary), vectors, strict=True):
            diagnostics.add(name, vector_K, (CLUSTERS,), scores.ids_M)
    return diagnostics


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
