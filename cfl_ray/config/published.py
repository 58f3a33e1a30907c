"""Tables of published results, as YAML: the numbers of a paper that runs are compared with."""

import math
from pathlib import Path
from typing import Self

from pydantic import Field, ValidationError, model_validator

from cfl_ray.config.experiment import explain, read_yaml
from cfl_ray.config.sections import ConfigSection
from cfl_ray.core.errors import ConfigError

PublishedValue = float | tuple[float, float]  # mean, or mean and standard deviation


class PaperConfig(ConfigSection):
    """The paper that tables are from."""

    title: str = Field(description="title")
    authors: str = Field("", description="authors")
    url: str = Field("", description="address; not shown as a link")


class MisprintConfig(ConfigSection):
    """A number that cannot be right as it is printed."""

    row: str = Field(description="its row")
    column: str = Field(description="its column")
    note: str = Field(description="why it cannot be right")


class PublishedRowConfig(ConfigSection):
    """The numbers of one method."""

    metric: str | None = Field(None, description="metric of this row; null: that of the table")
    values: dict[str, PublishedValue] = Field(min_length=1, description="by column: a mean, or [mean, deviation]")


class PublishedTableConfig(ConfigSection):
    """One table of a paper."""

    caption: str = Field("", description="caption in the paper")
    metric: str = Field("accuracy", description="metric of the rows (docs/metrics.md)")
    unit: str = Field("", description="percent: the numbers are a hundred times the metric")
    columns: list[str] = Field(min_length=1, description="settings, by the names that a study gives them")
    rows: dict[str, PublishedRowConfig] = Field(min_length=1, description="by label of the method")
    misprints: list[MisprintConfig] = Field([], description="numbers that cannot be right as printed")

    @model_validator(mode="after")
    def _check_columns(self) -> Self:
        for label, row in self.rows.items():
            for column in row.values:
                if column not in self.columns:
                    raise ValueError(f"row {label} has the column {column!r}, the table has {', '.join(self.columns)}")
        for one in self.misprints:
            if one.row not in self.rows or one.column not in self.rows[one.row].values:
                raise ValueError(f"misprint of row {one.row!r}, column {one.column!r}: there is no such number")
        return self

    def value(self, row: str, column: str) -> tuple[float, float] | None:
        """Mean and standard deviation (NaN: not given); None where the table has no such number."""
        found = self.rows[row].values.get(column) if row in self.rows else None
        if found is None:
            return None
        return found if isinstance(found, tuple) else (found, math.nan)

    def metric_of(self, row: str) -> str:
        """The metric of a row."""
        return self.rows[row].metric or self.metric

    def misprint(self, row: str, column: str) -> str:
        """Why a number cannot be right; empty where it may be."""
        return next((one.note for one in self.misprints if (one.row, one.column) == (row, column)), "")


class PublishedTables(ConfigSection):
    """All tables of a file."""

    paper: PaperConfig = Field(description="the paper")
    tables: dict[str, PublishedTableConfig] = Field(min_length=1, description="by name")


def load_published(path: str | Path) -> PublishedTables:
    """The tables of a file. Raises ConfigError for a file that is none of published tables."""
    try:
        return PublishedTables(**read_yaml(Path(path)))
    except ValidationError as error:
        raise ConfigError(f"{path}: {explain(error, PublishedTables)}") from None
