"""Epsilon against the values of dp-accounting, and of the published table."""

import logging
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from scipy.stats import norm

from cfl_ray.errors import ConfigError
from cfl_ray.privacy.accounting import Sampling, accountant, epsilon, last_round, solved_multiplier
from cfl_ray.privacy.noisy_sums import Releases

pytest.importorskip("dp_accounting")


def rounds(z, count, signatures=0):
    return Releases(Counter({z: count} if count else {}), signatures_N=np.array([signatures], np.int32))


@pytest.mark.parametrize(
    "population, cohort, count, delta, values",
    [
        (200, 20, 200, 1e-3, {0.5: 34.3, 1: 7.10, 2: 2.30}),
        (1000, 100, 200, 1000**-1.1, {0.5: 36.1, 1: 7.57, 2: 2.48}),
        (3400, 100, 1500, 3400**-1.1, {0.5: 38.6, 1: 6.35, 2: 2.12}),
        (10**6, 1000, 1500, 1e6**-1.1, {0.5: 5.04, 1: 0.25, 2: 0.08}),
    ],
)
def test_of_poisson_samples(population, cohort, count, delta, values):
    """Add or remove one client; PLD accountant. The first row is at delta 1e-3, at which the table's value holds."""
    sampling = Sampling("poisson", population, cohort)
    for z, expected in values.items():
        assert epsilon(rounds(z, count), sampling, delta) == pytest.approx(expected, abs=0.006, rel=2e-3)


@pytest.mark.parametrize(
    "population, cohort, count, values, least",
    [
        (1000, 100, 200, {1: 7.569077, 2: 2.481220}, 2.343369),
        (10**6, 1000, 1500, {1: 0.247073, 2: 0.083015}, 0.642443),
    ],
)
def test_of_pfl_research(population, cohort, count, values, least):
    """pfl 0.6.0: PLDPrivacyAccountant(count, cohort / population, "gaussian", noise_parameter=z, delta=delta).epsilon,
    and cohort_noise_parameter of the same with epsilon=2, which is the least noise, to within 0.2 %.
    """
    sampling, delta = Sampling("poisson", population, cohort), population**-1.1
    for z, expected in values.items():
        assert epsilon(rounds(z, count), sampling, delta) == pytest.approx(expected, rel=1e-3)
    assert epsilon(rounds(1.002 * least, count), sampling, delta) <= 2
    assert epsilon(rounds(least / 1.002, count), sampling, delta) > 2


@pytest.mark.parametrize(
    "population, cohort, z, delta, expected",
    [(20_000, 60, 2.0, 1e-5, 2.02471), (10**5, 200, 1.0, 1e-6, 4.00399)],
)
def test_of_many_rounds(population, cohort, z, delta, expected):
    """100,000 rounds. opacus 1.6.0: PRVAccountant with history [(z, cohort / population, 100_000)],
    _get_dprv(eps_error=0.002, delta_error=1e-4 * delta).compute_epsilon(delta, 1e-4 * delta, 0.002), which returns a
    lower bound 0.002 below, the estimate, and an upper bound 0.002 above.
    """
    found = epsilon(rounds(z, 100_000), Sampling("poisson", population, cohort), delta)
    assert found == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize("z, count", [(0.1, 100), (0.03, 100), (0.01, 100)])
def test_of_next_to_no_noise(z, count):
    """Against the closed form; in little memory. An epsilon so large protects nothing, but is recorded."""
    found, mu = epsilon(rounds(z, count), Sampling("all", 100, 100), 1e-3), count**0.5 / z
    log_second = lambda value: value + norm.logcdf(-mu / 2 - value / mu)
    of = lambda value: norm.cdf(mu / 2 - value / mu) - np.exp(log_second(value))
    assert of(found) <= 1e-3 <= of(found * 0.9985)


@pytest.mark.parametrize("least", [0.02, 0.7, 1.0, 5.0])
def test_the_least_noise_of_a_target(least):
    """Within a factor of 1.001, and enough."""
    assert least <= solved_multiplier(2.0, lambda z: 2.0 * least / z) <= 1.001 * least


@pytest.mark.parametrize(
    "epsilon_of",
    [
        lambda z: 2.0 / z,
        lambda z: 3.0 * z**-0.4,
        lambda z: 0.5 / z**2 + 1.3 / z,
        lambda z: float(np.expm1(1 / z)),
        lambda z: 9.0 if z < 1.7 else 0.0,  # of which no secant is known
        lambda z: np.inf if z < 0.3 else 1 / z,
        lambda z: np.round(2.0 / z, 1),
    ],
)
@pytest.mark.parametrize("target", [0.2, 1.0, 1.9])
def test_the_noise_is_that_of_bisection_with_fewer_epsilons(epsilon_of, target):
    """To the last bit, so that a target gives the noise that it gave."""
    low, high, asked = 0.01, 1.0, []
    while epsilon_of(high) > target:
        low, high = high, 2 * high
    doublings = round(np.log2(high)) + 1
    while high / low > 1.001:
        middle = (low * high) ** 0.5
        low, high = (middle, high) if epsilon_of(middle) > target else (low, middle)
    assert solved_multiplier(target, lambda z: asked.append(z) or epsilon_of(z)) == high
    smooth = epsilon_of(1.0) not in (9.0, 1.0) and epsilon_of(1.01) != epsilon_of(1.011)
    assert len(asked) <= doublings + (7 if smooth else 19), asked


def test_of_samples_without_replacement():
    """6.37 is for noise of twice the sensitivity. Replacing a client moves a sum by 2 C: z is 4."""
    sampling = Sampling("fixed", 1000, 100)
    assert epsilon(rounds(4.0, 200), sampling, 1000**-1.1) == pytest.approx(6.37, abs=0.005)


def test_of_samples_without_replacement_at_most_that_of_all_clients():
    """With replaced clients, z / 2; the bound of amplified Renyi moments alone is 4.16 of 3.92."""
    expected = epsilon(rounds(1.0, 3), Sampling("all", 20, 20), 20**-1.1)
    assert epsilon(rounds(2.0, 3), Sampling("fixed", 20, 10), 20**-1.1) == pytest.approx(expected, rel=1e-3)


def test_of_all_clients():
    """Against the closed form of n Gaussian mechanisms (Balle and Wang 2018), with mu = sqrt(n) / z."""
    found, mu = epsilon(rounds(2.0, 200), Sampling("all", 1000, 100), 1e-4), 200**0.5 / 2.0
    delta = norm.cdf(mu / 2 - found / mu) - np.exp(found) * norm.cdf(-mu / 2 - found / mu)
    assert delta == pytest.approx(1e-4, rel=0.02) and delta <= 1e-4


def test_of_discrete_noise():
    """At least the value of the Gaussian, which it tends to; at most that of zCDP (Bun and Steinke 2016, 1.3)."""
    sampling = Sampling("all", 1000, 100, discrete=True)
    for z, count in ((1.0, 1), (2.0, 50), (20.0, 200)):
        found, rho = epsilon(rounds(z, count), sampling, 1e-4), count / (2 * z**2)
        assert epsilon(rounds(z, count), Sampling("all", 1000, 100), 1e-4) < found
        assert found < rho + 2 * (rho * np.log(1e4)) ** 0.5


def test_signatures_are_not_amplified_and_count_as_replaced():
    sampling = Sampling("poisson", 1000, 10)
    alone = epsilon(rounds(1.0, 0, signatures=2), sampling, 1e-4, 4.0)
    assert alone == pytest.approx(epsilon(rounds(2.0, 2), Sampling("all", 1000, 1000), 1e-4), rel=1e-6)
    both = epsilon(rounds(1.0, 50, signatures=2), sampling, 1e-4, 4.0)
    assert both > alone and both < alone + epsilon(rounds(1.0, 50), sampling, 1e-4)
    assert epsilon(rounds(1.0, 0, signatures=2), Sampling("fixed", 1000, 10), 1e-4, 4.0) == pytest.approx(
        alone, rel=0.2
    )


@pytest.mark.parametrize("kind", ["poisson", "fixed"])
def test_a_client_that_is_known_to_be_in_a_cohort_has_no_amplification(kind):
    """Its vectors show in which rounds; with next to no noise in two of ten rounds, these two at worst."""
    sampling, vague = Sampling(kind, 1000, 10), 1e6
    releases = Releases(Counter({4.0: 8, 1.0: 2}), signatures_N=np.array([2], np.int32), shown=10)
    expected = epsilon(Releases(Counter({4.0: 8}), Counter({1.0: 2})), sampling, 1e-4)
    assert epsilon(releases, sampling, 1e-4, vague) == pytest.approx(expected, rel=1e-3)
    assert epsilon(replace(releases, shown=0), sampling, 1e-4, vague) < expected / 2


def test_orders_that_are_left_out_are_no_warnings():
    accountant()
    shown = [
        bool(logging.getLogger("absl").filter(logging.makeLogRecord({"msg": text})))
        for text in (
            "_compute_log_a_frac failed to converge. Excluding this order from the epsilon computation.",
            "other",
        )
    ]
    assert shown == [False, True]


def test_nothing_released_is_nothing():
    assert epsilon(Releases(), Sampling("poisson", 100, 10), 1e-3) == 0


def test_a_target_that_no_noise_reaches():
    with pytest.raises(ConfigError, match="target_epsilon: 1e-09 is not reached"):
        solved_multiplier(1e-9, lambda z: 1.0)


@pytest.mark.parametrize("target, expected", [(0.5, 0), (1.0, 1), (6.5, 6), (10.0, 10), (99.0, 10)])
def test_the_last_round_of_a_budget(target, expected):
    assert last_round(target, 10, float) == expected
