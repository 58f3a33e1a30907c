"""One Ray for all tests of this folder and its subfolders, and a view of the processes."""

import os
import sys
import threading
from pathlib import Path

import psutil
import pytest

os.environ.setdefault("RAY_AUTH_MODE", "token")  # read when ray is imported

from cfl_ray.plugins.loading import load_plugin

HERE = Path(__file__).parent
CPUS, GPUS = 6, 1  # logical: no test needs the hardware
PLUGIN = load_plugin(f"{HERE / 'logged.py'}:LoggedFederation", "federation").__module__


@pytest.fixture(scope="package")  # for pytest the session, since these folders hold no __init__.py
def cluster():
    """Address of the Ray started for these tests; every `run` in this process joins it."""
    import ray

    from cfl_ray.runtime.on_ray.connect import end_cluster, start_cluster

    start_cluster(CPUS, gpus=GPUS)
    yield ray.get_runtime_context().gcs_address
    end_cluster()


@pytest.hookimpl(trylast=True)  # after the fixtures of the module
def pytest_runtest_teardown(item, nextitem):
    """The cluster ends with the last file that uses it: an idle one takes a thirtieth of a core, for minutes."""
    if nextitem is None or nextitem.path == item.path or "ray" not in sys.modules:
        return
    later = item.session.items[item.session.items.index(nextitem) :]
    if not any("cluster" in other.fixturenames for other in later if isinstance(other, pytest.Function)):
        from cfl_ray.runtime.on_ray.connect import end_cluster

        end_cluster()


@pytest.fixture(scope="module")
def two_hosts(cluster):
    """Returns a function: Setup -> RayBackend over two hosts, with the server in this process."""
    import ray

    from cfl_ray.runtime.on_ray.host_actor import host_environment, start_host
    from cfl_ray.runtime.on_ray.pool import Pool
    from cfl_ray.runtime.on_ray.ray_backend import RayBackend

    pools = []

    def start(setup) -> RayBackend:
        setup_ref = ray.put(setup)
        pools.append(Pool(setup))
        with host_environment(None):  # that of the cluster
            hosts = [start_host(setup.experiment.runtime, setup_ref) for _ in range(2)]
        pools[-1].start(hosts, setup_ref)
        pools[-1].nodes()
        return RayBackend(pools[-1])

    yield start
    for pool in pools:
        pool.stop()


@pytest.fixture(scope="module", autouse=True)
def previous_actors_have_ended():
    """Tests count and kill the actors of this process; Ray ends those of the previous module in the background."""
    psutil.wait_procs([psutil.Process(pid) for kind in ("ClientHost", "ServerActor") for pid in actors(kind)], 60)


@pytest.fixture
def logged(tmp_path):
    """Makes a LoggedFederation whose log is `logged.log`."""
    module = sys.modules[PLUGIN]

    def make(clients: int = 12, **faults):
        return module.LoggedFederation(clients, make.log, **faults)

    make.log = str(tmp_path / "read.log")
    make.read = lambda: module.read(make.log)
    make.end = module.end
    return make


def actors(kind: str, of: int | None = None) -> list[int]:
    """Process ids of the actors of a class below process `of` (None: this one)."""
    parent, title = {}, {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parent[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
                title[int(entry.name)] = (entry / "cmdline").read_bytes().split(b"\0")[0].decode(errors="replace")
            except OSError:
                continue

    def below(pid: int) -> bool:
        while pid in parent:
            if pid == (of or os.getpid()):
                return True
            pid = parent[pid]
        return False

    return sorted(pid for pid, name in title.items() if name.startswith(f"ray::{kind}") and below(pid))


@pytest.fixture(name="actors")
def _actors():
    return actors


@pytest.fixture
def memory(actors):
    """Returns a sampler: `with memory(kind) as peak` sets peak[0] to the largest private memory (bytes)."""

    class Sampler:
        def __init__(self, kind):
            self.kind, self.peak, self.stop = kind, [0], threading.Event()

        def __enter__(self):
            self.thread = threading.Thread(target=self.sample, daemon=True)
            self.thread.start()
            return self.peak

        def __exit__(self, *_):
            self.stop.set()
            self.thread.join()

        def sample(self):
            looks = 0
            while not self.stop.wait(0.05):
                if looks % 10 == 0:  # a look at all processes of the machine takes long
                    pids = actors(self.kind)
                self.peak[0] = max([self.peak[0], *map(private, pids)])
                looks += 1

    return Sampler


def private(pid: int) -> int:
    """Bytes of the private memory of a process."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon:"))


@pytest.fixture
def meanwhile():
    """Runs functions in threads beside the test; an error in one of them fails it."""
    threads, errors = [], []

    def start(function):
        def guarded():
            try:
                function()
            except BaseException as error:
                errors.append(error)

        threads.append(threading.Thread(target=guarded, daemon=True))
        threads[-1].start()

    yield start
    for thread in threads:
        thread.join(60)
    assert not errors and not any(thread.is_alive() for thread in threads), errors
