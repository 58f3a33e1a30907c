"""A run is live as long as the process of its driver."""

import subprocess
import sys

import pytest

from cfl_ray.errors import RunError
from cfl_ray.runtime.run_lock import hold_run, is_live

HOLDER = """
import sys, time
from pathlib import Path
from cfl_ray.runtime.run_lock import hold_run

with hold_run(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(600)
"""


@pytest.fixture
def config(tmp_path):
    (tmp_path / "config.yaml").write_text("name: small\n")
    return tmp_path / "config.yaml"


def test_is_held_until_the_process_ends(config):
    """SIGKILL included, which leaves a process no time to clean up."""
    holder = subprocess.Popen([sys.executable, "-c", HOLDER, config], stdout=subprocess.PIPE, text=True)
    assert holder.stdout.readline() == "held\n" and is_live(config)
    with pytest.raises(RunError, match="is live already; see it with: cfl-ray status"), hold_run(config):
        pass
    holder.kill()
    holder.wait()
    assert not is_live(config)


def test_looking_does_not_hold_it(config):
    assert not is_live(config)
    with hold_run(config):
        assert is_live(config) and is_live(config)
    assert not is_live(config)
