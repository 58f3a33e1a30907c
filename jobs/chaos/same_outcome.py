"""Bit-for-bit comparison of a run with faults and an undisturbed one, for all jobs of this folder."""

import hashlib
import json
import shutil
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor

from cfl_ray import config, simulate
from cfl_ray.checkpoint.store import CheckpointStore
from cfl_ray.config import Experiment
from cfl_ray.results.arrow_log import read_reassignments
from cfl_ray.results.results import Results
from cfl_ray.run_directory import RunDirectory

if TYPE_CHECKING:  # importing mlflow takes a second or two
    import mlflow
    from mlflow import MlflowClient

IDENTICAL = "identical: metrics, reassignments, models, client states; every round once in metrics.jsonl and in MLflow"


def chaos_experiment(
    methods: Sequence[str], rounds: int, output: Path, epochs: int | None = None, **runtime: int
) -> Experiment:
    """Rotated digits with clients that join, leave, are unavailable, and whose data change.

    All clients take part in each round of more than ten methods, some of which need them.

    epochs: of local training; None: 20, with which a round takes seconds, and 1 for more than ten methods. runtime:
    further keys of the section.
    """
    options = {"ifca_cam": {"warmup_rounds": 2}, "stocfl": {"tau": 0.5}, "feddrift": {"step_rounds": 2}}
    many = len(methods) > 10
    if epochs is None:
        epochs = 1 if many else 20
    return Experiment(
        name="chaos",
        rounds=rounds,
        methods=[{name: options.get(name, {})} for name in methods],
        data={"shift": {"kind": "rotated"}, "partition": {"clients": 24}, "shards": str(output / "shards")},
        model={"options": {"hidden": 200}},
        local={"epochs": epochs, "batch_size": 16 if many else 8, "momentum": 0.5},
        cohort={"fraction": 1.0} if many else {"fraction": 0.5, "availability": 0.9, "dropout": 0.05},
        schedule=[
            {"round": 3, "join": [22, 23]},
            {"round": 5, "leave": [0], "change": [{"clients": [1], "rotate": 90}]},
        ],
        runtime={"engine": "sequential", "hosts": 3, "retries": 1000} | runtime,
        tracking={"report": False},
        output=str(output),
    )


def saved(experiment: Experiment) -> tuple[Path, Experiment]:
    """A file NAME.yaml with the experiment in its output folder, and the experiment as a run reads it there."""
    file = Path(experiment.output) / f"{experiment.name}.yaml"
    file.write_text(experiment.to_yaml())
    return file, config.load(file)


def undisturbed(experiment: Experiment, directory: Path) -> Results:
    """Runs the experiment in this process, without MLflow."""
    untracked = experiment.tracking.model_copy(update={"enabled": False})
    return simulate(experiment.model_copy(update={"tracking": untracked}), directory)


def rounds_done(directory: Path) -> int:
    """Rounds in the metrics logs of all methods of a run."""
    return sum(file.read_bytes().count(b"\n") for file in directory.glob("*/metrics.jsonl"))


def differences(experiment: Experiment, methods: Sequence[str], undisturbed: Path, disturbed: Path) -> list[str]:
    """The differences between two runs, each METHOD: WHAT. MLflow must have every round of the disturbed one."""
    found = []
    for method in methods:
        expected, there = outcome(undisturbed, method, experiment), outcome(disturbed, method, experiment)
        found += [f"{method}: {name}" for name in expected if expected[name] != there[name]]
    steps, rounds = in_mlflow(Path(experiment.output), experiment.name), list(range(1, experiment.rounds + 1))
    return found + [
        f"{method}: {len(steps.get(method, []))} entries of {len({*steps.get(method, [])})} rounds in MLflow"
        for method in methods
        if sorted(steps.get(method, [])) != rounds
    ]


def concluded(wrong: Sequence[str], right: str, folder: Path, keep: Path | None) -> int:
    """Prints everything that is wrong, else the text `right`, and returns the exit status.

    folder: of the runs; removed if nothing is wrong, unless the user named it (`keep`).
    """
    print("\n".join(["WRONG:", *wrong]) if wrong else right)
    if keep is None and not wrong:
        shutil.rmtree(folder)
    return 1 if wrong else 0


def outcome(directory: Path, method: str, experiment: Experiment) -> dict[str, object]:
    """Everything that must be equal in both runs, by name."""
    folder = directory / method
    records = [json.loads(line) for line in RunDirectory(folder).metrics.read_text().splitlines()]
    metrics = [
        {name: value for name, value in record.items() if name not in ("round_seconds", "time_ms")}
        for record in records
    ]
    checkpoint = CheckpointStore(folder, experiment.config_hash).load()
    return {
        "rounds": [record["round"] for record in records],
        "metrics": metrics,
        "reassignments": [(round, [*one]) for round, one in read_reassignments(RunDirectory(folder).reassignments)],
        "models": _sha256(sorted(checkpoint.tensors.items())),
        "client states": _sha256(sorted((key, saved.tensor()) for key, saved in checkpoint.client_states())),
        "scalars": {name: checkpoint.values[name] for name in ("state", "traffic")},
    }


def _sha256(entries: Iterable[tuple[object, Tensor]]) -> str:
    digest = hashlib.sha256()
    for key, tensor in entries:
        digest.update(repr((key, tuple(tensor.shape), str(tensor.dtype))).encode())
        digest.update(tensor.contiguous().numpy().tobytes())
    return digest.hexdigest()


def in_mlflow(output: Path, name: str) -> dict[str, list[int]]:
    """Steps of the metric `clients_online`, which every evaluated round logs, by method."""
    client, runs = _runs_in_mlflow(output, name)
    return {
        label: [metric.step for metric in client.get_metric_history(run.info.run_id, "clients_online")]
        for label, run in runs.items()
        if label
    }


def tags_in_mlflow(output: Path, name: str, tag: str) -> dict[str, str]:
    """The values of a tag, by method; "": of the comparison."""
    return {
        label: run.data.tags[tag] for label, run in _runs_in_mlflow(output, name)[1].items() if tag in run.data.tags
    }


def _runs_in_mlflow(output: Path, name: str) -> tuple["MlflowClient", dict[str, "mlflow.entities.Run"]]:
    from mlflow import MlflowClient

    client = MlflowClient(f"sqlite:///{output / 'mlflow.db'}")
    experiments = [found.experiment_id for found in client.search_experiments()]
    return client, {
        run.data.tags.get("label", ""): run for run in client.search_runs(experiments, f"tags.name = '{name}'")
    }
