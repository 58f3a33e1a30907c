"""Clusters that a run starts: the folder of their sessions, and one that does not start."""

import subprocess
import sys
from pathlib import Path

import pytest
from ray._private import node

from cfl_ray.errors import ConfigError, RunError
from cfl_ray.runtime.on_ray import connect, ray_internals

pytestmark = pytest.mark.usefixtures("no_fork_server")


@pytest.fixture
def own_cluster(monkeypatch):
    """Returns a function that sets what `ray.init` does for a cluster that `connect(None)` starts, on loopback."""

    def starts(init, address="127.0.0.1"):
        monkeypatch.setattr(connect.ray, "is_initialized", lambda: False)
        monkeypatch.setattr(connect.ray, "shutdown", lambda: None)  # other tests share a cluster
        monkeypatch.setattr(connect.ray, "init", init)
        monkeypatch.setattr(connect.ray, "nodes", lambda: [{"NodeManagerAddress": address}])
        monkeypatch.setattr(connect, "cluster_address", lambda address: None)

    return starts


def test_the_session_folder_is_the_users_alone(tmp_path, monkeypatch):
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    folder = connect.session_folder().parent
    assert folder.parent == tmp_path and folder.stat().st_mode & 0o777 == 0o700
    assert connect.session_folder() == folder / "ray"
    folder.chmod(0o777)
    with pytest.raises(ConfigError, match="is not a folder that only you can enter"):
        connect.session_folder()
    folder.chmod(0o700)
    monkeypatch.setattr(connect.os, "geteuid", lambda: folder.stat().st_uid + 1)  # it belongs to another user
    folder = folder.rename(tmp_path / f"cfl_ray-{connect.os.geteuid()}")
    with pytest.raises(ConfigError, match="is not a folder that only you can enter"):
        connect.session_folder()
    monkeypatch.undo()
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    folder = folder.rename(tmp_path / f"cfl_ray-{connect.os.geteuid()}")
    folder.rmdir()
    folder.symlink_to(tmp_path)
    with pytest.raises(ConfigError, match="is not a folder that only you can enter"):
        connect.session_folder()


def test_a_folder_that_others_can_enter_is_an_error_of_the_input(tmp_path, monkeypatch):
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    monkeypatch.setattr(connect.ray, "is_initialized", lambda: False)
    monkeypatch.setattr(connect.ray, "shutdown", lambda: None)  # other tests share a cluster
    monkeypatch.setattr(connect, "cluster_address", lambda address: None)
    connect.session_folder().parent.chmod(0o777)
    with pytest.raises(ConfigError, match="is not a folder that only you can enter"):
        connect.connect(None)


def test_a_folder_with_a_long_name_is_named_with_the_longest_that_fits(tmp_path, monkeypatch, own_cluster):
    """As the TMPDIR of a batch job: the paths of sockets are shorter than those of files."""
    below = f"/cfl_ray-{connect.os.geteuid()}/ray/{connect._LONGEST_SOCKET}".format(pid=connect.os.getpid())
    most, name = 107 - len(below), f"{tmp_path}/ö"
    Path(name).mkdir()
    monkeypatch.setenv("RAY_TMPDIR", name)
    own_cluster(lambda **options: pytest.fail("Ray would start"))
    bytes = len(name) + 1
    with pytest.raises(RunError, match=f"ö is too long .*: {bytes} bytes, at most {most}; set RAY_TMPDIR to a shorter"):
        connect.connect(None)


def test_a_full_disk_of_the_session_is_named_before_ray_starts(monkeypatch, own_cluster):
    usage = connect.shutil.disk_usage("/")
    monkeypatch.setattr(connect.shutil, "disk_usage", lambda folder: usage._replace(free=3_000_000))
    own_cluster(lambda **options: pytest.fail("Ray would start"))
    with pytest.raises(RunError, match=r"cfl_ray-\d+ has room for 3 MB, and the logs of Ray need 20 MB; make room, or"):
        connect.connect(None)


def test_a_cluster_of_a_run_has_its_session_there(own_cluster):
    started = {}
    own_cluster(lambda **options: started.update(options))
    assert connect.connect(None)
    assert started["_temp_dir"] == str(connect.session_folder())


def test_a_cluster_of_a_run_has_no_processes_that_no_run_uses(own_cluster, monkeypatch):
    of_ray, heads = node.Node, []
    monkeypatch.setattr(ray_internals, "TRIED", (connect.ray.__version__,))
    own_cluster(lambda **options: heads.append(node.Node))
    assert connect.connect(None) and node.Node is of_ray, "other clusters have Ray's own head"
    left_out = {name for name in vars(heads[0]) if name.startswith("start_")}
    assert left_out == {"start_api_server", "start_monitor", "start_log_monitor"} <= set(vars(of_ray))


@pytest.mark.parametrize("address, warnings", [("127.0.0.1", 0), ("10.0.0.7", 1)])
def test_a_cluster_that_others_can_reach_is_a_warning(address, warnings, own_cluster):
    shown = []
    own_cluster(lambda **options: None, address)
    assert connect.connect(None, warn=shown.append)
    assert len([line for line in shown if "listens on all addresses of this machine" in line]) == warnings


@pytest.mark.parametrize(
    "error, says, tries",
    [
        (Exception("The node timed out during startup."), "The node timed out.*try again", 2),  # after 30 s
        (
            PermissionError(13, "Permission denied", str(Path.home() / ".ray")),
            r"Permission denied: .*\.ray.*; .*set HOME to",
            1,
        ),
    ],
)
def test_a_cluster_that_does_not_start_is_an_error_of_the_run(error, says, tries, monkeypatch):
    def fail(**options):
        raise error

    shut_down = []
    monkeypatch.setattr(connect.ray, "shutdown", lambda: shut_down.append(True))  # other tests share a cluster
    monkeypatch.setattr(connect.ray, "is_initialized", lambda: False)
    monkeypatch.setattr(connect.ray, "init", fail)
    monkeypatch.setattr(connect, "cluster_address", lambda address: None)
    with pytest.raises(RunError, match=f"Ray does not start on this machine .*{says}"):
        connect.connect(None)
    assert shut_down == [True] * tries, "what has started ends"


def test_a_start_that_ray_gives_up_is_tried_again_and_leaves_no_process(own_cluster):
    started, shown = [], []

    def init(**options):
        command = [sys.executable, "-c", "input()", options["_temp_dir"]]
        started.append(subprocess.Popen(command, stdin=subprocess.PIPE))
        if len(started) == 1:
            raise Exception("The node timed out during startup.")

    other = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    own_cluster(init)
    assert connect.connect(None, warn=shown.append)
    assert shown == ["Ray has not started (The node timed out during startup.); it is tried again"]
    assert started[0].poll() is not None and [process.poll() for process in (started[1], other)] == [None, None]
    for process in (started[1], other):
        process.communicate()
