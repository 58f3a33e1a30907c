"""The command line `cfl-ray`."""

import sys

__all__ = ["main"]


def main(arguments: list[str] | None = None) -> None:
    """Runs the command line. Every error becomes a message and an exit status (`commands`)."""
    try:
        from cfl_ray.cli import commands  # imported here, so that Ctrl-C meanwhile shows no traceback
    except KeyboardInterrupt:
        sys.exit(130)
    commands.main(arguments)
