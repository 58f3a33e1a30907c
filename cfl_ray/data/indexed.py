"""Federations whose samples are rows of files: a range of rows for each client, held-out and validation rows last."""

from abc import abstractmethod
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch

from cfl_ray.data.federation import (
    DataShape,
    Federation,
    FederationView,
    TensorSamples,
    ValidationPart,
    tested_on,
    validated_on,
)
from cfl_ray.errors import DataError

StoredSamples = tuple[np.ndarray, np.ndarray]  # x (n, *input) as stored, y (n, *target_shape)
_LARGE = 10.0  # root mean square of a channel far above that of normalised inputs, which is 1


class RowsOfParts(NamedTuple):
    """The rows of a client within its file."""

    train: slice
    held_out: slice
    validation: slice


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
    validation_N: np.ndarray | None = None  # int64: number of validation rows, the last ones; None: there are none
    validation_set_N: np.ndarray | None = None  # int32: -1: no shared validation set; None: there are none

    def rows(self, client: int) -> RowsOfParts:
        """The rows of each part of a client's samples."""
        sizes = self.train_N, self.held_out_N, self.validation_N
        ends = np.cumsum([self.offset_N[client], *(0 if size_N is None else size_N[client] for size_N in sizes)])
        return RowsOfParts(*(slice(first, last) for first, last in pairwise(ends.tolist())))


@dataclass(frozen=True)
class Scaling:
    """How stored numbers become inputs: x / scale, then (x - mean) / std per channel. Token ids are not changed."""

    scale: float
    normalize: list[list[float]] | None  # [means, standard deviations]; None: only divide by scale
    tokens: bool = False  # the inputs are token ids

    def check(self, shape: tuple[int, ...]) -> "Scaling":
        """This scaling. Raises DataError if its means and deviations do not fit inputs of this shape."""
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
        """The stored numbers of inputs that `to_tensor` made: int64 if `scale` is not 1, otherwise float64."""
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


def layout_warnings(shape: tuple[int, ...]) -> list[str]:
    """A warning if inputs of this shape seem to be images with the channels last; otherwise empty."""
    if len(shape) != 3 or shape[-1] not in (1, 3, 4) or min(shape[:2]) <= 4:
        return []
    return [
        f"inputs of shape {shape} seem to be images with the channels last; networks take {shape[0]} channels of "
        f"{shape[1]}x{shape[2]} from them: give x.transpose(0, 3, 1, 2) if that is not meant"
    ]


class IndexedFederation(Federation):
    """A federation whose samples are rows of files, which subclasses read."""

    def __init__(self, shape: DataShape, view: str, recipe: dict[str, Any], index: Index, scaling: Scaling) -> None:
        self.shape, self.view, self.recipe = shape, view, recipe
        self.index, self.scaling = index, scaling
        self.scale, self.normalize = scaling.scale, scaling.normalize
        self._target_type = str(shape.target_dtype).removeprefix("torch.")
        self.num_samples_N, self.num_validation_N = index.train_N, index.validation_N
        self.group_N = None if (index.group_N < 0).all() else index.group_N

    @abstractmethod
    def _file(self, number: int) -> StoredSamples:
        """All rows of a file of clients."""

    @abstractmethod
    def _test_file(self, number: int) -> StoredSamples:
        """All rows of a shared test set."""

    def _validation_file(self, number: int) -> StoredSamples:
        """All rows of a shared validation set."""
        raise IndexError(f"validation set {number} of 0")

    max_test_samples: int | None = None  # to which shared sets of test and validation samples were cut; None: not cut
    validation_view: str | None = None  # of validation data of the source; None: there are none
    validation_sizes: Sequence[int] = ()  # samples of each shared validation set

    @property
    def tested_on(self) -> str:
        if self.view == "holdout" and self.recipe.get("source") == "arrays":  # shards of arrays do not tell how
            return super().tested_on
        return tested_on(self.view, self.num_test_sets(), self.max_test_samples)

    @property
    def validated_on(self) -> str:
        if self.validation_view is None:
            return super().validated_on
        return validated_on(self.validation_view, len(self.validation_sizes), self.max_test_samples)

    @cached_property
    def validation(self) -> Federation | None:
        if self.validation_view is None:
            return None
        return ValidationPart(self) if self.validation_view == "holdout" else _SharedValidation(self)

    @property
    def warnings(self) -> list[str]:
        """Of the layout, and of the inputs of client 0 unless they are stored with a scale."""
        lines = layout_warnings(self.shape.input)
        try:
            return lines + (scale_warnings(self.train(0)[0]) if self.scale == 1 else [])
        except (DataError, OSError):  # a run excludes the client and names the reason
            return lines

    def train(self, client: int) -> TensorSamples:
        return self._tensors(self._file_of(client), self.index.rows(client).train)

    def train_targets(self, client: int) -> torch.Tensor:
        _, y = self._file_of(client)
        return torch.from_numpy(y[self.index.rows(client).train].astype(self._target_type))

    def holdout(self, client: int) -> TensorSamples:
        if self.view != "holdout":
            raise DataError(f"client {client} has no held-out samples: the test view is {self.view}, not holdout")
        return self._tensors(self._file_of(client), self.index.rows(client).held_out)

    def num_test_samples(self, clients: np.ndarray) -> np.ndarray:
        """As in the base class; the number of held-out samples is in the index."""
        return self.index.held_out_N[clients] if self.view == "holdout" else super().num_test_samples(clients)

    def validation_samples(self, client: int) -> TensorSamples:
        return self._tensors(self._file_of(client), self.index.rows(client).validation)

    def validation_set(self, index: int, client: int | None = None, most: int | None = None) -> TensorSamples:
        """Shared validation set `index`; of a client, at most so many of the samples that it is tested on."""
        samples = self._validation_file(index)
        rows = slice(None) if client is None else self.test_rows(client, samples[1], most, 0)
        return self._tensors(samples, rows)

    def test_set(self, index: int) -> TensorSamples:
        if not 0 <= index < self.num_test_sets():
            raise IndexError(f"test set {index} of {self.num_test_sets()}")
        return self._tensors(self._test_file(index), slice(None))

    def test_set_of(self, clients: np.ndarray) -> np.ndarray:
        return self.index.test_set_N[clients]

    def labels_of(self, clients: np.ndarray) -> np.ndarray | None:
        return None if self.index.labels_NC is None else self.index.labels_NC[clients]

    def test(self, client: int, max_samples: int | None = None, seed: int = 0) -> TensorSamples:
        """As in the base class, but only the samples that are returned are converted."""
        if self.view == "holdout":
            return self.holdout(client)
        samples = self._test_file(int(self.index.test_set_N[client]))
        return self._tensors(samples, self.test_rows(client, samples[1], max_samples, seed))

    def _file_of(self, client: int) -> StoredSamples:
        return self._file(int(self.index.file_N[client]))

    def _tensors(self, samples: StoredSamples, rows: slice | np.ndarray) -> TensorSamples:
        x, y = samples
        return self.scaling.to_tensor(x[rows]), torch.from_numpy(y[rows].astype(self._target_type))


class _SharedValidation(FederationView):
    """An indexed federation whose clients are tested on shared validation sets of the source."""

    def __init__(self, base: IndexedFederation) -> None:
        super().__init__(base)
        assert base.validation_view is not None and base.index.validation_set_N is not None
        self._indexed, self._set_N = base, base.index.validation_set_N
        self.view, self.group_N = base.validation_view, base.group_N
        self.num_samples_N = np.append(np.array(base.validation_sizes, np.int64), 0)[self._set_N]

    def data_version(self, client: int) -> Hashable:
        return self._base.data_version(client), "validation"

    def num_test_sets(self) -> int:
        return len(self._indexed.validation_sizes)

    def test_set(self, index: int) -> TensorSamples:
        if not 0 <= index < self.num_test_sets():
            raise IndexError(f"validation set {index} of {self.num_test_sets()}")
        return self._indexed.validation_set(index)

    def test_set_of(self, clients: np.ndarray) -> np.ndarray:
        return self._set_N[clients]

    def labels_of(self, clients: np.ndarray) -> np.ndarray | None:
        return self._base.labels_of(clients) if self.view == "label" else None

    def test(self, client: int, max_samples: int | None = None, seed: int = 0) -> TensorSamples:
        return self._indexed.validation_set(int(self._set_N[client]), client, max_samples)
