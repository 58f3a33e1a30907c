"""The federation: N clients, the training data of each client, and the data on which it is tested."""

from abc import ABC, abstractmethod
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from cfl_ray.core.rng import stream
from cfl_ray.core.tasks import TARGETS

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
        kinds = {"class": "classes", "real": "numbers to predict", "binary": "labels"}
        return f"{self.num_classes} {kinds[self.targets]}"

    @property
    def outputs(self) -> tuple[int, ...]:
        """Shape of the network's output for a sample: (C,), or (T, V) for tokens."""
        return (*self.target_shape, self.num_classes) if self.targets == "tokens" else (self.num_classes,)


class GroupTransform(NamedTuple):
    """The distribution of a true group. Groups of the same family have the same samples, rotated and relabelled."""

    family: int
    turns: int = 0  # quarter turns counter-clockwise, 0..3
    offset: int = 0  # s in y -> (y + s) mod C


def tested_on(view: str, groups: int) -> str:
    """A sentence on which data a client is tested under a view. groups: number of true groups, 0 if unknown."""
    if view == "holdout":
        return "each client is tested on its own samples that are held out from training (data.test.view holdout)"
    if view == "all":
        return "each client is tested on all images of the test set, shifted like its group (data.test.view all)"
    whole = "the test set of its true group" if groups > 1 else "the whole test set"
    if view == "label":
        return f"each client is tested on the images of its own labels in {whole} (data.test.view label)"
    return f"each client is tested on {whole} (data.test.view cluster)"


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

    @property
    def digest(self) -> str | None:
        """Hash of the files that hold the data, equal for equal federations; None if there are no files."""
        return None

    @property
    def warnings(self) -> list[str]:
        """Lines about data that are probably not meant to be as they are."""
        return []

    @property
    def num_clients(self) -> int:
        """N."""
        return len(self.num_samples_N)

    @property
    def num_groups(self) -> int:
        """Number of true groups; 0 if they are unknown."""
        return 0 if self.group_N is None else len(np.unique(self.group_N[self.group_N >= 0]))

    @property
    def tested_on(self) -> str:
        """A sentence on which data a client is tested."""
        return tested_on(self.view, self.num_groups)

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

    def test(self, client: int, max_images: int | None = None, seed: int = 0) -> TensorSamples:
        """The client's test samples under its view.

        max_images: draw at most so many images of a shared test set, the same in every call; None: all images.
        """
        if self.view == "holdout":
            return self.holdout(client)
        x, y = self.test_set(int(self.test_set_of(np.array([client]))[0]))
        keep = self.test_rows(client, y.numpy(), max_images, seed)
        return (x, y) if len(keep) == len(y) else (x[keep], y[keep])

    def test_rows(self, client: int, y: np.ndarray, max_images: int | None, seed: int) -> np.ndarray:
        """The rows, ascending, of its shared test set on which the client is tested. y: the set's labels."""
        labels = self.labels_of(np.array([client]))
        keep = np.arange(len(y)) if labels is None else np.flatnonzero(labels[0][y])
        if max_images is not None and len(keep) > max_images:
            keep = np.sort(stream(seed, 0, 0, client, "test-images").choice(keep, max_images, replace=False))
        return keep


class FederationView(Federation):
    """The data of `base`, except those that a subclass changes."""

    def __init__(self, base: Federation) -> None:
        self._base = base
        self.shape, self.view, self.recipe = base.shape, base.view, base.recipe
        self.scale, self.normalize = base.scale, base.normalize

    @property
    def digest(self) -> str | None:
        return self._base.digest

    @property
    def warnings(self) -> list[str]:
        return self._base.warnings

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
