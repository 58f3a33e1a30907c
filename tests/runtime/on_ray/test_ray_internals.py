"""Releases of Ray with which its internals are used, and clusters that start without them."""

import os
import subprocess
import sys
from contextlib import ExitStack

import pytest
import ray
from ray._private import node, ray_constants
from ray._private.runtime_env.context import RuntimeEnvContext
from ray._private.workers import setup_worker

from cfl_ray.runtime.on_ray import connect, fork_server, ray_internals

TRIED = ray_internals.TRIED
OTHERS = ["2.61.0", "2.61.0.dev0", "3.0.0.dev0", "2.60.0rc1", "2.60.0+local", "2.60.0.post1", "2.51.2", "nightly", ""]
MODULES = [*ray_internals._USED, ray_internals.WORKER_MODULE, "ray._private"]


@pytest.fixture
def start(monkeypatch):
    """Starts a cluster without Ray's processes. Returns the lines shown, Ray's class of a head and its variables."""
    monkeypatch.setattr(ray_internals, "TRIED", (*TRIED, ray.__version__))

    def start():
        shown, heads = [], []
        with ExitStack() as started, monkeypatch.context() as patch:
            patch.setattr(connect, "_fork_server", started)
            patch.setattr(connect.ray, "init", lambda **options: heads.append((node.Node, dict(os.environ))))
            connect.start_cluster(1, warn=shown.append)
        return shown, *heads[0]

    return start


def test_a_tried_release_forks_its_workers_without_a_word(start):
    shown, head, variables = start()
    assert shown == [] and head is not node.Node
    assert fork_server.SOCKET_VARIABLE in variables
    assert variables[ray_internals.SETUP_VARIABLE] == setup_worker.__file__


def check_starts_as_ray_does(start, monkeypatch, named):
    ended = []
    monkeypatch.setattr(fork_server, "_new_program", lambda: pytest.fail("a fork server was started"))
    monkeypatch.setattr(connect, "end_unused", lambda: ended.append(True))
    (line,), head, variables = start()
    assert line.startswith("workers start as Ray starts them") and named in line
    assert head is node.Node and ended == [True]
    assert not {fork_server.SOCKET_VARIABLE, ray_internals.SETUP_VARIABLE} & variables.keys()


@pytest.mark.parametrize("release", OTHERS)
def test_with_another_release_workers_start_as_ray_starts_them(release, start, monkeypatch):
    monkeypatch.setattr(ray_internals, "TRIED", TRIED)
    monkeypatch.setattr(ray, "__version__", release)
    check_starts_as_ray_does(start, monkeypatch, f"tried with Ray {TRIED[0]} to {TRIED[-1]}, and this is Ray {release}")


@pytest.mark.parametrize("module", MODULES)
def test_a_module_that_is_not_there(module, start, monkeypatch):
    if module == "ray._private":
        for below in ray_internals._USED:
            monkeypatch.setitem(sys.modules, below, None)
    monkeypatch.setitem(sys.modules, module, None)
    check_starts_as_ray_does(start, monkeypatch, f"Ray {ray.__version__} lacks ray._private.")


@pytest.mark.parametrize(
    "owner, name",
    [
        (node, "Node"),
        (node.Node, "start_api_server"),
        (node.Node, "start_monitor"),
        (node.Node, "start_log_monitor"),
        (setup_worker, "parser"),
        (RuntimeEnvContext, "deserialize"),
    ],
)
def test_a_name_that_is_not_there(owner, name, start, monkeypatch):
    monkeypatch.delattr(owner, name)
    if owner is node:
        monkeypatch.setattr(node, "Node", None, raising=False)  # the comparison of this test reads it
    check_starts_as_ray_does(start, monkeypatch, name)


def test_an_import_that_fails_in_another_way(start, monkeypatch, tmp_path):
    (tmp_path / "setup_worker.py").write_text("raise RuntimeError('no such platform')")
    monkeypatch.delitem(sys.modules, "ray._private.workers.setup_worker")
    monkeypatch.setattr(sys.modules["ray._private.workers"], "__path__", [str(tmp_path)])
    check_starts_as_ray_does(start, monkeypatch, "ray._private.workers.setup_worker")


@pytest.mark.parametrize(
    "place, changed, named",
    [
        ("node.Node.__init__", lambda self, parameters: None, "ray_params of ray._private.node.Node"),
        ("parameter.RayParams", lambda worker_setup_path: None, "setup_worker_path of ray._private.parameter"),
    ],
)
def test_arguments_of_another_name(place, changed, named, start, monkeypatch):
    monkeypatch.setattr(f"ray._private.{place}", changed)
    check_starts_as_ray_does(start, monkeypatch, f"lacks the argument {named}")


def test_a_release_without_the_constant_of_loopback(monkeypatch):
    with ray_internals.loopback_only():
        assert ray_constants.ENABLE_RAY_CLUSTER is False
    assert ray_constants.ENABLE_RAY_CLUSTER is True
    monkeypatch.delattr(ray_constants, "ENABLE_RAY_CLUSTER")
    with ray_internals.loopback_only():
        assert not hasattr(ray_constants, "ENABLE_RAY_CLUSTER")


@pytest.mark.parametrize("missing", ["module", "function"])
def test_a_head_that_keeps_no_values(missing, monkeypatch):
    from ray.experimental import internal_kv

    if missing == "module":
        monkeypatch.setitem(sys.modules, "ray.experimental.internal_kv", None)
    else:
        monkeypatch.delattr(internal_kv, "_internal_kv_get")
    assert ray_internals.at_head("get", "key") is None


RUN = """
import os, sys
import psutil, ray
from cfl_ray import Experiment, run, simulate
from cfl_ray.lifecycle.driver import Watcher
from small_runs import figures

class Shown(Watcher):
    lines, parents = [], set()
    def warn(self, text):
        self.lines.append(text)
    def round(self, label, report):
        for process in psutil.Process().children(recursive=True):
            if process.cmdline()[:1] == ["ray::ClientHost"] or process.cmdline()[0].startswith("ray::ClientHost"):
                self.parents.add(process.parent().name())

exec(sys.argv[2])
experiment = Experiment(rounds=2, methods=["fedavg"], output=sys.argv[1], runtime={"hosts": 1, "engine": "sequential"},
                        data={"source": "synthetic", "synthetic_shape": [8], "partition": {"clients": 4}},
                        model={"options": {"hidden": 8}}, tracking={"enabled": False, "report": False})
shown = Shown()
on_ray, here = run(experiment, watcher=shown), simulate(experiment)
assert figures(on_ray.methods["fedavg"]) == figures(here.methods["fedavg"])
assert shown.parents == {"raylet"}, shown.parents
(line,) = [line for line in shown.lines if "as Ray starts them" in line]
print(line)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "change, named",
    [
        ("ray.__version__ = '3.0.0.dev0'", "this is Ray 3.0.0.dev0"),
        ("sys.modules['ray._private.workers.setup_worker'] = None", "lacks ray._private.workers.setup_worker"),
    ],
    ids=["another release", "a missing module"],
)
def test_a_run_without_internals(change, named, tmp_path):
    paths = os.pathsep.join([*filter(None, [os.environ.get("PYTHONPATH")]), *filter(None, sys.path)])
    done = subprocess.run(
        [sys.executable, "-c", RUN, tmp_path, change],
        env=os.environ | {"PYTHONPATH": paths},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0 and named in done.stdout, done.stderr
