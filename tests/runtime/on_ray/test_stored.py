"""Values of clients in the object store: packed where they are small, and packs written anew."""

import numpy as np
import pytest
import ray
import torch

from cfl_ray.core.work import ClientState
from cfl_ray.engine.client_state import ClientStateStore
from cfl_ray.runtime.on_ray import stored
from cfl_ray.runtime.on_ray.stored import Compaction, LazyTensors, Pack, StoredValue, tensor_of


def test_a_pack_has_values_of_any_length():
    values = {0: torch.tensor([1.0, 2]), 2: torch.tensor([3.0]), 3: torch.arange(4.0)}
    pack = tuple(Pack.of(values, 5))
    assert all(torch.equal(tensor_of(pack, i), value) for i, value in values.items())
    assert len(tensor_of(pack, 1)) == len(tensor_of(pack, 4)) == 0


def test_values_are_fetched_one_by_one(cluster, monkeypatch):
    pack, single = ray.put(tuple(Pack.of({0: torch.ones(2), 1: torch.zeros(3)}, 2))), ray.put(np.full(4, 7, np.float32))
    lazy = LazyTensors([pack, single], [(0, 1), (1, None), (0, 0)])
    assert [tensor.tolist() for tensor in (lazy[0], lazy[1], lazy[2])] == [[0] * 3, [7] * 4, [1] * 2]
    assert len(lazy) == 3


def test_all_values_are_put_small_ones_in_packs(cluster, monkeypatch):
    monkeypatch.setattr(stored, "_PACK_BYTES", 4 * 25)
    values = {("head", client): torch.full((10,), float(client)) for client in range(8)}
    values["model", 3] = torch.arange(stored.PACKED_BYTES // 4 + 1.0)
    places = dict(stored.put_all(values.items()))
    assert len({at.ref for at in places.values()}) == 4 and places["model", 3].position is None
    found = {key: tensor_of(ray.get(at.ref), at.position) for key, at in places.items()}
    assert found.keys() == values.keys() and all(torch.equal(found[key], value) for key, value in values.items())


class Work:
    """As much of a training exchange as the store looks at."""

    client_state, defers_results = ClientState("head"), False


@pytest.fixture
def states(cluster):
    """A store of 100 clients in packs of 50: client c has the value (c, c)."""
    store = ClientStateStore()
    for first in (0, 50):
        ref = ray.put(tuple(Pack.of({i: torch.full((2,), float(first + i)) for i in range(50)}, 50)))
        store.keep(Work, {first + i: StoredValue(ref, i) for i in range(50)}, {})
    list(store.changed())
    return store


def value_of(states, client) -> list[float]:
    at = states["head", client]
    return tensor_of(ray.get(at.ref), at.position).tolist()


def test_packs_of_which_few_values_are_in_use_are_written_anew(states):
    """Clients 0 .. 39 are trained again: of the first pack 10 of 50 values are left, of the second all."""
    before = {states["head", client].ref for client in range(40, 50)}, {states["head", 99].ref}
    ref = ray.put(tuple(Pack.of({i: torch.full((2,), -float(i)) for i in range(40)}, 40)))
    states.keep(Work, {i: StoredValue(ref, i) for i in range(40)}, {})
    compaction = Compaction()
    compaction.after(2 * 100 + 1024, states)  # not yet time
    assert states["head", 45].ref in before[0]
    compaction.after(1, states)
    moved = {states["head", client].ref for client in range(40, 50)}
    assert len(moved) == 1 and not moved & before[0] and states["head", 99].ref in before[1]
    assert [value_of(states, client)[0] for client in (3, 45, 99)] == [-3, 45, 99]
    assert {client for (_, client), _ in states.changed()} == set(range(40))  # a move is no change
