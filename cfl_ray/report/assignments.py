"""The assignments of clients to clusters over a run, as a table with a row for each change."""

from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from cfl_ray.system.files import drafted

SCHEMA = pa.schema(
    [
        pa.field("client", pa.int64(), nullable=False),
        pa.field("name", pa.string()),
        pa.field("group", pa.int32()),
        pa.field("cluster", pa.int32(), nullable=False),
        pa.field("round", pa.int32(), nullable=False),
    ]
)


class Assignment(NamedTuple):
    """A change: the client is in `cluster` from the end of `round` until its next row."""

    client: int
    cluster: int  # -1: the client is no longer in a cluster
    round: int
    group: int | None = None  # true group; None: not known
    name: str | None = None  # name of the client in the data; None: the data have no names


def write_assignments(path: str | Path, rows: Iterable[Assignment]) -> None:
    """Writes `rows` to the Parquet file `path`, replacing an existing file."""
    columns = tuple(zip(*rows, strict=True)) or ((),) * len(Assignment._fields)
    table = pa.table(dict(zip(Assignment._fields, columns, strict=True)), schema=SCHEMA)
    with drafted(Path(path)) as draft:
        pq.write_table(table, draft)
