"""The command line `cfl-ray`."""

from cfl_ray.cli.commands import main

__all__ = ["main"]
