"""The Ray actor of the server. Fast to import, for the reason given in `host_actor`."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray
from ray.exceptions import RayError

from cfl_ray.errors import NotReady, RunError, UserError, class_and_text, notes_of
from cfl_ray.runtime.on_ray.host_actor import start_host
from cfl_ray.runtime.on_ray.stall import Progress
from cfl_ray.system.collection import uncollected

if TYPE_CHECKING:
    from cfl_ray.config import RuntimeConfig
    from cfl_ray.runtime.on_ray.server_process import ServerProcess

_REQUESTS, _REQUEST_THREADS = "live", 4  # the concurrency group of requests to a live run


class ServerActor:
    """The server in a separate process; it owns the hosts.

    One thread does the rounds; other threads answer requests (`ask`), so that these do not wait for a round to end.
    """

    process: ServerProcess | None = None

    def start(
        self,
        packed: list[ray.ObjectRef[Any]],
        runtime: RuntimeConfig,
        hosts: int,
        run_dir: Path | None,
        session: str,
        fault: tuple[float, str] | None,
    ) -> None:
        """Starts the hosts and makes this server ready; `ClientHost.start` says why this is not the constructor."""
        started = [start_host(runtime, packed[0]) for _ in range(hosts)]
        with uncollected():
            from cfl_ray.runtime.on_ray.server_process import ServerProcess

        self.process = ServerProcess(packed, run_dir, session, fault)
        self.process.pool.start(started, packed[0])

    def call(self, verb: str, *arguments: Any) -> Any:
        """Calls a method of `ServerProcess` for the driver.

        Exceptions of other packages and of the user's code become a RunError with their text here, since Ray can send
        neither those that it cannot print nor those that it cannot pickle.
        """
        try:
            return getattr(self._ready(), verb)(*arguments)
        except (UserError, RayError):
            raise
        except Exception as error:
            raise RunError(f"{class_and_text(error)}{notes_of(error)}") from error

    @ray.method(concurrency_group=_REQUESTS)
    def ask(self, verb: str, *arguments: Any) -> Any:
        """Answers `cfl-ray status`, `join`, `leave` and `stop`. Raises ConfigError for a refused request."""
        if (process := self._ready()).requests is None:
            raise NotReady(_STARTING)
        return process.ask(verb, *arguments)

    @ray.method(concurrency_group=_REQUESTS)
    def progress(self) -> Progress:
        """The progress of the run, for a driver that waits."""
        return self.process.progress() if self.process else Progress("", (), time.process_time())

    def _ready(self) -> ServerProcess:
        if self.process is None:
            raise NotReady(_STARTING)
        return self.process


_STARTING = "the run is only starting; ask again in a moment"


def server_actor_class() -> Any:
    """The Ray actor class of servers."""
    remote: Any = ray.remote(concurrency_groups={_REQUESTS: _REQUEST_THREADS})  # type: ignore[call-overload]
    return remote(ServerActor)
