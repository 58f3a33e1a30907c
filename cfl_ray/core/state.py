"""What a method remembers between rounds."""

import re
from dataclasses import dataclass, fields, replace
from typing import Self

import numpy as np
import torch
from torch import Tensor

UNKNOWN = -1  # cluster of a client that the server knows nothing about


@dataclass(frozen=True)
class State:
    """Everything the server knows: frozen, and made of tensors, arrays and scalars only, so that one function saves any method.

    A method that remembers more subclasses this and names its class as `Method.State`.
    """

    models_KP: Tensor  # float32 (K, P): the cluster models
    assign_N: np.ndarray  # int32 (N,): cluster of each client, UNKNOWN where none is known
    phase: str = "federate"  # where the clustering stands: e.g. "warmup", "cluster", "federate"

    @property
    def num_clusters(self) -> int:
        return len(self.models_KP)

    @property
    def members_K(self) -> np.ndarray:
        """int64 (K,): members of each cluster."""
        return np.bincount(self.assign_N[self.assign_N >= 0], minlength=self.num_clusters)

    def place(self, ids_M: np.ndarray, assign_M: np.ndarray) -> np.ndarray:
        """`assign_N` with the clients `ids_M` in clusters `assign_M`."""
        assign_N = self.assign_N.copy()
        assign_N[ids_M] = assign_M
        return assign_N

    def advance(self, **changes) -> Self:
        """The next state: this one with `changes`."""
        return replace(self, **changes)

    def forget(self, ids: np.ndarray) -> Self:
        """This state without the assignment of clients that left."""
        return self.advance(assign_N=self.place(ids, UNKNOWN))

    def grown(self, num_clients: int) -> Self:
        """This state for a federation that grew to `num_clients`: newcomers have no cluster, and zeros in other fields per client.

        Fields are known by their axes: `more_N`, `seen_NK`, `best_KN`. A method that means something else by zero overrides this.
        """
        more, changes = num_clients - len(self.assign_N), {}
        for field in fields(self):
            value, axes = getattr(self, field.name), re.search(r"_([A-Z][A-Z0-9]*)$", field.name)
            if isinstance(value, (Tensor, np.ndarray)) and axes and "N" in axes[1]:
                axis = axes[1].index("N")
                rest = np.full((*value.shape[:axis], more, *value.shape[axis + 1 :]), UNKNOWN if field.name == "assign_N" else 0)
                array = np.concatenate([np.asarray(value), rest.astype(np.asarray(value).dtype)], axis)
                changes[field.name] = torch.from_numpy(array) if isinstance(value, Tensor) else array
        return self.advance(**changes)

    def split(self) -> tuple[dict[str, Tensor], dict[str, object]]:
        """(tensors, scalars) by field name: what a checkpoint stores."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        tensors = {name: value for name, value in values.items() if isinstance(value, (Tensor, np.ndarray))}
        scalars = {name: value for name, value in values.items() if name not in tensors}
        return {name: torch.as_tensor(value) for name, value in tensors.items()}, scalars

    @classmethod
    def join(cls, tensors: dict[str, Tensor], scalars: dict[str, object]) -> Self:
        """The inverse of `split`. Fields annotated as arrays come back as arrays."""
        arrays = {field.name for field in fields(cls) if "ndarray" in str(field.type)}
        values = {name: value.numpy() if name in arrays else value for name, value in tensors.items()}
        return cls(**values, **scalars)
