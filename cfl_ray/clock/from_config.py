"""The clock, the availability of clients and the asynchronous rounds of an experiment, made from its config."""

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from cfl_ray.clock import devices
from cfl_ray.clock.devices import ARGUMENTS, Clock, Devices, Speed
from cfl_ray.clock.traces import read_devices, read_trace
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
from cfl_ray.config.cohort import (
    AVAILABILITY_KINDS,
    AvailabilityConfig,
    BernoulliConfig,
    DiurnalConfig,
    PluginAvailabilityConfig,
    TraceConfig,
)
from cfl_ray.errors import ConfigError, RunError
from cfl_ray.plugins.calling import call_plugin, described, place_of, with_options
from cfl_ray.population import availability
from cfl_ray.population.availability import ALWAYS, Availability, Bernoulli, Diurnal, OwnAvailability, Trace


def clock_of(given: RunningClockConfig, num_clients: int, seed: int) -> Clock:
    """The clock of the section `clock`. Raises ConfigError or DataError for a clock that cannot be used."""
    speeds: Devices = CLOCK_KINDS.code_of(given)(given, num_clients, seed)
    clock = Clock(speeds, seed, given.jitter, given.deadline, given.availability_seconds)
    try:
        clock.devices(np.arange(min(num_clients, 2)))  # finds mistakes in a user's function
    except RunError as error:
        raise ConfigError(str(error)) from error
    return clock


def asynchrony_of(given: AsynchronousConfig) -> Asynchrony | None:
    """The asynchronous rounds that the section describes; None: rounds are synchronous."""
    if given.buffer is None:
        return None
    return Asynchrony(given.buffer, STALENESS_KINDS.code_of(given.staleness)(given.staleness), given)


def availability_of(given: AvailabilityConfig, num_clients: int, seed: int) -> Availability:
    """The availability of the section. Raises ConfigError or DataError for a function or trace that cannot be used."""
    made: Availability = AVAILABILITY_KINDS.code_of(given)(given, num_clients, seed)
    return made


# ---- the kinds of clocks, as `CLOCK_KINDS` names them: functions (section, clients, seed) -> devices


def constant(given: ConstantClockConfig, num_clients: int, seed: int) -> Devices:
    """The same device for all clients."""
    return partial(devices.lognormal, median=_median(given), seed=seed)


def lognormal(given: LognormalClockConfig, num_clients: int, seed: int) -> Devices:
    """Speeds with a log-normal distribution."""
    sigma, bandwidth_sigma = given.sigma, given.bandwidth_sigma
    return partial(devices.lognormal, median=_median(given), seed=seed, sigma=sigma, bandwidth_sigma=bandwidth_sigma)


def _median(given: ConstantClockConfig) -> Speed:
    return Speed.of(given.seconds_per_sample, given.down_mbps, given.up_mbps)


def classes(given: ClassesClockConfig, num_clients: int, seed: int) -> Devices:
    """Classes of devices, drawn by their shares."""
    speeds = [Speed.of(device.seconds_per_sample, device.down_mbps, device.up_mbps) for device in given.classes]
    columns = zip(*((speed.seconds_M, speed.down_M, speed.up_M) for speed in speeds), strict=True)
    share_C = np.array([device.share for device in given.classes])
    of_classes = Speed(*map(np.concatenate, columns))
    return partial(devices.of_classes, classes=of_classes, share_C=share_C / share_C.sum(), seed=seed)


def measured(given: TraceClockConfig, num_clients: int, seed: int) -> Devices:
    """Devices of a file."""
    seconds_R, network_R = read_devices(given.file)
    return partial(devices.measured, rows=Speed(seconds_R, network_R, network_R))


def own(given: PluginClockConfig, num_clients: int, seed: int) -> Devices:
    """Devices of a user's function."""
    function = with_options(CLOCK_KINDS.resolve(given.kind), given.options, "clock", ARGUMENTS)
    return partial(devices.own, function=function, num_clients=num_clients, seed=seed)


# ---- the kinds of availability, as `AVAILABILITY_KINDS` names them: functions (section, clients, seed)


def always_online(given: AvailabilityConfig, num_clients: int, seed: int) -> Availability:
    """Every client in every round."""
    return ALWAYS


def bernoulli(given: BernoulliConfig, num_clients: int, seed: int) -> Availability:
    """The same chance for all clients."""
    return Bernoulli(given.chance)


def diurnal(given: DiurnalConfig, num_clients: int, seed: int) -> Availability:
    """Day and night."""
    return Diurnal(given.chance, given.amplitude, given.period, seed, given.zones)


def recorded(given: TraceConfig, num_clients: int, seed: int) -> Availability:
    """Intervals of a file."""
    return Trace(*read_trace(given.file, num_clients), given.unit)


def own_availability(given: PluginAvailabilityConfig, num_clients: int, seed: int) -> Availability:
    """The availability of a user's function."""
    arguments = availability.ARGUMENTS
    function = with_options(AVAILABILITY_KINDS.resolve(given.kind), given.options, "availability", arguments)
    return OwnAvailability(function, seed)


# ---- the kinds of staleness, as `STALENESS_KINDS` names them: functions section -> s(tau)

Weights = Callable[[np.ndarray], np.ndarray]  # s(tau) of each staleness


def constant_weights(given: StalenessConfig) -> Weights:
    """The constant 1."""
    return partial(polynomial_staleness, power=0.0)


def polynomial_weights(given: PolynomialConfig) -> Weights:
    """(1 + tau)^-a."""
    return partial(polynomial_staleness, power=given.power)


def hinge_weights(given: HingeConfig) -> Weights:
    """1 up to a limit, then falling."""
    return partial(hinge_staleness, slope=given.slope, limit=given.limit)


def own_weights(given: PluginStalenessConfig) -> Weights:
    """The weights of a user's function. Raises ConfigError for one that cannot be used."""
    function = with_options(STALENESS_KINDS.resolve(given.kind), given.options, "staleness", ("staleness",))
    weights = partial(own_staleness, function=function)
    try:
        weights(np.arange(3))
    except RunError as error:
        raise ConfigError(str(error)) from error
    return weights


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
