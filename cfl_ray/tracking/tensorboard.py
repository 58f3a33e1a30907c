"""Tracker that writes TensorBoard event files; the only module that imports TensorBoard."""

from pathlib import Path
from typing import Any

from cfl_ray.errors import ConfigError
from cfl_ray.run_directory import check_inside
from cfl_ray.tracking.record import RoundRecord, RunEnd, RunInfo


class Tensorboard:
    """TensorBoard event files, a scalar per metric with the round as its step: `tensorboard --logdir runs`."""

    def __init__(self, folder: str = "tensorboard") -> None:
        check_inside("tracking.trackers: tensorboard.folder", folder)
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise ConfigError(f"tracker tensorboard: {error}; pip install 'cfl-ray[tensorboard]'") from error
        self.folder, self.make = folder, SummaryWriter
        self.writer: Any = None

    def open(self, run_dir: Path, info: RunInfo, after: int) -> None:
        self.path, self.after, self.writer = run_dir / self.folder, after, None

    def log(self, record: RoundRecord) -> None:
        if self.writer is None:  # made for the first record, since the parent of a comparison has no records
            # for a resumed run, TensorBoard drops the events after the last delivered round
            self.writer = self.make(str(self.path), purge_step=self.after + 1 if self.after else None)
        self._add(record)
        self.writer.flush()

    def close(self, end: RunEnd | None) -> None:
        if self.writer is None:
            return
        if end is not None:
            self._add(end.summary)
        self.writer.close()

    def _add(self, record: RoundRecord) -> None:
        for name, value in record.metrics.items():
            self.writer.add_scalar(name, value, record.round, walltime=record.time_ms / 1000)
