"""A federation of any size whose data are generated when they are read, from the client's id and the seed."""

import functools
from typing import Any

import numpy as np
import torch

from cfl_ray.core.rng import stream
from cfl_ray.data.federation import DataShape, Federation, GroupTransform, TensorSamples

TEST_SAMPLES = 1000  # samples in each group's test set
SPREAD = 0.25  # standard deviation of the prototypes and of the noise, so that inputs are as large as scaled pixels


class SyntheticFederation(Federation):
    """Synthetic clients; client i belongs to true group i mod G.

    With C classes, a sample with label y of group g is

        x = prototype[g div C, (y + g) mod C] + noise

    C groups have the same inputs with different labels, so a single model cannot fit them all. Each further C groups
    have other prototypes.
    """

    view = "cluster"

    def __init__(
        self,
        clients: int,
        *,
        input: tuple[int, ...] = (1, 28, 28),
        classes: int = 10,
        groups: int = 4,
        samples: int = 50,
        seed: int = 0,
    ) -> None:
        self.shape = DataShape(tuple(input), classes)
        self.recipe = {
            "source": "synthetic",
            "clients": clients,
            "input": list(input),
            "classes": classes,
            "groups": groups,
            "samples": samples,
            "seed": seed,
        }
        self.num_samples_N = np.broadcast_to(np.int64(samples), clients)
        self._clients, self._groups, self._samples, self._seed = clients, groups, samples, seed
        self._test_sets: dict[int, TensorSamples] = {}

    def __reduce__(self) -> tuple[Any, ...]:
        options = {name: value for name, value in self.recipe.items() if name != "source"}
        return functools.partial(SyntheticFederation, **options), ()

    @functools.cached_property
    def group_N(self) -> np.ndarray:  # type: ignore[override]  # computed on first use, never assigned
        return np.arange(self._clients, dtype=np.int32) % np.int32(self._groups)

    def group_transform(self, group: int) -> GroupTransform:
        block, offset = divmod(group, self.shape.num_classes)
        return GroupTransform(block, offset=-offset % self.shape.num_classes)

    def train(self, client: int) -> TensorSamples:
        return self._draw(client % self._groups, self._samples, stream(self._seed, -1, -1, client, "synthetic/train"))

    def num_test_sets(self) -> int:
        return self._groups

    def test_set(self, index: int) -> TensorSamples:
        if not 0 <= index < self._groups:
            raise IndexError(f"test set {index} of {self._groups}")
        if index not in self._test_sets:  # kept, because every client of the group is tested on it
            rng = stream(self._seed, -1, -1, index, "synthetic/test")
            self._test_sets[index] = self._draw(index, TEST_SAMPLES, rng)
        return self._test_sets[index]

    def test_set_of(self, clients: np.ndarray) -> np.ndarray:
        return (np.asarray(clients) % self._groups).astype(np.int32)

    def labels_of(self, clients: np.ndarray) -> None:
        return None

    def holdout(self, client: int) -> TensorSamples:
        raise ValueError(f"client {client} has no held-out samples: a synthetic federation has one test set per group")

    @functools.cached_property
    def _prototypes(self) -> list[np.ndarray]:
        """The prototypes, an array (C, *input) for every C groups."""
        shape = (self.shape.num_classes, *self.shape.input)
        blocks = range(-(-self._groups // self.shape.num_classes))
        return [
            SPREAD * stream(self._seed, -1, -1, block, "synthetic/prototypes").standard_normal(shape, np.float32)
            for block in blocks
        ]

    def _draw(self, group: int, n: int, rng: np.random.Generator) -> TensorSamples:
        y = rng.integers(self.shape.num_classes, size=n)
        x = rng.standard_normal((n, *self.shape.input), np.float32)
        x *= SPREAD
        block, offset = divmod(group, self.shape.num_classes)
        x += self._prototypes[block][(y + offset) % self.shape.num_classes]
        return torch.from_numpy(x), torch.from_numpy(y)
