"""The command line `cfl-ray`."""

import os
import sys

__all__ = ["main"]


def main(arguments: list[str] | None = None) -> None:
    """Runs the command line. Every error becomes a message and an exit status (`commands`)."""
    try:
        os.getcwd()
    except OSError:  # the libraries of PyTorch would end the process: "Cannot load libtorch_cpu.so"
        print("error: the working directory was removed; change to a folder that exists: cd", file=sys.stderr)
        sys.exit(2)
    try:
        from cfl_ray.cli import commands  # imported here, so that Ctrl-C meanwhile shows no traceback
    except KeyboardInterrupt:
        sys.exit(130)
    commands.main(arguments)
