"""The trackers in a config."""

from pathlib import Path
from typing import Any

from cfl_ray.config import TrackingConfig
from cfl_ray.errors import ConfigError
from cfl_ray.plugins.calling import parse_choice, place_of, reference_of, with_options
from cfl_ray.plugins.registry import Registry
from cfl_ray.tracking.csv_file import CsvFile
from cfl_ray.tracking.delivery import MLFLOW, Tracker
from cfl_ray.tracking.mlflow_tracker import Mlflow
from cfl_ray.tracking.tensorboard import Tensorboard
from cfl_ray.tracking.wandb import Wandb

TRACKERS: Registry[Any] = Registry(
    "tracker",
    {MLFLOW: Mlflow, "csv": CsvFile, "tensorboard": Tensorboard, "wandb": Wandb},
    TrackingConfig.trackers_group,
)


def new_trackers(tracking: TrackingConfig, uri: str | None = None, parent: Path | None = None) -> dict[str, Tracker]:
    """New trackers by name.

    uri: of MLflow (`resolve_uri`); None: without MLflow. parent: directory of the parent run.
    Raises ConfigError for an entry that is not a tracker, for unknown options, and for a missing package.
    """
    made: dict[str, Tracker] = {}
    for entry in tracking.trackers if tracking.enabled else ():
        part, options = parse_choice("tracking.trackers", entry)
        name = str(reference_of(part)).rpartition(":")[2].rpartition(".")[2]
        if name in made:
            raise ConfigError(f"tracking.trackers: {name!r} is listed twice; name each once")
        if part != MLFLOW:
            made[name] = _made(part, options)
        elif uri is not None:  # its options are keys of the section, not of the entry
            made[name] = Mlflow(uri, tracking.experiment, parent)
    return made


def _made(part: Any, options: dict[str, Any]) -> Tracker:
    factory = TRACKERS.resolve(part)
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
