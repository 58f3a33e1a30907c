"""Tracker that writes runs of Weights & Biases; the only module that imports wandb."""

from pathlib import Path
from typing import Any

from cfl_ray.errors import ConfigError
from cfl_ray.tracking.record import RoundRecord, RunEnd, RunInfo


class Wandb:
    """Runs of Weights & Biases, offline by default (`mode`); `wandb sync` uploads them."""

    def __init__(self, project: str = "cfl_ray", mode: str = "offline") -> None:
        try:
            import wandb
        except ImportError as error:
            raise ConfigError(f"tracker wandb: {error}; pip install 'cfl-ray[wandb]'") from error
        if mode not in ("offline", "online", "disabled"):
            raise ConfigError(f"tracker wandb: mode must be offline, online or disabled, got {mode!r}")
        self.wandb, self.project, self.mode = wandb, project, mode
        self.run: Any = None

    def open(self, run_dir: Path, info: RunInfo, after: int) -> None:
        self.run_dir, self.info, self.run = run_dir, info, None

    def log(self, record: RoundRecord) -> None:
        if self.run is None:  # made for the first record, since the parent of a comparison has no records
            self.run = self.wandb.init(
                project=self.project,
                name=self.info.name,
                id=self.info.uid,
                config=dict(self.info.params),
                tags=[tag for tag in (self.info.tags.get("dataset"), self.info.method) if tag],
                dir=str(self.run_dir.absolute()),
                mode=self.mode,
                resume="allow",
                reinit="create_new",  # the end of a method overlaps with the start of the next method
            )
        self.run.log(dict(record.metrics), step=record.round)  # W&B ignores a step that it already has

    def close(self, end: RunEnd | None) -> None:
        if self.run is None:
            return
        if end is not None:
            self.run.summary.update(dict(end.summary.metrics))
        self.run.finish(exit_code=0 if end is not None and end.status == "FINISHED" else 1)
