"""The federation: N clients, the training data of each client, and the data on which it is tested.

Shards and in-memory federations have a range of rows for each client, held-out rows last (`IndexedFederation`).
"""

import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch

from cfl_ray.core.rng import stream
from cfl_ray.core.tasks import TARGETS
from cfl_ray.data.validation_share import ValidationShare
from cfl_ray.errors import DataError, counted

# x: float32 (n, *input), for tokens int64; y: int64 (n,) for classes, for other targets see `core.tasks`
TensorSamples = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class DataShape:
    """The shapes of inputs and targets, which are equal for all clients."""

    input: tuple[int, ...]  # shape of a sample, channels first, e.g. (1, 28, 28)
    num_classes: int  # C; if targets are not classes, the network's outputs for each number that it predicts
    vocabulary: int | None = None  # inputs are token ids 0 .. vocabulary - 1; None: inputs are real numbers
    targets: str = "class"  # kind of the targets (`core.tasks`)
    target_shape: tuple[int, ...] = ()  # shape of a sample's target
    class_names: tuple[str, ...] = ()  # by label, if the source names its classes

    @property
    def dtype(self) -> torch.dtype:
        """Type of the inputs: int64 for token ids, float32 otherwise."""
        return torch.float32 if self.vocabulary is None else torch.int64

    @property
    def target_dtype(self) -> torch.dtype:
        """Type of the targets."""
        return TARGETS[self.targets].dtype

    @property
    def targets_in_words(self) -> str:
        """Number and kind of the targets."""
        if self.targets == "tokens":
            return f"{self.target_shape[0]} tokens of {self.num_classes} to predict"
        kinds = {
            "class": ("class", "classes"),
            "real": ("number to predict", "numbers to predict"),
            "binary": ("label",),
        }
        return counted(self.num_classes, *kinds[self.targets])

    @property
    def outputs(self) -> tuple[int, ...]:
        """Shape of the network's output for a sample: (C,), or (T, V) for tokens."""
        return (*self.target_shape, self.num_classes) if self.targets == "tokens" else (self.num_classes,)


class GroupTransform(NamedTuple):
    """The distribution of a true group. Groups of the same family have the same samples, rotated and relabelled."""

    family: int
    turns: int = 0  # quarter turns counter-clockwise, 0..3
    offset: int = 0  # s in y -> (y + s) mod C


def tested_on(view: str, test_sets: int, most: int | None = None) -> str:
    """A sentence on which data a client is tested. test_sets: those that clients share. most: samples of each."""
    if view == "holdout":
        return "each client is tested on its own samples that are held out from training (data.test.view holdout)"
    return f"each client is tested on {_of_shared(view, test_sets, 'test set', most)} (data.test.view {view})"


def validated_on(view: str, sets: int, most: int | None = None) -> str:
    """A sentence on which validation data of the source a client has, as `tested_on`."""
    what = "its own samples of the validation part"
    if view != "holdout":
        what = _of_shared(view, sets, "validation set", most)
    return f"validation: each client is measured on {what}"


def _of_shared(view: str, sets: int, name: str, most: int | None) -> str:
    limited = "" if most is None else f"at most {counted(most, 'sample')} of "
    whole = limited + (f"the {name} of its true group" if sets > 1 else f"the {name if limited else f'whole {name}'}")
    if view == "label":
        return f"the samples of its own labels in {whole}"
    return f"{whole}, also with labels that the group does not have" if view == "all" and sets > 1 else whole


class Federation(ABC):
    """The data of every client, by client id.

    Instances pickle to a few bytes (a path or a recipe) plus arrays of a few bytes per client.
    """

    shape: DataShape
    num_samples_N: np.ndarray  # int64 (N,): training samples of each client
    group_N: np.ndarray | None  # int32 (N,): true group of each client, -1 if unknown; None if all are unknown
    view: str  # "cluster", "label", "all" or "holdout"
    recipe: dict[str, Any]  # JSON: all settings that decide the content of this federation
    scale: float = 1.0  # by which stored samples are divided, before they are normalised
    normalize: list[list[float]] | None = None  # [means, standard deviations] per channel; None: not normalised
    said: tuple[str, ...] = ()  # warnings on how it was chosen; only in the process that did
    share: ValidationShare | None = None  # of the training samples that is held out for validation; None: there is none
    num_validation_N: np.ndarray | None = None  # int64 (N,): validation samples of each client; None: there are none

    @property
    def digest(self) -> str | None:
        """Hash of the files that hold the data, equal for equal federations; None if there are no files."""
        return None

    @property
    def content(self) -> str:
        """Digest of the samples and their division among clients, equal for equal federations.

        By default a hash of the recipe, which has digests of all arrays.
        """
        return hashlib.sha256(json.dumps(self.recipe, sort_keys=True, default=str).encode()).hexdigest()

    @property
    def notes(self) -> list[str]:
        """Lines on what was read."""
        return []

    @property
    def warnings(self) -> list[str]:
        """Lines about data that are probably not meant to be as they are."""
        return [*self.said]

    @property
    def num_clients(self) -> int:
        """N."""
        return len(self.num_samples_N)

    @property
    def num_groups(self) -> int:
        """Number of true groups; 0 if they are unknown."""
        return 0 if self.group_N is None else len(np.unique(self.group_N[self.group_N >= 0]))

    @property
    def whole(self) -> "Federation":
        """This federation with the share of the training samples that it holds out for validation, if it does."""
        return self

    @cached_property
    def validation(self) -> "Federation | None":
        """This federation with its validation data in place of its test data; None without validation data.

        Its `num_samples_N` are the numbers of validation samples.
        """
        return None if self.num_validation_N is None else ValidationPart(self)

    @property
    def tested_on(self) -> str:
        """A sentence on which data a client is tested."""
        if self.view == "holdout":  # `holdout` of a subclass returns any samples
            return "each client is tested on test samples of its own"
        return tested_on(self.view, self.num_test_sets())

    @property
    def validated_on(self) -> str:
        """A sentence on which validation data a client has; empty without validation data."""
        if self.share is not None:
            return self.share.in_words
        if (part := self.validation) is None:
            return ""
        return validated_on(part.view, part.num_test_sets())

    def client_name(self, client: int) -> str:
        """The client's name in the data, e.g. a FEMNIST writer; the id itself if the data have no names."""
        return str(client)

    def at(self, round: int) -> "Federation":
        """The federation as it is in a round; this object if no client's data change."""
        return self

    @property
    def changed_in(self) -> dict[int, np.ndarray]:
        """The clients whose data change before a round, int64 ids, ascending, by round."""
        return {}

    def data_version(self, client: int) -> Hashable:
        """A value that is equal for two federations only if the client's data are equal in both.

        By default this federation itself: the data in another federation that `at` returns may differ.
        """
        return self

    def group_transform(self, group: int) -> GroupTransform:
        """The `GroupTransform` of a true group; by default, no two groups share samples."""
        return GroupTransform(family=group)

    @abstractmethod
    def train(self, client: int) -> TensorSamples:
        """The training samples of a client: x of shape.dtype (n, *shape.input), normalised; y (n,)."""

    def train_targets(self, client: int) -> torch.Tensor:
        """The targets of the training samples of a client."""
        return self.train(client)[1]

    def validation_samples(self, client: int) -> TensorSamples:
        """The validation samples of a client, which it does not train on. Called if `num_validation_N` is not None."""
        raise DataError(f"client {client} has no validation samples; set data.validation")

    def files_of(self, clients: np.ndarray) -> np.ndarray | None:
        """Returns, for each of these clients, the number of the file with its training samples, int (M,).

        Clients with equal numbers are fetched together. None if no process has to fetch files.
        """
        return None

    def fetch(self, clients: np.ndarray) -> None:  # noqa: B027  # most federations have nothing to fetch
        """Fetches the files of these clients, in this order, so that reading their data does not wait for files."""

    @abstractmethod
    def num_test_sets(self) -> int:
        """T, the number of test sets that clients share; 0 if the view is hold-out."""

    @abstractmethod
    def test_set(self, index: int) -> TensorSamples:
        """Shared test set `index`: x and y of the types of `shape`. Raises IndexError outside 0..T-1."""

    @abstractmethod
    def test_set_of(self, clients: np.ndarray) -> np.ndarray:
        """int32 (M,): the shared test set of each of these clients; -1 if the view is hold-out."""

    @abstractmethod
    def labels_of(self, clients: np.ndarray) -> np.ndarray | None:
        """Bool (M, C): the labels on which each client is tested (label view); None: on all labels."""

    @abstractmethod
    def holdout(self, client: int) -> TensorSamples:
        """The held-out samples of a client (hold-out view only)."""

    def test(self, client: int, max_samples: int | None = None, seed: int = 0) -> TensorSamples:
        """The client's test samples under its view.

        max_samples: draw at most so many images of a shared test set, the same in every call; None: all images.
        """
        if self.view == "holdout":
            return self.holdout(client)
        x, y = self.test_set(int(self.test_set_of(np.array([client]))[0]))
        keep = self.test_rows(client, y.numpy(), max_samples, seed)
        return (x, y) if len(keep) == len(y) else (x[keep], y[keep])

    def num_test_samples(self, clients: np.ndarray) -> np.ndarray:
        """int64 (M,): the number of test samples of each of these clients under its view, by reading them."""
        if self.view == "holdout":
            return np.array([len(self.holdout(client)[1]) for client in clients.tolist()], np.int64)
        labels_MC, set_M = self.labels_of(clients), self.test_set_of(clients)
        num_M = np.zeros(len(clients), np.int64)
        for test_set in np.unique(set_M):
            y, same_M = self.test_set(int(test_set))[1], set_M == test_set
            if labels_MC is None:
                num_M[same_M] = len(y)
            else:
                num_M[same_M] = labels_MC[same_M] @ torch.bincount(y, minlength=labels_MC.shape[1]).numpy()
        return num_M

    def test_rows(self, client: int, y: np.ndarray, max_samples: int | None, seed: int) -> np.ndarray:
        """The rows, ascending, of its shared test set on which the client is tested. y: the set's labels."""
        labels = self.labels_of(np.array([client]))
        keep = np.arange(len(y)) if labels is None else np.flatnonzero(labels[0][y])
        if max_samples is not None and len(keep) > max_samples:
            keep = np.sort(stream(seed, 0, 0, client, "test-images").choice(keep, max_samples, replace=False))
        return keep


class FederationView(Federation):
    """The data of `base`, except those that a subclass changes."""

    def __init__(self, base: Federation) -> None:
        self._base = base
        self.shape, self.view, self.recipe = base.shape, base.view, base.recipe
        self.scale, self.normalize, self.share = base.scale, base.normalize, base.share

    @property
    def digest(self) -> str | None:
        return self._base.digest

    @property
    def content(self) -> str:
        return self._base.content

    @property
    def notes(self) -> list[str]:
        return self._base.notes

    @property
    def warnings(self) -> list[str]:
        return self._base.warnings

    @property
    def tested_on(self) -> str:
        return self._base.tested_on

    @property
    def validated_on(self) -> str:
        return self._base.validated_on if self.share is None else self.share.in_words

    def client_name(self, client: int) -> str:
        return self._base.client_name(client)

    def group_transform(self, group: int) -> GroupTransform:
        return self._base.group_transform(group)

    def train(self, client: int) -> TensorSamples:
        return self._base.train(client)

    def num_test_sets(self) -> int:
        return self._base.num_test_sets()

    def test_set(self, index: int) -> TensorSamples:
        return self._base.test_set(index)

    def test_set_of(self, clients: np.ndarray) -> np.ndarray:
        return self._base.test_set_of(clients)

    def labels_of(self, clients: np.ndarray) -> np.ndarray | None:
        return self._base.labels_of(clients)

    def holdout(self, client: int) -> TensorSamples:
        return self._base.holdout(client)


class ValidationPart(FederationView):
    """A federation whose clients are tested on validation samples of their own."""

    def __init__(self, base: Federation) -> None:
        super().__init__(base)
        assert base.num_validation_N is not None
        self.view, self.num_samples_N, self.group_N = "holdout", base.num_validation_N, base.group_N

    def data_version(self, client: int) -> Hashable:
        return self._base.data_version(client), "validation"

    def holdout(self, client: int) -> TensorSamples:
        return self._base.validation_samples(client)

    def num_test_samples(self, clients: np.ndarray) -> np.ndarray:
        return self.num_samples_N[clients]

    def num_test_sets(self) -> int:
        return 0

    def test_set(self, index: int) -> TensorSamples:
        raise IndexError(f"test set {index} of 0")

    def test_set_of(self, clients: np.ndarray) -> np.ndarray:
        return np.full(len(clients), -1, np.int32)

    def labels_of(self, clients: np.ndarray) -> None:
        return None


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
    validation_N: np.ndarray | None = None  # int64: number of validation rows, the last ones; None: there are none
    validation_set_N: np.ndarray | None = None  # int32: -1: no shared validation set; None: there are none


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
        start = self.index.offset_N[client]
        rows = slice(start, start + self.index.train_N[client])
        return self._tensors(self._file(int(self.index.file_N[client])), rows)

    def train_targets(self, client: int) -> torch.Tensor:
        start = self.index.offset_N[client]
        y = self._file(int(self.index.file_N[client]))[1]
        return torch.from_numpy(y[start : start + self.index.train_N[client]].astype(self._target_type))

    def holdout(self, client: int) -> TensorSamples:
        if self.view != "holdout":
            raise DataError(f"client {client} has no held-out samples: the test view is {self.view}, not holdout")
        start = self.index.offset_N[client] + self.index.train_N[client]
        rows = slice(start, start + self.index.held_out_N[client])
        return self._tensors(self._file(int(self.index.file_N[client])), rows)

    def num_test_samples(self, clients: np.ndarray) -> np.ndarray:
        """As in the base class; the number of held-out samples is in the index."""
        return self.index.held_out_N[clients] if self.view == "holdout" else super().num_test_samples(clients)

    def validation_samples(self, client: int) -> TensorSamples:
        assert self.index.validation_N is not None
        end = self.index.offset_N[client] + self.index.train_N[client] + self.index.held_out_N[client]
        rows = slice(end, end + self.index.validation_N[client])
        return self._tensors(self._file(int(self.index.file_N[client])), rows)

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
