"""One thread, as on a client host."""

import os
import signal
import tempfile

import pytest

from cfl_ray.system.threads import one_thread

os.environ.setdefault("RAY_AUTH_MODE", "token")  # read when ray is imported
# The user's own folder; processes that tests start use it too.
if "CFL_RAY_HOME" not in os.environ:
    os.environ["CFL_RAY_HOME"] = tempfile.mkdtemp(prefix="cfl_ray_home-")
# A process that a shell starts in the background ignores Ctrl-C, and so do all that it starts: tests interrupt these.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session", autouse=True)
def single_thread():
    with one_thread():
        yield
