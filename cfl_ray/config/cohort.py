"""The section `cohort`, with the availability of clients."""

from typing import Any, Self

from pydantic import Field, field_validator, model_validator

from cfl_ray.config.part import BuiltinKind, PartConfig, meanings_of
from cfl_ray.config.section import ConfigSection, without_effect


class AvailabilityConfig(PartConfig):
    """Which clients can be reached in a round. A number stands for {kind: bernoulli, chance: number}."""

    part = "availability"
    where = "cohort.availability"
    group = "cfl_ray.availability"
    builtin = {
        "always": BuiltinKind("every client in every round"),
        "bernoulli": BuiltinKind("the same chance in every round", ("chance",)),
        "diurnal": BuiltinKind("day and night", ("chance", "amplitude", "period", "zones")),
        "trace": BuiltinKind("recorded intervals", ("file", "unit")),
    }

    kind: Any = Field("always", description=meanings_of(builtin))
    chance: float = Field(
        0.5,
        gt=0,
        le=1,
        description="chance that a client can be reached in a round (bernoulli); mean of that chance over a day "
        "(diurnal)",
    )
    amplitude: float = Field(0.4, ge=0, le=1, description="swing of the chance around its mean (diurnal)")
    period: float = Field(24.0, gt=0, description="length of a day in rounds (diurnal)")
    zones: int | None = Field(
        None,
        ge=1,
        description="number of time zones that the clients are spread over; null: every client has its own phase "
        "(diurnal)",
    )
    file: str | None = Field(
        None,
        description="CSV or parquet file with columns client, from, to: a client can be reached in rounds from .. to, "
        "both included; a client without a row never can (trace)",
    )
    unit: float = Field(
        1.0,
        gt=0,
        description="length of a round in the time unit of the file, e.g. 60 for seconds and rounds of a minute "
        "(trace)",
    )

    @model_validator(mode="after")
    def _check_trace(self) -> Self:
        if (self.kind == "trace") != (self.file is not None):
            raise ValueError(f"kind trace and a file belong together, got kind {self.kind} and file {self.file}")
        return self


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
    availability: AvailabilityConfig = Field(
        AvailabilityConfig(),
        description="which clients can be reached; a number: each with this chance, drawn independently per round",
    )
    dropout: float = Field(
        0.0, ge=0, lt=1, description="chance that a selected client fails before it reports; 0: never"
    )

    @property
    def warnings(self) -> list[str]:
        """Warnings of keys that others replace, or that the kind of availability does not use."""
        reason = f"cohort.clients is {self.clients}"
        replaced = [] if self.clients is None else without_effect(self, "cohort", ["fraction"], reason)
        return replaced + self.availability.warnings

    @field_validator("availability", mode="before")
    @classmethod
    def _from_chance(cls, value: Any) -> Any:
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            return {} if value == 1 else {"kind": "bernoulli", "chance": value}
        return value
