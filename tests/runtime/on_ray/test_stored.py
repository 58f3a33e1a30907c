"""Values of clients in the object store, packed where they are small."""

import time
from types import SimpleNamespace

import numpy as np
import pytest
import ray
import torch
from ray.exceptions import GetTimeoutError

from cfl_ray.runtime.on_ray import stored
from cfl_ray.runtime.on_ray.client_states import RayClientStates
from cfl_ray.runtime.on_ray.host_process import HostProcess
from cfl_ray.runtime.on_ray.stored import LazyTensors, Pack, StoredValue, tensor_of, tensors_at


def test_a_pack_has_values_of_any_length():
    values = {0: torch.tensor([1.0, 2]), 2: torch.tensor([3.0]), 3: torch.arange(4.0)}
    pack = tuple(Pack.of(values, 5))
    assert all(torch.equal(tensor_of(pack, i), value) for i, value in values.items())
    assert len(tensor_of(pack, 1)) == len(tensor_of(pack, 4)) == 0


def test_values_are_fetched_one_by_one(cluster):
    pack, single = ray.put(tuple(Pack.of({0: torch.ones(2), 1: torch.zeros(3)}, 2))), ray.put(np.full(4, 7, np.float32))
    lazy = LazyTensors([pack, single], [(0, 1), (1, None), (0, 0)])
    assert [tensor.tolist() for tensor in (lazy[0], lazy[1], lazy[2])] == [[0] * 3, [7] * 4, [1] * 2]
    assert len(lazy) == 3


def test_an_object_that_does_not_arrive_is_named_with_the_limit(cluster, monkeypatch):
    """At each of the places that fetch: its task hangs, as a node does that never sends it."""
    monkeypatch.setattr(stored, "_FETCH_SECONDS", 0.2)
    ref = ray.remote(num_cpus=0)(lambda: time.sleep(3600)).remote()
    process = SimpleNamespace(rows={})
    fetches = [
        lambda: next(tensors_at([(ref, None)])),
        lambda: LazyTensors([ref], [(0, None)])[0],
        lambda: RayClientStates.tensor(None, StoredValue(ref, None, 4)),
        lambda: HostProcess._row(process, {(0, 0): ref}, 0, 0),
    ]
    try:
        for fetch in fetches:
            with pytest.raises(GetTimeoutError, match=rf"object {ref.hex()} .* within 0.2 s.*`cfl-ray resume`"):
                fetch()
    finally:
        ray.cancel(ref, force=True)


def test_all_values_are_put_small_ones_in_packs(cluster, monkeypatch):
    monkeypatch.setattr(stored, "_PACK_BYTES", 4 * 25)
    values = {("head", client): torch.full((10,), float(client)) for client in range(8)}
    values["model", 3] = torch.arange(stored.PACKED_BYTES // 4 + 1.0)
    places = dict(stored.put_all(values.items()))
    assert len({at.ref for at in places.values()}) == 4 and places["model", 3].position is None
    found = {key: tensor_of(ray.get(at.ref), at.position) for key, at in places.items()}
    assert {key: at.nbytes for key, at in places.items()} == {key: value.nbytes for key, value in values.items()}
    in_turn = list(tensors_at((at.ref, at.position) for at in places.values()))
    assert all(torch.equal(a, b) for a, b in zip(in_turn, map(found.get, places), strict=True))
    assert found.keys() == values.keys() and all(torch.equal(found[key], value) for key, value in values.items())
