import pytest
import torch
from torch import nn

from cfl_ray.core.params import Columns, ParamSpec


class Net(nn.Module):
    """conv 2x1x1x1 + 2, batch norm 2 + 2 (+ 2 + 2 statistics + an integer counter), a scalar, and a head of 3x2 + 3."""

    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(1, 2, 1), nn.BatchNorm2d(2)
        self.scale = nn.Parameter(torch.tensor(5.0))
        self.head = nn.Linear(2, 3)
        self.register_buffer("space", torch.ones(7), persistent=False)


SPEC = ParamSpec.of(Net())


def test_parameters_come_first_then_persistent_float_buffers():
    trained = ["scale", "conv.weight", "conv.bias", "norm.weight", "norm.bias", "head.weight", "head.bias"]
    assert SPEC.names == (*trained, "norm.running_mean", "norm.running_var")
    assert SPEC.num_params == 7
    assert SPEC.trained == 1 + 2 + 2 + 2 + 2 + 6 + 3 and SPEC.size == SPEC.trained + 4
    assert SPEC.all == Columns(((0, SPEC.size),))


def test_a_row_and_its_tensors_are_inverse():
    module = Net()
    row_P = SPEC.row_of(module)
    state = module.state_dict()
    tensors = SPEC.tensors(row_P)
    assert set(tensors) == set(state) - {"norm.num_batches_tracked"}
    assert all(torch.equal(value, state[name]) and value.shape == state[name].shape for name, value in tensors.items())
    with torch.no_grad():
        module.scale.fill_(9)
    assert tensors["scale"] == 5, "row_of copies"
    tensors["scale"].fill_(7)
    assert row_P[0] == 7, "tensors are views"


def test_tensors_of_several_rows_keep_their_leading_axes():
    rows_KP = torch.stack([torch.arange(SPEC.size).float(), torch.arange(SPEC.size) + 100.0])
    assert SPEC.tensors(rows_KP)["head.weight"].shape == (2, 3, 2)
    assert SPEC.tensors(rows_KP)["head.weight"][1, 0].tolist() == [109, 110]
    assert SPEC.tensors(rows_KP)["scale"].tolist() == [0, 100]


def test_the_head_is_the_last_layer_and_the_base_is_the_rest_with_its_buffers():
    assert SPEC.head == Columns(((9, 18),))
    assert SPEC.base == Columns(((0, 9), (18, 22)))
    assert SPEC.head.count + SPEC.base.count == SPEC.size


def test_a_layer_has_the_columns_of_one_module():
    """In the order of the model's parameters; those of a normalisation include its statistics."""
    assert SPEC.layers == ("", "conv", "norm", "head")
    assert [SPEC.layer(number) for number in (1, 2, 3)] == [
        Columns(((0, 1),)),
        Columns(((1, 5),)),
        Columns(((5, 9), (18, 22))),
    ]
    assert SPEC.layer(4) == SPEC.head
    alone = ParamSpec.of(nn.Linear(2, 3))
    assert alone.layer(1) == alone.head == alone.all
    for number in (0, -1, 5):
        with pytest.raises(ValueError, match=f"the model has layers 1 .. 4, got {number}"):
            SPEC.layer(number)


def test_columns_by_prefix_join_neighbours():
    assert SPEC.columns(["conv."]) == Columns(((1, 5),))
    assert SPEC.columns(["conv.", "norm."]) == Columns(((1, 9), (18, 22)))
    with pytest.raises(ValueError, match="no parameter starts with 'fc'; the model has scale, conv.weight"):
        SPEC.columns(["conv", "fc"])


def test_columns_are_taken_and_put_back():
    rows = torch.arange(20.0).reshape(2, 10)
    columns = Columns(((1, 3), (7, 9)))
    assert columns.count == 4 and columns.of(rows).tolist() == [[1, 2, 7, 8], [11, 12, 17, 18]]
    columns.put(rows, torch.full((2, 4), -1.0))
    assert rows[0].tolist() == [0, -1, -1, 3, 4, 5, 6, -1, -1, 9]
    one = Columns(((2, 5),)).of(rows)
    one.fill_(-2)
    assert rows[1].tolist() == [10, -1, -2, -2, -2, 15, 16, -1, -1, 19], "one range is a view"


def test_columns_by_one_name_by_a_part_of_it_and_all_others():
    assert SPEC.columns("conv.") == SPEC.columns(["conv."])
    assert SPEC.columns("weight") == SPEC.columns([name for name in SPEC.names if name.endswith("weight")])
    columns = SPEC.columns("conv.")
    assert columns.count + columns.others(SPEC.size).count == SPEC.size
    with pytest.raises(ValueError, match="no parameter starts with 'onv.'"):
        SPEC.columns("onv.")
