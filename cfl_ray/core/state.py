"""State of a method between rounds."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

UNASSIGNED = -1  # cluster of a client without a cluster

_AXES = re.compile(r"_([A-Z][A-Z0-9]*)$")  # axis letters at the end of a field's name


@dataclass(frozen=True)
class State:
    """Everything that the server of a method keeps between rounds.

    Fields are tensors, arrays and scalars only, so that any state can be saved. A method that needs more fields uses a
    subclass: `class StoCFL(Method[StoCFLState], name="stocfl")`.
    """

    models_KP: Tensor  # float32 (K, P): the cluster models
    assign_N: np.ndarray  # int32 (N,): cluster of each client, UNASSIGNED for a client without one
    # stage of the clustering, such as "warmup" or "federate"; by keyword, so that fields of a subclass need no default
    phase: str = field(default="federate", kw_only=True)

    @property
    def num_clusters(self) -> int:
        """K."""
        return len(self.models_KP)

    @property
    def members_K(self) -> np.ndarray:
        """Number of clients in each cluster, int64 (K,)."""
        return np.bincount(self.assign_N[self.assign_N >= 0], minlength=self.num_clusters)

    def place(self, ids_M: np.ndarray | Sequence[int], assign_M: np.ndarray | int) -> np.ndarray:
        """A copy of `assign_N` with the clients `ids_M` in the clusters `assign_M`."""
        assign_N = self.assign_N.copy()
        assign_N[ids_M] = assign_M
        return assign_N

    def advance(self, **changes: Any) -> Self:
        """The next state: this state with the given fields replaced."""
        return replace(self, **changes)

    def forget(self, ids: np.ndarray) -> Self:
        """This state without the clients `ids`, which left."""
        return self.advance(assign_N=self.place(ids, UNASSIGNED))

    def grown(self, num_clients: int) -> Self:
        """This state for a federation that grew to `num_clients` clients.

        Newcomers have no cluster, and 0 in every other field with an axis N (`more_N`, `seen_NK`, `best_KN`). A
        subclass for which 0 is not the value of a newcomer overrides this.
        """
        more = num_clients - len(self.assign_N)
        changes: dict[str, Tensor | np.ndarray] = {}
        for item in fields(self):
            value, axes = getattr(self, item.name), _AXES.search(item.name)
            if not isinstance(value, (Tensor, np.ndarray)) or not axes or "N" not in axes[1]:
                continue
            array, axis = np.asarray(value), axes[1].index("N")
            shape = (*array.shape[:axis], more, *array.shape[axis + 1 :])
            added = np.full(shape, UNASSIGNED if item.name == "assign_N" else 0, array.dtype)
            longer = np.concatenate([array, added], axis)
            changes[item.name] = torch.from_numpy(longer) if isinstance(value, Tensor) else longer
        return self.advance(**changes)

    def to_checkpoint(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """(tensors, scalars) by field name, in the form that a checkpoint stores."""
        values = {item.name: getattr(self, item.name) for item in fields(self)}
        tensors = {name: value for name, value in values.items() if isinstance(value, (Tensor, np.ndarray))}
        scalars = {name: value for name, value in values.items() if name not in tensors}
        return {name: torch.as_tensor(value) for name, value in tensors.items()}, scalars

    @classmethod
    def from_checkpoint(cls, tensors: dict[str, Tensor], scalars: dict[str, Any]) -> Self:
        """The inverse of `to_checkpoint`. Fields annotated as arrays come back as arrays."""
        arrays = {item.name for item in fields(cls) if "ndarray" in str(item.type)}
        values: dict[str, Any] = {name: value.numpy() if name in arrays else value for name, value in tensors.items()}
        return cls(**values, **scalars)


@dataclass(frozen=True, kw_only=True)
class OwnModelsState(State):
    """A state in which the server keeps a model for each of the S clients that have taken part.

    Other clients have the global model, row 0 of `models_KP`.
    """

    own_SP: Tensor  # float32
    seen_S: np.ndarray  # int64: ids of the clients, in the order of their first models

    @property
    def all_models(self) -> Tensor:
        """The global model and those of the clients, (1 + S, P)."""
        return torch.cat([self.models_KP[:1], self.own_SP])

    def rows_of(self, ids_M: np.ndarray) -> np.ndarray:
        """The row of `all_models` for each of these clients, int64 (M,)."""
        row_of = {client: row for row, client in enumerate(self.seen_S.tolist(), 1)}
        return np.array([row_of.get(client, 0) for client in ids_M.tolist()], np.int64)

    def with_models(self, ids_M: np.ndarray, models_MP: Tensor) -> Self:
        """This state with new models of these clients."""
        row_M, seen_S = self.rows_of(ids_M), np.concatenate([self.seen_S, ids_M[self.rows_of(ids_M) == 0]])
        row_M[row_M == 0] = np.arange(len(self.seen_S), len(seen_S)) + 1
        own_SP = torch.cat([self.own_SP, self.own_SP.new_empty(len(seen_S) - len(self.seen_S), models_MP.shape[1])])
        own_SP[torch.from_numpy(row_M - 1)] = models_MP
        return self.advance(own_SP=own_SP, seen_S=seen_S)

    def forget(self, ids: np.ndarray) -> Self:
        """This state without the clients `ids`, which left, and without their models."""
        stay_S = ~np.isin(self.seen_S, ids)
        return super().forget(ids).advance(own_SP=self.own_SP[torch.from_numpy(stay_S)], seen_S=self.seen_S[stay_S])
