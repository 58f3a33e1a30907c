"""What a method remembers between rounds."""

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
