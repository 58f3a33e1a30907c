"""The base class of shards and in-memory federations: a client's data are a range of rows, held-out rows last."""

from abc import abstractmethod
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from cfl_ray.data.federation import DataShape, Federation, TensorSamples
from cfl_ray.errors import DataError

StoredSamples = tuple[np.ndarray, np.ndarray]  # x (n, *input) as stored, y (n, *target_shape)
_LARGE = 10.0  # root mean square of a channel far above that of normalised inputs, which is 1


@dataclass(frozen=True)
class Index:
    """The rows of each client. -1 in group_N: true group not known; in test_set_N: no shared test set."""

    file_N: np.ndarray  # int32
    offset_N: np.ndarray  # int64: first row within the file
    train_N: np.ndarray  # int64: number of training rows
    held_out_N: np.ndarray  # int64: number of held-out rows, after the training rows
    group_N: np.ndarray  # int32
    test_set_N: np.ndarray  # int32
    labels_NC: np.ndarray | None  # bool; None unless the view is label


@dataclass(frozen=True)
class Scaling:
    """How stored numbers become inputs: x / scale, then (x - mean) / std per channel. Token ids are not changed."""

    scale: float
    normalize: list[list[float]] | None  # [means, standard deviations]; None: only divide by scale
    tokens: bool = False  # the inputs are token ids

    def check(self, shape: tuple[int, ...]) -> "Scaling":
        """This object. Raises DataError if means and deviations do not fit inputs of this shape."""
        if self.normalize is not None and self.tokens:
            raise DataError(
                f"data.normalize: token ids are not numbers to normalise; set it to null, not {self.normalize}"
            )
        if self.normalize is not None:
            lengths = [len(part) for part in self.normalize]
            fit = len(lengths) == 2 and all(length in (1, shape[0]) for length in lengths)
            if not fit or min(self.normalize[1]) <= 0 or not np.isfinite(np.concatenate(self.normalize)).all():
                raise DataError(
                    f"data.normalize must be [means, stds] with {shape[0]} values each (or 1), all finite, and stds "
                    f"above 0, got {self.normalize}"
                )
        return self

    def to_tensor(self, x: np.ndarray) -> torch.Tensor:
        """A float32 copy with the same bits as torchvision's ToTensor and Normalize; int64 for token ids."""
        if self.tokens:
            return torch.from_numpy(x.astype(np.int64))
        with np.errstate(over="ignore", invalid="ignore"):  # values beyond float32 are infinite: the client is excluded
            scaled = np.divide(x, np.float32(self.scale), dtype=np.float32)
        if self.normalize is not None:
            mean, std = (np.asarray(part, np.float32).reshape(-1, *[1] * (x.ndim - 2)) for part in self.normalize)
            scaled -= mean
            scaled /= std
        return torch.from_numpy(scaled)

    def to_stored(self, x: torch.Tensor) -> np.ndarray:
        """The inverse of `to_tensor`: whole numbers, int64, if `scale` is not 1; otherwise float64."""
        values = x.double().numpy()
        if self.normalize is not None:
            mean, std = (np.asarray(part).reshape(-1, *[1] * (x.ndim - 2)) for part in self.normalize)
            values = values * std + mean
        return values if self.scale == 1 else np.rint(values * self.scale).astype(np.int64)


def scale_warnings(x: torch.Tensor) -> list[str]:
    """A warning if a channel or feature of inputs (n, C, ...) has large values; otherwise empty."""
    if not x.is_floating_point():
        return []
    channel_C = x.double().transpose(0, 1).flatten(1)
    worst = int((rms_C := channel_C.square().mean(1).sqrt()).argmax())
    if not rms_C[worst] > _LARGE:  # nor NaN, for which a client is excluded
        return []
    mean, std = channel_C[worst].mean(), channel_C[worst].std(correction=0)
    return [
        f"inputs have large values (number {worst} of {len(rms_C)}: mean {mean:.3g}, standard deviation {std:.3g} in "
        "client 0), with which training often fails; set data.normalize: [[mean, ...], [standard deviation, ...]]"
    ]


class IndexedFederation(Federation):
    """A federation whose samples are rows of files, which subclasses read."""

    def __init__(self, shape: DataShape, view: str, recipe: dict[str, Any], index: Index, scaling: Scaling) -> None:
        self.shape, self.view, self.recipe = shape, view, recipe
        self.index, self.scaling = index, scaling
        self.scale, self.normalize = scaling.scale, scaling.normalize
        self._target_type = str(shape.target_dtype).removeprefix("torch.")
        self.num_samples_N = index.train_N
        self.group_N = None if (index.group_N < 0).all() else index.group_N

    @abstractmethod
    def _file(self, number: int) -> StoredSamples:
        """All rows of a file of clients."""

    @abstractmethod
    def _test_file(self, number: int) -> StoredSamples:
        """All rows of a shared test set."""

    @property
    def warnings(self) -> list[str]:
        """Of the inputs of client 0, unless they are stored with a scale."""
        try:
            return scale_warnings(self.train(0)[0]) if self.scale == 1 else []
        except (DataError, OSError):  # a run excludes the client and names the reason
            return []

    def train(self, client: int) -> TensorSamples:
        start = self.index.offset_N[client]
        rows = slice(start, start + self.index.train_N[client])
        return self._tensors(self._file(int(self.index.file_N[client])), rows)

    def holdout(self, client: int) -> TensorSamples:
        if self.view != "holdout":
            raise DataError(f"client {client} has no held-out samples: the test view is {self.view}, not holdout")
        start = self.index.offset_N[client] + self.index.train_N[client]
        rows = slice(start, start + self.index.held_out_N[client])
        return self._tensors(self._file(int(self.index.file_N[client])), rows)

    def test_set(self, index: int) -> TensorSamples:
        if not 0 <= index < self.num_test_sets():
            raise IndexError(f"test set {index} of {self.num_test_sets()}")
        return self._tensors(self._test_file(index), slice(None))

    def test_set_of(self, clients: np.ndarray) -> np.ndarray:
        return self.index.test_set_N[clients]

    def labels_of(self, clients: np.ndarray) -> np.ndarray | None:
        return None if self.index.labels_NC is None else self.index.labels_NC[clients]

    def test(self, client: int, max_images: int | None = None, seed: int = 0) -> TensorSamples:
        """As in the base class, but only the samples that are returned are converted."""
        if self.view == "holdout":
            return self.holdout(client)
        samples = self._test_file(int(self.index.test_set_N[client]))
        return self._tensors(samples, self.test_rows(client, samples[1], max_images, seed))

    def _tensors(self, samples: StoredSamples, rows: slice | np.ndarray) -> TensorSamples:
        x, y = samples
        return self.scaling.to_tensor(x[rows]), torch.from_numpy(y[rows].astype(self._target_type))
