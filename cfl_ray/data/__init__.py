"""Federations: base data sets, shifts between groups, the division among clients, and shards on disk."""

from typing import TYPE_CHECKING

from cfl_ray.system.imports import lazy_names

if TYPE_CHECKING:
    from cfl_ray.data.arrays import federation_from_arrays
    from cfl_ray.data.federation import Federation
    from cfl_ray.data.from_config import FederationSummary, build, describe, has_validation
    from cfl_ray.data.shards import open_shards
    from cfl_ray.data.torch_dataset import federation_from_dataset

__all__ = [
    "Federation",
    "FederationSummary",
    "build",
    "describe",
    "federation_from_arrays",
    "federation_from_dataset",
    "has_validation",
    "open_shards",
]

_MODULES = {  # imported on first use: `cfl_ray.engine` needs only `federation`, not the libraries of the others
    "cfl_ray.data.arrays": ("federation_from_arrays",),
    "cfl_ray.data.federation": ("Federation",),
    "cfl_ray.data.from_config": ("FederationSummary", "build", "describe", "has_validation"),
    "cfl_ray.data.shards": ("open_shards",),
    "cfl_ray.data.torch_dataset": ("federation_from_dataset",),
}

if not TYPE_CHECKING:  # type checkers read the imports above, and report names that do not exist
    __getattr__, __dir__ = lazy_names(__name__, _MODULES)
