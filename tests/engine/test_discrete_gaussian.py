"""Samples of the discrete Gaussian against its probabilities."""

import numpy as np
import pytest
from scipy import stats

from cfl_ray.core.secure_aggregation import LARGEST_SIGMA
from cfl_ray.engine.discrete_gaussian import _exp, discrete_gaussian


@pytest.mark.parametrize("sigma", [1, 2, 3, 7])
def test_has_the_probabilities_of_the_definition(sigma):
    """Chi-square test of 50,000 samples; both tails are one class each."""
    found = discrete_gaussian(np.random.default_rng(sigma), sigma, 50_000)
    far = 3 * sigma
    x = np.arange(-60 * sigma, 60 * sigma + 1)
    weight = np.exp(-(x**2) / (2 * sigma**2))
    chance = np.bincount(np.clip(x, -far, far) + far, weight / weight.sum())
    counts = np.bincount(np.clip(found, -far, far) + far, minlength=len(chance))
    assert stats.chisquare(counts, chance * len(found)).pvalue > 1e-3


@pytest.mark.parametrize("sigma", [1_000, 209_715, LARGEST_SIGMA])
def test_is_near_the_gaussian_for_a_large_deviation(sigma):
    """Kolmogorov and Smirnov; 64 bits are enough up to the largest deviation."""
    found = discrete_gaussian(np.random.default_rng(sigma), sigma, 50_000)
    assert stats.kstest((found + 0.0) / sigma, "norm").pvalue > 1e-3
    assert abs((found % 2).mean() - 0.5) < 4.5 * 0.5 / 50_000**0.5, "the last bit is drawn, too"


@pytest.mark.parametrize("p, q", [(0, 5), (1, 3), (1, 1), (7, 8)])
def test_events_have_the_probability_of_the_exponential(p, q):
    happened = _exp(np.random.default_rng(0), np.full(40_000, p), q).mean()
    chance = np.exp(-p / q)
    assert happened == pytest.approx(chance, abs=4.5 * (chance * (1 - chance) / 40_000) ** 0.5 + 1e-12)


def test_the_same_draw_gives_the_same_samples():
    first, second = (discrete_gaussian(np.random.default_rng(5), 10, 70_001) for _ in range(2))
    assert (first == second).all() and first.shape == (70_001,) and not len(discrete_gaussian(None, 10, 0))
