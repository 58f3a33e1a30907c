"""One thread, as on a client host."""

import os
import signal
import tempfile
import time

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


@pytest.fixture(autouse=True)
def compute_thread():
    """One, as hosts have it: with several, sums in this process have other last bits."""
    with one_thread():
        yield


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    for name in ("RAY_ADDRESS", "RAY_JOB_ID", "MLFLOW_TRACKING_URI"):
        monkeypatch.delenv(name, raising=False)


def until(condition, seconds: float = 300):
    """Waits for a true value of `condition()` and returns it. The limit only bounds a test that fails."""
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < deadline, f"waited {seconds} s in vain"
        time.sleep(0.02)
    return found


@pytest.fixture(name="until")
def _until():
    return until


@pytest.fixture
def figures():
    """Returns a function: results -> every metric of every round of every method, without the seconds."""

    def of(results):
        return {
            label: [
                (record.round, {name: value for name, value in record.metrics.items() if name != "round_seconds"})
                for record in method.records
            ]
            for label, method in results.methods.items()
        }

    return of
