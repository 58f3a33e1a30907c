"""The clients that changed their cluster, round by round, in the folder of a method: an Arrow stream.

    reassignments.arrow    round, client, cluster (-1: the client left its cluster)

Runs of formats 1 and 2 have a JSON line for each round, and continue with lines.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
import pyarrow as pa
from pydantic import Field, TypeAdapter, ValidationError

from cfl_ray.core.reassigned import Reassigned
from cfl_ray.data.federation import Federation
from cfl_ray.errors import DataError
from cfl_ray.report.assignments import write_assignments
from cfl_ray.report.snapshots import ClusterHistory, Reassignment
from cfl_ray.results.arrow_log import ArrowLog, check_columns, whole_batches
from cfl_ray.run_directory import RunDirectory
from cfl_ray.system.files import append_line, cut_torn_line, open_private, read_file

_SCHEMA = pa.schema([("round", pa.int32()), ("client", pa.int32()), ("cluster", pa.int32())])
_LINES = ".jsonl"  # last part of the file's name in formats 1 and 2


@dataclass(frozen=True)
class _Line:
    """A line of the file in formats 1 and 2."""

    round: int
    moved: list[Annotated[list[int], Field(min_length=2, max_length=2)]]  # client, cluster


_LINE = TypeAdapter(_Line)


def read_reassignments(file: Path) -> list[Reassignment]:
    """The rounds of the file with their reassignments, in memory-mapped arrays; empty without a file.

    An incomplete end is ignored. Raises DataError for a file that is damaged before its end.
    """
    rounds: list[Reassignment] = []
    try:
        for round, reassigned in _lines_in(file) if file.suffix == _LINES else _batches_in(file):
            if rounds and round <= rounds[-1][0]:
                raise ValueError(f"round {round} after round {rounds[-1][0]}")
            reassigned.check()
            rounds.append((round, reassigned))
    except (ValueError, OverflowError) as error:  # a ValidationError and an ArrowInvalid are ValueErrors
        reason = error.errors()[0]["msg"] if isinstance(error, ValidationError) else error
        raise DataError(
            f"{file} is damaged ({reason}); restore it, or remove it: the reassignments so far are lost then"
        ) from error
    return rounds


def _lines_in(file: Path) -> Iterator[Reassignment]:
    for content in (read_file(file) or b"").split(b"\n")[:-1]:
        line = _LINE.validate_json(content, strict=True)
        yield line.round, Reassigned.of(line.moved)


def _batches_in(file: Path) -> Iterator[Reassignment]:
    batches, _, schema = whole_batches(file) if file.exists() else ([], 0, None)
    check_columns(file, schema, _SCHEMA)
    for batch in batches:
        batch.validate()
        round_R, client_R, cluster_R = (column.to_numpy() for column in batch.columns)
        if len(round_R) == 0 or (round_R != round_R[0]).any():
            raise ValueError("a batch is not of one round")
        yield int(round_R[0]), Reassigned(client_R, cluster_R)


class Reassignments:
    """Stores the reassignments of clients in a file or, without a directory, in memory.

    Replayed rounds are ignored; an incomplete end of the file is removed.
    """

    def __init__(self, directory: Path | None):
        self.file = RunDirectory(directory).reassignments if directory else None
        self._kept: list[Reassignment] = []  # without a file
        rounds = self.rounds
        self.last = rounds[-1][0] if rounds else 0
        if self.file is not None and self.file.suffix == _LINES:
            cut_torn_line(self.file)
        elif self.file is not None:
            ArrowLog(self.file, _SCHEMA).open()

    @property
    def rounds(self) -> list[Reassignment]:
        """The rounds with reassignments, and these reassignments."""
        return self._kept if self.file is None else read_reassignments(self.file)

    def add(self, round: int, reassigned: Reassigned) -> None:
        """Stores the reassignments of a round, if any; they are in the file when this returns."""
        if not len(reassigned) or round <= self.last:
            return
        if self.file is None:
            self._kept.append((round, reassigned))
        elif self.file.suffix == _LINES:
            line = json.dumps({"round": round, "moved": [*reassigned]}) + "\n"
            with open_private(self.file, "ab") as out:
                append_line(out, line.encode())
        else:
            columns = (np.full(len(reassigned), round, np.int32), reassigned.client_R, reassigned.cluster_R)
            ArrowLog(self.file, _SCHEMA).append(pa.record_batch([*map(pa.array, columns)], schema=_SCHEMA))
        self.last = round

    @property
    def rounds_with_changes(self) -> list[int]:
        """Rounds in which a client moved between clusters.

        The first assignment of a client does not count, unless the method forms its first clusters after round 1.
        """
        return ClusterHistory(self.rounds).rounds_with_changes

    def write(self, path: Path, federation: Federation) -> None:
        """Writes assignments.parquet: a row for every change of a client's cluster.

        Raises DataError if the file has clients that are not in the federation.
        """
        rounds = self.rounds
        largest = max((int(reassigned.client_R[-1]) for _, reassigned in rounds), default=0)
        if largest >= federation.num_clients:
            raise DataError(f"{self.file} has client {largest}, and the federation {federation.num_clients} clients")
        write_assignments(path, rounds, federation.group_N)
