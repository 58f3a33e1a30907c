"""The sections `stopping` and `keep`: the early end of a method, and the round whose models it keeps."""

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from cfl_ray.config.section import ConfigSection

Goal = Annotated[
    Literal["maximize", "minimize"] | None,
    Field(
        description="whether more of the metric is better; null: as it is known of the metric (less of losses and "
        "errors, more of scores)"
    ),
]


class StoppingConfig(ConfigSection):
    """The end of a method whose evaluations no longer improve."""

    metric: str | None = Field(
        None,
        description="metric of an evaluation, such as validation/accuracy (docs/metrics.md); null: the first of the "
        "validation data",
    )
    patience: int = Field(
        10,
        ge=1,
        description="a method ends after so many evaluations in a row in which the metric is not better, by more than "
        "min_delta, than its value at the last improvement",
    )
    min_delta: float = Field(0.0, ge=0, description="difference that an improvement exceeds, in units of the metric")
    goal: Goal = None


class KeepConfig(ConfigSection):
    """The round whose models a method keeps, for predictions, tables and the report; `keep: best` sets `which`."""

    which: Literal["last", "best"] = Field(
        "last", description="last: the last round | best: the evaluated round with the best value of the metric"
    )
    metric: str | None = Field(
        None,
        description="metric of an evaluation; null: that of `stopping`, else the first of the validation data, else "
        "the first of the test data, with a warning",
    )
    goal: Goal = None

    @model_validator(mode="before")
    @classmethod
    def _from_word(cls, values: Any) -> Any:
        return {"which": values} if isinstance(values, str) else values
