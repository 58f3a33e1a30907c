"""The run directory: its files, whether it is live, whether this user made it, and its format."""

from cfl_ray.run_directory.directory import File, RunDirectory, UntrustedError, check_inside

__all__ = ["File", "RunDirectory", "UntrustedError", "check_inside"]
