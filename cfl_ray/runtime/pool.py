"""The hosts of a run: started, given work as they become free, restarted when they die."""

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import ray
from ray.exceptions import NodeDiedError, ObjectLostError, OutOfMemoryError, RayActorError, RayTaskError

from cfl_ray.core.errors import ConfigError, RunError, UserError
from cfl_ray.data.federation import Federation
from cfl_ray.engine.choose import Choice
from cfl_ray.engine.worker import ClientFailure
from cfl_ray.runtime.hosts import ClientHost
from cfl_ray.runtime.setup import Setup, engine_choice

_IN_FLIGHT = 2  # pieces a host has at a time: one to do, one waiting, so that it never waits for the server
_START_SECONDS = 300
LOST = (RayActorError, ObjectLostError, NodeDiedError, OutOfMemoryError)  # a host, or what it had found, is gone
# One compute thread; and freed memory is kept, for fetching pages anew for every gradient takes a tenth of the time.
_HOST_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "MALLOC_TRIM_THRESHOLD_": str(1 << 30), "MALLOC_MMAP_THRESHOLD_": str(1 << 30)}


@dataclass
class Host:
    """A host as the pool sees it."""

    number: int
    actor: Any
    starting: ray.ObjectRef | None  # answers when the host stands ready; None from then on
    node: str = ""
    restarts: int = 0


@dataclass(frozen=True)
class Call:
    """One call that a host may have to repeat elsewhere: `start(actor)` makes it, the first return is what is waited for."""

    start: Callable[[Any], list[ray.ObjectRef]]
    home: int | None = None  # the only host that may do it; None: any


@dataclass
class Pool:
    """Client hosts of one experiment.

    A call that was lost with its host is made again on another; a host that dies is restarted with a growing pause, at most
    `retries` times, then the run goes on without it. Raises RunError when none is left.
    """

    setup: Setup
    choice: Choice | None = None
    device: str = "cpu"
    hosts: list[Host] = field(default_factory=list)
    exchanges: int = 0
    faults: list[str] = field(default_factory=list)  # one line for each host that was lost, until read

    def start(self, count: int, setup_ref: ray.ObjectRef) -> None:
        """Starts the hosts and, once one is ready, settles on an engine."""
        self.setup_ref = setup_ref
        self.hosts = [Host(number, *self._actor()) for number in range(count)]
        self._ready()
        self.choice = engine_choice(self.setup, self.device, self._measure)
        for host in self.hosts:
            host.actor.set_engine.remote(self.choice.engine)

    def use(self, federation: Federation) -> None:
        """Hosts work on this federation from their next piece on, and so do those that start later."""
        if federation is self.setup.federation:
            return
        self.setup = replace(self.setup, federation=federation)
        self.setup_ref = ray.put(self.setup)
        for host in list(self.hosts):
            host.actor.use.remote([self.setup_ref])

    def _measure(self) -> Choice:
        while True:
            host = self._ready()[0]
            try:
                return ray.get(host.actor.measure_engine.remote())
            except LOST as error:
                self._lost(host, error)
            except RayTaskError as error:
                raise told(error) from error

    def _actor(self) -> tuple[Any, ray.ObjectRef]:
        """A new host and the reference that answers when it is ready."""
        runtime = self.setup.experiment.runtime
        actor = (
            ray.remote(ClientHost)
            .options(
                num_cpus=runtime.cpus_per_host,
                num_gpus=runtime.gpus_per_host,
                scheduling_strategy="SPREAD",
                runtime_env={"env_vars": _HOST_ENVIRONMENT},
            )
            .remote()
        )
        return actor, actor.start.remote([self.setup_ref], self.choice.engine if self.choice else "sequential")

    # ---- hosts that start: none gets work before it stands, since it may wait for room on the cluster for ever

    def _ready(self) -> list[Host]:
        """The hosts that stand ready; waits for the first."""
        while not (ready := [host for host in self.hosts if host.starting is None]):
            self._await([])
        return ready

    def nodes(self, seconds: float = 30) -> int:
        """Nodes that the hosts are on, those that are ready within `seconds`."""
        deadline = time.monotonic() + seconds
        while (starting := [host.starting for host in self.hosts if host.starting]) and time.monotonic() < deadline:
            for ref in ray.wait(starting, timeout=1)[0]:
                self._greet(ref)
        return len({host.node for host in self._ready()})

    def _await(self, calls: list[ray.ObjectRef]) -> ray.ObjectRef | None:
        """The next of `calls` that ended; None after news of a starting host, or after it was given up."""
        starting = [host.starting for host in self.hosts if host.starting]
        ended, _ = ray.wait(calls + starting, timeout=None if calls else _START_SECONDS)
        if not ended:
            for host in [host for host in self.hosts if host.starting]:
                self._give_up(host, f"could not be placed within {_START_SECONDS} s (free: {_free()})")
        elif ended[0] in calls:
            return ended[0]
        else:
            self._greet(ended[0])
        return None

    def _greet(self, ref: ray.ObjectRef) -> None:
        host = next(host for host in self.hosts if host.starting == ref)
        try:
            about = ray.get(ref)
        except LOST as error:
            self._lost(host, error)
        except RayTaskError as error:
            raise told(error) from error
        else:
            host.starting, host.node, self.device = None, about["node"], about["device"]

    # ---- work

    def next_exchange(self) -> int:
        """A number that no exchange of these hosts had before."""
        self.exchanges += 1
        return self.exchanges

    def run(self, calls: list[Call], take: Callable[[int, list[ray.ObjectRef]], None], collect: Callable[[Any], ray.ObjectRef] | None, merge: Callable[[Any], None]) -> None:
        """Makes every call once and hands its returns to `take(call number, returns)`.

        With `collect`, each host that worked is asked for what it gathered, and `merge` gets that once per host. A host that
        dies before it was collected takes its gathered calls with it: they are made again. Raises ObjectLostError when something
        that the calls need (what clients own) went down with its node.
        """
        todo = deque(range(len(calls)))
        while todo:
            done = self._work_off(calls, todo, take)
            if collect is None:
                return
            for host, numbers in done.items():
                try:
                    merge(ray.get(collect(self._host(host).actor)))
                except LOST as error:
                    todo.extend(numbers)
                    self._lost(self._host(host), error)

    def _work_off(self, calls: list[Call], todo: deque[int], take: Callable) -> dict[int, list[int]]:
        """Empties `todo`. Returns which calls each host that is still alive has done."""
        waiting: dict[ray.ObjectRef, tuple[int, int, list]] = {}
        done: dict[int, list[int]] = {}
        while todo or waiting:
            for host in self.hosts if waiting else self._ready():
                while not host.starting and todo and sum(number == host.number for number, _, _ in waiting.values()) < _IN_FLIGHT:
                    position = self._next_for(host, calls, todo)
                    if position is None:
                        break
                    returns = calls[position].start(host.actor)
                    waiting[returns[0]] = (host.number, position, returns)
            ended = self._await(list(waiting))
            if ended is None:
                continue
            number, position, returns = waiting.pop(ended)
            try:
                take(position, [ray.get(returns[0]), *returns[1:]])
                done.setdefault(number, []).append(position)
            except RayTaskError as error:  # before LOST: an argument that is lost makes an error that is both
                raise error.cause if isinstance(error.cause, ObjectLostError) else told(error) from error
            except LOST as error:
                lost = [ref for ref, entry in waiting.items() if entry[0] == number]
                todo.extend([position, *(waiting.pop(ref)[1] for ref in lost), *done.pop(number, [])])
                self._lost(self._host(number), error)
        return done

    def _next_for(self, host: Host, calls: list[Call], todo: deque[int]) -> int | None:
        if calls[todo[0]].home is None:
            return todo.popleft()
        homes = {other.number for other in self.hosts}
        for position in todo:
            home = calls[position].home
            if home == host.number or (home not in homes and host is self.hosts[0]):
                todo.remove(position)
                return position
        return None

    def _host(self, number: int) -> Host:
        return next(host for host in self.hosts if host.number == number)

    def _lost(self, host: Host, error: Exception) -> None:
        """Restarts a host that died, or goes on without it."""
        retries = self.setup.experiment.runtime.retries
        if host.restarts >= retries:
            return self._give_up(host, f"died after {retries} restarts ({first_line(error)})")
        ray.kill(host.actor)
        host.restarts += 1
        time.sleep(min(0.1 * 2**host.restarts, 5))
        host.actor, host.starting = self._actor()
        self.faults.append(f"host {host.number} died ({first_line(error)}); restart {host.restarts} of {retries}, its work is done again")

    def _give_up(self, host: Host, why: str) -> None:
        ray.kill(host.actor)
        self.hosts.remove(host)
        if not self.hosts:
            raise RunError(f"the last client host {why}")
        self.faults.append(f"host {host.number} {why}; going on with {len(self.hosts)} hosts")

    def stop(self) -> None:
        for host in self.hosts:
            ray.kill(host.actor)
        self.hosts = []


def host_count(setup: Setup, resources: dict[str, float]) -> int:
    """Hosts that the config asks for, or that the cluster has room for. Raises ConfigError where there are fewer GPUs than asked for."""
    runtime = setup.experiment.runtime
    cpus, gpus = resources.get("CPU", 0), resources.get("GPU", 0)
    room = int(min(cpus / runtime.cpus_per_host, gpus / runtime.gpus_per_host if runtime.gpus_per_host else float("inf")) + 1e-9)
    wanted = runtime.hosts
    if runtime.clients_per_host:
        wanted = -(-setup.federation.num_clients // runtime.clients_per_host)
    count = wanted or max(room, 1)
    if runtime.gpus_per_host and count * runtime.gpus_per_host > gpus + 1e-9:
        raise ConfigError(
            f"runtime: {count} hosts with {runtime.gpus_per_host} GPU each need {count * runtime.gpus_per_host:g} GPUs, the cluster has {gpus:g}; lower runtime.gpus_per_host or runtime.hosts"
        )
    if count * runtime.cpus_per_host > cpus + 1e-9:
        raise ConfigError(
            f"runtime: {count} hosts with {runtime.cpus_per_host:g} CPU each need {count * runtime.cpus_per_host:g} CPUs, the cluster has {cpus:g}; lower runtime.cpus_per_host or runtime.hosts"
        )
    return count


def told(error: RayTaskError) -> UserError:
    """What a person can use of an error that happened in an actor."""
    cause = error.cause
    if isinstance(cause, UserError):
        return cause
    if isinstance(cause, ClientFailure):
        return RunError(str(cause))
    return RunError(f"{type(cause).__name__}: {cause}")


def _free() -> str:
    return ", ".join(f"{value:g} {name}" for name, value in sorted(ray.available_resources().items()) if name in ("CPU", "GPU")) or "no CPU"


def first_line(error: Exception) -> str:
    """What an error says, in short."""
    return (str(error).strip() or type(error).__name__).splitlines()[0][:160]
