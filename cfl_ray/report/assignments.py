"""Which client was in which cluster, and since when: one row per change."""

from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from cfl_ray.tracking.files import drafted

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
    """A client is in `cluster` from the end of `round` on, until its next row."""

    client: int
    cluster: int  # -1: in none any more
    round: int
    group: int | None = None  # the true group, None where it is not known
    name: str | None = None  # None: the client has only a number


def write_assignments(path: str | Path, rows: Iterable[Assignment]) -> None:
    """Replaces the parquet file `path` by one with `rows`."""
    columns = tuple(zip(*rows, strict=True)) or ((),) * len(Assignment._fields)
    table = pa.table(dict(zip(Assignment._fields, columns, strict=True)), schema=SCHEMA)
    with drafted(Path(path)) as draft:
        pq.write_table(table, draft)
