"""How clients predict."""

from dataclasses import dataclass

import numpy as np
from torch import Tensor

from cfl_ray.core.clients import Own
from cfl_ray.core.local import LocalSGD


@dataclass(frozen=True)
class Serving:
    """The model of each of M clients: row `row_M` of `models_KP`, with the columns a client owns taken from its own memory.

    Row -1: the method has no model for the client yet, and it is not tested.
    """

    models_KP: Tensor
    row_M: np.ndarray  # int (M,)
    own: Own | None = None  # None: clients with the same row share one model
    beside_P: Tensor | None = None  # a model whose logits are added to everybody's
    vote: bool = False  # all models predict together, by the mean of their class probabilities; `row_M` is then for P-tune
    tune: LocalSGD | None = None  # a client trains so much on its own data before it predicts

    @property
    def alone(self) -> bool:
        """Whether every client predicts with a model of its own."""
        return self.own is not None or self.tune is not None
