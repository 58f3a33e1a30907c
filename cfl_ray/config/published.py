"""Published numbers: the tables of a paper, in the names of the study that repeats them."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field, ValidationError, field_validator, model_validator

from cfl_ray.config.experiment import explain, read_yaml
from cfl_ray.config.section import ConfigSection
from cfl_ray.errors import ConfigError, did_you_mean

Unit = Literal["percent", "rounds", "mbit", "clients", "count"]


@dataclass(frozen=True)
class PublishedNumber:
    """One cell of a published table."""

    metric: str  # what of ours it is to be compared with
    unit: Unit
    mean: float | None  # None: the target was not reached
    std: float | None  # None: not printed
    misprint: str  # why it is not to be trusted; empty: no reason is known

    @property
    def scale(self) -> float:
        """Factor by which our metric, a share 0..1 if this is in percent, is multiplied to compare the two."""
        return 100.0 if self.unit == "percent" else 1.0


class PaperConfig(ConfigSection):
    """The paper that the numbers were published in."""

    title: str = Field(description="title")
    authors: str = Field(description="authors, as in a list of references")
    venue: str = Field(description="where and when it was published")
    url: str = Field(description="where it can be read")

    @property
    def reference(self) -> str:
        """The paper on one line."""
        return ", ".join([self.authors, self.title, self.venue, self.url])


class PublishedRowConfig(ConfigSection):
    """The numbers of one method."""

    metric: str | None = Field(None, description="metric of this row; null: that of the table")
    values: dict[str, float | list[float] | None] = Field(
        min_length=1, description="by column, a number or [mean, standard deviation]; null: the target was not reached"
    )

    @field_validator("values")
    @classmethod
    def _check_pairs(cls, values: dict[str, Any]) -> dict[str, Any]:
        for column, value in values.items():
            if isinstance(value, list) and len(value) != 2:
                raise ValueError(f"{column}: a list is [mean, standard deviation], got {len(value)} numbers")
            numbers = value if isinstance(value, list) else [0.0 if value is None else value]
            if not all(map(math.isfinite, numbers)):
                raise ValueError(f"{column}: numbers are finite, got {value}; null stands for a target not reached")
            if len(numbers) == 2 and numbers[1] < 0:
                raise ValueError(f"{column}: a standard deviation is at least 0, got {numbers[1]:g}")
        return values


class MisprintConfig(ConfigSection):
    """A number that is probably not what the authors measured."""

    row: str = Field(description="label of the method")
    column: str = Field(description="column of the table")
    note: str = Field(min_length=1, description="why it is not to be trusted")


class PublishedTable(ConfigSection):
    """One table of a paper, for one metric."""

    caption: str = Field(description="what the table shows")
    study: str = Field(description="file of the study that repeats it, from the folder above that of this file")
    metric: str = Field("accuracy", description="metric of ours that its rows are compared with")
    unit: Unit = Field("percent", description="unit of its numbers: percent | rounds | mbit | clients | count")
    columns: list[str] = Field(min_length=1, description="settings of the study")
    rows: dict[str, PublishedRowConfig] = Field(min_length=1, description="by label of a method of the study")
    misprints: list[MisprintConfig] = Field([], description="numbers that are not to be trusted")

    @model_validator(mode="after")
    def _check_names(self) -> Self:
        for label, row in self.rows.items():
            for column in row.values:
                if column not in self.columns:
                    raise ValueError(
                        f"rows.{label}: no column is called {column!r}{did_you_mean(column, self.columns)}"
                    )
        for one in self.misprints:
            if one.row not in self.rows or one.column not in self.rows[one.row].values:
                raise ValueError(f"misprints: row {one.row!r} has no number in column {one.column!r}")
        return self

    def number(self, row: str, column: str) -> PublishedNumber | None:
        """Returns what was published for a method in a setting; None for nothing."""
        found = self.rows.get(row)
        if found is None or column not in found.values:
            return None
        value = found.values[column]
        mean, std = value if isinstance(value, list) else (value, None)
        note = next((one.note for one in self.misprints if (one.row, one.column) == (row, column)), "")
        return PublishedNumber(found.metric or self.metric, self.unit, mean, std, note)

    def cells(self) -> Iterator[tuple[str, str, PublishedNumber]]:
        """Returns row, column and number of all that was published, row by row."""
        for row in self.rows:
            for column in self.columns:
                if (number := self.number(row, column)) is not None:
                    yield row, column, number


class PublishedTables(ConfigSection):
    """The tables of one paper."""

    paper: PaperConfig = Field(description="the paper")
    tables: dict[str, PublishedTable] = Field(min_length=1, description="by name, e.g. table1")

    def __init__(self, **values: Any) -> None:
        try:
            super().__init__(**values)
        except ValidationError as error:
            raise ConfigError(explain(error, PublishedTables)) from None

    def table(self, name: str) -> PublishedTable:
        """Returns a table. Raises ConfigError if there is none of this name."""
        if name not in self.tables:
            raise ConfigError(f"no published table is called {name!r}{did_you_mean(name, list(self.tables))}")
        return self.tables[name]


def load_published(file: str | Path) -> PublishedTables:
    """Returns the published tables of a YAML file. Raises ConfigError."""
    try:
        return PublishedTables(**read_yaml(Path(file)))
    except ConfigError as error:
        raise ConfigError(f"{file}: {error}") from None
