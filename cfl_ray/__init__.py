"""Clustered federated learning on Ray.

`Experiment` describes what to run; `run` runs it on Ray, `simulate` in the calling process, with the same results.
"""

import sys
from typing import TYPE_CHECKING

from cfl_ray.system.imports import lazy_names

if TYPE_CHECKING:
    from cfl_ray.config import Experiment, load
    from cfl_ray.config.study import Study, load_study
    from cfl_ray.core.clients import ClientProgram, ClientState, LocalTraining, Proximal, UpdateFeatures
    from cfl_ray.core.method import Method, option
    from cfl_ray.core.metrics import Metric
    from cfl_ray.core.mixtures import Mixture
    from cfl_ray.core.serving import Serving
    from cfl_ray.core.state import State
    from cfl_ray.core.tasks import Task
    from cfl_ray.core.weights import cluster_weights
    from cfl_ray.data import Federation, federation_from_arrays, federation_from_dataset
    from cfl_ray.errors import ConfigError, UserError
    from cfl_ray.lifecycle.launch import resume, run, simulate
    from cfl_ray.lifecycle.load import load_run
    from cfl_ray.results.comparison import compare_runs
    from cfl_ray.study.run import run_study

__all__ = [
    "ClientProgram",
    "ClientState",
    "ConfigError",
    "Experiment",
    "Federation",
    "LocalTraining",
    "Method",
    "Metric",
    "Mixture",
    "Proximal",
    "Serving",
    "State",
    "Study",
    "Task",
    "UpdateFeatures",
    "UserError",
    "cluster_weights",
    "compare_runs",
    "federation_from_arrays",
    "federation_from_dataset",
    "load",
    "load_run",
    "load_study",
    "option",
    "resume",
    "run",
    "run_study",
    "simulate",
]
__version__ = "0.1.0"

_RUNNING: dict[str, tuple[str, ...]] = {  # functions that show their progress in a notebook
    "cfl_ray.lifecycle.launch": ("resume", "run", "simulate"),
    "cfl_ray.study.run": ("run_study",),
}
if "ipykernel" in sys.modules:  # the kernel of a notebook
    _RUNNING = {"cfl_ray.cli.notebook": ("resume", "run", "run_study", "simulate")}
_MODULES = {  # the modules of the names above, imported on first use: `cfl-ray --help` needs neither torch nor Ray
    "cfl_ray.config": ("Experiment", "load"),
    "cfl_ray.config.study": ("Study", "load_study"),
    "cfl_ray.core.clients": (
        "ClientProgram",
        "ClientState",
        "LocalTraining",
        "Proximal",
        "UpdateFeatures",
    ),
    "cfl_ray.errors": ("ConfigError", "UserError"),
    "cfl_ray.core.method": ("Method", "option"),
    "cfl_ray.core.metrics": ("Metric",),
    "cfl_ray.core.mixtures": ("Mixture",),
    "cfl_ray.core.serving": ("Serving",),
    "cfl_ray.core.state": ("State",),
    "cfl_ray.core.tasks": ("Task",),
    "cfl_ray.core.weights": ("cluster_weights",),
    "cfl_ray.data": ("Federation", "federation_from_arrays", "federation_from_dataset"),
    "cfl_ray.results.comparison": ("compare_runs",),
    "cfl_ray.lifecycle.load": ("load_run",),
    **_RUNNING,
}

if not TYPE_CHECKING:  # type checkers read the imports above, and report names that do not exist
    __getattr__, __dir__ = lazy_names(__name__, _MODULES)
