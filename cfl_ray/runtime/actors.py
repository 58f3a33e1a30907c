"""The processes of a run, as Ray sees them: one server, and client hosts wherever there is room.

Importing this is light. What an actor does is imported when it starts, and a server begins its hosts before that: importing torch
takes seconds, which are then the same seconds for all of them.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray

from cfl_ray.core.errors import RunError

if TYPE_CHECKING:
    from cfl_ray.engine.choose import Choice
    from cfl_ray.runtime.server import Report
    from cfl_ray.sections import Runtime

_LIVE, _LIVE_THREADS = "live", 4  # the concurrency group of what is asked from outside
# One compute thread; and freed memory is kept, for fetching pages anew for every gradient takes a tenth of the time.
_HOST_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "MALLOC_TRIM_THRESHOLD_": str(1 << 30), "MALLOC_MMAP_THRESHOLD_": str(1 << 30)}


class ClientHost:
    """One process with one compute thread."""

    def start(self, packed: list[ray.ObjectRef], engine: str) -> dict[str, Any]:
        """Makes this host ready. Returns where it runs and on what.

        Not in the constructor: what goes wrong there reaches the server as the text of a traceback, not as the error itself.
        """
        from cfl_ray.runtime.hosts import HostSide

        self.side = HostSide(packed, engine)
        return self.side.about()

    def measure_engine(self) -> "Choice":
        return self.side.measure_engine()

    def set_engine(self, engine: str) -> None:
        self.side.worker.engine = engine

    def use(self, packed: list[ray.ObjectRef]) -> None:
        self.side.use(packed)

    def work(self, *order) -> Any:
        return self.side.work(*order)

    def collect(self, exchange: int) -> tuple[dict, dict]:
        return self.side.collect(exchange)


class ServerActor:
    """The server in a process of its own; it owns the hosts.

    One thread does the rounds; others answer what people ask meanwhile (`ask`), so that nobody waits for a round.
    """

    side = None

    def start(self, packed: list[ray.ObjectRef], runtime: "Runtime", hosts: int, run_dir: Path | None, session: str, fault: tuple[float, str] | None) -> None:
        """Begins the hosts and makes this server ready. Not in the constructor, for the reason given in `ClientHost.start`."""
        begun = [begin_host(runtime, packed[0]) for _ in range(hosts)]
        from cfl_ray.runtime.serverside import ServerSide

        self.side = ServerSide(packed, begun, run_dir, session, fault)

    def begin(self, label: str) -> "Report":
        return self.side.begin(label)

    def advance(self) -> "Report":
        return self.side.advance()

    def facts(self) -> dict[str, str]:
        return self.side.facts()

    @ray.method(concurrency_group=_LIVE)
    def ask(self, verb: str, *arguments) -> Any:
        """What `cfl-ray status`, `join`, `leave` and `stop` ask of a live run. Raises ConfigError for a request that is refused."""
        if self.side is None or self.side.server is None:
            raise RunError("the run is only starting; ask again in a moment")
        return self.side.ask(verb, *arguments)


def begin_host(runtime: "Runtime", setup_ref: ray.ObjectRef, engine: str = "sequential") -> tuple[Any, ray.ObjectRef]:
    """A new host and the reference that answers when it is ready."""
    options = {"num_cpus": runtime.cpus_per_host, "num_gpus": runtime.gpus_per_host, "scheduling_strategy": "SPREAD", "runtime_env": {"env_vars": _HOST_ENVIRONMENT}}
    actor = ray.remote(ClientHost).options(**options).remote()
    return actor, actor.start.remote([setup_ref], engine)


def server_kind() -> Any:
    """The actor class of servers."""
    return ray.remote(concurrency_groups={_LIVE: _LIVE_THREADS})(ServerActor)
