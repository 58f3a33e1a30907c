"""The section `tracking`."""

from dataclasses import dataclass
from typing import Any, Self

from pydantic import Field, field_validator, model_validator

from cfl_ray.config.part import BuiltinKind, check_name
from cfl_ray.config.section import ConfigSection
from cfl_ray.plugins.registry import Registry


@dataclass(frozen=True)
class TrackerKind(BuiltinKind):
    """A tracker: a class with the methods open, log and close."""

    elsewhere: bool = False  # whether it may write outside the run directory and the places of other keys


TRACKERS = Registry[Any](
    "tracker",
    {
        "mlflow": TrackerKind(code="tracking:Mlflow"),
        "csv": TrackerKind(code="tracking.trackers:CsvFile"),
        "tensorboard": TrackerKind(code="tracking.trackers:Tensorboard"),
        "wandb": TrackerKind(code="tracking.trackers:Wandb", elsewhere=True),
    },
    "cfl_ray.trackers",
)


class TrackingConfig(ConfigSection):
    """Where results are recorded."""

    uri: str | None = Field(
        None, description="MLflow tracking URI; null: MLFLOW_TRACKING_URI, or an SQLite store below `output`"
    )
    experiment: str = Field(
        "cfl_ray",
        min_length=1,
        max_length=500,
        description="name of the MLflow experiment; a server on PostgreSQL or MySQL takes 256 characters",
    )
    enabled: bool = Field(True, description="use the trackers; false: only write the files of the run directory")
    log_models: bool = Field(
        False,
        description="at the end of a method, log the model of each cluster (cluster-0, ...) to its MLflow run, with "
        "signature and input example",
    )
    report: bool = Field(
        True,
        description="at the end of the run, write artifacts/report.html (2 MB), which is an artifact of the parent "
        "run in MLflow",
    )
    patience: float = Field(
        600.0,
        ge=0,
        description="most seconds that the end of a method waits for a tracker which still receives records; the "
        "next command delivers to MLflow what is left then",
    )
    trackers: list[Any] = Field(
        ["mlflow"],
        description="where records go beside the files of the run directory: mlflow | csv | tensorboard | wandb | "
        "path/to/file.py:Class; with options, e.g. {tensorboard: {folder: tb}}",
    )

    @property
    def uses_mlflow(self) -> bool:
        """Whether records go to MLflow."""
        return self.enabled and "mlflow" in self.trackers

    @model_validator(mode="after")
    def _check_log_models(self) -> Self:
        if self.log_models and "mlflow" not in self.trackers:
            raise ValueError(f"log_models: true needs the tracker mlflow, got trackers {self.trackers}; add it to them")
        return self

    @field_validator("trackers")
    @classmethod
    def _check_trackers(cls, entries: list[Any]) -> list[Any]:
        for entry in entries:
            if isinstance(entry, dict) and len(entry) != 1:
                raise ValueError(
                    f"an entry is one tracker with its options, e.g. {{csv: {{file: m.csv}}}}, got {entry}"
                )
            name, options = next(iter(entry.items())) if isinstance(entry, dict) else (entry, {})
            if name == "mlflow" and options:
                raise ValueError("mlflow takes no options; its keys are tracking.uri, experiment and log_models")
            check_name(name, TRACKERS.kind, TRACKERS.builtin, TRACKERS.group)
        return entries
