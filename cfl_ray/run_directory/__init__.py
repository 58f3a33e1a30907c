"""The run directory: its files, whether it is live, whether this user made it, and its format."""

from cfl_ray.run_directory.directory import RUNS_OF_STUDY, File, RunDirectory, UntrustedError, check_inside

__all__ = ["RUNS_OF_STUDY", "File", "RunDirectory", "UntrustedError", "check_inside"]
