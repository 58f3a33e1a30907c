"""The metrics of each client in each evaluated round, in the folder of a method."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa

from cfl_ray.results.arrow_log import ArrowLog, check_columns, whole_batches
from cfl_ray.run_directory import RunDirectory

_SCORES = ("accuracy", "macro_f1", "loss")  # of classification


def _schema(scores: Sequence[str]) -> pa.Schema:
    """The columns of a client's scores."""
    return pa.schema([("round", pa.int32()), ("client", pa.int64()), *((name, pa.float32()) for name in scores)])


class ClientMetrics:
    """P-server of every client and evaluated round, in an Arrow stream that grows by a batch per evaluation.

    An incomplete last batch is removed; replayed rounds are ignored. Without a directory the batches are in memory.
    """

    def __init__(self, directory: Path | None, scores: Sequence[str] = _SCORES):
        self.log = ArrowLog(RunDirectory(directory).client_metrics if directory else None, _schema(scores))
        batches = self.log.open()
        self.last = max((batch["round"][0].as_py() or 0 for batch in batches if batch.num_rows), default=0)

    @property
    def kept(self) -> pa.Table:
        """The scores in memory."""
        return pa.Table.from_batches(self.log.kept, self.log.schema)

    def add(self, round: int, scores_MV: np.ndarray) -> None:
        """Keeps the scores of a round: client, then each score. They are in the file when this returns."""
        if round <= self.last:
            return
        client, *scores = scores_MV.T
        columns = [np.full(len(client), round, np.int32), client.astype(np.int64)]
        columns += [values.astype(np.float32) for values in scores]
        self.log.append(pa.record_batch([pa.array(column) for column in columns], schema=self.log.schema))
        self.last = round


def read_client_metrics(path: Path) -> pa.Table:
    """The complete batches of the file; an empty table without a file. Raises DataError for a damaged file."""
    batches, _, schema = whole_batches(path)
    schema = schema or _schema(_SCORES)
    if schema != _schema(schema.names[2:]):
        check_columns(path, schema, _schema(_SCORES))
    return pa.Table.from_batches(batches, schema)
