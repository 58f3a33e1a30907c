"""The clients that changed their cluster, round by round, in the folder of a method."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from pydantic import Field, TypeAdapter, ValidationError

from cfl_ray.data.federation import Federation
from cfl_ray.errors import DataError
from cfl_ray.report.assignments import Assignment, write_assignments
from cfl_ray.run_directory import RunDirectory
from cfl_ray.system.files import append_line, cut_torn_line, open_private, read_file


@dataclass(frozen=True)
class _Line:
    """A line of the file."""

    round: int
    moved: list[Annotated[list[int], Field(min_length=2, max_length=2)]]  # client, cluster


_LINE = TypeAdapter(_Line)
Row = tuple[int, list[list[int]]]  # a round, and the [client, cluster] of each client that changed in it


def read_reassignments(file: Path) -> list[Row]:
    """The rows of the file; an incomplete last line is left out.

    Raises DataError for a file that is damaged elsewhere.
    """
    content = read_file(file) or b""
    try:
        lines = [_LINE.validate_json(line, strict=True) for line in content.split(b"\n")[:-1]]
    except ValidationError as error:
        reason = error.errors()[0]["msg"]
        raise DataError(
            f"{file} is damaged ({reason}); restore it, or remove it: the reassignments so far are lost then"
        ) from error
    return [(line.round, line.moved) for line in lines]


class Reassignments:
    """The changes of clients' clusters: a line of JSON for each round that has any; replayed rounds are ignored."""

    def __init__(self, directory: Path | None):
        self.file = RunDirectory(directory).reassignments if directory else None
        self.rows: list[Row] = []
        if self.file is not None and self.file.exists():
            self.rows = read_reassignments(self.file)
            cut_torn_line(self.file)

    def add(self, round: int, moved: Sequence[tuple[int, int]]) -> None:
        """Keeps the (client, cluster) of each client that changed; they are in the file when this returns."""
        if not moved or (self.rows and round <= self.rows[-1][0]):
            return
        if self.file is not None:
            with open_private(self.file, "ab") as out:
                append_line(out, (json.dumps({"round": round, "moved": moved}) + "\n").encode())
        self.rows.append((round, [list(change) for change in moved]))

    @property
    def rounds(self) -> list[int]:
        """Rounds in which a client changed from one cluster to another.

        The first cluster of a client does not count, unless the method forms its first clusters after round 1.
        """
        placed: set[int] = set()
        rounds = []
        for round, moved in self.rows:
            divided = not placed and round > 1 and any(cluster >= 0 for _, cluster in moved)
            if divided or any(client in placed and cluster >= 0 for client, cluster in moved):
                rounds.append(round)
            placed |= {client for client, cluster in moved if cluster >= 0}
            placed -= {client for client, cluster in moved if cluster < 0}
        return rounds

    def write(self, path: Path, federation: Federation) -> None:
        """assignments.parquet: a row for every change of a client's cluster."""
        groups: list[int | None] = [None] * federation.num_clients  # true groups, None if they are not known
        if federation.group_N is not None:
            groups = [None if group < 0 else group for group in federation.group_N.tolist()]
        rows = (
            Assignment(client, cluster, round, groups[client])
            for round, moved in self.rows
            for client, cluster in moved
        )
        write_assignments(path, rows)
