"""The run directory: its files, whether it is live, whether this user made it, and its format."""

from cfl_ray.run_directory.directory import File, RunDirectory

__all__ = ["File", "RunDirectory"]
