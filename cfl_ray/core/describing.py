"""Functions that clients apply to their data: the data that they are given, and the check of their results."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from cfl_ray.core.local_sgd import LocalSGD
from cfl_ray.core.params import Columns, ParamSpec
from cfl_ray.errors import RunError
from cfl_ray.plugins.calling import call_plugin, described, place_of


class ClientData(Protocol):
    """The argument of a function given to `Clients.describe`: one client, on the host that reads its data."""

    @property
    def x(self) -> Tensor:
        """float32 (n, *shape): normalised training samples."""

    @property
    def y(self) -> Tensor:
        """int64 (n,): their labels; targets of other tasks as `core.tasks` says."""

    @property
    def spec(self) -> ParamSpec: ...

    def gradient(
        self, row_P: Tensor, batch: int = 2048, samples: slice = slice(None), columns: Columns | None = None
    ) -> Tensor:
        """Gradient (trained columns,) of the mean loss over the training data at a model; without dropout.

        samples: the samples to use. columns: trained columns, whose gradient alone is computed and returned.
        """

    def batch_gradients(self, row_P: Tensor, size: int | None) -> Iterator[Tensor]:
        """`gradient` of each `size` samples in order, the last of fewer; None: of all. The engine of the run computes
        them, so that they equal those of `gradient` up to rounding.
        """

    def loss(self, row_P: Tensor, samples: slice = slice(None)) -> float:
        """Mean loss of a model on the training data, in evaluation mode. samples: the samples to use."""

    def features(self, row_P: Tensor) -> Tensor:
        """Inputs (n, F) of the last layer of a model for all training samples, in evaluation mode."""

    def outputs(self, row_P: Tensor) -> Tensor:
        """Outputs (n, *output_shape) of a model for all training samples, in evaluation mode."""

    def train(self, row_P: Tensor, local: LocalSGD | None = None, **changes: Any) -> Tensor:
        """The row (P,) after local training from `row_P` with this round's settings, or with `changes` to them."""


@dataclass(frozen=True)
class CheckedFunction:
    """A function given to `Clients.describe`, whose results are checked where it is called."""

    function: Callable[..., Any]

    @property
    def floats(self) -> Any:
        """The function's attribute `floats`, the numbers that a client uploads, if any; for `cfl-ray check`."""
        return getattr(self.function, "floats", None)

    def __call__(self, client: Any, anchor_P: Tensor | None) -> Tensor:
        returned = call_plugin("function", self.function, client, anchor_P, where=" of Clients.describe")
        try:
            vector = torch.as_tensor(returned).float().reshape(-1)
        except (TypeError, ValueError, RuntimeError):
            vector = torch.zeros(0)
        if not len(vector):
            raise RunError(
                f"function {place_of(self.function)} of Clients.describe returned {described(returned)}, "
                "expected a tensor or array of at least one number"
            )
        return vector
