"""What a run came to, and the files that say so."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from cfl_ray.data.federation import Federation
from cfl_ray.report.assignments import Assignment, write_assignments
from cfl_ray.runtime.server import Report
from cfl_ray.tracking import RoundRecord
from cfl_ray.tracking.files import append_line, cut_torn_line


@dataclass(frozen=True)
class MethodResult:
    """One method's records and its figures at the end."""

    label: str
    records: list[RoundRecord]
    summary: dict[str, float]  # RUN_METRICS that apply

    @property
    def seconds(self) -> float:
        """Wall time of all rounds."""
        return sum(record.metrics.get("round_seconds", 0.0) for record in self.records)

    @property
    def final(self) -> dict[str, float]:
        """Metrics of the last evaluated round."""
        return dict(next(record.metrics for record in reversed(self.records) if "accuracy" in record.metrics))


@dataclass(frozen=True)
class Results:
    """All methods of an experiment, by label in the order of the config."""

    methods: dict[str, MethodResult]
    run_dir: Path | None  # None: nothing was kept
    tracking: str | None = None  # MLflow, without credentials; None: not tracked
    facts: dict[str, str] | None = None  # hosts, device and engine

    def __getitem__(self, label: str) -> MethodResult:
        return self.methods[label]


class Moves:
    """Which client moved to which cluster in which round: one JSON line per round with changes, replayed rounds ignored."""

    def __init__(self, directory: Path | None):
        self.file = directory / "moves.jsonl" if directory else None
        self.rows: list[tuple[int, list]] = [(row["round"], row["moved"]) for row in self._stored()]

    def _stored(self) -> Iterator[dict]:
        if self.file is None or not self.file.exists():
            return
        cut_torn_line(self.file)
        yield from map(json.loads, self.file.read_bytes().splitlines())

    def add(self, report: Report) -> None:
        if not report.moved or (self.rows and report.round <= self.rows[-1][0]):
            return
        if self.file is not None:
            with self.file.open("ab", buffering=0) as out:
                append_line(out, (json.dumps({"round": report.round, "moved": report.moved}) + "\n").encode())
        self.rows.append((report.round, [list(move) for move in report.moved]))

    @property
    def rounds(self) -> list[int]:
        return [round for round, _ in self.rows]

    def write(self, path: Path, federation: Federation) -> None:
        """assignments.parquet: a row for every change of a client's cluster."""
        groups = [None] * federation.num_clients if federation.group_N is None else [None if group < 0 else group for group in federation.group_N.tolist()]
        write_assignments(
            path,
            (Assignment(client, cluster, round, groups[client]) for round, moved in self.rows for client, cluster in moved),
        )
