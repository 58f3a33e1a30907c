from dataclasses import dataclass, fields, replace

import numpy as np
import pytest
import torch

from cfl_ray.core.checked_method import _check_state
from cfl_ray.core.method import Start
from cfl_ray.core.params import ParamSpec
from cfl_ray.core.state import UNASSIGNED, OwnModelsState, State
from cfl_ray.errors import RunError
from cfl_ray.methods import REGISTRY

SPEC = ParamSpec.of(torch.nn.Linear(3, 2))
START = Start(5, SPEC, lambda index: torch.arange(8.0) + index, (3,), (2,))


def test_a_checkpoint_restores_the_state_of_every_method():
    """Its type is the one that the method names as its state, since a checkpoint is read as that type."""
    for cls in REGISTRY.values():
        state = cls().init(START)
        assert type(state) is cls.state_type
        tensors, scalars = state.to_checkpoint()
        assert all(isinstance(value, torch.Tensor) for value in tensors.values())
        again = cls.state_type.from_checkpoint({name: value.clone() for name, value in tensors.items()}, dict(scalars))
        for item in fields(state):
            name, before, after = f"{cls.name}.{item.name}", getattr(state, item.name), getattr(again, item.name)
            assert type(after) is type(before), name
            assert getattr(after, "dtype", None) == getattr(before, "dtype", None), name
            if isinstance(before, (torch.Tensor, np.ndarray)):
                assert np.array_equal(after, before, equal_nan=np.asarray(before).dtype.kind == "f"), name
            else:
                assert after == before or (before != before and after != after), name  # NaN is not equal to itself


CHANGES = {"sum_KP"}  # of control variates, which are no models


def test_every_method_starts_from_the_common_model():
    for cls in REGISTRY.values():
        state = cls().init(START)
        assert state.assign_N.dtype == np.int32 and len(state.assign_N) == 5
        tensors = {name: value for name, value in state.to_checkpoint()[0].items() if name not in CHANGES}
        tables = [value for value in tensors.values() if value.ndim == 2 and len(value)]
        tables = [value for value in tables if value.shape[1] == SPEC.size]
        if cls.name.endswith("_cam"):  # cluster models are independent; the global model may lack the last layer
            tables = [state.global_KP[:, : SPEC.base.count]]
        assert tables, cls.name
        for models_KP in tables:
            assert torch.equal(models_KP[0], START.new_model(0)[: models_KP.shape[1]]), cls.name


def test_ifca_starts_from_different_models():
    state = REGISTRY["ifca"](num_clusters=3).init(START)
    assert torch.equal(state.models_KP, torch.stack([START.new_model(k) for k in range(3)]))


def test_a_state_is_changed_by_making_another():
    state = State(torch.zeros(2, 3), np.array([0, 1, UNASSIGNED], np.int32))
    placed = state.place(np.array([2, 0]), np.array([1, 1]))
    assert placed.tolist() == [1, 1, 1] and state.assign_N.tolist() == [0, 1, UNASSIGNED]
    after = state.advance(assign_N=placed, phase="warmup").forget(np.array([1]))
    assert after.assign_N.tolist() == [1, UNASSIGNED, 1] and after.phase == "warmup" and after.num_clusters == 2
    assert state.phase == "federate"
    with pytest.raises(AttributeError):
        state.phase = "cluster"


def test_a_grown_state_is_that_of_more_clients():
    """It is the first state of a federation with the newcomers, except that these have no cluster."""
    for cls in REGISTRY.values():
        state = cls().init(START)
        grown, large = state.grown(8), cls().init(replace(START, num_clients=8))
        assert grown.assign_N.tolist() == [*state.assign_N.tolist(), UNASSIGNED, UNASSIGNED, UNASSIGNED]
        expected = large.to_checkpoint()[0]
        for name, value in grown.to_checkpoint()[0].items():
            if name != "assign_N":
                assert value.dtype == expected[name].dtype, (cls.name, name)
                assert value.shape == expected[name].shape and torch.allclose(
                    value, expected[name], rtol=0, atol=0, equal_nan=True
                ), (cls.name, name)


@dataclass(frozen=True, kw_only=True)
class ManyFields(State):
    seen_N: np.ndarray
    score_KN: torch.Tensor
    pair_NF: torch.Tensor
    centre_KF: torch.Tensor
    last_N: np.ndarray | None = None


def test_fields_with_an_axis_of_all_clients_grow_along_it():
    state = ManyFields(
        models_KP=torch.ones(2, 3),
        assign_N=np.array([0, 1], np.int32),
        seen_N=np.ones(2, bool),
        score_KN=torch.ones(2, 2),
        pair_NF=torch.ones(2, 3),
        centre_KF=torch.ones(2, 2),
    )
    grown = state.grown(3)
    assert type(grown) is ManyFields and grown.seen_N.dtype == bool
    assert grown.seen_N.tolist() == [True, True, False] and grown.score_KN.tolist() == [[1, 1, 0]] * 2
    assert grown.pair_NF.tolist() == [[1] * 3, [1] * 3, [0] * 3]
    assert grown.centre_KF is state.centre_KF and grown.last_N is None
    assert grown.assign_N.tolist() == [0, 1, UNASSIGNED] and grown.assign_N.dtype == np.int32


def test_fields_of_a_subclass_need_no_default():
    @dataclass(frozen=True)
    class Own(State):
        seen_N: np.ndarray

    state = Own(torch.zeros(1, 2), np.zeros(3, np.int32), np.ones(3))
    assert state.phase == "federate" and state.grown(5).seen_N.tolist() == [1, 1, 1, 0, 0]


def test_models_of_clients_are_kept_replaced_and_forgotten():
    """In the order of their first models; other clients have the global one, row 0."""
    rows = torch.arange(1.0, 5)[:, None].repeat(1, 2)
    empty = OwnModelsState(
        models_KP=torch.zeros(1, 2),
        assign_N=np.zeros(6, np.int32),
        own_SP=torch.zeros(0, 2),
        seen_S=np.zeros(0, np.int64),
    )
    state = empty.with_values(np.array([4, 1]), own_SP=rows[:2]).with_values(np.array([1, 3]), own_SP=rows[2:])
    assert state.seen_S.tolist() == [4, 1, 3] and state.all_models[:, 0].tolist() == [0, 1, 3, 4]
    assert state.rows_of(np.array([3, 0, 4])).tolist() == [3, 0, 1]
    left = state.forget(np.array([4, 0]))
    assert left.seen_S.tolist() == [1, 3] and left.own_SP[:, 0].tolist() == [3, 4] and left.assign_N[4] == UNASSIGNED
    again = left.grown(8).with_values(np.array([7]), own_SP=rows[:1])
    assert again.rows_of(np.array([7, 4])).tolist() == [3, 0] and len(empty.own_SP) == 0 and len(left.own_SP) == 2


@dataclass(frozen=True)
class OwnState(State):
    table: object = None
    more_S: np.ndarray | None = None


@pytest.mark.parametrize("value", [None, True, 2.5, "a", [1, [None]], {"a": {"b": [1]}}, torch.zeros(2).bfloat16()])
def test_plain_values_and_tensors_are_kept(value):
    state = OwnState(torch.zeros(1, 8), np.zeros(5, np.int32), table=value, more_S=np.zeros(3, bool))
    assert state.unsaved() is None


@pytest.mark.parametrize(
    "field, value",
    [
        *[("table", value) for value in ((1,), {1: 2}, [np.int64(1)], {1, 2}, 1j, {"a": torch.zeros(1)})],
        *[("table", value) for value in (np.zeros(2), torch.eye(2).to_sparse(), torch.zeros(1, requires_grad=True))],
        *[("more_S", value) for value in (np.array(["a"]), np.array([None]), torch.zeros(1))],
    ],
)
def test_a_value_that_a_checkpoint_would_change_is_refused(field, value):
    state = replace(OwnState(torch.zeros(1, 8), np.zeros(5, np.int32)), **{field: value})
    with pytest.raises(RunError, match=rf"a state whose {field} is .*, which a checkpoint does not keep"):
        _check_state(state, State.advance, OwnState, 5, 8)


def test_a_field_that_a_state_lacks_is_named():
    state = OwnState(torch.zeros(1, 8), np.zeros(5, np.int32))
    with pytest.raises(TypeError, match=r"OwnState has no field 'models_K' \(did you mean 'models_KP'\?\)"):
        state.advance(models_K=torch.zeros(1, 8))
