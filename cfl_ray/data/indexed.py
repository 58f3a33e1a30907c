"""What shards and in-memory federations share: a client is a run of rows, training samples first, held-out samples after."""

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from cfl_ray.core.errors import DataError
from cfl_ray.data.federation import Federation, Shape

Samples = tuple[np.ndarray, np.ndarray]  # x (n, *input) as stored, y integer (n,)


@dataclass(frozen=True)
class Index:
    """Where each client's rows are. -1: no group known, no shared test set."""

    file_N: np.ndarray  # int32
    offset_N: np.ndarray  # int64: first row within the file
    train_N: np.ndarray  # int64: training rows
    held_out_N: np.ndarray  # int64: held-out rows, after the training rows
    group_N: np.ndarray  # int32
    test_set_N: np.ndarray  # int32
    labels_NC: np.ndarray | None  # bool; None unless the view is label


@dataclass(frozen=True)
class Scaling:
    """From stored numbers to the network's input: x / scale, then (x - mean) / std per channel."""

    scale: float
    normalize: Sequence[Sequence[float]] | None  # [means, stds]; None: only divide

    def check(self, shape: tuple[int, ...]) -> "Scaling":
        """Itself. Raises DataError where mean and std do not fit inputs of this shape."""
        if self.normalize is not None:
            lengths = [len(part) for part in self.normalize]
            if len(lengths) != 2 or any(length not in (1, shape[0]) for length in lengths) or min(self.normalize[1]) <= 0:
                raise DataError(f"data.normalize must be [means, stds] with {shape[0]} values each (or 1) and stds above 0, got {self.normalize}")
        return self

    def to_tensor(self, x: np.ndarray) -> torch.Tensor:
        """A float32 copy; bit for bit what torchvision's ToTensor and Normalize give."""
        scaled = np.divide(x, np.float32(self.scale), dtype=np.float32)
        if self.normalize is not None:
            mean, std = (np.asarray(part, np.float32).reshape(-1, *[1] * (x.ndim - 2)) for part in self.normalize)
            scaled -= mean
            scaled /= std
        return torch.from_numpy(scaled)


class IndexedFederation(Federation):
    """A federation of files of rows; where the files are is the subclass's affair."""

    def __init__(self, shape: Shape, view: str, recipe: dict, index: Index, scaling: Scaling):
        self.shape, self.view, self.recipe = shape, view, recipe
        self._index, self._scaling = index, scaling
        self.normalize = scaling.normalize
        self.size_N = index.train_N
        self.group_N = None if (index.group_N < 0).all() else index.group_N

    @abstractmethod
    def _file(self, number: int) -> Samples:
        """Every row of one file of clients."""

    @abstractmethod
    def _test_file(self, number: int) -> Samples:
        """Every row of one shared test set."""

    def train(self, client: int) -> tuple[torch.Tensor, torch.Tensor]:
        start = self._index.offset_N[client]
        return self._tensors(self._file(int(self._index.file_N[client])), slice(start, start + self._index.train_N[client]))

    def holdout(self, client: int) -> tuple[torch.Tensor, torch.Tensor]:
        if self.view != "holdout":
            raise DataError(f"client {client} has no held-out samples: the test view is {self.view}, not holdout")
        start = self._index.offset_N[client] + self._index.train_N[client]
        return self._tensors(self._file(int(self._index.file_N[client])), slice(start, start + self._index.held_out_N[client]))

    def test_set(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        if not 0 <= index < self.num_test_sets():
            raise IndexError(f"test set {index} of {self.num_test_sets()}")
        return self._tensors(self._test_file(index), slice(None))

    def test_set_of(self, clients: np.ndarray) -> np.ndarray:
        return self._index.test_set_N[clients]

    def labels_of(self, clients: np.ndarray) -> np.ndarray | None:
        return None if self._index.labels_NC is None else self._index.labels_NC[clients]

    def test(self, client: int, max_images: int | None = None, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
        """As the base class says; converts only the samples it returns."""
        if self.view == "holdout":
            return self.holdout(client)
        samples = self._test_file(int(self._index.test_set_N[client]))
        return self._tensors(samples, self._test_rows(client, samples[1], max_images, seed))

    def _tensors(self, samples: Samples, rows: slice | np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
        x, y = samples
        return self._scaling.to_tensor(x[rows]), torch.from_numpy(y[rows].astype(np.int64))
