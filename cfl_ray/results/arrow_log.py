"""Arrow streams with a batch per round: record files of a method in addition to its JSON lines."""

import os
from pathlib import Path

import pyarrow as pa

from cfl_ray.errors import DataError
from cfl_ray.system.files import append_line, open_private, opened


class ArrowLog:
    """A stream to append to: a file or, without a file, the batches in `kept`."""

    def __init__(self, file: Path | None, schema: pa.Schema):
        self.file, self.schema = file, schema
        self.kept: list[pa.RecordBatch] = []

    def open(self) -> list[pa.RecordBatch]:
        """The batches of the file; an incomplete last batch is removed. Raises DataError for other columns."""
        if self.file is None or not self.file.exists():
            return []
        batches, end, schema = whole_batches(self.file)
        check_columns(self.file, schema, self.schema)
        if end < self.file.stat().st_size:
            os.truncate(self.file, end)
        return batches

    def append(self, batch: pa.RecordBatch) -> None:
        """Appends a batch; it is in the file when this returns."""
        if self.file is None:
            self.kept.append(batch)
            return
        begun = self.file.exists() and self.file.stat().st_size > 0
        with open_private(self.file, "ab") as out:
            if not begun:
                append_line(out, memoryview(self.schema.serialize()))
            append_line(out, memoryview(batch.serialize()))


def read_batches(file: Path, schema: pa.Schema) -> list[pa.RecordBatch]:
    """The complete batches of a file; empty without a file. Raises DataError for other columns than `schema`."""
    batches, _, columns = whole_batches(file)
    check_columns(file, columns, schema)
    return batches


def check_columns(file: Path, columns: pa.Schema | None, expected: pa.Schema) -> None:
    """Raises DataError if a file has other columns than expected. columns: None if the file is empty."""
    if columns not in (None, expected):
        raise DataError(f"{file} has columns {columns.names}, expected {expected.names}")


def whole_batches(file: Path) -> tuple[list[pa.RecordBatch], int, pa.Schema | None]:
    """The complete batches, the offset after the last of them, and their columns (None for an empty or missing file).

    Raises DataError for a file that cannot be read, or is damaged before its end.
    """
    batches: list[pa.RecordBatch] = []
    schema = None
    with opened(file) as regular:  # raises unless it is a regular file
        if regular is None:
            return [], 0, None
    with pa.memory_map(str(file)) as source:  # pages are read when values are used
        end = 0
        try:
            reader = pa.ipc.open_stream(source)
            schema = reader.schema
            end = source.tell()
            while True:
                batches.append(reader.read_next_batch())
                end = source.tell()
        except (StopIteration, pa.ArrowInvalid, OSError):
            return batches, end, schema
        # damaged before the end: the file is left as it is
        except (pa.ArrowException, ValueError, OverflowError) as error:
            raise DataError(f"{file} is damaged ({error}); remove it: what it has recorded so far is lost") from error
