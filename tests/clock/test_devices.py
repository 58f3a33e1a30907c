"""Seconds of clients against the formula, and the distributions of their devices."""

from functools import partial

import numpy as np
import pytest

from cfl_ray.clock.devices import Clock, Load, Speed, lognormal, measured, normals, of_classes, own
from cfl_ray.clock.from_config import own_staleness
from cfl_ray.errors import RunError

IDS = np.arange(4000)
DEVICE = Speed.of(0.01, 20.0, 5.0)


def test_seconds_are_those_of_training_testing_and_transfer():
    """s (samples trained + samples tested / 3) + bits down / down + bits up / up."""
    clock, load = Clock(partial(lognormal, median=DEVICE, seed=0), 0), Load(4e6, 1e6, trainings=2.0, tests=3.0)
    found = clock.seconds(1, np.array([5, 9]), np.array([100, 40]), np.array([50, 20]), load)
    expected = [0.01 * (200 + 150 / 3) + 4e6 / 20e6 + 1e6 / 5e6, 0.01 * (80 + 60 / 3) + 4e6 / 20e6 + 1e6 / 5e6]
    assert found.tolist() == pytest.approx(expected, rel=1e-12)


def test_without_bandwidths_transfer_takes_no_time():
    clock = Clock(partial(lognormal, median=Speed.of(0.5, None, None), seed=0), 0)
    assert clock.seconds(1, IDS[:1], np.array([8]), np.array([8]), Load(1e9, 1e9)).tolist() == [4.0]


def test_normals_have_the_mean_and_deviation_of_their_name():
    """The mean of 4,000 has standard deviation 0.016, their deviation 0.011."""
    draws = normals(0, 1, 0, IDS, "some purpose")
    assert abs(draws.mean()) < 0.08 and abs(draws.std() - 1) < 0.06
    assert np.array_equal(normals(0, 1, 0, IDS[7:9], "some purpose"), draws[7:9])


def test_log_normal_speeds_have_their_medians_and_sigma():
    speed = lognormal(IDS, median=DEVICE, seed=3, sigma=1.2, bandwidth_sigma=0.5)
    assert np.median(speed.seconds_M) == pytest.approx(0.01, rel=0.1)
    assert np.log(speed.seconds_M).std() == pytest.approx(1.2, rel=0.06)
    assert np.log(speed.down_M).std() == pytest.approx(0.5, rel=0.06)
    assert np.allclose(speed.down_M / speed.up_M, 4)  # one factor for both ways
    assert abs(np.corrcoef(np.log(speed.seconds_M), np.log(speed.up_M))[0, 1]) < 0.08


def test_classes_have_their_shares():
    classes = Speed(np.array([1.0, 2.0]), np.array([3.0, 4.0]), np.array([5.0, 6.0]))
    speed = of_classes(IDS, classes=classes, share_C=np.array([0.25, 0.75]), seed=0)
    assert set(zip(speed.seconds_M, speed.down_M, speed.up_M, strict=True)) == {(1.0, 3.0, 5.0), (2.0, 4.0, 6.0)}
    assert (speed.seconds_M == 1).mean() == pytest.approx(0.25, abs=5 * np.sqrt(0.25 * 0.75 / 4000))


def test_measured_devices_are_used_in_turn():
    rows = Speed(np.array([1.0, 2.0, 3.0]), np.ones(3), np.ones(3))
    assert measured(np.array([0, 4, 8]), rows=rows).seconds_M.tolist() == [1.0, 2.0, 3.0]


def test_jitter_differs_by_round_and_draw_and_not_by_call():
    clock, one = Clock(partial(lognormal, median=DEVICE, seed=0), 0, jitter=0.3), np.ones(4000)
    times = {key: clock.seconds(key[0], IDS, one, one, Load(0, 0), key[1]) for key in ((1, 0), (2, 0), (1, 1))}
    assert np.array_equal(times[1, 0], clock.seconds(1, IDS, one, one, Load(0, 0)))
    assert np.log(times[1, 0] / 0.01).std() == pytest.approx(0.3, rel=0.06)
    for other in ((2, 0), (1, 1)):
        assert abs(np.corrcoef(times[1, 0], times[other])[0, 1]) < 0.08


def test_own_devices_depend_on_ids_alone():
    def function(clients, draw):
        return draw.random(len(clients)), clients + 1.0, clients + 2.0

    few, all_of_them = (
        own(clients, function=function, num_clients=50, seed=0) for clients in (np.array([3, 40]), np.arange(50))
    )
    assert np.array_equal(few.seconds_M, all_of_them.seconds_M[[3, 40]]) and few.up_M.tolist() == [5.0, 42.0]


@pytest.mark.parametrize("result", [3, (1, 2), (np.ones(2), np.ones(2), np.zeros(3))])
def test_own_devices_of_another_form_are_named(result):
    with pytest.raises(RunError, match=r"expected \(seconds per sample >= 0, bit/s down > 0, bit/s up > 0\)"):
        own(np.arange(2), function=lambda clients, draw: result, num_clients=2, seed=0)


@pytest.mark.parametrize(
    "result, message",
    [
        (
            (np.array([1, -2]), np.ones(2), np.ones(2)),
            "gave client 1 -2 seconds per sample, expected a finite number >= 0",
        ),
        ((np.array([np.inf, 1]), np.ones(2), np.ones(2)), "gave client 0 inf seconds per sample"),
        ((np.ones(2), np.array([1, np.nan]), np.ones(2)), "gave client 1 nan bit/s down, expected > 0"),
        ((np.ones(2), np.ones(2), np.zeros(2)), "gave client 0 0 bit/s up, expected > 0"),
    ],
)
def test_a_speed_that_no_device_has_is_named(result, message):
    with pytest.raises(RunError, match=message):
        own(np.arange(2), function=lambda clients, draw: result, num_clients=2, seed=0)


def test_a_weight_of_own_staleness_that_is_not_above_0_is_named():
    with pytest.raises(RunError, match="returned 0 for 2, expected a finite weight > 0"):
        own_staleness(np.array([0.0, 2.0]), function=lambda tau: 1 - tau / 2)
    with pytest.raises(RunError, match=r"expected a weight > 0 for each update: shape \(2,\)"):
        own_staleness(np.array([0.0, 2.0]), function=lambda tau: 1.0)
