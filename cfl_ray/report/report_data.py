"""The records of runs from which the page is made."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from cfl_ray.report.snapshots import RecordedMatrix
from cfl_ray.tracking.record import RoundRecord

Moves = Sequence[tuple[int, Sequence[Sequence[int]]]]  # (round, (client, cluster) of each move); -1: in none any more


@dataclass(frozen=True)
class MethodRun:
    """One method under one seed."""

    seed: int
    records: Sequence[RoundRecord]
    moves: Moves = ()
    scores: Mapping[str, np.ndarray] = field(default_factory=dict)  # of the last evaluation, by metric; one per client
    matrices: Mapping[str, RecordedMatrix] = field(default_factory=dict)  # the last one of each name

    @property
    def is_clustered(self) -> bool:
        """Whether it has put a client into a cluster."""
        return any(cluster >= 0 for _, moved in self.moves for _, cluster in moved)


@dataclass(frozen=True)
class ReportedExperiment:
    """Runs that differ in their seed alone, with all their methods."""

    name: str
    run_info: Mapping[str, str]  # settings in words
    command: str  # that runs it again, with the file below
    config: str  # YAML, without credentials
    methods: Mapping[str, Sequence[MethodRun]]  # by label, each in the order of seeds
    group_of: Mapping[int, int] = field(default_factory=dict)  # true group of each client, where it is known
    score: str = "accuracy"  # first metric of the task
    higher_is_better: bool = True

    @cached_property
    def seeds(self) -> list[int]:
        """Seeds of all its runs."""
        return sorted({run.seed for runs in self.methods.values() for run in runs})

    @cached_property
    def num_groups(self) -> int:
        """Number of true groups that clients are known to belong to."""
        return len(set(self.group_of.values()))


@dataclass(frozen=True)
class Comparison:
    """One number of ours beside the one that was published."""

    table: str  # name in the file of published tables
    caption: str
    row: str  # method
    column: str  # setting
    metric: str
    unit: str
    ours: float
    ours_std: float  # of a sample; NaN of one seed
    seeds: int
    published: float
    published_std: float  # NaN: not given
    misprint: str = ""  # why the published number cannot be right; empty: it may be


@dataclass(frozen=True)
class Report:
    """Everything that a page shows."""

    title: str
    experiments: Sequence[ReportedExperiment]
    columns: Sequence[str]  # metrics of the table
    rows: Sequence[Mapping[str, object]]  # experiment, method, runs; METRIC and METRIC_std (NaN: none); p
    comparisons: Sequence[Comparison] = ()
    paper: str = ""  # title and authors of the published tables
    notes: Sequence[str] = ()
