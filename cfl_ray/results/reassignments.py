"""The clients that changed their cluster, round by round, in the folder of a method: an Arrow stream.

reassignments.arrow    round, client, cluster (-1: the client left its cluster)
"""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa

from cfl_ray.core.reassigned import Reassigned
from cfl_ray.data.federation import Federation
from cfl_ray.errors import DataError
from cfl_ray.report.assignments import write_assignments
from cfl_ray.report.snapshots import ClusterHistory, Reassignment
from cfl_ray.results.arrow_log import ArrowLog, check_columns, whole_batches
from cfl_ray.run_directory import RunDirectory

_SCHEMA = pa.schema([("round", pa.int32()), ("client", pa.int32()), ("cluster", pa.int32())])


def read_reassignments(file: Path) -> list[Reassignment]:
    """The rounds of the file with their reassignments, in memory-mapped arrays; empty without a file.

    An incomplete end is ignored. Raises DataError for a file that is damaged before its end.
    """
    rounds: list[Reassignment] = []
    try:
        for round, reassigned in _batches_in(file):
            if rounds and round <= rounds[-1][0]:
                raise ValueError(f"round {round} after round {rounds[-1][0]}")
            reassigned.check()
            rounds.append((round, reassigned))
    except (ValueError, OverflowError) as error:  # an ArrowInvalid is a ValueError
        raise DataError(
            f"{file} is damaged ({error}); restore it, or remove it: the reassignments so far are lost then"
        ) from error
    return rounds


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
        if self.file is not None:
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
