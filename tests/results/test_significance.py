"""Tests of methods against the best one: over seeds, over clients, and corrected."""

import math

import numpy as np
import pytest
from scipy.stats import wilcoxon

from cfl_ray.results.significance import PairedTest, corrected, holm, signed_rank_test

NAN = math.nan


def test_holm_by_hand():
    """Sorted 0.01, 0.02, 0.03, 0.04: times 4, 3, 2, 1 are 0.04, 0.06, 0.06, 0.04, and the running maximum."""
    assert holm([0.04, 0.01, NAN, 0.03, 0.02]) == pytest.approx([0.06, 0.04, NAN, 0.06, 0.06], nan_ok=True)
    assert holm([0.6, 0.7]) == [1.0, 1.0] and holm([0.03]) == [0.03] and holm([]) == []
    two = [PairedTest(0.02, 0.5, 9), PairedTest(), PairedTest(0.03, -0.5, 9)]
    assert [one.p for one in corrected(two, "holm")] == pytest.approx([0.04, NAN, 0.04], nan_ok=True)
    assert corrected(two, "none") == two and corrected(two, "holm")[0].effect == 0.5


def test_wilcoxon_with_ties_and_zeros():
    """Differences -1, -2, -2, 3, 4 and two zeros: mean ranks 1, 2.5, 2.5, 4, 5, so W+ = 9, W- = 6 of 15."""
    ours = {(0, client): value for client, value in enumerate([4.0, 3.0, 3.0, 8.0, 9.0, 5.0, 5.0, NAN, 1.0])}
    best = {(0, client): 5.0 for client in range(8)}
    p, effect = signed_rank_test(ours, best)
    assert effect == pytest.approx((9 - 6) / 15)
    assert p == wilcoxon([-1.0, -2.0, -2.0, 3.0, 4.0]).pvalue


def test_wilcoxon_without_ties_is_exact():
    """All 2^5 signs are equally likely: both tails of the most extreme sum have probability 2 / 2^5."""
    ours = dict(enumerate([0.1, 0.2, 0.3, 0.4, 0.5]))
    p, effect = signed_rank_test(ours, dict.fromkeys(ours, 0.6))
    assert p == pytest.approx(2 / 2**5) and effect == -1.0


def test_clients_that_are_equal_up_to_rounding_are_left_out():
    ours = {0: 0.6 - 0.5, 1: 0.1, 2: 0.1, 3: 0.1}
    assert np.isnan(signed_rank_test(ours, {0: 0.8 - 0.7, 1: 0.1, 2: 0.1, 3: 0.1})).all()
    assert np.isnan(signed_rank_test({0: 1.0, 1: 2.0}, {0: 2.0, 1: 3.0})).all(), "two clients"
    assert np.isnan(signed_rank_test({}, {})).all()
