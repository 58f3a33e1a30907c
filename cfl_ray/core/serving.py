"""The models with which clients predict."""

from dataclasses import dataclass, replace
from typing import Self

import numpy as np
from torch import Tensor

from cfl_ray.core.local_sgd import LocalSGD
from cfl_ray.core.work import ClientState


@dataclass(frozen=True)
class Serving:
    """The model of each of M clients: row `row_M` of `models_KP`, with the columns of its client state put in."""

    models_KP: Tensor
    row_M: np.ndarray  # integer (M,); -1: the method has no model for the client yet, and it is not tested
    client_state: ClientState | None = None  # None: clients with the same row share one model
    frozen_P: Tensor | None = None  # frozen model: its logits are added to those of every client's model
    # weights (M, K) of all models in the mean of their class probabilities; `row_M` is then used by P-tune only.
    # None: each client predicts with its row
    weight_MK: np.ndarray | None = None
    tune: LocalSGD | None = None  # local training of each client on its own data before it predicts

    @classmethod
    def vote(cls, models_KP: Tensor, num_clients: int) -> Self:
        """Every client predicts by a soft vote of all models."""
        count = len(models_KP)
        return cls(models_KP, np.zeros(num_clients, np.int64), weight_MK=np.full((num_clients, count), 1 / count))

    def select(self, mask_M: np.ndarray) -> Self:
        """The models of the clients at `mask_M` (bool or indices)."""
        weight_MK = None if self.weight_MK is None else self.weight_MK[mask_M]
        return replace(self, row_M=self.row_M[mask_M], weight_MK=weight_MK)

    @property
    def is_personal(self) -> bool:
        """Whether clients with the same row may predict with different models."""
        return self.client_state is not None or self.tune is not None
