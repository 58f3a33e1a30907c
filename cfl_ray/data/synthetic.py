"""A federation of any size whose data are generated when they are read, from the client's id and the seed."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from cfl_ray.config.data import SOURCE_KINDS
from cfl_ray.core.rng import stream
from cfl_ray.data.federation import DataShape, Federation, GroupTransform, TensorSamples

TEST_SAMPLES = 1000  # samples in each group's test set
SPREAD = 0.25  # standard deviation of the prototypes and of the noise, so that inputs are as large as scaled pixels


Rule = Callable[[np.ndarray], np.ndarray]  # points (n, D) of the unit cube -> whether each has label 1, bool (n,)


def _below_sine(x_nD: np.ndarray) -> np.ndarray:
    return x_nD[:, 1] <= np.sin(x_nD[:, 0])


def _outside(first: float, second: float, radius: float) -> Rule:
    return lambda x_nD: (x_nD[:, 0] - first) ** 2 + (x_nD[:, 1] - second) ** 2 > radius**2


def _sum_below(limit: float) -> Rule:
    return lambda x_nD: 10 * x_nD[:, 0] + 10 * x_nD[:, 1] <= limit


class Concepts(NamedTuple):
    """Concepts on points that are uniform in the unit cube."""

    dimensions: int  # D
    rules: Sequence[Rule]  # one for each concept
    noise: float = 0.0  # share of labels that are flipped
    are_opposite: bool = False  # whether the second of two concepts has the other labels


# Thresholds and noise of SEA: W. Street, Y. Kim, KDD 2001; SINE and CIRCLE as in FedDrift's code (microsoft/FedDrift)
SINE = Concepts(2, (_below_sine, lambda x_nD: ~_below_sine(x_nD)), are_opposite=True)
CIRCLE = Concepts(2, (_outside(0.2, 0.5, 0.15), _outside(0.6, 0.5, 0.25)))
SEA = Concepts(3, (_sum_below(8), _sum_below(9), _sum_below(7), _sum_below(9.5)), noise=0.1)


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


class ConceptFederation(SyntheticFederation):
    """Points in the unit cube with two labels; client i has concept i mod G, the rule by which points are labelled.

    name: a source of `SOURCE_KINDS` whose code is `Concepts`.
    """

    def __init__(self, clients: int, *, name: str, samples: int = 500, seed: int = 0) -> None:
        self._concepts: Concepts = SOURCE_KINDS.builtin[name].load()
        groups, input = len(self._concepts.rules), (self._concepts.dimensions,)
        super().__init__(clients, input=input, classes=2, groups=groups, samples=samples, seed=seed)
        self.recipe = {"source": name, "clients": clients, "samples": samples, "seed": seed}

    def __reduce__(self) -> tuple[Any, ...]:
        options = {("name" if name == "source" else name): value for name, value in self.recipe.items()}
        return functools.partial(ConceptFederation, **options), ()

    def group_transform(self, group: int) -> GroupTransform:
        return GroupTransform(0, offset=group) if self._concepts.are_opposite else GroupTransform(group)

    def _draw(self, group: int, n: int, rng: np.random.Generator) -> TensorSamples:
        x = rng.random((n, *self.shape.input), np.float32)
        y = self._concepts.rules[group](x) ^ (rng.random(n) < self._concepts.noise)
        return torch.from_numpy(x), torch.from_numpy(y.astype(np.int64))
