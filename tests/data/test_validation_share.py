import numpy as np
import pytest

from cfl_ray.data.validation_share import ValidationShare, drawn_per_class


def test_the_share_is_rounded_and_leaves_a_sample_for_training():
    sizes = np.array([1, 2, 3, 7, 8, 100])
    assert ValidationShare(0.2, "random", 0).counts(sizes).tolist() == [0, 0, 1, 1, 2, 20]  # round(0.2 n)
    assert ValidationShare(0.9, "random", 0).counts(sizes).tolist() == [0, 1, 2, 6, 7, 90]  # at most n - 1


@pytest.mark.parametrize(
    "sizes, count, expected",
    [
        ([50, 30, 20], 20, [[10, 6, 4]]),  # n_c count / n
        ([7, 7, 6], 4, [[1, 2, 1], [2, 1, 1]]),  # 1.4, 1.4, 1.2: a tie of the largest remainders
        ([16, 3, 1], 5, [[4, 1, 0]]),  # 4, 0.75, 0.25
        ([10, 3, 1], 4, [[3, 1, 0]]),  # 2.86, 0.86, 0.29: a tie that leaves the single sample of the last class
        (
            [3, 1, 1],
            2,
            [[2, 0, 0]],
        ),  # 1.2, 0.4, 0.4: single samples stay for training, though their remainder is larger
        ([8, 1, 1, 1], 6, [[6, 0, 0, 0]]),  # 4.4 and 0.5: also if the first class has to give two more
        ([2, 1, 1, 1], 3, [[1, 1, 1, 0], [1, 1, 0, 1], [1, 0, 1, 1]]),  # 1.2, 0.6: then no class has others
        ([1, 1], 1, [[1, 0], [0, 1]]),  # no class has others
    ],
)
def test_each_class_gives_its_share(sizes, count, expected):
    y = np.repeat(np.arange(len(sizes)) * 3 - 2, sizes)  # labels may be any integers
    for seed in range(5):
        order = np.random.default_rng(seed).permutation(len(y))
        rows = drawn_per_class(y[order], count, np.random.default_rng(seed))
        assert len(rows) == count and (np.diff(rows) > 0).all()
        drawn = np.bincount(np.unique(y, return_inverse=True)[1][order][rows], minlength=len(sizes)).tolist()
        assert drawn in expected


def test_draws_are_of_the_client_and_the_seed():
    y, rows = (
        np.arange(60) % 3,
        [
            ValidationShare(0.2, "random", seed).rows(client, np.arange(60) % 3)
            for seed, client in ((0, 0), (0, 0), (0, 1), (1, 0))
        ],
    )
    for kept, held in rows:
        assert np.array_equal(np.sort(np.concatenate([kept, held])), np.arange(60))
        assert np.bincount(y[held]).tolist() == [4, 4, 4]  # 0.2 * 20
    assert np.array_equal(rows[0][1], rows[1][1])
    assert not np.array_equal(rows[0][1], rows[2][1]) and not np.array_equal(rows[0][1], rows[3][1])


def test_targets_that_are_no_classes_are_drawn_from_all():
    for y in (np.random.default_rng(0).standard_normal(20), np.zeros((20, 3), np.int64)):
        assert len(drawn_per_class(y, 4, np.random.default_rng(0))) == 4


def test_the_last_samples():
    kept, held = ValidationShare(0.2, "last", 0).rows(3, np.arange(10) % 2)
    assert np.arange(10)[kept].tolist() == list(range(8)) and np.arange(10)[held].tolist() == [8, 9]
