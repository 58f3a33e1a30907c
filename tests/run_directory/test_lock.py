"""A run is live as long as the process of its driver."""

import subprocess
import sys

import pytest

from cfl_ray.errors import RunError
from cfl_ray.run_directory.lock import hold, is_held

HOLDER = """
import sys, time
from pathlib import Path
from cfl_ray.run_directory.lock import hold

with hold(Path(sys.argv[1])):
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
    assert holder.stdout.readline() == "held\n" and is_held(config)
    with pytest.raises(RunError, match="is live already; see it with: cfl-ray status"), hold(config):
        pass
    holder.kill()
    holder.wait()
    assert not is_held(config)


def test_looking_does_not_hold_it(config):
    assert not is_held(config)
    with hold(config):
        assert is_held(config) and is_held(config)
    assert not is_held(config)
