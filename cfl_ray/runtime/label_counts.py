"""Label counts of the clients whose similarity a method has reported, so that the report can compare the two."""

from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from cfl_ray.core.clients import ClientData, Clients
from cfl_ray.core.diagnostics import CLIENTS, MOST_VALUES, ReportedDiagnostic, sample_of
from cfl_ray.data.federation import Federation


@dataclass(frozen=True)
class CountLabels:
    """The number of a client's training samples of each class, (C,)."""

    num_classes: int

    def __call__(self, client: ClientData, anchor_P: Tensor | None) -> Tensor:
        return torch.bincount(client.y, minlength=self.num_classes)


@dataclass
class LabelCounts:
    """Label counts by client; a client is asked once, and again when its data have changed."""

    num_classes: int
    known: dict[tuple[int, Hashable], Tensor] = field(default_factory=dict)  # by client and version of its data

    def bounded(self, ids: np.ndarray, seed: int) -> np.ndarray:
        """A sample of the clients, small enough that their counts fit into a diagnostic."""
        return ids[sample_of(ids, MOST_VALUES // self.num_classes, seed)]

    def of(self, clients: Clients, federation: Federation) -> tuple[np.ndarray, Tensor]:
        """Ids of those of the clients whose data are valid, and their counts (M, C)."""
        key_of = {client: (client, federation.data_version(client)) for client in clients.ids_M.tolist()}
        missing = clients.select(np.array([key not in self.known for key in key_of.values()], bool))
        found_MC, valid_M = missing.describe(CountLabels(self.num_classes))
        for client, counts_C in zip(missing.ids_M[valid_M].tolist(), found_MC[torch.from_numpy(valid_M)], strict=True):
            self.known[key_of[client]] = counts_C
        ids = [client for client, key in key_of.items() if key in self.known]
        counts_MC = torch.stack([self.known[key_of[client]] for client in ids]) if ids else found_MC[:0]
        return np.array(ids, np.int64), counts_MC


def compared_clients(reported: Iterable[ReportedDiagnostic]) -> np.ndarray:
    """Ids, ascending, of the clients in matrices of clients by clients."""
    found = [one.diagnostic.labels[0] for one in reported if one.diagnostic.axes == (CLIENTS, CLIENTS)]
    return np.unique(np.concatenate(found)) if found else np.zeros(0, np.int64)
