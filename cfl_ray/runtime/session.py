"""A session carries out one experiment, method after method: in this process, or on a Ray cluster."""

from contextlib import ExitStack
from pathlib import Path
from typing import Protocol

from cfl_ray.core.threads import one_thread
from cfl_ray.engine import choose
from cfl_ray.engine.local import InProcess
from cfl_ray.runtime.checkpoint import CheckpointStore
from cfl_ray.runtime.server import Report, Server
from cfl_ray.runtime.setup import Setup, device_of, engine_choice


class Session(Protocol):
    """What the driver asks for."""

    def begin(self, label: str) -> Report:
        """Makes a method ready: before round 1, or after its newest checkpoint."""

    def advance(self) -> Report:
        """The next round of that method."""

    def facts(self) -> dict[str, str]:
        """Where and how this session computes, for the log."""

    def close(self) -> None: ...


def store_of(setup: Setup, run_dir: Path | None, label: str) -> CheckpointStore | None:
    """The checkpoints of one method; None where nothing is kept."""
    if run_dir is None:
        return None
    return CheckpointStore(Path(run_dir) / label, setup.experiment.config_hash, setup.experiment.runtime.keep_last)


class InProcessSession:
    """Everything in this process, for notebooks, debugging and tests: the same numbers as on Ray."""

    def __init__(self, setup: Setup, run_dir: Path | None):
        self.setup, self.run_dir = setup, run_dir
        self.threads = ExitStack()
        self.threads.enter_context(one_thread())  # as a host has it
        self.device = device_of(setup.experiment, has_gpu=True)
        self.worker = setup.worker(self.device)
        self.choice = engine_choice(
            setup, self.device, lambda: choose.measure(self.worker.network, setup.federation, setup.local, setup.experiment.seed)
        )
        self.worker.engine = self.choice.engine

    def begin(self, label: str) -> Report:
        backend = InProcess(self.worker, bool(self.setup.experiment.runtime.clients_per_host))
        self.server = Server(self.setup, label, self.worker.network, backend, store_of(self.setup, self.run_dir, label))
        return self.server.advance()

    def advance(self) -> Report:
        return self.server.advance()

    def facts(self) -> dict[str, str]:
        return {"hosts": "this process", "device": self.device, "engine": self.choice.reason}

    def close(self) -> None:
        self.threads.close()
