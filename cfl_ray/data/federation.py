"""The federation: N clients, the data of each, and the test data that measures each."""

from abc import ABC, abstractmethod
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from cfl_ray.core.rng import stream
from cfl_ray.core.tasks import TARGETS

# x float32 or, for tokens, int64 (n, *input); y int64 (n,) for classes, else as `core.tasks` says
TensorSamples = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class DataShape:
    """The shape that the data of all clients share."""

    input: tuple[int, ...]  # of one sample, channels first, e.g. (1, 28, 28)
    num_classes: int  # C; of targets that are no classes: outputs of the network for each number that it predicts
    vocabulary: int | None = None  # inputs are token ids 0 .. vocabulary - 1; None: they are real numbers
    targets: str = "class"  # kind of the targets (`core.tasks`)
    target_shape: tuple[int, ...] = ()  # of one sample's target

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
        """Shape of the network's output for one sample: (C,), or (T, V) for tokens."""
        return (*self.target_shape, self.num_classes) if self.targets == "tokens" else (self.num_classes,)


class GroupTransform(NamedTuple):
    """The distribution of a true group: groups of one family see the same samples, rotated and relabelled."""

    family: int
    turns: int = 0  # quarter turns counter-clockwise, 0..3
    offset: int = 0  # s in y -> (y + s) mod C


def tested_on(view: str, groups: int) -> str:
    """Returns the test data of a client under a view, in words; `groups`: number of true groups, 0 if unknown."""
    if view == "holdout":
        return "each client is tested on its own samples that are held out from training (data.test.view holdout)"
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
    group_N: np.ndarray | None  # int32 (N,): true group of each client, -1 if unknown; None if none is known
    view: str  # "cluster", "label" or "holdout"
    recipe: dict[str, Any]  # JSON-able: everything that decides the content of this federation
    normalize: list[list[float]] | None = None  # [means, standard deviations] per channel; None: not normalised

    @property
    def digest(self) -> str | None:
        """Hash of the files that hold all data, equal in equal federations; None if there are no files."""
        return None

    @property
    def num_clients(self) -> int:
        """N."""
        return len(self.num_samples_N)

    @property
    def num_groups(self) -> int:
        """Number of true groups; 0 if none are known."""
        return 0 if self.group_N is None else len(np.unique(self.group_N[self.group_N >= 0]))

    @property
    def tested_on(self) -> str:
        """The test data of a client, in words."""
        return tested_on(self.view, self.num_groups)

    def client_name(self, client: int) -> str:
        """Returns the client's name in the data, e.g. a FEMNIST writer; the id itself if the data have no names."""
        return str(client)

    def at(self, round: int) -> "Federation":
        """Returns the federation as it is in a round; itself if no client's data change."""
        return self

    def changed(self, round: int) -> np.ndarray:
        """Returns int64 ids, ascending: the clients whose data change before this round."""
        return np.zeros(0, np.int64)

    def data_version(self, client: int) -> Hashable:
        """Returns what the client's data in this federation depend on: equal versions, equal data.

        By default this federation itself, so that nothing is assumed of another federation that `at` returns.
        """
        return self

    def group_transform(self, group: int) -> GroupTransform:
        """Returns the `GroupTransform` of a true group; by default, no two groups share samples."""
        return GroupTransform(family=group)

    @abstractmethod
    def train(self, client: int) -> TensorSamples:
        """Returns the training samples of a client: x of shape.dtype (n, *shape.input), normalised; y (n,)."""

    def files_of(self, clients: np.ndarray) -> np.ndarray | None:
        """Returns the number of the file, int (m,), that holds the training samples of each of these clients.

        None if no process has to fetch files. It tells which clients' data come together, and nothing else.
        """
        return None

    def fetch(self, clients: np.ndarray) -> None:  # noqa: B027  # most federations have nothing to fetch
        """Fetches the files of these clients, in this order, so that reading them later need not wait."""

    @abstractmethod
    def num_test_sets(self) -> int:
        """Returns T, the number of test sets that clients share; 0 under hold-out."""

    @abstractmethod
    def test_set(self, index: int) -> TensorSamples:
        """Returns shared test set `index`: x and y of the types of `shape`. Raises IndexError outside 0..T-1."""

    @abstractmethod
    def test_set_of(self, clients: np.ndarray) -> np.ndarray:
        """Returns int32 (M,): the shared test set of each of these clients, -1 under hold-out."""

    @abstractmethod
    def labels_of(self, clients: np.ndarray) -> np.ndarray | None:
        """Returns bool (M, C): the labels each client is tested on (label view); None if all labels count."""

    @abstractmethod
    def holdout(self, client: int) -> TensorSamples:
        """Returns the held-out samples of one client (hold-out view only)."""

    def test(self, client: int, max_images: int | None = None, seed: int = 0) -> TensorSamples:
        """Returns the client's test samples under its view.

        max_images: limit for a shared test set, drawn without replacement, the same images in every call; None: all.
        """
        if self.view == "holdout":
            return self.holdout(client)
        x, y = self.test_set(int(self.test_set_of(np.array([client]))[0]))
        keep = self._test_rows(client, y.numpy(), max_images, seed)
        return (x, y) if len(keep) == len(y) else (x[keep], y[keep])

    def _test_rows(self, client: int, y: np.ndarray, max_images: int | None, seed: int) -> np.ndarray:
        """Returns the sorted rows that measure this client in its shared test set, whose labels are `y`."""
        labels = self.labels_of(np.array([client]))
        keep = np.arange(len(y)) if labels is None else np.flatnonzero(labels[0][y])
        if max_images is not None and len(keep) > max_images:
            keep = np.sort(stream(seed, 0, 0, client, "test-images").choice(keep, max_images, replace=False))
        return keep
