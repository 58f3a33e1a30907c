"""The sections `clock` and `asynchronous`: virtual time, and rounds that do not wait for all clients."""

from typing import Annotated, Any, Literal

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
        "constant": BuiltinKind("the same device for all clients", ConstantClockConfig),
        "lognormal": BuiltinKind("log-normal speeds", LognormalClockConfig),
        "classes": BuiltinKind("classes of devices with shares", ClassesClockConfig),
        "trace": BuiltinKind("measured devices", TraceClockConfig),
    },
    "cfl_ray.clocks",
    PluginClockConfig,
)


class StalenessConfig(ConfigSection):
    """Weight s(tau) of an update whose client received its models tau server steps ago."""

    kind: Any = Field("constant", description="function s(tau) of the staleness tau")


class PolynomialConfig(StalenessConfig):
    """Kind polynomial: s(tau) = (1 + tau)^-a."""

    power: float = Field(0.5, ge=0, le=10, description="a in s(tau) = (1 + tau)^-a (FedBuff: 0.5)")


class HingeConfig(StalenessConfig):
    """Kind hinge: s(tau) = 1 up to tau = b, then 1 / (a (tau - b) + 1)."""

    slope: float = Field(10.0, gt=0, description="a in s(tau) = 1 / (a (tau - b) + 1) for tau > b, else 1")
    limit: float = Field(4.0, ge=0, description="b")


class PluginStalenessConfig(PluginConfig, StalenessConfig):
    """A function f(staleness) -> weights, an array each."""


STALENESS_KINDS = Kinds[StalenessConfig](
    "staleness",
    {
        "constant": BuiltinKind("1", StalenessConfig),
        "polynomial": BuiltinKind("(1 + tau)^-a", PolynomialConfig),
        "hinge": BuiltinKind("1 up to b, then 1 / (a (tau - b) + 1)", HingeConfig),
    },
    "cfl_ray.staleness",
    PluginStalenessConfig,
)


class AsynchronousConfig(ConfigSection):
    """Asynchronous rounds: a round is a step of the server, with the first `buffer` updates that arrive."""

    buffer: int | None = Field(
        None, ge=1, description="B, updates of a server step (FedBuff); 1: FedAsync; null: synchronous rounds"
    )
    concurrency: int | None = Field(
        None, ge=1, description="clients at work at any time; null: as many as a synchronous cohort (`cohort`)"
    )
    staleness: Annotated[StalenessConfig, STALENESS_KINDS] = Field(
        StalenessConfig(), description="weight of an update by its staleness"
    )
    mixing: float = Field(
        1.0, gt=0, le=1, description="alpha, factor of the server's step (FedAsync: the mixing weight)"
    )
    mix: Literal["changes", "models"] = Field(
        "changes",
        description="what moves a model: the mean of its clients' changes (FedBuff), or of their models (FedAsync)",
    )
    max_staleness: int | None = Field(
        None, ge=0, description="server steps after which an update is discarded when it arrives; null: never"
    )
    per_cluster: bool = Field(
        False, description="each cluster has a buffer of its own, and steps when it is full; false: one for all"
    )
