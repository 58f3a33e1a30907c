"""Columns of a table that number its rows. As inputs they would tell a model the place of a sample in the file."""

import contextlib
import json
import re
from collections.abc import Sequence

import numpy as np
import pyarrow as pa

# names that writers give to an index: pandas ("Unnamed: 0" when it reads a CSV file), R ("" in a CSV file), readr
_WRITTEN = re.compile(r"\s*|Unnamed: \d+(_level_\d+)?|__index_level_\d+__|\.\.\.\d+")
_USUAL = {"index", "level_0", "rownames", "row.names", "row_names", "rowname", "rowid", "row_id", "row", "X"}
FEWEST = 10  # rows; fewer numbers are distinct and without a gap by chance


def index_columns(table: pa.Table) -> list[str]:
    """The columns that are an index by their name, or by what pandas recorded in a Parquet file."""
    recorded: list[object] = []
    with contextlib.suppress(ValueError, AttributeError):  # of another writer
        recorded = json.loads((table.schema.metadata or {}).get(b"pandas", b"{}")).get("index_columns", [])
    indices = {name for name in recorded if isinstance(name, str)}  # a mapping describes a range, which is no column
    return [name for name in table.column_names if name in indices or _WRITTEN.fullmatch(name)]


def counting_columns(tables: Sequence[pa.Table], names: Sequence[str]) -> tuple[list[str], list[str]]:
    """(columns with the usual name of an index, others) of those that number the rows of every table.

    Such a column has distinct integers without a gap, in any order.
    """
    counting = [name for name in names if all(_counts(table[name]) for table in tables)]
    if sum(table.num_rows for table in tables) < FEWEST:
        return [], []
    return [name for name in counting if name in _USUAL], [name for name in counting if name not in _USUAL]


def _counts(values: pa.ChunkedArray) -> bool:
    if not pa.types.is_integer(values.type) or values.null_count or not len(values):
        return False
    numbers = values.to_numpy()
    return int(numbers.max()) - int(numbers.min()) == len(numbers) - 1 and len(np.unique(numbers)) == len(numbers)
