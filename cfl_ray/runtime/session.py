"""Sessions, which run the methods of an experiment one after another: in this process, or on a Ray cluster."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from inspect import getmembers, isfunction
from pathlib import Path
from typing import Any, Protocol

from cfl_ray.checkpoint.store import CheckpointStore
from cfl_ray.config.runtime import BACKENDS
from cfl_ray.core.backend import Backend
from cfl_ray.engine.in_process import InProcessBackend
from cfl_ray.errors import ConfigError, RunError, UserError
from cfl_ray.nn.precision import products_in
from cfl_ray.plugins.calling import call_plugin, parse_choice, place_of, users_place, with_place
from cfl_ray.results.environment import Environment, HostEnvironment, described, read_environment
from cfl_ray.results.run_record import stored_hash
from cfl_ray.results.trained import TrainedMethod
from cfl_ray.run_directory import RunDirectory
from cfl_ray.runtime.round_loop import RoundLoop
from cfl_ray.setup.engine_choice import compute_device, device_name, engine_by_rule, engine_choice
from cfl_ray.setup.setup import Setup
from cfl_ray.system import cpu
from cfl_ray.system.threads import one_thread
from cfl_ray.tracking import RoundRecord

_BACKEND_PARTS = ["client_states", *(name for name, _ in getmembers(Backend, isfunction) if not name.startswith("_"))]


class Session(Protocol):
    """Runs the methods of one experiment for the driver."""

    def rounds(self, label: str, record_wait: Callable[[str], None]) -> Iterator[RoundRecord]:
        """Yields the records of one method, as `RoundLoop.rounds`.

        record_wait: called with a line for the user when a round waits for hosts or for a server without progress.
        """

    def about(self) -> tuple[dict[str, str], Environment]:
        """(hosts, device, engine, CPU and PyTorch of this session as text, its environment)."""

    def trained(self) -> Callable[[], TrainedMethod] | None:
        """A function that returns the present method as trained; None: the method is only in checkpoints."""

    def close(self) -> None:
        """Frees the session's resources; the session cannot be used afterwards."""


def checkpoint_store(setup: Setup, run_dir: Path | None, label: str) -> CheckpointStore | None:
    """The checkpoints of one method; None if no files are kept."""
    if run_dir is None:
        return None
    run = RunDirectory(run_dir)
    hash = stored_hash(run, setup.experiment)
    return CheckpointStore(run.method(label).path, hash, setup.experiment.runtime.keep_last)


def store_with_lease(setup: Setup, run_dir: Path | None, label: str) -> CheckpointStore | None:
    """The checkpoints of one method, for the process that continues its run: a server before it can no longer save."""
    if (store := checkpoint_store(setup, run_dir, label)) is not None:
        store.take_lease()
    return store


class InProcessSession:
    """A session in this process, for notebooks, debugging and tests, with the same results as on Ray."""

    def __init__(self, setup: Setup, run_dir: Path | None):
        self.setup, self.run_dir = setup, run_dir
        cpu.check_instructions(setup.experiment.runtime.cpu_capability, "in this process")
        self.settings = ExitStack()  # as on a host
        self.settings.enter_context(one_thread())
        self.settings.enter_context(products_in(setup.experiment.runtime.precision))
        self.device = compute_device(setup.experiment, has_gpu=True)
        self.worker = setup.worker(self.device)
        self.choice = engine_choice(
            setup,
            lambda: engine_by_rule(setup, self.worker.network),
            kept.choice if (kept := read_environment(run_dir)) else None,
        )
        self.worker.engine, self.worker.last_batch = self.choice.engine, self.choice.last_batch
        self._backend()  # built anew for each method; built here once to reject an invalid backend

    def rounds(self, label: str, record_wait: Callable[[str], None]) -> Iterator[RoundRecord]:
        self.backend = self._backend()
        store = store_with_lease(self.setup, self.run_dir, label)
        self.loop = RoundLoop(self.setup, label, self.worker.network, self.backend, store)
        return self._rounds_of(self.loop)

    def _rounds_of(self, loop: RoundLoop) -> Iterator[RoundRecord]:
        """The rounds; an exception of the user's code in them is a RunError that names its place, as on Ray.

        The iterator holds the session, whose settings would otherwise end with the last other reference to it.
        """
        try:
            yield from loop.rounds()
        except (UserError, OSError):
            raise
        except Exception as error:
            if users_place(error):
                raise RunError(with_place(error)) from error
            raise

    def _backend(self) -> Any:
        """A new backend. Raises ConfigError for a plugin that is not a backend."""
        runtime = self.setup.experiment.runtime
        part, options = parse_choice("runtime.backend", runtime.backend)
        if part in BACKENDS.builtin:
            return InProcessBackend(self.worker, bool(runtime.clients_per_host))
        backend_class = BACKENDS.resolve(part)
        if not isinstance(backend_class, type):
            raise ConfigError(f"backend {place_of(backend_class)} is {type(backend_class).__name__}, expected a class")
        backend = call_plugin("backend", partial(backend_class, **options), self.worker, error=ConfigError)
        if missing := [name for name in _BACKEND_PARTS if not hasattr(backend, name)]:
            raise ConfigError(
                f"backend {place_of(backend_class)} has no {missing[0]!r}; "
                f"a backend has {', '.join(_BACKEND_PARTS)} "
                "(a subclass of cfl_ray.engine.in_process.InProcessBackend has them)"
            )
        return backend

    def trained(self) -> Callable[[], TrainedMethod] | None:
        method = self.loop.kept(self.backend)
        return lambda: method

    def about(self) -> tuple[dict[str, str], Environment]:
        device, hosts = device_name(self.device), [HostEnvironment.here()]
        return described(self.setup.experiment.runtime, self.choice, device, hosts, "this process")

    def close(self) -> None:
        self.settings.close()
