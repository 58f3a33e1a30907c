"""Learning-rate schedules: factors of `local.lr` as functions of the round (or local step) t = 1 .. T."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from cfl_ray.errors import ConfigError
from cfl_ray.plugins.calling import call_plugin, check_options, parse_choice, place_of
from cfl_ray.plugins.registry import Registry

ScheduleFunction = Callable[..., float]  # (t, T, **options) -> factor


def constant(t: int, total: int) -> float:
    """The factor 1."""
    return 1.0


def step(t: int, total: int, every: int = 10, gamma: float = 0.5) -> float:
    """A factor gamma after each `every` rounds or steps: gamma^floor((t - 1) / every)."""
    return float(gamma ** ((t - 1) // _at_least_1("every", every)))


def exponential(t: int, total: int, gamma: float = 0.98) -> float:
    """A factor gamma each round or step: gamma^(t - 1)."""
    return float(gamma ** (t - 1))


def linear(t: int, total: int, floor: float = 0.0) -> float:
    """A linear decrease from 1 at t = 1 to `floor` after T."""
    return 1 - (1 - floor) * (t - 1) / total


def cosine(t: int, total: int, floor: float = 0.0) -> float:
    """Half a period of the cosine from 1 to `floor`: floor + (1 - floor) (1 + cos(pi (t - 1) / T)) / 2."""
    return floor + (1 - floor) * (1 + math.cos(math.pi * (t - 1) / total)) / 2


def warmup(t: int, total: int, length: int = 5) -> float:
    """A linear increase to 1 over the first `length` rounds or steps: t / length."""
    return min(t / _at_least_1("length", length), 1.0)


def _at_least_1(option: str, value: float) -> float:
    """The value of an option. Raises ConfigError if it is smaller."""
    if value < 1:
        raise ConfigError(f"option {option} of a schedule is at least 1, got {value}")
    return value


SCHEDULES: Registry[ScheduleFunction] = Registry(
    "schedule",
    {function.__name__: function for function in (constant, step, exponential, linear, cosine, warmup)},
    "cfl_ray.schedules",
)


@dataclass(frozen=True)
class RateSchedule:
    """A factor of the learning rate: a pure function of t = 1 .. T and T."""

    function: ScheduleFunction
    options: dict[str, Any] = field(default_factory=dict)

    def __call__(self, t: int, total: int) -> float:
        """The factor. Raises ConfigError for anything but a finite number >= 0."""
        factor = call_plugin("schedule", partial(self.function, **self.options), t, total, error=ConfigError)
        if isinstance(factor, bool) or not isinstance(factor, (int, float)) or not 0 <= factor < math.inf:
            raise ConfigError(
                f"schedule {place_of(self.function)} returns {factor!r} at {t} of {total}, expected a number >= 0"
            )
        return float(factor)


def resolve_schedule(key: str, value: Any) -> RateSchedule | None:
    """The schedule of a name, {name: options}, `file.py:function` or a function; None for constant. Raises ConfigError.

    key: of the config, for messages.
    """
    name, options = parse_choice(key, value)
    function: Any = SCHEDULES.resolve(name)
    if not callable(function):
        raise ConfigError(f"{key} {name!r} is {type(function).__name__}, expected a function of (t, total)")
    check_options(key, function, options, ("t", "total"))
    return None if function is constant else RateSchedule(function, options)
