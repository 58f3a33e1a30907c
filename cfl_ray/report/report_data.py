"""The data from which the page is made."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from cfl_ray.report.ranks import Ranks
from cfl_ray.report.snapshots import ClusterHistory, PerClient, Reassignment, RecordedMatrix
from cfl_ray.tracking.record import RoundRecord


@dataclass(frozen=True)
class MethodRun:
    """A run of a method with a seed."""

    seed: int
    records: Sequence[RoundRecord]
    reassignments: Sequence[Reassignment] = ()  # by ascending round
    scores: Mapping[str, np.ndarray] = field(default_factory=dict)  # each client's last evaluation, by metric
    matrices: Mapping[str, RecordedMatrix] = field(default_factory=dict)  # the last matrix of each name
    # mixture weights by recorded round: the round, ids of clients (S,), and their weights (S, K)
    mixtures: Sequence[tuple[int, np.ndarray, np.ndarray]] = ()
    # mean score, by evaluated round, of the clients whose data change in the run; empty: no data change
    changed_scores: Mapping[int, float] = field(default_factory=dict)
    # rounds_to_recover and backward_transfer, if they apply
    recovery: Mapping[str, float] = field(default_factory=dict)

    @property
    def is_clustered(self) -> bool:
        """Whether the method has assigned a client to a cluster."""
        return len(self.history.cluster_K) > 0

    @cached_property
    def history(self) -> ClusterHistory:
        """The clusters of the clients over the rounds."""
        return ClusterHistory(self.reassignments)


@dataclass(frozen=True)
class ReportedExperiment:
    """Runs of an experiment, which differ only in their seeds, with all methods."""

    name: str
    run_info: Mapping[str, str]  # settings as text
    command: str  # the command that runs the experiment again, with `config` as its file
    config: str  # YAML, without credentials
    methods: Mapping[str, Sequence[MethodRun]]  # by label, each in the order of seeds
    groups: PerClient = field(default_factory=PerClient)  # true group of each client whose group is known
    score: str = "accuracy"  # first metric of the task
    higher_is_better: bool = True
    groups_change: bool = False  # whether the schedule changes true groups; `groups` are those of the last round
    # number of clients whose data change, by the round before which they do
    changes: Mapping[int, int] = field(default_factory=dict)

    def first_runs(self, has: Callable[[MethodRun], object]) -> Iterator[tuple[str, MethodRun, str]]:
        """Yields the label of each method, its first run that has something, and the seed if the method has several."""
        for label, runs in self.methods.items():
            for run in filter(has, runs):
                yield label, run, f"seed {run.seed}" if len(runs) > 1 else ""
                break

    @property
    def when_grouped(self) -> str:
        """A sentence for captions of earlier rounds, if true groups change; else empty."""
        return " True groups are those of the last round." if self.groups_change else ""

    @cached_property
    def seeds(self) -> list[int]:
        """The seeds of all runs, ascending."""
        return sorted({run.seed for runs in self.methods.values() for run in runs})

    @cached_property
    def num_groups(self) -> int:
        """Number of true groups among the clients whose group is known."""
        return len(self.groups.sizes)


@dataclass(frozen=True)
class Comparison:
    """Our number and the corresponding published number."""

    table: str  # name in the file of published tables
    row: str  # method
    column: str  # setting
    metric: str
    unit: str
    ours: float
    ours_std: float  # sample standard deviation over the seeds; NaN for a single seed
    seeds: int
    published: float
    published_std: float  # NaN: not given
    misprint: str = ""  # why the published number cannot be right; empty: no known misprint


@dataclass(frozen=True)
class Report:
    """All data of a page."""

    title: str
    experiments: Sequence[ReportedExperiment]
    columns: Sequence[str]  # metrics of the table
    rows: Sequence[Mapping[str, Any]]  # keys: experiment, method, runs, METRIC and METRIC_std (NaN: none), p, effect
    comparisons: Sequence[Comparison] = ()
    paper: str = ""  # title and authors of the published tables
    notes: Sequence[str] = ()
    ranks: Ranks | None = None  # None: fewer than three methods, or fewer than two pairs (setting, seed)
