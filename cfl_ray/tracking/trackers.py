"""The trackers in a config; the only module that imports wandb and TensorBoard. `TRACKERS` declares them."""

import csv
import io
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from cfl_ray.config import TrackingConfig
from cfl_ray.config.tracking import TRACKERS
from cfl_ray.errors import ConfigError, DataError, UserError, class_and_text
from cfl_ray.plugins.calling import parse_choice, place_of, reference_of, with_options
from cfl_ray.run_directory import check_inside
from cfl_ray.system.files import append_line, cut_torn_line, open_private, read_text, write_text
from cfl_ray.tracking.delivery import MLFLOW, Tracker
from cfl_ray.tracking.mlflow_tracker import Mlflow
from cfl_ray.tracking.record import ROUND_METRICS, RoundRecord, RunEnd, RunInfo

_WANDB_BYTES = 65536  # more than W&B writes at a time


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
        self._check_disk()

    def close(self, end: RunEnd | None) -> None:
        if self.run is None:
            return
        if end is not None:
            self._check_disk()
            self.run.summary.update(dict(end.summary.metrics) | end.remarks)
        self.run.finish(exit_code=0 if end is not None and end.status == "FINISHED" else 1)

    def _check_disk(self) -> None:
        """Raises OSError if the disk of the run is full: W&B writes that to its own log alone."""
        folder = self.run_dir / "wandb"
        if not folder.is_dir():
            return
        try:
            with tempfile.TemporaryFile(dir=folder) as file:
                file.write(bytes(_WANDB_BYTES))
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(folder)) from error


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
            _hide_tracebacks_of_tensorboard()
            # for a resumed run, TensorBoard drops the events after the last delivered round
            self.writer = self.make(str(self.path), purge_step=self.after + 1 if self.after else None)
        self._add(record)
        self.writer.flush()

    def close(self, end: RunEnd | None) -> None:
        if self.writer is None:
            return
        if end is not None:
            self._add(end.summary)
            for name, text in end.remarks.items():
                self.writer.add_text(name, str(text), end.summary.round, walltime=end.summary.time_ms / 1000)
        self.writer.close()

    def _add(self, record: RoundRecord) -> None:
        for name, value in record.metrics.items():
            self.writer.add_scalar(name, value, record.round, walltime=record.time_ms / 1000)


def _hide_tracebacks_of_tensorboard() -> None:
    """From now on, errors that end TensorBoard's threads, which it reports to the caller too, are not printed."""
    shown = threading.excepthook
    if getattr(shown, "hides_tensorboard", False):
        return

    def show(error: threading.ExceptHookArgs) -> None:
        if type(error.thread).__module__.partition(".")[0] != "tensorboard":
            shown(error)

    show.hides_tensorboard = True  # type: ignore[attr-defined]
    threading.excepthook = show


class CsvFile:
    """A CSV file in the directory of each method: round, time_ms and a column per metric."""

    def __init__(self, file: str = "metrics.csv") -> None:
        check_inside("tracking.trackers: csv.file", file)
        self.name = file

    def open(self, run_dir: Path, info: RunInfo, after: int) -> None:
        self.path = run_dir / self.name
        cut_torn_line(self.path)
        try:
            reader = csv.DictReader((read_text(self.path) or "").splitlines())
            self.columns = list(reader.fieldnames or ("round", "time_ms", *ROUND_METRICS))
            if "round" not in self.columns:
                raise ValueError("it has no column 'round'")
            rows = list(reader)
            self.last = int(rows[-1]["round"]) if rows else 0
        except (csv.Error, ValueError, KeyError, TypeError) as error:
            raise DataError(f"{self.path} is damaged ({error!r}); remove it") from error

    def log(self, record: RoundRecord) -> None:
        if record.round <= self.last:  # written already, but the cursor was not saved
            return
        if new := [name for name in record.metrics if name not in self.columns]:
            self._add_columns(new)
        text = io.StringIO(newline="")
        writer = csv.DictWriter(text, self.columns)
        with open_private(self.path, "ab") as file:
            if file.tell() == 0:
                writer.writeheader()
            writer.writerow({"round": record.round, "time_ms": record.time_ms, **record.metrics})
            append_line(file, text.getvalue().encode())
        self.last = record.round

    def close(self, end: RunEnd | None) -> None:
        """No effect: the file is closed between rounds."""

    def _add_columns(self, names: list[str]) -> None:
        self.columns += names
        if lines := (read_text(self.path) or "").splitlines():
            header, *rows = lines
            longer = [",".join([header, *names]), *(row + "," * len(names) for row in rows)]
            write_text(self.path, "".join(f"{line}\r\n" for line in longer))


def new_trackers(
    tracking: TrackingConfig,
    uri: str | None = None,
    parent: Path | None = None,
    warn: Callable[[str], None] | None = None,
) -> dict[str, Tracker]:
    """New trackers by name.

    uri: of MLflow (`resolve_uri`); None: without MLflow. parent: directory of the parent run.
    warn: receives a line for each tracker that cannot be made, and the others are returned; None: raises ConfigError
    for an entry that is not a tracker, for unknown options, for an error in it, and for a missing package.
    """
    made: dict[str, Tracker] = {}
    for entry in tracking.trackers if tracking.enabled else ():
        part, options = parse_choice("tracking.trackers", entry)
        name = str(reference_of(part)).rpartition(":")[2].rpartition(".")[2]
        if name in made:
            raise ConfigError(f"tracking.trackers: {name!r} is listed twice; name each once")
        if part != MLFLOW:
            try:
                made[name] = _made(part, options)
            except (UserError, SystemExit) as error:
                if warn is None:
                    raise
                reason = error if isinstance(error, UserError) else f"tracker {name} failed: {class_and_text(error)}"
                warn(f"{reason}; the run continues without this tracker, and the run directory has its results")
        elif uri is not None:  # its options are keys of the section, not of the entry
            made[name] = Mlflow(uri, tracking.experiment, parent)
    return made


def _made(part: Any, options: dict[str, Any]) -> Tracker:
    factory = (
        TRACKERS.builtin[part].load() if isinstance(part, str) and part in TRACKERS.builtin else TRACKERS.resolve(part)
    )
    if not callable(factory):
        raise ConfigError(
            f"tracker {place_of(factory)} is an object, expected a class: every method of a run has its own"
        )
    tracker = with_options(factory, options, "tracker")
    if not isinstance(tracker, Tracker):
        raise ConfigError(
            f"tracker {place_of(factory)} is no tracker: expected a class with the methods "
            "open(run_dir, info, after), log(record) and close(end)"
        )
    return tracker
