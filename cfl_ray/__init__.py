"""Clustered federated learning on Ray.

`Experiment` describes what to run; `run` runs it on Ray, `simulate` in this process with the same numbers.
"""

import importlib

_PUBLIC = {
    "Experiment": "cfl_ray.config",
    "load": "cfl_ray.config",
    "run": "cfl_ray.runtime.launch",
    "simulate": "cfl_ray.runtime.launch",
    "resume": "cfl_ray.runtime.launch",
    "ConfigError": "cfl_ray.core.errors",
    "UserError": "cfl_ray.core.errors",
    "Federation": "cfl_ray.data",
    "federation_from_arrays": "cfl_ray.data",
    "Method": "cfl_ray.core.method",
    "option": "cfl_ray.core.method",
    "State": "cfl_ray.core.state",
    "Serving": "cfl_ray.core.serving",
    "Own": "cfl_ray.core.clients",
    "Pull": "cfl_ray.core.clients",
    "by_cluster": "cfl_ray.core.grouping",
    "everyone": "cfl_ray.core.grouping",
}
__all__ = sorted(_PUBLIC)
__version__ = "0.1.0"


def __getattr__(name):  # lazily, so that `cfl-ray --help` does not wait for torch and ray
    if name in _PUBLIC:
        return getattr(importlib.import_module(_PUBLIC[name]), name)
    raise AttributeError(f"module 'cfl_ray' has no attribute {name!r}")
