"""The clients that changed their cluster, round by round, in the folder of a method.

reassignments.arrow               round, client, cluster (-1: the client left its cluster); an Arrow stream
artifacts/assignments.parquet     a row for each change of a client's cluster
"""

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from cfl_ray.core.reassigned import Reassigned
from cfl_ray.data.federation import Federation
from cfl_ray.errors import DataError
from cfl_ray.report.snapshots import ClusterHistory, Reassignment
from cfl_ray.results.arrow_log import ArrowLog, read_batches
from cfl_ray.run_directory import RunDirectory
from cfl_ray.system.files import drafted

_SCHEMA = pa.schema([("round", pa.int32()), ("client", pa.int32()), ("cluster", pa.int32())])
# of assignments.parquet: the client is in `cluster` (-1: in none) from the end of `round` until its next row
_ASSIGNMENTS = pa.schema(
    [
        pa.field("client", pa.int64(), nullable=False),
        pa.field("name", pa.string()),  # always null: `TrainedMethod.assignments` has the names
        pa.field("group", pa.int32()),  # true group; null: not known
        pa.field("cluster", pa.int32(), nullable=False),
        pa.field("round", pa.int32(), nullable=False),
    ]
)
_ROWS = 1 << 17  # most rows of a batch, and fewest of a row group except the last


class Reassignments:
    """Stores the reassignments of clients in a file or, without a directory, in memory.

    Replayed rounds are ignored; an incomplete end of the file is removed.
    """

    def __init__(self, directory: Path | None):
        self.log = ArrowLog(RunDirectory(directory).reassignments if directory else None, _SCHEMA)
        rounds = self.rounds
        self.last = rounds[-1][0] if rounds else 0
        self.log.open()

    @property
    def rounds(self) -> list[Reassignment]:
        """The rounds with reassignments, and these reassignments."""
        return _rounds_of(self.log.kept) if self.log.file is None else read_reassignments(self.log.file)

    def add(self, round: int, reassigned: Reassigned) -> None:
        """Stores the reassignments of a round, if any; they are in the file when this returns."""
        if not len(reassigned) or round <= self.last:
            return
        columns = (np.full(len(reassigned), round, np.int32), reassigned.client_R, reassigned.cluster_R)
        self.log.append(pa.record_batch([*map(pa.array, columns)], schema=_SCHEMA))
        self.last = round

    @property
    def rounds_with_changes(self) -> list[int]:
        """Rounds in which a client moved between clusters.

        The first assignment of a client does not count, unless the method forms its first clusters after round 1.
        """
        return ClusterHistory(self.rounds).rounds_with_changes

    def write(self, path: Path, federation: Federation) -> None:
        """Writes assignments.parquet, replacing an existing file.

        Raises DataError if the file of reassignments has clients that are not in the federation.
        """
        rounds = self.rounds
        largest = max((int(reassigned.client_R[-1]) for _, reassigned in rounds), default=0)
        if largest >= federation.num_clients:
            raise DataError(
                f"{self.log.file} has client {largest}, and the federation {federation.num_clients} clients"
            )
        with drafted(path) as draft, pq.ParquetWriter(draft, _ASSIGNMENTS) as writer:
            waiting, rows = list[pa.RecordBatch](), 0
            for batch in _assignments(rounds, federation.group_N):
                waiting.append(batch)
                rows += batch.num_rows
                if rows >= _ROWS:
                    writer.write_table(pa.Table.from_batches(waiting))
                    waiting, rows = [], 0
            writer.write_table(pa.Table.from_batches(waiting, _ASSIGNMENTS))


def read_reassignments(file: Path) -> list[Reassignment]:
    """The rounds of the file with their reassignments, in memory-mapped arrays; empty without a file.

    An incomplete end is ignored. Raises DataError for a file that is damaged before its end.
    """
    try:
        return _rounds_of(read_batches(file, _SCHEMA))
    except (ValueError, OverflowError) as error:  # an ArrowInvalid is a ValueError
        raise DataError(
            f"{file} is damaged ({error}); restore it, or remove it: the reassignments so far are lost then"
        ) from error


def _rounds_of(batches: Sequence[pa.RecordBatch]) -> list[Reassignment]:
    """The reassignments in these batches. Raises ValueError for a batch that no round has."""
    rounds: list[Reassignment] = []
    for batch in batches:
        batch.validate()
        round_R, client_R, cluster_R = (column.to_numpy() for column in batch.columns)
        if len(round_R) == 0 or (round_R != round_R[0]).any():
            raise ValueError("a batch is not of one round")
        if rounds and round_R[0] <= rounds[-1][0]:
            raise ValueError(f"round {round_R[0]} after round {rounds[-1][0]}")
        reassigned = Reassigned(client_R, cluster_R)
        reassigned.check()
        rounds.append((int(round_R[0]), reassigned))
    return rounds


def _assignments(rounds: Sequence[Reassignment], group_N: np.ndarray | None) -> Iterator[pa.RecordBatch]:
    """Rows of assignments.parquet. group_N: true group of each client, below 0 if it is not known."""
    for round, reassigned in rounds:
        for at in range(0, len(reassigned), _ROWS):
            client_r, cluster_r = reassigned.client_R[at : at + _ROWS], reassigned.cluster_R[at : at + _ROWS]
            group_r = np.full(len(client_r), -1, np.int32) if group_N is None else group_N[client_r]
            columns = [
                pa.array(client_r, pa.int64()),
                pa.nulls(len(client_r), pa.string()),
                pa.array(group_r, pa.int32(), mask=group_r < 0),
                pa.array(cluster_r),
                pa.array(np.full(len(client_r), round, np.int32)),
            ]
            yield pa.record_batch(columns, schema=_ASSIGNMENTS)
