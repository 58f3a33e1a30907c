"""Federations: base data sets, how groups differ, who holds what, and the shards it is read from."""

from cfl_ray.data.arrays import federation_from_arrays
from cfl_ray.data.federation import Federation, Shape
from cfl_ray.data.prepare import Summary, build, describe
from cfl_ray.data.shards import open_shards

__all__ = ["Federation", "Shape", "Summary", "build", "describe", "federation_from_arrays", "open_shards"]
