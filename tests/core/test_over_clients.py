"""Closed forms of the numbers over clients."""

import numpy as np
import pytest

from cfl_ray.core.over_clients import OVER_CLIENTS, best_tenth, gini, jain, worst_tenth


def test_gini():
    """Of 1 .. M the coefficient is (M - 1) / (3 M); of one client that has all, 1 - 1/M."""
    assert gini(np.arange(10.0, 0, -1)) == pytest.approx((10 - 1) / (3 * 10))
    assert gini(np.array([0, 0, 0, 5.0])) == pytest.approx(1 - 1 / 4)
    assert gini(np.full(7, 0.3)) == pytest.approx(0) and np.isnan(gini(np.zeros(3)))
    values = np.random.default_rng(0).random(20)
    pairs = np.abs(values[:, None] - values).sum()
    assert gini(values) == pytest.approx(pairs / (2 * 20**2 * values.mean()))


def test_jain():
    """Of 1 .. M the index is 3 (M + 1) / (2 (2 M + 1)); k of M clients with equal shares have k/M."""
    assert jain(np.arange(1.0, 11)) == pytest.approx(3 * 11 / (2 * 21))
    assert jain(np.array([1, 1, 0, 0, 0.0])) == pytest.approx(2 / 5)
    assert jain(np.full(7, 0.3)) == pytest.approx(1) and np.isnan(jain(np.zeros(3)))


def test_tenths():
    """Of 1 .. 25 the tenth is three clients, rounded up."""
    scores = np.random.default_rng(1).permutation(np.arange(1.0, 26))
    assert worst_tenth(scores) == np.mean([1, 2, 3]) and best_tenth(scores) == np.mean([23, 24, 25])
    assert worst_tenth(scores, False) == np.mean([23, 24, 25]) and best_tenth(scores, False) == np.mean([1, 2, 3])
    assert all(np.isfinite(function(np.array([0.5]), True)) for function in OVER_CLIENTS.values())
