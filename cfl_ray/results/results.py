"""The results of a run, and the files that hold them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import numpy as np
import pyarrow as pa
from pydantic import Field, TypeAdapter, ValidationError
from torch import Tensor, nn

from cfl_ray.core.diagnostics import Diagnostic, ReportedDiagnostic
from cfl_ray.core.events import ClusterEvent
from cfl_ray.data.federation import Federation
from cfl_ray.errors import ConfigError, DataError
from cfl_ray.report.assignments import Assignment, write_assignments
from cfl_ray.results.trained import TrainedMethod
from cfl_ray.run_directory import RunDirectory
from cfl_ray.runtime.arrow_log import ArrowLog, check_columns, whole_batches
from cfl_ray.runtime.diagnostics_log import by_name, read_diagnostics
from cfl_ray.runtime.round_report import RoundReport
from cfl_ray.system.files import append_line, cut_torn_line, open_private, read_file
from cfl_ray.tracking import RoundRecord
from cfl_ray.tracking.record import is_evaluated

if TYPE_CHECKING:  # pandas is imported by those who ask for a frame
    import pandas as pd


@dataclass(frozen=True)
class MethodResult:
    """The records of one method, its metrics at the end, and what it has learned."""

    label: str
    records: list[RoundRecord]
    summary: dict[str, float]  # those of RUN_METRICS that apply
    directory: Path | None = None  # of its files; None: nothing was kept
    # opens what the method has learned; None: it has not begun
    open_trained: Callable[[], TrainedMethod] | None = field(default=None, repr=False, compare=False)
    reported: Sequence[ReportedDiagnostic] = field(default=(), repr=False, compare=False)  # where nothing was kept

    @property
    def events(self) -> list[ClusterEvent]:
        """Splits, merges, births and deaths of clusters with the figures that decided them; changes of the phase."""
        return [event for record in self.records for event in record.events]

    @property
    def seconds(self) -> float:
        """Wall time of all rounds."""
        return sum(record.metrics.get("round_seconds", 0.0) for record in self.records)

    @property
    def final(self) -> dict[str, float]:
        """Metrics of the last evaluated round; empty before the first one."""
        return dict(next((one.metrics for one in reversed(self.records) if is_evaluated(one.metrics)), {}))

    def to_frame(self) -> pd.DataFrame:
        """One row per round: `round`, then a column for each metric (docs/metrics.md); NaN where it does not apply."""
        import pandas as pd

        rows = [{"round": record.round, **record.metrics} for record in self.records]
        return pd.DataFrame(rows, columns=None if rows else ["round"])

    def client_metrics(self) -> pd.DataFrame:
        """P-server of every client in every evaluated round: round, client, the task's metrics, loss.

        For classification the metrics are accuracy and macro_f1, and those of `evaluation.metrics`.

        Raises ConfigError where no files were kept.
        """
        if self.directory is None:
            raise ConfigError(f"client metrics of {self.label} are in files; give the run a directory (run_dir)")
        return read_client_metrics(RunDirectory(self.directory).client_metrics).to_pandas()

    @property
    def diagnostics(self) -> dict[str, dict[int, Diagnostic]]:
        """Values that the method reported beside its metrics (docs/metrics.md): {name: {round: diagnostic}}.

        An array is there for each evaluated round in which it differs from the one before, by the round in which the
        method reported it.
        """
        reported = (
            self.reported if self.directory is None else read_diagnostics(RunDirectory(self.directory).diagnostics)
        )
        return by_name(reported, self.records)

    def diagnostics_frame(self) -> pd.DataFrame:
        """One row per round: `round`, then a column for each diagnostic that is a number; NaN where it has none."""
        return self.to_frame().reindex(columns=["round", *self.last_numbers])

    @property
    def last_numbers(self) -> dict[str, float]:
        """The last value of each diagnostic that is a number."""
        last = {name: found[max(found)] for name, found in self.diagnostics.items()}
        return {name: float(one.value) for name, one in last.items() if not one.axes}

    # ---- what it has learned

    @cached_property
    def trained(self) -> TrainedMethod:
        """The method after its last round or, of a run that is live or was stopped, after the last one saved."""
        if self.open_trained is None:
            raise ConfigError(f"{self.label} has not begun, so it has no models yet")
        return self.open_trained()

    def model(self, cluster: int | None = None) -> nn.Module:
        """A cluster's model, in evaluation mode; see `TrainedMethod.model`."""
        return self.trained.model(cluster)

    def state_dict(self, cluster: int | None = None) -> dict[str, Tensor]:
        """Parameters and buffers of a cluster's model; see `TrainedMethod.state_dict`."""
        return self.trained.state_dict(cluster)

    def personal_model(self, client: int) -> nn.Module:
        """The model that a client would predict with now; see `TrainedMethod.personal_model`."""
        return self.trained.personal_model(client)

    def predict(self, client: int, x: Tensor | np.ndarray) -> np.ndarray:
        """Predictions of a client's model for normalised inputs; see `TrainedMethod.predict`."""
        return self.trained.predict(client, x)

    def assignments(self) -> pd.DataFrame:
        """One row per client: client, name, cluster, true group; see `TrainedMethod.assignments`."""
        return self.trained.assignments()


@dataclass(frozen=True)
class Results:
    """All methods of an experiment, by label in the order of the config."""

    methods: dict[str, MethodResult]
    run_dir: Path | None  # None: nothing was kept
    tracking: str | None = None  # MLflow, without credentials; None: not tracked
    facts: dict[str, str] | None = None  # hosts, device and engine

    def __getitem__(self, label: str) -> MethodResult:
        return self.method(label)

    def method(self, label: str) -> MethodResult:
        """The results of one method. Raises ConfigError, with the labels there are, for another name."""
        if label not in self.methods:
            raise ConfigError(f"no method {label!r} in this run; it has {', '.join(self.methods)}")
        return self.methods[label]

    def to_frame(self) -> pd.DataFrame:
        """One row per method and round: `method`, `round`, then a column for each metric (docs/metrics.md)."""
        import pandas as pd

        frames = [result.to_frame().assign(method=label) for label, result in self.methods.items() if result.records]
        if not frames:
            return pd.DataFrame(columns=["method", "round"])
        frame = pd.concat(frames, ignore_index=True)
        first = ["method", "round"]
        return frame[first + [name for name in frame.columns if name not in first]]

    @property
    def frame(self) -> pd.DataFrame:
        """`to_frame()`."""
        return self.to_frame()


_SCORES = ("accuracy", "macro_f1", "loss")  # of classes


def _schema(scores: Sequence[str]) -> pa.Schema:
    """The columns of a client's scores."""
    return pa.schema([("round", pa.int32()), ("client", pa.int64()), *((name, pa.float32()) for name in scores)])


class ClientMetrics:
    """P-server of every client and evaluated round, in an Arrow stream that grows by a batch per evaluation.

    A batch that a crash has torn is cut off; rounds that are replayed are ignored.
    """

    def __init__(self, directory: Path | None, scores: Sequence[str] = _SCORES):
        self.schema = _schema(scores)
        self.log = ArrowLog(RunDirectory(directory).client_metrics, self.schema) if directory else None
        batches = self.log.open() if self.log else []
        self.last = max(
            (batch["round"][0].as_py() or 0 for batch in batches if batch.num_rows), default=0
        )  # in the file

    def add(self, report: RoundReport) -> None:
        """Keeps the scores of a round; they are in the file when this returns."""
        if self.log is None or report.scores_MV is None or report.round <= self.last:
            return
        client, *scores = report.scores_MV.T
        columns = [np.full(len(client), report.round, np.int32), client.astype(np.int64)]
        columns += [values.astype(np.float32) for values in scores]
        self.log.append(pa.record_batch([pa.array(column) for column in columns], schema=self.schema))
        self.last = report.round


def read_client_metrics(path: Path) -> pa.Table:
    """The whole batches of the file; an empty table where there is none. Raises DataError for a damaged one."""
    batches, _, schema = whole_batches(path) if path.exists() else ([], 0, None)
    schema = schema or _schema(_SCORES)
    if schema != _schema(schema.names[2:]):
        check_columns(path, schema, _schema(_SCORES))
    return pa.Table.from_batches(batches, schema)


@dataclass(frozen=True)
class _Moves:
    """A line of the file."""

    round: int
    moved: list[Annotated[list[int], Field(min_length=2, max_length=2)]]  # client, cluster


_MOVES = TypeAdapter(_Moves)


class ClusterMoves:
    """The changes of clients' clusters: one JSON line per round that has any; replayed rounds are ignored."""

    def __init__(self, directory: Path | None):
        self.file = RunDirectory(directory).reassignments if directory else None
        # (round, [client, cluster] of each move)
        self.rows: list[tuple[int, list[list[int]]]] = [(row.round, row.moved) for row in self._stored()]

    def _stored(self) -> Iterator[_Moves]:
        content = None if self.file is None else read_file(self.file)
        if self.file is None or content is None:
            return
        cut_torn_line(self.file)
        try:
            for line in content[: content.rfind(b"\n") + 1].split(b"\n")[:-1]:
                yield _MOVES.validate_json(line, strict=True)
        except ValidationError as error:
            reason = error.errors()[0]["msg"]
            raise DataError(f"{self.file} is damaged ({reason}); remove it: the moves so far are lost") from error

    def add(self, report: RoundReport) -> None:
        """Keeps the moves of a round; they are in the file when this returns."""
        if not report.moved or (self.rows and report.round <= self.rows[-1][0]):
            return
        if self.file is not None:
            with open_private(self.file, "ab") as out:
                append_line(out, (json.dumps({"round": report.round, "moved": report.moved}) + "\n").encode())
        self.rows.append((report.round, [list(move) for move in report.moved]))

    @property
    def rounds(self) -> list[int]:
        """Rounds in which a client changed from one cluster to another.

        The first cluster of a client is no change, except where a method forms clusters after rounds without any.
        """
        placed: set[int] = set()
        found = []
        for round, moved in self.rows:
            divided = not placed and round > 1 and any(cluster >= 0 for _, cluster in moved)
            if divided or any(client in placed and cluster >= 0 for client, cluster in moved):
                found.append(round)
            placed |= {client for client, cluster in moved if cluster >= 0}
            placed -= {client for client, cluster in moved if cluster < 0}
        return found

    def write(self, path: Path, federation: Federation) -> None:
        """assignments.parquet: a row for every change of a client's cluster."""
        groups: list[int | None] = [None] * federation.num_clients  # true groups, None where they are not known
        if federation.group_N is not None:
            groups = [None if group < 0 else group for group in federation.group_N.tolist()]
        rows = (
            Assignment(client, cluster, round, groups[client])
            for round, moved in self.rows
            for client, cluster in moved
        )
        write_assignments(path, rows)
