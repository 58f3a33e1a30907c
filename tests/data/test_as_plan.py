"""Shards of federations of arrays, of generated ones and of the user's own hold the same samples."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from cfl_ray.data import federation_from_arrays
from cfl_ray.data.chained import grown
from cfl_ray.data.federation import Federation
from cfl_ray.data.from_config import with_shards
from cfl_ray.data.synthetic import SyntheticFederation
from cfl_ray.errors import DataError

DRAW = np.random.default_rng(0)
Y, OWNER = np.arange(60) % 3, np.array([f"c{i}" for i in DRAW.integers(0, 5, 60)])
IMAGES = DRAW.integers(0, 256, (60, 1, 4, 4), dtype=np.uint8)
NUMBERS = DRAW.normal(size=(60, 4)).astype("float32")


class Named(SyntheticFederation):
    """Classes with names, as a user's own federation may have."""

    def __init__(self) -> None:
        super().__init__(5, input=(4,), classes=3, groups=2, samples=6)
        self.shape = replace(self.shape, class_names=("ant", "bee", "cow"))


FEDERATIONS = {
    "held out": lambda: federation_from_arrays(
        NUMBERS, Y, OWNER, groups={name: int(name > "c2") for name in set(OWNER)}
    ),
    "one test set": lambda: federation_from_arrays(
        IMAGES, Y, OWNER, x_test=IMAGES[:9], y_test=Y[:9], normalize=[[0.5], [0.2]]
    ),
    "labels": lambda: federation_from_arrays(NUMBERS, Y, OWNER, x_test=NUMBERS, y_test=Y, view="label"),
    "own tests": lambda: federation_from_arrays(
        NUMBERS, Y, OWNER, x_test=NUMBERS, y_test=Y, test_clients=OWNER, num_classes=5
    ),
    "real": lambda: federation_from_arrays(NUMBERS, NUMBERS[:, :2], OWNER, targets="real"),
    "tokens": lambda: federation_from_arrays(DRAW.integers(0, 7, (60, 5)), Y, OWNER, vocabulary=7),
    "generated": lambda: SyntheticFederation(5, input=(4,), classes=3, groups=2, samples=6),
    "named classes": Named,
}


def equal(one, other) -> bool:
    return all(torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("name", FEDERATIONS)
def test_shards_hold_the_federation(name, tmp_path):
    federation = FEDERATIONS[name]()
    shards = with_shards(federation, "mine", tmp_path)
    assert (
        shards.uri.startswith(str(tmp_path / "mine-")) and shards.uri == with_shards(federation, "mine", tmp_path).uri
    )
    assert (shards.shape, shards.view, shards.normalize) == (federation.shape, federation.view, federation.normalize)
    assert np.array_equal(shards.num_samples_N, federation.num_samples_N)
    if federation.group_N is not None:
        assert np.array_equal(shards.group_N, federation.group_N)
    for client in range(federation.num_clients):
        assert shards.client_name(client) == federation.client_name(client)
        assert equal(shards.train(client), federation.train(client))
        assert equal(shards.test(client), federation.test(client))


def test_shards_of_arrays_can_be_newcomers(tmp_path):
    normal = {"normalize": [[0.5], [0.2]]}
    first = federation_from_arrays(IMAGES, Y, OWNER, **normal)
    second = with_shards(federation_from_arrays(IMAGES, Y, np.char.add(OWNER, "b"), **normal), "more", tmp_path)
    assert grown(first, second).num_clients == first.num_clients + second.num_clients


def test_a_federation_that_normalises_its_samples_itself_is_refused(tmp_path):
    class Own(SyntheticFederation):
        normalize = [[0.5], [0.2]]

    assert issubclass(Own, Federation)
    with pytest.raises(DataError, match="a Own normalises its samples itself"):
        with_shards(Own(3), "own", tmp_path)
