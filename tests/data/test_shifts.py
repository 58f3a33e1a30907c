import sys
from functools import partial

import numpy as np
import pytest
import torch
from scipy.ndimage import gaussian_filter

from cfl_ray.config.data import SOURCE_KINDS
from cfl_ray.config.shift import SHIFT_KINDS
from cfl_ray.data.data_set import DataSet
from cfl_ray.data.from_config import build, describe
from cfl_ray.data.shards import _rotation
from cfl_ray.data.shifts import make_groups
from cfl_ray.errors import ConfigError, DataError


def groups(images, other=None, natural=True, **shift):
    return make_groups(images, other, SHIFT_KINDS.of(**shift), natural)


def test_rotation_is_numpys_and_torchvisions(toy):
    from torchvision.transforms import functional  # here, because it takes two seconds

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
    rows = DataSet(np.zeros((4, 5), np.float32), np.zeros(4, np.int16), None, None, 2)
    with pytest.raises(DataError, match=r"45 degrees needs images .*, these samples have shape \(5,\)"):
        groups(rows, kind="rotated", angles=[45])
    with pytest.raises(DataError, match="90 degrees needs square images, these are 4x6; use 0 and 180"):
        groups(images, kind="rotated", angles=[0, 90])


def test_shifted_labels(toy):
    images = toy()
    for offset, group in zip((0, 3, 6, 9), groups(images, kind="shifted"), strict=True):
        x, y = group.variant.train(group.rows)
        assert np.array_equal(y, (images.train_y + offset) % 10) and np.array_equal(x, images.train_x)


def test_pathological_groups_hold_and_are_tested_on_their_labels(toy):
    images = toy()
    for labels, group in zip(
        SHIFT_KINDS.of(kind="pathological").label_sets, groups(images, kind="pathological"), strict=True
    ):
        assert set(images.train_y[group.rows]) == set(images.test_y[group.test_rows]) == set(labels)
        assert len(group.rows) == 40 * len(labels)


def test_rotated_labels_is_the_product(toy):
    found = groups(toy(), kind="rotated_labels", angles=[0, 180], label_sets=[[0, 1], [2]])
    assert [(group.variant.turns, len(group.rows)) for group in found] == [(0, 80), (0, 40), (2, 80), (2, 40)]


def test_hybrid_takes_each_group_from_its_own_data_set(toy):
    first, second = toy(seed=1), toy(n=300, seed=2)
    found = groups(first, second, kind="hybrid")
    assert [group.variant.data_set for group in found] == [first, second]
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


class TestAnyAngle:
    def test_is_bilinear_as_torchvisions_and_rounded(self, toy):
        from torchvision.transforms import functional

        images = toy(shape=(1, 6, 6))
        rows = np.arange(3, 9)
        x = groups(images, kind="rotated", angles=[0, 37.5])[1].variant.train(rows)[0]
        expected = functional.rotate(
            torch.from_numpy(images.train_x[rows]).float(), 37.5, functional.InterpolationMode.BILINEAR
        )
        assert x.dtype == np.uint8 and np.array_equal(x, np.rint(expected.numpy()))

    def test_keeps_any_shape_and_the_labels(self, toy):
        images = toy(shape=(1, 4, 6))
        x, y = groups(images, kind="rotated", angles=[45])[0].variant.train(np.arange(4))
        assert x.shape == (4, 1, 4, 6) and np.array_equal(y, images.train_y[:4])

    def test_turns_counter_clockwise_about_the_centre(self, toy):
        """A quarter turn in two steps: the bright pixel at the right, middle, goes to the top, middle."""
        images = toy(shape=(1, 5, 5))
        images.train_x[0], images.train_x[0, 0, 2, 4] = 0, 200
        half = groups(images, kind="rotated", angles=[45])[0].variant.train(np.arange(1))[0][0, 0]
        row, column = np.unravel_index(half.argmax(), half.shape)
        assert row < 2 and column > 2

    def test_multiples_of_90_are_exact_however_they_are_written(self, toy):
        images = toy()
        for angles in ([90.0, -90, 450], [90, 270, 90]):
            turns = [group.variant.turns for group in groups(images, kind="rotated", angles=angles)]
            assert turns == [1, 3, 1]
        assert all(group.variant.change is None for group in groups(images, kind="rotated", angles=[90.0]))

    def test_groups_of_a_rest_are_a_family(self):
        """After a further quarter turn, 30 degrees become 120, not 90."""
        transforms = [_rotation(0, 1, [0, 30, 90, 120], group) for group in range(4)]
        assert [(one.family, one.turns) for one in transforms] == [(0, 0), (1, 0), (0, 1), (1, 1)]
        assert [_rotation(0, 1, [0, 90, -90], group) for group in range(3)] == [(0, 0, 0), (0, 1, 0), (0, 3, 0)]


class TestPixels:
    def test_noise_has_the_groups_standard_deviation_in_units_of_the_pixel_range(self, toy):
        """Rounded to whole pixels, and kept within 0..255: here from the middle of the range."""
        images = toy(n=400, shape=(1, 8, 8))
        images.train_x[:] = 128
        first, second = groups(images, kind="noise", sigmas=[0, 0.1])
        rows = np.arange(400)
        assert np.array_equal(first.variant.train(rows)[0], images.train_x)
        found = second.variant.train(rows)[0].astype(float) - 128
        assert found.std() == pytest.approx(25.5, rel=0.02) and abs(found.mean()) < 1

    def test_noise_depends_on_the_samples_and_the_seed_alone(self, toy):
        images = toy()

        def noisy(seed, rows):
            made = make_groups(images, None, SHIFT_KINDS.of(kind="noise", sigmas=[0.2]), True, seed)
            return made[0].variant.train(rows)[0]

        rows = np.arange(20)
        assert np.array_equal(noisy(0, rows), noisy(0, rows))
        assert not np.array_equal(noisy(0, rows), noisy(1, rows))

    def test_blur_is_scipys_and_brightness_a_factor(self, toy):
        images, rows = toy(shape=(1, 6, 6)), np.arange(8)
        x = groups(images, kind="blur", radii=[1.5])[0].variant.train(rows)[0]
        expected = gaussian_filter(images.train_x[rows].astype(float), (0, 0, 1.5, 1.5), mode="nearest")
        assert np.array_equal(x, np.rint(expected).astype(np.uint8))
        x = groups(images, kind="brightness", factors=[2.0])[0].variant.train(rows)[0]
        assert np.array_equal(x, np.clip(images.train_x[rows].astype(int) * 2, 0, 255))

    def test_blur_needs_images(self):
        with pytest.raises(DataError, match=r"blur needs images, these samples are of shape \(5,\); use another kind"):
            groups(DataSet(np.zeros((4, 5), np.float32), np.zeros(4, np.int16), None, None, 2), kind="blur")


class TestOwnShift:
    def test_sees_samples_group_and_draw(self, toy):
        seen = []

        def shift(x, y, group, draw, step):
            seen.append((x.dtype, y.dtype, group, draw.random()))
            return x, (y + step * group) % 10

        images, rows = toy(), np.arange(7)
        found = groups(images, kind=shift, groups=3, options={"step": 2})
        labels = [group.variant.train(rows)[1] for group in found]
        assert [one.tolist() for one in labels] == [
            ((images.train_y[rows] + 2 * group) % 10).tolist() for group in range(3)
        ]
        assert [one[:3] for one in seen] == [(np.uint8, np.int64, group) for group in range(3)]
        assert len({one[3] for one in seen}) == 3 and labels[0].dtype == np.int16
        assert np.array_equal(found[1].variant.test_labels(rows), (images.test_y[rows] + 2) % 10)

    @pytest.mark.parametrize(
        "function, message",
        [
            (lambda x, y, group, draw: x, "returned ndarray of uint8 and shape .*, expected a pair"),
            (lambda x, y, group, draw: (x / 2, y), "returned x as ndarray of float64 .*, expected uint8 of shape"),
            (lambda x, y, group, draw: (x[:1], y), r"expected uint8 of shape \(5, 1, 4, 4\)"),
            (
                lambda x, y, group, draw: (x, y[:1]),
                r"returned y as ndarray of int64 and shape \(1,\), expected",
            ),
            (lambda x, y, group, draw: (x, y + 1), "returned label 10; the data set has 10 classes, 0..9"),
            (lambda x, y, group, draw: 1 // 0, r"failed: ZeroDivisionError: .* \(line \d+\)"),
        ],
    )
    def test_wrong_results_name_the_function_and_its_line(self, toy, function, message):
        variant = groups(toy(), kind=function)[0].variant
        with pytest.raises(DataError, match=rf"data.shift .*<lambda> \(.*test_shifts.py, line \d+\) .*{message}"):
            variant.train(np.arange(5, 10))

    def test_a_wrong_signature_is_an_error_before_any_sample(self, toy):
        with pytest.raises(ConfigError, match="data.shift .*<lambda> .* is called with x, y, group, draw: too many"):
            groups(toy(), kind=lambda x, y: (x, y))

    def test_an_edited_file_makes_new_shards(self, tmp_path):
        file, folders = tmp_path / "own.py", set()
        for top in (16, 15):
            file.write_text(f"def f(x, y, group, draw):\n    return {top} - x.clip(0, {top}), y\n")
            sys.modules.pop("cfl_ray_plugin_own", None)
            data = SOURCE_KINDS.of(shift={"kind": f"{file}:f"}, partition={"clients": 2})
            folders.add(build(data, 0, tmp_path / "shards").uri)
        assert len(folders) == 2

    def test_an_edited_file_beside_it_makes_new_shards(self, tmp_path):
        (tmp_path / "own.py").write_text("import beside\n\ndef f(x, y, group, draw):\n    return beside.f(x), y\n")
        folders = set()
        for top in (16, 15):
            (tmp_path / "beside.py").write_text(f"def f(x):\n    return {top} - x.clip(0, {top})\n")
            data = SOURCE_KINDS.of(shift={"kind": f"{tmp_path / 'own.py'}:f"}, partition={"clients": 2})
            folders.add(build(data, 0, tmp_path / "shards").uri)
        assert len(folders) == 2

    def test_functions_of_one_name_have_shards_of_their_own(self, tmp_path):
        """Lambdas, closures and functions with bound options, of one file."""

        def times(factor):
            return lambda x, y, group, draw: (x * factor, y)

        def plus(x, y, group, draw, offset):
            return x + np.uint8(offset), y

        def largest(kind):
            data = SOURCE_KINDS.of(shift={"kind": kind, "groups": 1}, partition={"clients": 2})
            return build(data, 0, tmp_path / "shards").train(0)[0].max()

        kinds = [lambda x, y, group, draw: (x // 4, y), lambda x, y, group, draw: (x // 2, y), times(1), times(2)]
        kinds += [partial(plus, offset=offset) for offset in (1, 2)]
        assert [round(float(largest(kind)) * 16) for kind in kinds] == [4, 8, 16, 32, 17, 18]

    def test_sizes_are_described_without_pixels(self):
        """The labels of a group are those that the function gives, here for tests by label."""

        def next_label(x, y, group, draw):
            return x, (y + group) % 10

        partition = {"kind": "classes", "clients": 4, "classes_per_client": 2}
        data = SOURCE_KINDS.of(shift={"kind": next_label, "groups": 2}, partition=partition, test={"view": "label"})
        summary = describe(data, 0)
        assert (summary.clients, summary.groups, summary.test_sets) == (4, 2, 2)
