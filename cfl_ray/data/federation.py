"""The federation: N clients, the training data of each client, and the data on which it is tested."""

import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Hashable
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
    preparation_warnings: tuple[str, ...] = ()  # of the process that prepared it, and only there
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
        return [*self.preparation_warnings]

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
