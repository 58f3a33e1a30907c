import numpy as np
import pytest
import torch
from torchvision.transforms import functional

from cfl_ray.config import ShiftConfig
from cfl_ray.core.errors import DataError
from cfl_ray.data.shifts import make_groups


def groups(images, other=None, natural=True, **shift):
    return make_groups(images, other, ShiftConfig(**shift), natural)


def test_rotation_is_numpys_and_torchvisions(toy):
    images = toy(shape=(3, 6, 6))
    rows = np.arange(5, 25)
    for angle, group in zip((0, 90, 180, 270), groups(images, kind="rotated"), strict=True):
        x, y = group.variant.train(rows)
        assert np.array_equal(x, np.rot90(images.train_x[rows], angle // 90, axes=(2, 3)))
        assert torch.equal(torch.from_numpy(x.copy()), functional.rotate(torch.from_numpy(images.train_x[rows]), angle))
        assert np.array_equal(y, images.train_y[rows]) and len(group.rows) == len(images.train_y)
        assert np.array_equal(group.variant.test(rows)[0], np.rot90(images.test_x[rows], angle // 90, axes=(2, 3)))


def test_half_turns_keep_any_shape_and_quarter_turns_need_squares(toy):
    images = toy(shape=(1, 4, 6))
    assert groups(images, kind="rotated", angles=[0, 180])[1].variant.train(np.arange(2))[0].shape == (2, 1, 4, 6)
    with pytest.raises(DataError, match="90 degrees needs square images, these are 4x6; use 0 and 180"):
        groups(images, kind="rotated", angles=[0, 90])


def test_shifted_labels(toy):
    images = toy()
    for offset, group in zip((0, 3, 6, 9), groups(images, kind="shifted"), strict=True):
        x, y = group.variant.train(group.rows)
        assert np.array_equal(y, (images.train_y + offset) % 10) and np.array_equal(x, images.train_x)


def test_pathological_groups_hold_and_are_tested_on_their_labels(toy):
    images = toy()
    for labels, group in zip(ShiftConfig().label_sets, groups(images, kind="pathological"), strict=True):
        assert set(images.train_y[group.rows]) == set(images.test_y[group.test_rows]) == set(labels)
        assert len(group.rows) == 40 * len(labels)


def test_rotated_labels_is_the_product(toy):
    found = groups(toy(), kind="rotated_labels", angles=[0, 180], label_sets=[[0, 1], [2]])
    assert [(group.variant.turns, len(group.rows)) for group in found] == [(0, 80), (0, 40), (2, 80), (2, 40)]


def test_hybrid_takes_each_group_from_its_own_data_set(toy):
    first, second = toy(seed=1), toy(n=300, seed=2)
    found = groups(first, second, kind="hybrid")
    assert [group.variant.images for group in found] == [first, second]
    assert [len(group.rows) for group in found] == [400, 300]
    with pytest.raises(
        DataError,
        match=r"data.source is \(1, 4, 4, 10, 255\), data.shift.other 'fashion_mnist' is \(1, 6, 6, 10, 255\)",
    ):
        groups(first, toy(shape=(1, 6, 6)), kind="hybrid")


def test_groups_that_the_data_came_with(toy):
    group, test_group = (np.arange(400) // 250).astype(np.int32), (np.arange(100) // 90).astype(np.int32)
    images = toy(group=group, test_group=test_group)
    assert [(len(one.rows), len(one.test_rows)) for one in groups(images)] == [(250, 90), (150, 10)]
    assert len(groups(images, natural=False)) == 1


@pytest.mark.parametrize(
    "kind, values, message",
    [
        ("pathological", {"label_sets": [[0], [9, 10]]}, "label 10 does not exist; the data set has 10 classes, 0..9"),
        ("pathological", {"label_sets": [[0], []]}, "label_sets has an empty list"),
        ("rotated", {"angles": []}, "angles has an empty list"),
        ("shifted", {"offsets": []}, "offsets has an empty list"),
    ],
)
def test_values_that_do_not_fit(toy, kind, values, message):
    with pytest.raises(DataError, match=message):
        groups(toy(), kind=kind, **values)
