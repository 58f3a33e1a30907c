"""The Ray actor of a client host: a process with one compute thread.

This module is fast to import. The code of its work is imported when it starts: importing torch takes seconds, and the
server starts its hosts before it imports torch itself, so that all of them load it at the same time.
"""

from __future__ import annotations

import os
import time
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import ray

from cfl_ray.core.engine_names import SEQUENTIAL
from cfl_ray.system.collection import uncollected
from cfl_ray.system.cpu import instructions_environment
from cfl_ray.system.variables import ONE_THREAD, environment

if TYPE_CHECKING:
    from cfl_ray.checkpoint.lease import SharedDirectory
    from cfl_ray.checkpoint.segments import ClientStateFile, EntryFile
    from cfl_ray.config import RuntimeConfig
    from cfl_ray.engine.choice import EngineChoice
    from cfl_ray.runtime.on_ray.host_process import HostProcess
    from cfl_ray.runtime.on_ray.stored import Place

_LIVE = "live"  # the concurrency group of calls that are answered while work is in progress
_PRIORITY = {"RAY_worker_niceness": "0"}  # as other processes of the user; Ray's default, 15, gives way to all of them
# set in processes of a cluster that was started with this environment: its instructions; "": not set
_INHERITED = "CFL_RAY_HOST_ENVIRONMENT"


def host_environment(instructions: str | None) -> AbstractContextManager[None]:
    """Context in which a cluster is started whose hosts inherit their environment.

    Two hosts with separate environments cost 1.4 s of CPU more, and are ready 2 s later on two cores: Ray waits
    for its agent that makes environments, and cannot use the processes that it has started already.
    """
    own = {_INHERITED: instructions or ""}
    return environment(ONE_THREAD | instructions_environment(instructions) | own | _PRIORITY)


def host_runtime_env(instructions: str | None) -> dict[str, Any] | None:
    """Ray's runtime environment of a host with these instructions; None if its cluster was started with them."""
    if os.environ.get(_INHERITED) == (instructions or ""):
        return None
    return {"env_vars": ONE_THREAD | instructions_environment(instructions)}


def server_runtime_env(instructions: str | None) -> dict[str, Any] | None:
    """Ray's runtime environment of the server, which has no limit of threads; None as for a host."""
    if instructions is None or os.environ.get(_INHERITED) == instructions:
        return None
    return {"env_vars": instructions_environment(instructions)}


class ClientHost:
    """One process with one compute thread; `host_process.HostProcess` does the work."""

    process: HostProcess | None = None

    def start(
        self, packed: list[ray.ObjectRef[Any]], engine: str, last_batch: int = 0, pause: float = 0.0
    ) -> dict[str, Any]:
        """Makes this host ready after a pause (seconds). Returns its node, process id and device.

        packed: references of the setup and, if it has changed since, of the federation. They are in a list, which Ray
            does not resolve: `HostProcess` fetches them, so that the server gets the original error of a failed fetch.
            For the same reason this is not the constructor, whose errors reach the server as the text of a traceback.
        """
        time.sleep(pause)
        with uncollected():
            from cfl_ray.runtime.on_ray.host_process import HostProcess

        self.process = HostProcess(packed, engine, last_batch)
        return self.process.about()

    def _ready(self) -> HostProcess:
        assert self.process is not None, "it has no work before it is ready"
        return self.process

    def engine_by_rule(self) -> EngineChoice:
        return self._ready().engine_by_rule()

    def set_engine(self, engine: str, last_batch: int) -> None:
        worker = self._ready().worker
        worker.engine, worker.last_batch = engine, last_batch

    def use(self, packed: list[ray.ObjectRef[Any]]) -> None:
        self._ready().use(packed)

    def work(self, *order: Any) -> Any:
        return self._ready().work(*order)

    @ray.method(concurrency_group=_LIVE)
    def placed(self) -> tuple[str, int]:
        """The node and the process id, which are known before the host is ready."""
        return ray.get_runtime_context().get_node_id(), os.getpid()

    @ray.method(concurrency_group=_LIVE)
    def progress(self) -> tuple[int, float]:
        """(Number of completed chunks of the present call, CPU seconds of this process so far)."""
        return self.process.chunks_done if self.process else 0, time.process_time()

    @ray.method(concurrency_group=_LIVE)
    def has_directory(self, shared: SharedDirectory) -> bool:
        """Whether this machine has the run directory of the server."""
        return shared.is_here()

    def write(self, file: ClientStateFile, places: list[Place]) -> EntryFile:
        return self._ready().write(file, places)

    def collect(self, exchange: int, rows: list[int]) -> Any:
        return self._ready().collect(exchange, rows)

    def combine(self, last: bool, *totals: np.ndarray | None) -> np.ndarray | None:
        return self._ready().combine(last, *totals)


class StartedHost(NamedTuple):
    """A host that was started."""

    actor: Any
    ready: ray.ObjectRef[Any]  # resolved when it is ready
    placed: ray.ObjectRef[Any]  # resolved when it has a process, with the result of `ClientHost.placed`


def start_host(
    runtime: RuntimeConfig,
    setup_ref: ray.ObjectRef[Any],
    engine: str = SEQUENTIAL,
    last_batch: int = 0,
    pause: float = 0.0,
    federation_ref: ray.ObjectRef[Any] | None = None,
) -> StartedHost:
    """Starts a host wherever there is room, or as soon as there is. engine, last_batch: of `EngineChoice`.

    pause: see `ClientHost.start`.

    For an actor that waits for room, the cluster's autoscaler adds machines, until the run ends. A call of
    `ray.autoscaler.sdk.request_resources` would stay after the run, and replace that of other runs on the cluster.
    """
    remote: Any = ray.remote(concurrency_groups={_LIVE: 1})  # type: ignore[call-overload]
    actor_class = remote(ClientHost)
    actor = actor_class.options(
        num_cpus=runtime.cpus_per_host,
        num_gpus=runtime.gpus_per_host,
        scheduling_strategy="SPREAD",
        runtime_env=host_runtime_env(runtime.cpu_capability),
        enable_task_events=False,  # Ray's head would keep 3 kB for each of the last 100,000 calls
    ).remote()
    packed = [setup_ref] if federation_ref is None else [setup_ref, federation_ref]
    return StartedHost(actor, actor.start.remote(packed, engine, last_batch, pause), actor.placed.remote())
