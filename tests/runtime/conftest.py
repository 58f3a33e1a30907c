"""One Ray of our own for all tests of this folder, experiments that take a second, and a view of the processes at work."""

import os
import sys
import threading
import time
from pathlib import Path

import pytest

os.environ.setdefault("RAY_AUTH_MODE", "token")  # read when ray is imported

from cfl_ray import Experiment
from cfl_ray.core.plugin import load_plugin
from cfl_ray.runtime.driver import Watcher

HERE = Path(__file__).parent
CPUS, GPUS = 6, 1  # logical: no test needs the hardware
PLUGIN = load_plugin(f"{HERE / 'logged.py'}:LoggedFederation", "federation").__module__


@pytest.fixture(scope="package")
def cluster():
    """Address of a Ray started for these tests; every `run` in this process joins it."""
    import ray

    ray.init(
        address="local", num_cpus=CPUS, num_gpus=GPUS, include_dashboard=False, _node_ip_address="127.0.0.1", log_to_driver=False, logging_level="error"
    )
    yield ray.get_runtime_context().gcs_address
    ray.shutdown()


@pytest.fixture(scope="module")
def two_hosts(cluster):
    """Returns a function: what an experiment was prepared to -> its port over two hosts, with the server in this process."""
    import ray

    from cfl_ray.runtime.actors import begin_host
    from cfl_ray.runtime.pool import Pool
    from cfl_ray.runtime.port import OnRay

    pools = []

    def start(setup) -> OnRay:
        setup_ref = ray.put(setup)
        pools.append(Pool(setup))
        pools[-1].start([begin_host(setup.experiment.runtime, setup_ref) for _ in range(2)], setup_ref)
        pools[-1].nodes()
        return OnRay(pools[-1])

    yield start
    for pool in pools:
        pool.stop()


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    for name in ("RAY_ADDRESS", "RAY_JOB_ID", "MLFLOW_TRACKING_URI"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def experiment(tmp_path):
    """Makes a small experiment; sections are merged into these defaults."""

    def make(**changes) -> Experiment:
        values = {
            "name": "small", "rounds": 4, "methods": ["ditto"], "model": {"options": {"hidden": 16}}, "output": str(tmp_path),
            "data": {"source": "synthetic", "synthetic_shape": [8], "synthetic_samples": 20, "partition": {"clients": 12}},
            "local": {"epochs": 2, "batch_size": 8, "momentum": 0.9}, "cohort": {"fraction": 0.75},
            "runtime": {"engine": "sequential", "hosts": 2}, "tracking": {"enabled": False},
        }  # fmt: skip
        for key, value in changes.items():
            merge = isinstance(value, dict) and isinstance(values.get(key), dict)
            values[key] = values[key] | value if merge else value
        return Experiment(**values)

    return make


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


@pytest.fixture
def figures():
    """Returns a function: results -> every metric of every round of every method, but the seconds."""

    def of(results):
        return {
            label: [(record.round, {name: value for name, value in record.metrics.items() if name != "round_seconds"}) for record in method.records]
            for label, method in results.methods.items()
        }

    return of


class Notes(Watcher):
    """Keeps what a run says, and does something after each round."""

    def __init__(self, after_round=lambda number: None):
        self.lines, self.rounds, self.facts, self.after_round = [], [], {}, after_round

    def started(self, setup, run_dir, facts):
        self.facts = facts

    def method(self, label, report):
        self.lines += report.notes

    def round(self, label, report):
        self.lines += report.notes
        self.rounds.append(report.round)
        self.after_round(report.round)


@pytest.fixture
def notes():
    return Notes


def actors(kind: str, of: int | None = None) -> list[int]:
    """Process ids of the actors of a class that are below process `of` (None: this one)."""
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
    """Returns a sampler: `with memory(kind) as peak` puts the largest private memory (bytes) of any actor of the class in peak[0]."""

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
            while not self.stop.wait(0.05):
                self.peak[0] = max([self.peak[0], *map(private, actors(self.kind))])

    return Sampler


def private(pid: int) -> int:
    """Bytes of memory that a process shares with nobody."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon:"))


def until(condition, seconds: float = 60):
    """Waits for a true value of `condition()` and returns it."""
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.02)
    return found


@pytest.fixture(name="until")
def _until():
    return until


@pytest.fixture
def meanwhile():
    """Runs functions beside the test; what they raise fails it."""
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
