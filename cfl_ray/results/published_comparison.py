"""Our numbers beside the published ones."""

import math
from collections.abc import Mapping, Sequence

import numpy as np

from cfl_ray.config.study import load_study
from cfl_ray.errors import ConfigError, did_you_mean
from cfl_ray.report.report_data import Comparison, mean_and_std
from cfl_ray.results.comparison import experiments_of, values_of
from cfl_ray.results.published import PublishedNumber, PublishedTables
from cfl_ray.results.recorded_runs import FoundRun
from cfl_ray.results.results import MethodResult
from cfl_ray.run_directory import RunDirectory
from cfl_ray.tracking import METRICS as RECORDED_METRICS


def compare_with(runs: Sequence[FoundRun], published: PublishedTables, column: str | None = None) -> list[Comparison]:
    """Our numbers and the published numbers of each method that has a row in the tables.

    A run of a study belongs to the column of its setting in the tables that the study repeats, any other run to
    `column`, or to the only column. Raises ConfigError if the column is not known, if none of our runs is in the
    tables, if two experiments belong to one column, and for a metric that is neither in docs/metrics.md nor in a run.
    """
    if unknown := unknown_metric(runs, published):
        raise ConfigError(unknown)
    if column is not None and column not in (columns := _columns_of(published)):
        raise ConfigError(f"the published tables have no column {column!r}{did_you_mean(column, columns)}")
    tables = [name for name in _tables_of(runs) if name in published.tables] or list(published.tables)
    results_of = _results_by_cell(runs, published, tables, column)
    compared = [
        _compared(name, row, column, number, results_of[column, row])
        for name in tables
        for row, column, number in published.tables[name].cells()
        if (column, row) in results_of and number.mean is not None
    ]
    compared.sort(key=lambda comparison: (comparison.table, comparison.column))  # a stable sort: rows keep their order
    comparisons = [comparison for comparison in compared if not math.isnan(comparison.ours)]
    if compared and not comparisons:
        metrics = ", ".join(sorted({comparison.metric for comparison in compared}))
        raise ConfigError(f"no run has a number for the published tables: {metrics} is not known with every seed")
    if not comparisons:
        rows = dict.fromkeys(row for table in published.tables.values() for row in table.rows)
        ours = "; ".join(f"{label}, {column}" for column, label in results_of)
        raise ConfigError(
            f"no run is in the published tables: they have the methods {', '.join(rows)} and the columns "
            f"{', '.join(_columns_of(published))}; the runs have {ours}"
        )
    return comparisons


def _results_by_cell(
    runs: Sequence[FoundRun], published: PublishedTables, tables: Sequence[str], column: str | None
) -> dict[tuple[str, str], dict[int, MethodResult]]:
    """The results by (column, label of the method), then seed. Raises ConfigError for two experiments in one cell."""
    results_of: dict[tuple[str, str], dict[int, MethodResult]] = {}
    experiment_of: dict[tuple[str, str], str] = {}
    cells = {(column, row) for name in tables for row, column, _ in published.tables[name].cells()}
    for name, of_experiment in experiments_of(runs):
        for run in of_experiment:
            for label, result in run.methods.items():
                key = (run.setting or column or _only_column(published), label)
                if (other := experiment_of.setdefault(key, name)) != name and key in cells:
                    raise ConfigError(
                        f"column {key[0]!r} stands for one experiment, but two have method {label}: {other} and "
                        f"{name}; compare them one at a time"
                    )
                results_of.setdefault(key, {})[run.experiment.seed] = result
    return results_of


def unknown_metric(runs: Sequence[FoundRun], published: PublishedTables) -> str:
    """A message if a metric of the tables is neither in docs/metrics.md nor in a run; otherwise empty."""
    present = {name for run in runs for result in run.methods.values() for name in values_of(result)}
    for name in _tables_of(runs) or published.tables:
        for row, _, number in published.tables[name].cells() if name in published.tables else ():
            if number.metric not in RECORDED_METRICS and number.metric not in present:
                near = did_you_mean(number.metric, present)
                return f"tables.{name}, row {row}: no run has the metric {number.metric!r}{near}"
    return ""


def _tables_of(runs: Sequence[FoundRun]) -> list[str]:
    """The published tables that the studies of these runs repeat."""
    studies = dict.fromkeys(run.study for run in runs if run.study is not None)
    return [name for study in studies for name in load_study(RunDirectory(study).study).tables]


def _columns_of(published: PublishedTables) -> list[str]:
    return list(dict.fromkeys(column for table in published.tables.values() for column in table.columns))


def _only_column(published: PublishedTables) -> str:
    columns = _columns_of(published)
    if len(columns) > 1:
        raise ConfigError(f"the published tables have several columns; name one with --column: {', '.join(columns)}")
    return columns[0]


def _compared(
    table: str, row: str, column: str, number: PublishedNumber, of_seeds: Mapping[int, MethodResult]
) -> Comparison:
    ours = number.scale * np.array([values_of(result).get(number.metric, math.nan) for result in of_seeds.values()])
    mean, std = mean_and_std(ours)
    return Comparison(
        table=table,
        row=row,
        column=column,
        metric=number.metric,
        unit=number.unit,
        ours=mean,
        ours_std=std,
        seeds=len(ours),
        published=math.nan if number.mean is None else number.mean,
        published_std=math.nan if number.std is None else number.std,
        misprint=number.misprint,
    )
