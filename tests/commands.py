"""Commands that run in this process."""

import pytest

from cfl_ray.cli import main


def status_of(*arguments: object) -> int:
    """Exit status of `cfl-ray ARGUMENTS`."""
    with pytest.raises(SystemExit) as ended:
        main([str(one) for one in arguments])
    return ended.value.code or 0


def call(capture: pytest.CaptureFixture, *arguments: object) -> tuple[int, str, str]:
    """The same, and what the command wrote to standard output and to standard error."""
    status = status_of(*arguments)
    printed = capture.readouterr()
    return status, printed.out, printed.err
