"""The data from which the page is made.

Clusters and groups are arrays with a few bytes per client, so that reports of runs with a million clients are possible.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from cfl_ray.core.reassigned import Reassigned
from cfl_ray.core.reported import OTHER_CLUSTERS
from cfl_ray.report.ranks import Ranks
from cfl_ray.tracking.record import RoundRecord

Reassignment = tuple[int, Reassigned]  # a round, and the clients whose cluster changed in it


@dataclass(frozen=True)
class RecordedMatrix:
    """A matrix that a method reported in a round, with a row for each client of a sample."""

    round: int
    client_S: np.ndarray
    values: np.ndarray  # (S, S) for pairs of clients; (S, F) for signatures
    of_pairs: bool  # whether the values are similarities or distances of pairs of clients
    # each client's number of training samples of each class; NaN: not recorded for the client; None: not recorded
    label_counts_SC: np.ndarray | None = None


def mean_and_std(values: Sequence[float] | np.ndarray) -> tuple[float, float]:
    """The mean and the sample standard deviation of values, such as those of seeds; the latter NaN for a single one."""
    with np.errstate(invalid="ignore"):  # infinite values have no spread
        return float(np.mean(values)), float(np.std(values, ddof=1)) if len(values) > 1 else np.nan


ALL_CLIENTS = "all clients"


@dataclass(frozen=True)
class RecordedConfusion:
    """Numbers of test samples by cluster, true class and predicted class, in the evaluation of a round."""

    round: int
    names: Sequence[str]  # of the C classes
    clusters: Sequence[int]  # -1: clients in no cluster; OTHER_CLUSTERS: those of the clusters that are not listed
    counts_KCC: np.ndarray  # int64

    @property
    def parts(self) -> dict[str, np.ndarray]:
        """The counts (C, C) of all clients and, if there are several clusters, of the clients of each, by its name."""
        whole = {ALL_CLIENTS: self.counts_KCC.sum(0)}
        if len(self.clusters) < 2:
            return whole
        return whole | dict(zip(map(_cluster_name, self.clusters), self.counts_KCC, strict=True))


def _cluster_name(cluster: int) -> str:
    return {-1: "no cluster", OTHER_CLUSTERS: "other clusters"}.get(cluster, f"cluster {cluster}")


def accuracy_of_classes(counts_CC: np.ndarray) -> np.ndarray:
    """The share of each true class that is predicted, float64 (C,), from counts by true and predicted class.

    NaN for a class without samples.
    """
    total_C = counts_CC.sum(1)
    return np.divide(np.diag(counts_CC), total_C, out=np.full(len(total_C), np.nan), where=total_C > 0)


@dataclass(frozen=True, eq=False)
class PerClient:
    """A number for each of M clients, such as a cluster or a true group."""

    client_M: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))  # ids, ascending
    value_M: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int32))  # below 0: none

    def __len__(self) -> int:
        return len(self.client_M)

    def __getitem__(self, client_S: np.ndarray | Sequence[int]) -> np.ndarray:
        """The numbers of these clients (S,); -1 for other clients."""
        client_S = np.asarray(client_S, np.int64)
        if not len(self):
            return np.full(len(client_S), -1, np.int32)
        at_S = np.minimum(np.searchsorted(self.client_M, client_S), len(self) - 1)
        return np.where(self.client_M[at_S] == client_S, self.value_M[at_S], -1)

    def updated(self, other: "PerClient") -> "PerClient":
        """The numbers of both; `other` takes precedence."""
        client_M, first_M = np.unique(np.concatenate([other.client_M, self.client_M]), return_index=True)
        return PerClient(client_M, np.concatenate([other.value_M, self.value_M])[first_M])

    @property
    def sizes(self) -> np.ndarray:
        """Number of clients for each distinct number that is not negative."""
        return np.unique(self.value_M[self.value_M >= 0], return_counts=True)[1]


class ClusterHistory:
    """The cluster of each client over the rounds.

    reassignments: by ascending round.
    """

    def __init__(self, reassignments: Sequence[Reassignment]):
        self.reassignments = reassignments

    @cached_property
    def client_M(self) -> np.ndarray:
        """Ids of the clients that were ever in a cluster, int32, ascending."""
        client_M = np.zeros(0, np.int32)
        for _, reassigned in self.reassignments:
            if not np.isin(reassigned.client_R, client_M, assume_unique=True).all():
                client_M = np.union1d(client_M, reassigned.client_R)
        return client_M

    @cached_property
    def cluster_K(self) -> np.ndarray:
        """Numbers of the clusters that ever had a member, int32, ascending."""
        cluster_K = np.zeros(0, np.int32)
        for _, reassigned in self.reassignments:
            cluster_K = np.union1d(cluster_K, reassigned.cluster_R)
        return cluster_K[cluster_K >= 0]

    def rows(self, rounds: Sequence[int]) -> Iterator[np.ndarray]:
        """Yields, for each of the ascending `rounds`, each client's place in `cluster_K` after it, int32 (M,).

        -1: the client is in no cluster. The same array is yielded each time.
        """
        row_M, applied = np.full(len(self.client_M), -1, np.int32), 0
        for round in rounds:
            while applied < len(self.reassignments) and self.reassignments[applied][0] <= round:
                self._reassign(row_M, self.reassignments[applied][1])
                applied += 1
            yield row_M

    def sizes(self, rounds: Sequence[int]) -> Iterator[np.ndarray]:
        """Yields, for each of the ascending `rounds`, the number of members of each cluster after it, int64 (K,)."""
        for row_M in self.rows(rounds):
            yield np.bincount(row_M + 1, minlength=len(self.cluster_K) + 1)[1:]

    def clusters_at(self, round: int) -> PerClient:
        """The cluster of each client after a round."""
        row_M = next(self.rows([round]))
        return PerClient(self.client_M, np.append(self.cluster_K, np.int32(-1))[row_M])

    def changes(self) -> Iterator[tuple[int, np.ndarray, np.ndarray, np.ndarray]]:
        """Yields, for each round in which clients move between clusters, the round, these clients, and their clusters
        before and after it. A first assignment, or an assignment after an absence, is not a move.
        """
        row_M = np.full(len(self.client_M), -1, np.int32)
        for round, reassigned in self.reassignments:
            at_R, before_R = self._reassign(row_M, reassigned)
            goes_R = (before_R >= 0) & (row_M[at_R] >= 0) & (before_R != row_M[at_R])
            if goes_R.any():
                at_R, before_R = at_R[goes_R], before_R[goes_R]
                yield round, self.client_M[at_R], self.cluster_K[before_R], self.cluster_K[row_M[at_R]]

    @property
    def rounds_with_changes(self) -> list[int]:
        """The rounds of `changes`, and each round after the first in which clients are assigned to clusters while no
        client is in a cluster.
        """
        row_M, members, rounds = np.full(len(self.client_M), -1, np.int32), 0, {round for round, *_ in self.changes()}
        for round, reassigned in self.reassignments:
            at_R, before_R = self._reassign(row_M, reassigned)
            joined, left = int((row_M[at_R] >= 0).sum()), int((before_R >= 0).sum())
            if not members and joined and round > 1:
                rounds.add(round)
            members += joined - left
        return sorted(rounds)

    def _reassign(self, row_M: np.ndarray, reassigned: Reassigned) -> tuple[np.ndarray, np.ndarray]:
        """Applies the reassignments of a round; returns the places of these clients, and their previous rows."""
        at_R = np.searchsorted(self.client_M, reassigned.client_R)
        before_R = row_M[at_R]
        row_R = np.searchsorted(self.cluster_K, reassigned.cluster_R)
        row_R[reassigned.cluster_R < 0] = -1
        row_M[at_R] = row_R
        return at_R, before_R


def evenly(items: Sequence[int] | np.ndarray, most: int) -> list[int]:
    """At most `most` of the items, evenly spaced, the first and the last included."""
    if len(items) <= most:
        return [int(item) for item in items]
    return [int(items[place]) for place in np.unique(np.linspace(0, len(items) - 1, most).round().astype(int))]


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
    confusion: RecordedConfusion | None = None  # in the round whose metrics are final; None: not recorded

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
    has_best: bool = False  # whether a method keeps the models of its best round, of which its row is
    ranks: Ranks | None = None  # None: fewer than three methods, or fewer than two pairs (setting, seed)
