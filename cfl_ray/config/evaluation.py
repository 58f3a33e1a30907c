"""The sections `evaluation` and `tracking`: what is measured, and where it is recorded."""

from typing import Any, ClassVar, Self

from pydantic import Field, field_validator, model_validator

from cfl_ray.config.section import ConfigSection, check_name


class EvaluationConfig(ConfigSection):
    """The evaluation: what it measures, and how often."""

    every: int = Field(
        1, ge=1, description="rounds from one evaluation to the next; the last round is always evaluated"
    )
    clients: int | None = Field(
        None, ge=1, description="number of clients evaluated, the same random sample in all rounds; null: all clients"
    )
    local: bool = Field(True, description="also measure P-local: each client's model right after its own training")
    local_images: int = Field(
        500,
        ge=1,
        description="most images of a shared test set for a model of a single client (P-local, personal models)",
    )
    choice_samples: int | None = Field(
        256,
        ge=1,
        description="number of training samples, the same random ones in all rounds, on which a client compares models "
        "to choose one for the evaluation (ifca, ifca_cam); null: as many as the method uses in training, where this "
        "limit has no effect",
    )
    tuned_epochs: int = Field(
        0, ge=0, description="F of P-tune(F): local epochs of fine-tuning before the test; 0: do not measure it"
    )
    past: bool = Field(
        False,
        description="also test clients whose data have changed on the data that they had before their last change, for "
        "the backward transfer",
    )
    target: float | None = Field(
        None,
        description="target of rounds_to_target and mbit_to_target (P-server, and _local for P-local): a value of the "
        "first metric of the task, for accuracy above 0 and at most 1; null: do not measure them",
    )
    metrics: list[Any] = Field(
        [],
        description="further metrics of each client: accuracy | macro_f1 | micro_f1 | subset_accuracy | mse | mae | "
        "r2 | token_accuracy | perplexity | path/to/file.py:function of the outputs (n, C) and the targets (n,) that "
        "returns a number",
    )


TRACKERS = ("mlflow", "csv", "tensorboard", "wandb")  # names of the classes of `tracking`


class TrackingConfig(ConfigSection):
    """Where results are recorded."""

    uri: str | None = Field(
        None, description="MLflow tracking URI; null: MLFLOW_TRACKING_URI, or an SQLite store below `output`"
    )
    experiment: str = Field("cfl_ray", description="name of the MLflow experiment")
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
    trackers: list[Any] = Field(
        ["mlflow"],
        description="where records go beside the files of the run directory: mlflow | csv | tensorboard | wandb | "
        "path/to/file.py:Class; with options, e.g. {tensorboard: {folder: tb}}",
    )

    trackers_group: ClassVar[str] = "cfl_ray.trackers"

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
            check_name(name, "tracker", TRACKERS, cls.trackers_group)
        return entries
