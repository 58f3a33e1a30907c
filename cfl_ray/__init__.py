"""Clustered federated learning on Ray.

`Experiment` describes what to run; `run` runs it on Ray, `simulate` in this process with the same numbers.
"""

import importlib

_PUBLIC = {
    "Experiment": "cfl_ray.config",
    "ConfigError": "cfl_ray.core.errors",
    "Federation": "cfl_ray.data",
    "Method": "cfl_ray.core.method",
    "run": "cfl_ray.runtime.launch",
    "simulate": "cfl_ray.runtime.launch",
    "resume": "cfl_ray.runtime.launch",
}
__all__ = sorted(_PUBLIC)
__version__ = "0.1.0"


def __getattr__(name):  # lazily, so that `cfl-ray --help` does not wait for torch and ray
    if name in _PUBLIC:
        return getattr(importlib.import_module(_PUBLIC[name]), name)
    raise AttributeError(f"module 'cfl_ray' has no attribute {name!r}")
