from dataclasses import dataclass, fields, replace

import numpy as np
import pytest
import torch

from cfl_ray.core.method import Start
from cfl_ray.core.params import ParamSpec
from cfl_ray.core.state import UNKNOWN, State
from cfl_ray.methods import REGISTRY

SPEC = ParamSpec.of(torch.nn.Linear(3, 2))
START = Start(5, SPEC, lambda index: torch.arange(8.0) + index)


@pytest.mark.parametrize("cls", REGISTRY.values(), ids=REGISTRY)
def test_split_and_join_are_inverse_for_every_method(cls):
    """The class that a method names as its State is the one it uses, or a checkpoint could not be read again."""
    state = cls().init(START)
    assert type(state) is cls.State
    tensors, scalars = state.split()
    assert all(isinstance(value, torch.Tensor) for value in tensors.values())
    again = cls.State.join({name: value.clone() for name, value in tensors.items()}, dict(scalars))
    for item in fields(state):
        before, after = getattr(state, item.name), getattr(again, item.name)
        assert type(after) is type(before), item.name
        same = torch.equal if isinstance(before, torch.Tensor) else np.array_equal if isinstance(before, np.ndarray) else lambda a, b: a == b or a != a and b != b  # also where neither is a number
        assert same(after, before) and getattr(after, "dtype", None) == getattr(before, "dtype", None), item.name


@pytest.mark.parametrize("cls", REGISTRY.values(), ids=REGISTRY)
def test_every_method_starts_from_the_common_model(cls):
    state = cls().init(START)
    assert state.assign_N.dtype == np.int32 and len(state.assign_N) == 5
    firsts = [value for value in state.split()[0].values() if value.ndim == 2 and value.shape == (len(value), 8) and len(value)]
    if cls.name.endswith("_cam"):  # there the global model does, without its last layer in one of them; cluster models are independent
        firsts = [state.global_KP[:, : SPEC.base.count]]
    assert firsts and all(torch.equal(models_KP[0], START.new_model(0)[: models_KP.shape[1]]) for models_KP in firsts)


def test_ifca_starts_from_different_models():
    state = REGISTRY["ifca"](num_clusters=3).init(START)
    assert torch.equal(state.models_KP, torch.stack([START.new_model(k) for k in range(3)]))


def test_a_state_is_changed_by_making_another():
    state = State(torch.zeros(2, 3), np.array([0, 1, UNKNOWN], np.int32))
    placed = state.place(np.array([2, 0]), np.array([1, 1]))
    assert placed.tolist() == [1, 1, 1] and state.assign_N.tolist() == [0, 1, UNKNOWN]
    after = state.advance(assign_N=placed, phase="warmup").forget(np.array([1]))
    assert after.assign_N.tolist() == [1, UNKNOWN, 1] and after.phase == "warmup" and after.num_clusters == 2
    assert state.phase == "federate"
    with pytest.raises(AttributeError):
        state.phase = "cluster"


@pytest.mark.parametrize("cls", REGISTRY.values(), ids=REGISTRY)
def test_a_state_grows_to_one_for_more_clients(cls):
    """As if the method had started with them, but for their clusters: newcomers have none."""
    grown, large = cls().init(START).grown(8), cls().init(replace(START, num_clients=8))
    assert grown.assign_N.tolist() == [*cls().init(START).assign_N.tolist(), UNKNOWN, UNKNOWN, UNKNOWN]
    for name, value in grown.split()[0].items():
        expected = large.split()[0][name]
        assert name == "assign_N" or (torch.equal(value, expected) and value.dtype == expected.dtype), name


def test_fields_with_an_axis_of_all_clients_grow_along_it():
    @dataclass(frozen=True)
    class Mine(State):
        seen_N: np.ndarray = None
        score_KN: torch.Tensor = None
        pair_NF: torch.Tensor = None
        centre_KF: torch.Tensor = None
        last_N: np.ndarray = None

    state = Mine(torch.ones(2, 3), np.array([0, 1], np.int32), seen_N=np.ones(2, bool), score_KN=torch.ones(2, 2), pair_NF=torch.ones(2, 3), centre_KF=torch.ones(2, 2))
    grown = state.grown(3)
    assert grown.seen_N.tolist() == [True, True, False] and grown.score_KN.tolist() == [[1, 1, 0]] * 2
    assert grown.pair_NF.tolist() == [[1] * 3, [1] * 3, [0] * 3] and grown.centre_KF is state.centre_KF and grown.last_N is None
    assert grown.assign_N.tolist() == [0, 1, UNKNOWN] and grown.assign_N.dtype == np.int32
