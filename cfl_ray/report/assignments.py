"""The assignments of clients to clusters over a run, as a table with a row for each change."""

from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from cfl_ray.report.snapshots import Reassignment
from cfl_ray.system.files import drafted

# the client is in `cluster` (-1: in none) from the end of `round` until its next row
SCHEMA = pa.schema(
    [
        pa.field("client", pa.int64(), nullable=False),
        pa.field("name", pa.string()),  # null: the data have no names
        pa.field("group", pa.int32()),  # true group; null: not known
        pa.field("cluster", pa.int32(), nullable=False),
        pa.field("round", pa.int32(), nullable=False),
    ]
)
_ROWS = 1 << 17  # most rows of a batch, and fewest of a row group except the last


def write_assignments(
    path: str | Path, reassignments: Iterable[Reassignment], group_N: np.ndarray | None = None
) -> None:
    """Writes the reassignments to the Parquet file `path`, replacing an existing file.

    group_N: true group of each client, below 0 if it is not known; None: all are unknown.
    """
    with drafted(Path(path)) as draft, pq.ParquetWriter(draft, SCHEMA) as writer:
        waiting: list[pa.RecordBatch] = []
        for batch in _batches(reassignments, group_N):
            waiting.append(batch)
            if sum(batch.num_rows for batch in waiting) >= _ROWS:
                writer.write_table(pa.Table.from_batches(waiting))
                waiting = []
        writer.write_table(pa.Table.from_batches(waiting, SCHEMA))


def _batches(reassignments: Iterable[Reassignment], group_N: np.ndarray | None) -> Iterator[pa.RecordBatch]:
    for round, reassigned in reassignments:
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
            yield pa.record_batch(columns, schema=SCHEMA)
