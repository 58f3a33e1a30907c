"""The clock and the asynchronous rounds of an experiment, made from its config."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from cfl_ray.clock.devices import (
    ARGUMENTS,
    Clock,
    DeviceClasses,
    Devices,
    LognormalDevices,
    MeasuredDevices,
    OwnDevices,
    Speed,
)
from cfl_ray.clock.virtual_time import Asynchrony
from cfl_ray.config.clock import (
    CLOCK_KINDS,
    STALENESS_KINDS,
    AsynchronousConfig,
    ClassesClockConfig,
    ConstantClockConfig,
    HingeConfig,
    LognormalClockConfig,
    PluginClockConfig,
    PluginStalenessConfig,
    PolynomialConfig,
    RunningClockConfig,
    StalenessConfig,
    TraceClockConfig,
)
from cfl_ray.data.traces import read_devices
from cfl_ray.errors import ConfigError, RunError
from cfl_ray.plugins.calling import call_plugin, described, place_of, with_options


def clock_of(given: RunningClockConfig, num_clients: int, seed: int) -> Clock:
    """The clock of the section `clock`. Raises ConfigError or DataError for a clock that cannot be used."""
    clock = Clock(_devices(given, num_clients, seed), seed, given.jitter, given.deadline, given.availability_seconds)
    try:
        clock.devices.of(np.arange(min(num_clients, 2)))  # finds mistakes in a user's function
    except RunError as error:
        raise ConfigError(str(error)) from error
    return clock


def _devices(given: RunningClockConfig, num_clients: int, seed: int) -> Devices:
    if isinstance(given, PluginClockConfig):
        function = with_options(CLOCK_KINDS.resolve(given.kind), given.options, "clock", ARGUMENTS)
        return OwnDevices(function, num_clients, seed)
    if isinstance(given, TraceClockConfig):
        seconds_R, network_R = read_devices(given.file)
        return MeasuredDevices(Speed(seconds_R, network_R, network_R))
    if isinstance(given, ClassesClockConfig):
        speeds = [Speed.of(device.seconds_per_sample, device.down_mbps, device.up_mbps) for device in given.classes]
        columns = zip(*((speed.seconds_M, speed.down_M, speed.up_M) for speed in speeds), strict=True)
        share_C = np.array([device.share for device in given.classes])
        return DeviceClasses(Speed(*map(np.concatenate, columns)), share_C / share_C.sum(), seed)
    assert isinstance(given, ConstantClockConfig)
    median = Speed.of(given.seconds_per_sample, given.down_mbps, given.up_mbps)
    sigmas = (given.sigma, given.bandwidth_sigma) if isinstance(given, LognormalClockConfig) else ()
    return LognormalDevices(median, seed, *sigmas)


def asynchrony_of(given: AsynchronousConfig) -> Asynchrony | None:
    """The asynchronous rounds that the section describes; None: rounds are synchronous."""
    if given.buffer is None:
        return None
    staleness, others = _staleness(given.staleness), (given.mix == "models", given.max_staleness, given.per_cluster)
    return Asynchrony(given.buffer, staleness, given.mixing, *others)


def _staleness(given: StalenessConfig) -> Callable[[np.ndarray], np.ndarray]:
    """The function s(tau). Raises ConfigError for a user's function that cannot be used."""
    if isinstance(given, PluginStalenessConfig):
        function = with_options(STALENESS_KINDS.resolve(given.kind), given.options, "staleness", ("staleness",))
        own = OwnStaleness(function)
        try:
            own(np.arange(3))
        except RunError as error:
            raise ConfigError(str(error)) from error
        return own
    if isinstance(given, HingeConfig):
        return HingeStaleness(given.slope, given.limit)
    return PolynomialStaleness(given.power if isinstance(given, PolynomialConfig) else 0.0)


@dataclass(frozen=True)
class PolynomialStaleness:
    """(1 + tau)^-a; with a = 0 the constant 1."""

    power: float

    def __call__(self, tau_M: np.ndarray) -> np.ndarray:
        return (1.0 + tau_M) ** -self.power


@dataclass(frozen=True)
class HingeStaleness:
    """1 up to `limit`, then 1 / (slope (tau - limit) + 1)."""

    slope: float
    limit: float

    def __call__(self, tau_M: np.ndarray) -> np.ndarray:
        late_M: np.ndarray = np.maximum(tau_M - self.limit, 0.0)
        return 1.0 / (self.slope * late_M + 1.0)


@dataclass(frozen=True)
class OwnStaleness:
    """A user's function f(staleness) -> weights > 0."""

    function: Callable[..., Any]

    def __call__(self, tau_M: np.ndarray) -> np.ndarray:
        """Raises RunError, with the function's file and line, for a result of another form."""
        result = call_plugin("staleness", self.function, tau_M)
        weights = np.asarray(result, np.float64)
        if weights.shape != tau_M.shape or not ((weights > 0) & np.isfinite(weights)).all():
            raise RunError(
                f"staleness {place_of(self.function)} returned {described(result)}, "
                f"expected a weight > 0 for each update: shape ({len(tau_M)},)"
            )
        return weights
