"""With several workers (`pytest -n 2`), whatever starts Ray or measures processes goes to one of them; the rest goes to the others."""

import os
import signal

import pytest

os.environ.setdefault("RAY_AUTH_MODE", "token")  # read when ray is imported
WITH_RAY = ("runtime", "jobs", "tracking", "test_security.py", "test_readme.py", "test_cli.py")
# Started in the background by a shell, this process ignores Ctrl-C, and so would all that it starts: they are to be interrupted here.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def scope(nodeid: str) -> str:
    """What goes to one worker together: all that starts Ray, or else the tests of a file."""
    file = nodeid.partition("::")[0]
    return "ray" if file.split("/")[1] in WITH_RAY else file


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    from xdist.scheduler import LoadScopeScheduling

    class Scheduling(LoadScopeScheduling):
        def _split_scope(self, nodeid):
            return scope(nodeid)

    return Scheduling(config, log)
