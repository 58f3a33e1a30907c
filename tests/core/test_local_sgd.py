import numpy as np
import pytest

from cfl_ray.core.local_sgd import LocalSGD


@pytest.mark.parametrize(
    "local, size, expected",
    [
        (LocalSGD(epochs=5, batch_size=10), 25, 15),  # E * ceil(n / B) = 5 * 3
        (LocalSGD(epochs=5, batch_size=10), 5, 5),
        (LocalSGD(epochs=5), 25, 5),  # B = n
        (LocalSGD(epochs=5, steps=7, batch_size=10), 25, 7),
    ],
)
def test_steps(local, size, expected):
    assert local.steps_of(np.array([size])).tolist() == [expected]


def test_fractional_epochs_are_rounded_and_at_least_one_step():
    local = LocalSGD(epochs=5, steps=7, batch_size=10)
    assert local.steps_of(np.array([100, 100, 100]), np.array([0.44, 0.45, 0.0])).tolist() == [4, 5, 1]


def test_every_epoch_is_a_new_permutation_with_the_last_partial_batch():
    batches = list(LocalSGD(batch_size=4).batches(10, 6, np.random.default_rng(0)))
    assert [len(batch) for batch in batches] == [4, 4, 2, 4, 4, 2]
    first, second = np.concatenate(batches[:3]), np.concatenate(batches[3:])
    assert sorted(first) == sorted(second) == list(range(10)) and not np.array_equal(first, second)


def test_steps_may_end_in_the_middle_of_an_epoch():
    whole = list(LocalSGD(batch_size=4).batches(10, 6, np.random.default_rng(0)))
    part = list(LocalSGD(batch_size=4).batches(10, 4, np.random.default_rng(0)))
    assert len(part) == 4 and all(map(np.array_equal, part, whole))


@pytest.mark.parametrize("batch_size", [None, 10, 11])
def test_a_batch_of_all_samples_needs_no_draw(batch_size):
    draw = np.random.default_rng(0)
    assert list(LocalSGD(batch_size=batch_size).batches(10, 3, draw)) == [None] * 3
    assert draw.random() == np.random.default_rng(0).random()


def test_drop_last_leaves_out_the_samples_that_fill_no_batch():
    cases = ((33, 32, [32, 1], [32]), (10, 4, [4, 4, 2], [4, 4]), (3, 8, [3], [3]), (2, 1, [1, 1], [1, 1]))
    for size, batch, whole, dropped in cases:
        single = dropped if whole[-1] == 1 < batch else whole
        for drop_last, sizes in ((False, whole), (True, dropped), ("single", single)):
            local = LocalSGD(epochs=2, batch_size=batch, drop_last=drop_last)
            steps = int(local.steps_of(np.array([size]))[0])
            found = [size if one is None else len(one) for one in local.batches(size, steps, np.random.default_rng(0))]
            assert found == 2 * sizes
