"""The section `cohort`, with the availability of clients."""

from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from cfl_ray.config.part import BuiltinKind, Kinds, PluginConfig
from cfl_ray.config.section import FILE, ConfigSection


class AvailabilityConfig(ConfigSection):
    """Which clients can be reached in a round. A number stands for {kind: bernoulli, chance: number}."""

    kind: Any = Field("always", description="which clients can be reached")


class BernoulliConfig(AvailabilityConfig):
    """The same chance for all clients."""

    chance: float = Field(
        0.5, gt=0, le=1, description="chance that a client can be reached in a round; diurnal: its mean over a day"
    )


class DiurnalConfig(BernoulliConfig):
    """A chance that rises and falls over a day."""

    amplitude: float = Field(0.4, ge=0, le=1, description="swing of the chance around its mean")
    period: float = Field(24.0, ge=1e-6, description="length of a day in rounds")
    zones: int | None = Field(
        None,
        ge=1,
        le=10_000,
        description="number of time zones that the clients are spread over; null: every client has its own phase",
    )


class TraceConfig(AvailabilityConfig):
    """Kind trace: a file with the intervals in which each client can be reached."""

    file: Annotated[str, FILE] = Field(
        description="CSV or parquet file with columns client, from, to: a client can be reached in rounds from .. to, "
        "both included; a client without a row never can",
    )
    unit: float = Field(
        1.0,
        gt=0,
        description="length of a round in the time unit of the file, e.g. 60 for seconds and rounds of a minute",
    )


class PluginAvailabilityConfig(PluginConfig, AvailabilityConfig):
    """A function f(clients, round, draw)."""


AVAILABILITY_KINDS = Kinds[AvailabilityConfig](
    "availability",
    {
        "always": BuiltinKind("every client in every round", AvailabilityConfig, "clock.from_config:always_online"),
        "bernoulli": BuiltinKind("the same chance in every round", BernoulliConfig, "clock.from_config:bernoulli"),
        "diurnal": BuiltinKind("day and night", DiurnalConfig, "clock.from_config:diurnal"),
        "trace": BuiltinKind("recorded intervals", TraceConfig, "clock.from_config:recorded"),
    },
    "cfl_ray.availability",
    PluginAvailabilityConfig,
    "clock.from_config:own_availability",
)


class CohortConfig(ConfigSection):
    """The clients that are selected for a round."""

    fraction: float = Field(
        0.5,
        gt=0,
        le=1,
        description="R, share of the clients online that a round selects: m = max(1, floor(R * online))",
    )
    clients: int | None = Field(
        None, ge=1, description="m, clients per round, instead of a fraction; null: the fraction decides"
    )
    sampling: Literal["fixed", "poisson"] = Field(
        "fixed",
        description="fixed: m clients, drawn without replacement; poisson: each client online by itself, with the "
        "chance `fraction`, or `clients` over all clients of the federation, so that the cohort's size varies",
    )
    availability: Annotated[AvailabilityConfig, AVAILABILITY_KINDS] = Field(
        AvailabilityConfig(),
        description="which clients can be reached; a number: each with this chance, drawn independently per round",
    )
    dropout: float = Field(
        0.0, ge=0, lt=1, description="chance that a selected client fails before it reports; 0: never"
    )
    over_selection: float = Field(
        1.0,
        ge=1,
        le=10,
        description="factor of the clients that are selected; a round ends when the first m are done in virtual time",
    )

    @model_validator(mode="after")
    def _sampling_fits(self) -> "CohortConfig":
        if self.sampling == "poisson" and self.availability.kind != "always":
            raise ValueError(
                f"sampling poisson needs availability always, got {self.availability.kind}: the cohort is then no draw "
                "with equal chances"
            )
        return self

    @field_validator("availability", mode="before")
    @classmethod
    def _from_chance(cls, value: Any) -> Any:
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            return {} if value == 1 else {"kind": "bernoulli", "chance": value}
        return value
