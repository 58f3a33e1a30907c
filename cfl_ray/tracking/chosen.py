"""The trackers that a config chooses."""

from typing import Any

from cfl_ray.config import TrackingConfig
from cfl_ray.errors import ConfigError
from cfl_ray.plugins.calling import place_of, reference_of, with_options
from cfl_ray.plugins.registry import Registry
from cfl_ray.tracking.csv_file import CsvFile
from cfl_ray.tracking.mlflow_tracker import MlflowTracker
from cfl_ray.tracking.sink import Sink
from cfl_ray.tracking.tensorboard import Tensorboard
from cfl_ray.tracking.wandb import Wandb

TRACKERS: Registry[Any] = Registry(
    "tracker",
    {"mlflow": MlflowTracker, "csv": CsvFile, "tensorboard": Tensorboard, "wandb": Wandb},
    TrackingConfig.trackers_group,
)


def sinks(tracking: TrackingConfig) -> dict[str, Sink]:
    """New sinks by name, without MLflow, which has keys and a delivery of its own.

    Raises ConfigError for what is no tracker, for options that it does not take, and for a package that is absent.
    """
    made: dict[str, Sink] = {}
    for entry in tracking.trackers if tracking.enabled else ():
        part, options = next(iter(entry.items())) if isinstance(entry, dict) else (entry, {})
        if part == "mlflow":
            continue
        name = str(reference_of(part)).rpartition(":")[2].rpartition(".")[2]
        found = TRACKERS.resolve(part)
        if not callable(found):
            raise ConfigError(
                f"tracker {place_of(found)} is an object, expected a class: every method of a run has its own"
            )
        sink = with_options(found, options or {}, "tracker")
        if not isinstance(sink, Sink):
            raise ConfigError(
                f"tracker {place_of(found)} is no tracker: expected a class with the methods "
                "open(run_dir, info, after), log(record) and close(end)"
            )
        if name in made:
            raise ConfigError(f"tracking.trackers: {name!r} is listed twice; name each once")
        made[name] = sink
    return made
