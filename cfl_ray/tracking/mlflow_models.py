"""Models as MLflow stores them, written to a folder of the run directory: no server is needed until delivery."""

from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from cfl_ray.errors import ConfigError
from cfl_ray.tracking.mlflow import set_defaults

NEEDED = (3, 11)  # the first MLflow that writes models as exported programs without pickle


def check_mlflow() -> None:
    """Raises ConfigError if the installed MLflow cannot write models, without importing it."""
    installed = version("mlflow")
    if tuple(int(part) for part in installed.split(".")[:2]) < NEEDED:
        needed = ".".join(map(str, NEEDED))
        raise ConfigError(f"tracking.log_models needs MLflow {needed} or newer, got {installed}: pip install -U mlflow")


def save_model(module: Any, example: np.ndarray, outputs: np.ndarray, folder: Path) -> None:
    """Writes a PyTorch module as an MLflow model: a program exported by torch.export, without Python code.

    example: inputs (n, ...), n >= 2, which become the model's input example; outputs: those of the module for them.
    The model accepts any number of samples. Raises the errors of torch.export for a module that it cannot export.
    """
    set_defaults()
    import mlflow.pytorch
    from mlflow.models import infer_signature

    mlflow.pytorch.save_model(
        module,
        str(folder),
        signature=infer_signature(example, outputs),
        input_example=example,
        serialization_format="pt2",
        pip_requirements=[f"{name}=={version(name)}" for name in ("mlflow", "numpy", "torch")],
    )
