"""Published numbers: the tables of a paper, in the names of the study that repeats them."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from cfl_ray.config.explanation import WholeConfig
from cfl_ray.config.reading import read_yaml
from cfl_ray.config.section import ConfigSection
from cfl_ray.errors import ConfigError, did_you_mean

Unit = Literal["percent", "rounds", "mbit", "clients", "count"]


@dataclass(frozen=True)
class PublishedNumber:
    """A number of a published table."""

    metric: str  # our metric that it is compared with
    unit: Unit
    mean: float | None  # None: the target was not reached
    std: float | None  # None: not printed
    misprint: str  # why it is probably wrong; empty: no reason is known

    @property
    def scale(self) -> float:
        """Factor that converts our metric to this unit: 100 for percent, since ours is a share 0..1; else 1."""
        return 100.0 if self.unit == "percent" else 1.0


class PaperConfig(ConfigSection):
    """The paper that the numbers were published in."""

    title: str = Field(description="title")
    authors: str = Field(description="authors, as in a list of references")
    venue: str = Field(description="where and when it was published")
    url: str = Field(description="where it can be read")

    @property
    def reference(self) -> str:
        """The paper on a single line."""
        return ", ".join([self.authors, self.title, self.venue, self.url])


class PublishedRowConfig(ConfigSection):
    """The numbers of a method."""

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
            if len(numbers) == 2 and numbers[1] < 0:
                raise ValueError(f"{column}: a standard deviation is at least 0, got {numbers[1]:g}")
        return values


class MisprintConfig(ConfigSection):
    """A number that is probably not what the authors measured."""

    row: str = Field(description="label of the method")
    column: str = Field(description="column of the table")
    note: str = Field(min_length=1, description="why it is not to be trusted")


class PublishedTable(ConfigSection):
    """A table of a paper, for a metric."""

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
        for misprint in self.misprints:
            label, column = misprint.row, misprint.column
            if label not in self.rows or column not in self.rows[label].values:
                raise ValueError(f"misprints: row {label!r} has no number in column {column!r}")
        return self

    def number(self, row: str, column: str) -> PublishedNumber | None:
        """The published number of a method (row) in a setting (column); None if it was not published."""
        published = self.rows.get(row)
        if published is None or column not in published.values:
            return None
        value = published.values[column]
        mean, std = value if isinstance(value, list) else (value, None)
        notes = (misprint.note for misprint in self.misprints if (misprint.row, misprint.column) == (row, column))
        return PublishedNumber(published.metric or self.metric, self.unit, mean, std, next(notes, ""))

    def cells(self) -> Iterator[tuple[str, str, PublishedNumber]]:
        """Yields (row, column, number) of all published numbers, row by row."""
        for row in self.rows:
            for column in self.columns:
                if (number := self.number(row, column)) is not None:
                    yield row, column, number


class PublishedTables(WholeConfig):
    """The tables of a paper."""

    paper: PaperConfig = Field(description="the paper")
    tables: dict[str, PublishedTable] = Field(min_length=1, description="by name, e.g. table1")

    def table(self, name: str) -> PublishedTable:
        """The table of this name. Raises ConfigError for an unknown name."""
        if name not in self.tables:
            raise ConfigError(f"no published table is called {name!r}{did_you_mean(name, list(self.tables))}")
        return self.tables[name]


def load_published(file: str | Path) -> PublishedTables:
    """The published tables of a YAML file. Raises ConfigError."""
    try:
        return PublishedTables(**read_yaml(Path(file)))
    except ConfigError as error:
        raise ConfigError(f"{file}: {error}") from None
