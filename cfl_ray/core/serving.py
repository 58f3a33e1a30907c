"""The models with which clients predict."""

from dataclasses import dataclass

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
    # True: all models predict together, by the mean of their class probabilities; `row_M` is then for P-tune alone
    vote: bool = False
    tune: LocalSGD | None = None  # local training of each client on its own data before it predicts

    @property
    def is_personal(self) -> bool:
        """Whether every client predicts with a model of its own."""
        return self.client_state is not None or self.tune is not None
