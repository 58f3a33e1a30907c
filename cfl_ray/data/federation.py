"""The federation: N clients, what each holds, and the test data that measures each."""

from abc import ABC, abstractmethod
from dataclasses import dataclass

import numpy as np
import torch

from cfl_ray.core.rng import stream


@dataclass(frozen=True)
class Shape:
    """What every client's data have in common."""

    input: tuple[int, ...]  # of one sample, channels first, e.g. (1, 28, 28)
    num_classes: int  # C


class Federation(ABC):
    """Answers what client i holds. Instances pickle to a few bytes (a path or a recipe) plus arrays of a few bytes per client."""

    shape: Shape
    size_N: np.ndarray  # int64 (N,): training samples of each client
    group_N: np.ndarray | None  # int32 (N,): true group of each client, None where no truth is known
    view: str  # "cluster", "label" or "holdout"
    recipe: dict  # JSON-able: everything that made this federation
    normalize: list[list[float]] | None = None  # [means, stds] per channel that inputs went through; None: none
    digest: str | None = None  # of files that all data are read from: equal in equal federations; None where there are none

    @property
    def num_clients(self) -> int:
        """N."""
        return len(self.size_N)

    def client_name(self, client: int) -> str:
        """What the data's owner calls this client, e.g. a FEMNIST writer; the id itself where the data name nobody."""
        return str(client)

    def at(self, round: int) -> "Federation":
        """The federation as it is in a round; itself where no client's data change."""
        return self

    def changed(self, round: int) -> np.ndarray:
        """int64 ids, ascending: the clients whose data change before this round."""
        return np.zeros(0, np.int64)

    def place_of(self, group: int) -> tuple[int, int, int]:
        """(family, quarter turns, label offset) of a true group: groups of one family see the same samples, turned and relabelled."""
        return group, 0, 0

    @abstractmethod
    def train(self, client: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Training samples of a client: x float32 (n, *shape.input), normalised, and y int64 (n,)."""

    @abstractmethod
    def num_test_sets(self) -> int:
        """S, the number of test sets that clients share; 0 under hold-out."""

    @abstractmethod
    def test_set(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Shared test set `index`: x float32, y int64. Raises IndexError outside 0..S-1."""

    @abstractmethod
    def test_set_of(self, clients: np.ndarray) -> np.ndarray:
        """int32 (M,): the shared test set of each of these clients, -1 under hold-out."""

    @abstractmethod
    def labels_of(self, clients: np.ndarray) -> np.ndarray | None:
        """bool (M, C): the labels a client is tested on (label view); None where all labels count."""

    @abstractmethod
    def holdout(self, client: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Held-out samples of one client (hold-out view only)."""

    def test(self, client: int, max_images: int | None = None, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
        """The client's own test samples under its view, at most `max_images` drawn without replacement (the same ones in every call)."""
        if self.view == "holdout":
            return self.holdout(client)
        x, y = self.test_set(int(self.test_set_of(np.array([client]))[0]))
        keep = self._test_rows(client, y.numpy(), max_images, seed)
        return (x, y) if len(keep) == len(y) else (x[keep], y[keep])

    def _test_rows(self, client: int, y: np.ndarray, max_images: int | None, seed: int) -> np.ndarray:
        """Sorted rows of the client's shared test set, whose labels are `y`, that measure this client."""
        labels = self.labels_of(np.array([client]))
        keep = np.arange(len(y)) if labels is None else np.flatnonzero(labels[0][y])
        if max_images is not None and len(keep) > max_images:
            keep = np.sort(stream(seed, 0, 0, client, "test-images").choice(keep, max_images, replace=False))
        return keep
