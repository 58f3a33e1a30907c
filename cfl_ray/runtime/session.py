"""A session carries out one experiment, method after method: in this process, or on a Ray cluster."""

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Protocol

from cfl_ray.core.threads import one_thread
from cfl_ray.engine import autotune
from cfl_ray.engine.in_process import InProcessBackend
from cfl_ray.runtime.checkpoint.store import CheckpointStore
from cfl_ray.runtime.prepare import Setup, compute_device, engine_choice
from cfl_ray.runtime.round_loop import RoundLoop, RoundReport
from cfl_ray.runtime.trained import TrainedMethod


class Session(Protocol):
    """Carries out the methods of one experiment, as the driver asks."""

    def begin(self, label: str) -> RoundReport:
        """Makes a method ready: before round 1, or after its newest checkpoint."""

    def advance(self) -> RoundReport:
        """Goes through the next round of that method."""

    def facts(self) -> dict[str, str]:
        """Hosts, device and engine of this session, in words."""

    def trained(self) -> Callable[[], TrainedMethod] | None:
        """Opens what the present method has learned, where it is in this process; None: it is in checkpoints only."""

    def close(self) -> None:
        """Frees what the session holds; it cannot be used afterwards."""


def checkpoint_store(setup: Setup, run_dir: Path | None, label: str) -> CheckpointStore | None:
    """The checkpoints of one method; None where no files are kept."""
    if run_dir is None:
        return None
    return CheckpointStore(Path(run_dir) / label, setup.experiment.config_hash, setup.experiment.runtime.keep_last)


def claimed_store(setup: Setup, run_dir: Path | None, label: str) -> CheckpointStore | None:
    """The same, for the process that goes on with the run: a server that it replaces can no longer save."""
    if (store := checkpoint_store(setup, run_dir, label)) is not None:
        store.claim()
    return store


class InProcessSession:
    """A session in this process, for notebooks, debugging and tests: the same numbers as on Ray."""

    def __init__(self, setup: Setup, run_dir: Path | None):
        self.setup, self.run_dir = setup, run_dir
        self.threads = ExitStack()
        self.threads.enter_context(one_thread())  # as on a host
        self.device = compute_device(setup.experiment, has_gpu=True)
        self.worker = setup.worker(self.device)
        self.choice = engine_choice(
            setup,
            self.device,
            lambda: autotune.measure(
                self.worker.network, setup.federation, setup.local, setup.experiment.seed, setup.division
            ),
        )
        self.worker.engine = self.choice.engine

    def begin(self, label: str) -> RoundReport:
        backend = InProcessBackend(self.worker, bool(self.setup.experiment.runtime.clients_per_host))
        store = claimed_store(self.setup, self.run_dir, label)
        self.loop = RoundLoop(self.setup, label, self.worker.network, backend, store)
        self.backend = backend
        return self.loop.advance()

    def trained(self) -> Callable[[], TrainedMethod] | None:
        method = TrainedMethod(self.setup, self.loop, self.backend)
        return lambda: method

    def advance(self) -> RoundReport:
        return self.loop.advance()

    def facts(self) -> dict[str, str]:
        return {"hosts": "this process", "device": self.device, "engine": self.choice.reason}

    def close(self) -> None:
        self.threads.close()
