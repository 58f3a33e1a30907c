"""The clock and the asynchronous rounds of an experiment, made from its config."""

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from cfl_ray.clock import devices
from cfl_ray.clock.devices import ARGUMENTS, Clock, Devices, Speed
from cfl_ray.clock.traces import read_devices
from cfl_ray.clock.virtual_time import Asynchrony
from cfl_ray.config.asynchronous import (
    STALENESS_KINDS,
    AsynchronousConfig,
    HingeConfig,
    PluginStalenessConfig,
    PolynomialConfig,
    StalenessConfig,
)
from cfl_ray.config.clock import (
    CLOCK_KINDS,
    ClassesClockConfig,
    ConstantClockConfig,
    LognormalClockConfig,
    PluginClockConfig,
    RunningClockConfig,
    TraceClockConfig,
)
from cfl_ray.errors import ConfigError, RunError
from cfl_ray.plugins.calling import call_plugin, described, place_of, with_options


def clock_of(given: RunningClockConfig, num_clients: int, seed: int) -> Clock:
    """The clock of the section `clock`. Raises ConfigError or DataError for a clock that cannot be used."""
    clock = Clock(_devices(given, num_clients, seed), seed, given.jitter, given.deadline, given.availability_seconds)
    try:
        clock.devices(np.arange(min(num_clients, 2)))  # finds mistakes in a user's function
    except RunError as error:
        raise ConfigError(str(error)) from error
    return clock


def _devices(given: RunningClockConfig, num_clients: int, seed: int) -> Devices:
    if isinstance(given, PluginClockConfig):
        function = with_options(CLOCK_KINDS.resolve(given.kind), given.options, "clock", ARGUMENTS)
        return partial(devices.own, function=function, num_clients=num_clients, seed=seed)
    if isinstance(given, TraceClockConfig):
        seconds_R, network_R = read_devices(given.file)
        return partial(devices.measured, rows=Speed(seconds_R, network_R, network_R))
    if isinstance(given, ClassesClockConfig):
        speeds = [Speed.of(device.seconds_per_sample, device.down_mbps, device.up_mbps) for device in given.classes]
        columns = zip(*((speed.seconds_M, speed.down_M, speed.up_M) for speed in speeds), strict=True)
        share_C = np.array([device.share for device in given.classes])
        classes = Speed(*map(np.concatenate, columns))
        return partial(devices.of_classes, classes=classes, share_C=share_C / share_C.sum(), seed=seed)
    assert isinstance(given, ConstantClockConfig)
    median = Speed.of(given.seconds_per_sample, given.down_mbps, given.up_mbps)
    if not isinstance(given, LognormalClockConfig):
        return partial(devices.lognormal, median=median, seed=seed)
    sigma, bandwidth_sigma = given.sigma, given.bandwidth_sigma
    return partial(devices.lognormal, median=median, seed=seed, sigma=sigma, bandwidth_sigma=bandwidth_sigma)


def asynchrony_of(given: AsynchronousConfig) -> Asynchrony | None:
    """The asynchronous rounds that the section describes; None: rounds are synchronous."""
    if given.buffer is None:
        return None
    return Asynchrony(given.buffer, _staleness(given.staleness), given)


def _staleness(given: StalenessConfig) -> Callable[[np.ndarray], np.ndarray]:
    """The function s(tau). Raises ConfigError for a user's function that cannot be used."""
    if isinstance(given, PluginStalenessConfig):
        function = with_options(STALENESS_KINDS.resolve(given.kind), given.options, "staleness", ("staleness",))
        own = partial(own_staleness, function=function)
        try:
            own(np.arange(3))
        except RunError as error:
            raise ConfigError(str(error)) from error
        return own
    if isinstance(given, HingeConfig):
        return partial(hinge_staleness, slope=given.slope, limit=given.limit)
    return partial(polynomial_staleness, power=given.power if isinstance(given, PolynomialConfig) else 0.0)


def polynomial_staleness(tau_M: np.ndarray, *, power: float) -> np.ndarray:
    """(1 + tau)^-a; with a = 0 the constant 1."""
    return (1.0 + tau_M) ** -power


def hinge_staleness(tau_M: np.ndarray, *, slope: float, limit: float) -> np.ndarray:
    """1 up to `limit`, then 1 / (slope (tau - limit) + 1)."""
    late_M: np.ndarray = np.maximum(tau_M - limit, 0.0)
    return 1.0 / (slope * late_M + 1.0)


def own_staleness(tau_M: np.ndarray, *, function: Callable[..., Any]) -> np.ndarray:
    """The weights > 0 of a user's function f(staleness).

    Raises RunError, with the function's file and line, for a result of another form.
    """
    result = call_plugin("staleness", function, tau_M)
    weights = np.asarray(result, np.float64)
    if weights.shape != tau_M.shape:
        raise RunError(
            f"staleness {place_of(function)} returned {described(result)}, "
            f"expected a weight > 0 for each update: shape ({len(tau_M)},)"
        )
    if len(bad := np.flatnonzero(~((weights > 0) & np.isfinite(weights)))):
        raise RunError(
            f"staleness {place_of(function)} returned {weights[bad[0]]:g} for {tau_M[bad[0]]:g}, "
            "expected a finite weight > 0"
        )
    return weights
