from dataclasses import fields

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
