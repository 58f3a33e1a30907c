"""Workers that are forked from a process which has imported PyTorch, and workers that cannot be."""

import json
import os
import signal
import subprocess
import sys
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import NamedTuple

import psutil
import pytest
import ray
from ray._private.runtime_env.context import RuntimeEnvContext

from cfl_ray import run
from cfl_ray.runtime.on_ray import fork_server, ray_internals
from cfl_ray.runtime.on_ray.fork_server import WORKER_PROGRAM

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="nothing is forked elsewhere")

ABOUT = """
import gc, json, os, resource, sys
from threadpoolctl import threadpool_info
imported = [name for name in ("torch", "ray", "cfl_ray.methods") if name in sys.modules]
import random
print(json.dumps({
    "imported": imported, "name": __name__, "arguments": sys.argv, "path": sys.path, "parent": os.getppid(),
    "own group": os.getpgid(0) == os.getpid(), "job": os.environ["RAY_JOB_ID"], "read": sys.stdin.read(),
    "draw": random.random(), "threads": os.environ.get("OMP_NUM_THREADS"), "gc": gc.get_threshold(),
    "most threads": max((pool["num_threads"] for pool in threadpool_info()), default=0),
    "files": resource.getrlimit(resource.RLIMIT_NOFILE)[0],
    "parent's command": open(f"/proc/{os.getppid()}/cmdline").read().split("\\0"),
}))
"""
# in the place of Ray's setup_worker.py
NEW = "import json, sys; print(json.dumps({'imported': 'nothing', 'arguments': sys.argv[1:]}))"


WAITS = "import os, time; print(os.getpid(), flush=True); time.sleep(600)"


@pytest.fixture(scope="module")
def started(tmp_path_factory):
    """The folder of the programs that Ray starts, and the environment of its cluster.

    At its end the fork server leaves no file and no fork, not even a halted one.
    """
    folder = tmp_path_factory.mktemp("workers")
    for name, source in (("about.py", ABOUT), ("setup_worker.py", NEW), ("waits.py", WAITS)):
        (folder / name).write_text(source)
    (sockets := folder / "sockets").mkdir()
    with ExitStack() as ends_last:
        with fork_server.fork_server(sockets) as variables:
            program = {ray_internals.SETUP_VARIABLE: str(folder / "setup_worker.py")}
            given = folder, os.environ | variables | program | {"RAY_JOB_ID": "ffffffff"}
            yield given
            _, fork = ends_last.enter_context(sleeping(given))
            server = fork.parent()
            assert server.cmdline()[1] == fork_server.__file__ and list(sockets.iterdir())
            fork.suspend()
        assert not server.is_running() and not list(sockets.iterdir())
        fork.wait(60)


def fork_servers():
    """Those of this process; without those whose command line the kernel does not show yet."""

    def commands(child):
        try:
            return child.cmdline()
        except psutil.Error:  # it has ended
            return []

    return [child for child in psutil.Process().children() if fork_server.__file__ in commands(child)]


def output_of_worker(started, *arguments, language="PYTHON", **variables):
    """The output of about.py as a worker that Ray starts with these arguments; of setup_worker.py if it is no fork."""
    folder, environment = started
    command = [sys.executable, WORKER_PROGRAM, str(folder / "about.py"), *arguments, f"--language={language}"]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    process = subprocess.Popen(command, env=environment | variables, **pipes)
    return json.loads(process.communicate("given", timeout=180)[0])


def test_a_worker_is_forked_and_is_as_a_new_program(started):
    folder, environment = started
    first, second = (
        output_of_worker(started, "--node-id=5"),
        output_of_worker(started, "--node-id=6", RAY_JOB_ID="01000000"),
    )
    assert first["imported"] == ["torch", "ray", "cfl_ray.methods"]
    assert (first["name"], first["read"]) == ("__main__", "given")
    assert first["arguments"] == [str(folder / "about.py"), "--node-id=5"] and second["arguments"][1] == "--node-id=6"
    usual = subprocess.check_output([sys.executable, folder / "about.py"], env=environment, stdin=subprocess.DEVNULL)
    assert first["path"] == second["path"] == json.loads(usual)["path"]
    assert (first["job"], second["job"]) == (ray.JobID.nil().hex(), "01000000")
    assert first["own group"] and first["parent"] == second["parent"] != os.getpid()
    assert first["draw"] != second["draw"]


@pytest.mark.parametrize(
    "context",
    [{"env_vars": {"OMP_NUM_THREADS": "7"}}, {"command_prefix": ["nice"]}, {"py_executable": "/other/python"}],
    ids=["variable", "prefix", "python"],
)
def test_a_worker_with_a_runtime_environment_is_a_new_program(started, context):
    wanted = f"--serialized-runtime-env-context={RuntimeEnvContext(**context).serialize()}"
    output = output_of_worker(started, wanted)
    assert output["imported"] == "nothing" and output["arguments"][1:] == [wanted, "--language=PYTHON"]


def test_a_worker_with_another_environment_or_language_is_a_new_program(started):
    assert output_of_worker(started)["imported"] != "nothing"
    assert output_of_worker(started, OMP_NUM_THREADS="7")["imported"] == "nothing"
    assert output_of_worker(started, language="JAVA")["arguments"][1:] == ["--language=JAVA"]


def test_a_worker_needs_no_fork_server(started, until, tmp_path):
    folder, environment = started
    nowhere, before = environment | {fork_server.SOCKET_VARIABLE: str(tmp_path / "gone")}, fork_servers()
    assert output_of_worker((folder, nowhere))["imported"] == "nothing"
    with fork_server.fork_server(tmp_path) as variables:
        (server,) = until(lambda: [server for server in fork_servers() if server not in before])
        assert output_of_worker((folder, environment | variables))["parent"] == server.pid
        server.kill()
        server.wait()
        assert output_of_worker((folder, environment | variables))["imported"] == "nothing"
    assert not list(tmp_path.iterdir())


def test_a_fork_server_that_dies_before_its_use_is_not_needed(started, tmp_path, monkeypatch):
    folder, environment = started
    process = fork_server._new_program()
    os.kill(process.pid, signal.SIGKILL)
    os.waitpid(process.pid, 0)
    monkeypatch.setattr(fork_server, "_forked_or_new", lambda: process)
    with fork_server.fork_server(tmp_path) as variables:
        assert output_of_worker((folder, environment | variables))["imported"] == "nothing"


@contextmanager
def sleeping(started):
    """Context of a worker that sleeps: the process that Ray started, and its fork."""
    folder, environment = started
    command = [sys.executable, WORKER_PROGRAM, str(folder / "waits.py"), "--language=PYTHON"]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as program:
        fork = psutil.Process(int(program.stdout.readline()))
        yield program, fork
        program.kill()


@pytest.fixture
def waiting(started):
    with sleeping(started) as processes:
        yield processes


def test_a_halted_fork_ends_with_the_process_that_ray_started(waiting, until):
    program, fork = waiting
    fork.suspend()
    program.kill()
    until(lambda: not fork.is_running())


def test_the_process_that_ray_started_ends_with_its_fork(waiting):
    program, fork = waiting
    fork.kill()
    assert program.wait(60) == 0


WORKER = f"""
    command = [sys.executable, {WORKER_PROGRAM!r}, str(folder / "waits.py"), "--language=PYTHON"]
    program = subprocess.Popen(command, env=os.environ | variables, stdout=subprocess.PIPE, text=True)
    fork = int(program.stdout.readline())
    os.kill(fork, signal.SIGSTOP)
    print(fork, flush=True)
    sys.stdin.read()
"""
DRIVER = f"""
import os, pathlib, signal, subprocess, sys
from cfl_ray.runtime.on_ray.fork_server import fork_server
folder = pathlib.Path(sys.argv[1])
with fork_server(folder / "sockets") as variables:
{WORKER}
"""
FORKED_DRIVER = f"""
import gc, os, resource
import cfl_ray.cli.run_commands
from cfl_ray.system.variables import ONE_THREAD
from cfl_ray.runtime.on_ray.fork_server import forkable_imports
gc.set_threshold(50_000)
resource.setrlimit(resource.RLIMIT_NOFILE, (256, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
before = dict(os.environ)
with forkable_imports():
    import cfl_ray.lifecycle.launch
assert os.environ == before
os.environ |= ONE_THREAD
import pathlib, signal, subprocess, sys
from cfl_ray.runtime.on_ray.fork_server import fork_server
folder = pathlib.Path(sys.argv[1])
os.environ |= {{"RAY_AUTH_MODE": "token", "MLFLOW_TRACKING_URI": ""}}
with fork_server(folder / "sockets") as variables:
    for _ in range(2):
        command = [sys.executable, {WORKER_PROGRAM!r}, str(folder / "about.py"), "--node-id=5", "--language=PYTHON"]
        subprocess.run(command, env=os.environ | variables | {{"RAY_JOB_ID": "ffffffff"}}, stdin=subprocess.DEVNULL)
{WORKER}
"""


def assert_it_ends_with(driver, fork, folder, is_forked):
    """After a kill of the driver there is no fork server, no file and no fork, not even a halted one."""
    server = fork.parent()
    assert list((folder / "sockets").iterdir())
    assert (server.cmdline()[1] == "-c") == is_forked
    driver.kill()
    driver.communicate()
    server.wait(60)
    fork.wait(60)
    assert not list((folder / "sockets").iterdir())


@pytest.fixture
def start_driver(tmp_path):
    """Returns a function that starts a program, which prints what its workers print."""
    for name, source in (("about.py", ABOUT), ("waits.py", WAITS)):
        (tmp_path / name).write_text(source)
    (tmp_path / "sockets").mkdir()
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    return lambda source, **options: subprocess.Popen([sys.executable, "-c", source, tmp_path], **pipes, **options)


def test_it_ends_with_its_killed_driver_and_leaves_no_file_and_no_fork(start_driver, tmp_path):
    driver = start_driver(DRIVER)
    fork = psutil.Process(int(driver.stdout.readline()))
    assert_it_ends_with(driver, fork, tmp_path, is_forked=False)


def test_a_program_that_begins_is_forked(start_driver, tmp_path):
    environment = {name: value for name, value in os.environ.items() if "THREADS" not in name}
    driver = start_driver(FORKED_DRIVER, env=environment)
    first, second, fork = (json.loads(driver.stdout.readline()) for _ in range(3))
    usual = subprocess.check_output(
        [sys.executable, tmp_path / "about.py"], env=environment | {"RAY_JOB_ID": ""}, stdin=subprocess.DEVNULL
    )
    for worker in (first, second):
        assert worker["imported"] == ["torch", "ray", "cfl_ray.methods"] and worker["name"] == "__main__"
        assert worker["path"] == json.loads(usual)["path"] and worker["threads"] == "1"
        assert worker["most threads"] == 1, "in all libraries that compute"
        assert worker["gc"] == json.loads(usual)["gc"] and worker["files"] > 256
        assert worker["own group"] and worker["arguments"] == [str(tmp_path / "about.py"), "--node-id=5"]
        assert "-c" in worker["parent's command"], "the fork server is a fork of the program"
    assert first["draw"] != second["draw"]
    assert_it_ends_with(driver, psutil.Process(fork), tmp_path, is_forked=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["about.py", "sockets", "waits.py"]


@pytest.mark.parametrize("earlier", ["torch", "ray"])
def test_a_program_that_has_imported_a_library_is_not_forked(earlier, monkeypatch):
    monkeypatch.setattr(
        sys, "modules", {name: sys.modules[name] for name in sys.modules if name not in ("torch", "ray")}
    )
    monkeypatch.setitem(sys.modules, earlier, None)
    monkeypatch.setattr(fork_server.threading, "active_count", lambda: 1)
    monkeypatch.setattr(fork_server, "_fork", lambda: pytest.fail("forked"))
    with fork_server.forkable_imports():
        pass


@pytest.mark.parametrize(
    "changes, fits",
    [
        ({}, True),
        ({"RAY_AUTH_MODE": "token", "CFL_RAY_HOME": "/", "MLFLOW_TRACKING_URI": "", "GIT_PYTHON_REFRESH": ""}, True),
        ({"KMP_DUPLICATE_LIB_OK": "True", "KMP_INIT_AT_FORK": "FALSE"}, True),  # an import of scikit-learn
        ({"OPENBLAS_CORETYPE": "Haswell"}, False),
        ({"OMP_NUM_THREADS": "7"}, False),
        ({"CUDA_VISIBLE_DEVICES": ""}, False),
    ],
)
def test_a_fork_is_used_unless_libraries_would_be_imported_in_another_way(changes, fits, monkeypatch):
    ended, new = [], object()

    class Waiting(NamedTuple):
        environment: dict

        def end(self):
            ended.append(self)

    forked = Waiting({name: value for name, value in os.environ.items() if not name.startswith("KMP_")})
    monkeypatch.setattr(fork_server, "_forked", [forked])
    monkeypatch.setattr(fork_server, "_new_program", lambda: new)
    for name, value in changes.items():
        monkeypatch.setenv(name, value)
    assert fork_server._forked_or_new() is (forked if fits else new)
    assert ended == ([] if fits else [forked]) and not fork_server._forked


def test_a_fork_that_no_cluster_uses_ends(monkeypatch):
    ended = []
    monkeypatch.setattr(fork_server, "_forked", [SimpleNamespace(end=lambda: ended.append(True))])
    fork_server.end_unused()
    assert ended == [True] and not fork_server._forked


@pytest.mark.skipif(bool(ray_internals.why_not()), reason="this release of Ray has not been tried")
def test_hosts_and_server_of_a_run_are_forked(cluster, experiment, actors, notes, tmp_path):
    parents = set()

    def look(round):
        parents.update(psutil.Process(pid).ppid() for kind in ("ClientHost", "ServerActor") for pid in actors(kind))

    run(experiment(runtime={"hosts": 2}), tmp_path / "run", notes(look))
    assert len(parents) == 1 and parents <= {server.pid for server in fork_servers()}
