"""How clients predict."""

from dataclasses import dataclass

import numpy as np
from torch import Tensor

from cfl_ray.core.clients import Own


@dataclass(frozen=True)
class Serving:
    """The model of each of M clients: row `row_M` of `models_KP`, with the columns a client owns taken from its own memory."""

    models_KP: Tensor
    row_M: np.ndarray  # int (M,)
    own: Own | None = None  # None: clients with the same row share one model
