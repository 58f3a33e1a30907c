"""The section `asynchronous`: rounds that do not wait for all clients."""

from typing import Annotated, Any, Literal

from pydantic import Field

from cfl_ray.config.part import BuiltinKind, Kinds, PluginConfig
from cfl_ray.config.section import ConfigSection


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
        "constant": BuiltinKind("1", StalenessConfig, "clock.from_config:constant_weights"),
        "polynomial": BuiltinKind("(1 + tau)^-a", PolynomialConfig, "clock.from_config:polynomial_weights"),
        "hinge": BuiltinKind("1 up to b, then 1 / (a (tau - b) + 1)", HingeConfig, "clock.from_config:hinge_weights"),
    },
    "cfl_ray.staleness",
    PluginStalenessConfig,
    "clock.from_config:own_weights",
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
