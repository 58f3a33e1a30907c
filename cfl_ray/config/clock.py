"""The section `clock`: virtual time."""

from typing import Annotated, Any

from pydantic import Field

from cfl_ray.config.part import BuiltinKind, Kinds, PluginConfig
from cfl_ray.config.section import FILE, ConfigSection


class ClockConfig(ConfigSection):
    """Virtual time: how long each client would take for its part of a round. Nothing waits for it."""

    kind: Any = Field("none", description="devices of the clients, which decide how long their work takes")


class RunningClockConfig(ClockConfig):
    """Keys of all devices."""

    jitter: float = Field(
        0.0,
        ge=0,
        le=10,
        description="sigma of a log-normal factor (median 1) of each client's time in each round; 0: none",
    )
    deadline: float | None = Field(
        None,
        gt=0,
        description="virtual seconds after which a round waits for no further client; null: it waits for all",
    )
    availability_seconds: float | None = Field(
        None,
        gt=0,
        description="virtual seconds that cohort.availability takes for a round, e.g. 3600 for a period of 24 h; "
        "null: its rounds are those of the run",
    )


class DeviceConfig(ConfigSection):
    """Speed of a device."""

    seconds_per_sample: float = Field(
        0.01, ge=0, le=1e6, description="seconds of training per sample; a forward pass takes a third of it"
    )
    down_mbps: float | None = Field(20.0, gt=0, description="download, Mbit per second; null: it takes no time")
    up_mbps: float | None = Field(5.0, gt=0, description="upload, Mbit per second; null: it takes no time")


class ConstantClockConfig(RunningClockConfig, DeviceConfig):
    """The same device for all clients."""


class LognormalClockConfig(ConstantClockConfig):
    """Speeds with a log-normal distribution over clients, of which the three speeds are the medians."""

    sigma: float = Field(
        1.0, ge=0, le=10, description="standard deviation over clients of the logarithm of seconds_per_sample"
    )
    bandwidth_sigma: float = Field(
        0.5, ge=0, le=10, description="the same of a factor of both bandwidths, drawn independently"
    )


class DeviceClassConfig(DeviceConfig):
    """A class of devices."""

    share: float = Field(
        gt=0, le=1e9, description="share of the clients, of any scale: shares are divided by their sum"
    )


class ClassesClockConfig(RunningClockConfig):
    """Classes of devices, such as phones and servers; each client is in one, drawn at random by the shares."""

    classes: list[DeviceClassConfig] = Field(min_length=1, description="the classes, with share and speeds")


class TraceClockConfig(RunningClockConfig):
    """Measured devices, as in FedScale."""

    file: Annotated[str, FILE] = Field(
        description="CSV or parquet file with columns computation (ms of a forward pass per sample; training takes "
        "three times as long) and communication (kbit per second, both ways); client i has row i modulo the number of "
        "rows"
    )


class PluginClockConfig(PluginConfig, RunningClockConfig):
    """A function f(clients, draw) -> seconds per sample, bit/s down, bit/s up, an array each."""


CLOCK_KINDS = Kinds[ClockConfig](
    "clock",
    {
        "none": BuiltinKind("no virtual time", ClockConfig),
        "constant": BuiltinKind("the same device for all clients", ConstantClockConfig, "clock.from_config:constant"),
        "lognormal": BuiltinKind("log-normal speeds", LognormalClockConfig, "clock.from_config:lognormal"),
        "classes": BuiltinKind("classes of devices with shares", ClassesClockConfig, "clock.from_config:classes"),
        "trace": BuiltinKind("measured devices", TraceClockConfig, "clock.from_config:measured"),
    },
    "cfl_ray.clocks",
    PluginClockConfig,
    "clock.from_config:own",
)
