"""A federation of any size that is made while it is read: a client's samples follow from its id and the seed."""

import functools

import numpy as np
import torch

from cfl_ray.core.rng import stream
from cfl_ray.data.federation import Federation, Shape

TEST_SAMPLES = 1000  # of each group's test set
SPREAD = 0.25  # standard deviation of prototypes and of the noise around them: inputs of the size of scaled images


class SyntheticFederation(Federation):
    """Client i belongs to group i mod G. Its samples of label y are

        x = prototype[g div C, (y + g) mod C] + noise

    so up to C groups see the same inputs and disagree about every label: one model cannot serve them all. Further groups see others.
    """

    view = "cluster"

    def __init__(self, clients: int, *, input: tuple[int, ...] = (1, 28, 28), classes: int = 10, groups: int = 4, samples: int = 50, seed: int = 0):
        self.shape = Shape(tuple(input), classes)
        self.recipe = {"source": "synthetic", "clients": clients, "input": list(input), "classes": classes, "groups": groups,
                       "samples": samples, "seed": seed}
        self._clients, self._groups, self._samples, self._seed = clients, groups, samples, seed
        self._test_sets: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def __reduce__(self):
        options = {name: value for name, value in self.recipe.items() if name != "source"}
        return _make, (options,)

    @property
    def size_N(self) -> np.ndarray:
        return np.broadcast_to(np.int64(self._samples), self._clients)

    @functools.cached_property
    def group_N(self) -> np.ndarray:
        return np.arange(self._clients, dtype=np.int32) % np.int32(self._groups)

    def place_of(self, group: int) -> tuple[int, int, int]:
        block, offset = divmod(group, self.shape.num_classes)
        return block, 0, -offset % self.shape.num_classes

    def train(self, client: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self._draw(client % self._groups, self._samples, stream(self._seed, -1, -1, client, "synthetic/train"))

    def num_test_sets(self) -> int:
        return self._groups

    def test_set(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        if not 0 <= index < self._groups:
            raise IndexError(f"test set {index} of {self._groups}")
        if index not in self._test_sets:  # G sets at most; clients of a group ask for the same one again and again
            self._test_sets[index] = self._draw(index, TEST_SAMPLES, stream(self._seed, -1, -1, index, "synthetic/test"))
        return self._test_sets[index]

    def test_set_of(self, clients: np.ndarray) -> np.ndarray:
        return (np.asarray(clients) % self._groups).astype(np.int32)

    def labels_of(self, clients: np.ndarray) -> None:
        return None

    def holdout(self, client: int) -> tuple[torch.Tensor, torch.Tensor]:
        raise ValueError(f"client {client} has no held-out samples: a synthetic federation has one test set per group")

    @functools.cached_property
    def _prototypes(self) -> list[np.ndarray]:
        """One array (C, *input) for every C groups."""
        shape = (self.shape.num_classes, *self.shape.input)
        blocks = range(-(-self._groups // self.shape.num_classes))
        return [SPREAD * stream(self._seed, -1, -1, block, "synthetic/prototypes").standard_normal(shape, np.float32) for block in blocks]

    def _draw(self, group: int, n: int, rng: np.random.Generator) -> tuple[torch.Tensor, torch.Tensor]:
        y = rng.integers(self.shape.num_classes, size=n)
        x = rng.standard_normal((n, *self.shape.input), np.float32)
        x *= SPREAD
        block, offset = divmod(group, self.shape.num_classes)
        x += self._prototypes[block][(y + offset) % self.shape.num_classes]
        return torch.from_numpy(x), torch.from_numpy(y)


def _make(options: dict) -> SyntheticFederation:
    return SyntheticFederation(**options)
