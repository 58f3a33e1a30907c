"""The hosts of a run: started, given work as they become free, restarted when they die."""

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import ray
from ray.exceptions import ActorDiedError, ActorUnavailableError, GetTimeoutError, RayActorError, RayTaskError

from cfl_ray.engine.choose import Choice
from cfl_ray.engine.worker import ClientFailure
from cfl_ray.core.errors import ConfigError, RunError, UserError
from cfl_ray.runtime.hosts import ClientHost
from cfl_ray.runtime.setup import Setup, engine_choice

_IN_FLIGHT = 2  # pieces a host has at a time: one to do, one waiting, so that it never waits for the server
_START_SECONDS = 300


@dataclass
class Host:
    """A host as the pool sees it."""

    number: int
    actor: Any
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

    def start(self, count: int) -> None:
        """Starts the hosts and settles on an engine."""
        self.setup_ref = ray.put(self.setup)
        self.hosts = [Host(number, self._actor()) for number in range(count)]
        self.device = self._describe(self.hosts[0])["device"]
        self.choice = engine_choice(self.setup, self.device, lambda: ray.get(self.hosts[0].actor.measure_engine.remote()))
        for host in self.hosts:
            host.actor.set_engine.remote(self.choice.vectorise)

    def _describe(self, host: Host) -> dict[str, Any]:
        try:
            return ray.get(host.actor.describe.remote(), timeout=_START_SECONDS)
        except GetTimeoutError:
            raise RunError(f"no host could be placed within {_START_SECONDS} s; the cluster has {ray.available_resources()} free") from None
        except RayTaskError as error:
            raise told(error) from error
        except ActorDiedError as error:
            raise RunError(f"a client host died while it started: {_short(error)}") from error

    def _actor(self) -> Any:
        runtime = self.setup.experiment.runtime
        return (
            ray.remote(ClientHost)
            .options(
                num_cpus=runtime.cpus_per_host,
                num_gpus=runtime.gpus_per_host,
                scheduling_strategy="SPREAD",
                runtime_env={"env_vars": {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}},
            )
            .remote(self.setup_ref, bool(self.choice and self.choice.vectorise))
        )

    # ---- work

    def next_exchange(self) -> int:
        """A number that no exchange of these hosts had before."""
        self.exchanges += 1
        return self.exchanges

    def run(self, calls: list[Call], take: Callable[[int, list[ray.ObjectRef]], None], collect: Callable[[Any], ray.ObjectRef] | None, merge: Callable[[Any], None]) -> None:
        """Makes every call once and hands its returns to `take(call number, returns)`.

        With `collect`, each host that worked is asked for what it gathered, and `merge` gets that once per host. A host that
        dies before it was collected takes its gathered calls with it: they are made again.
        """
        todo = deque(range(len(calls)))
        while todo:
            done = self._work_off(calls, todo, take)
            if collect is None:
                return
            for host, numbers in done.items():
                try:
                    merge(ray.get(collect(self._host(host).actor)))
                except RayActorError as error:
                    todo.extend(numbers)
                    self._lost(self._host(host), error)

    def _work_off(self, calls: list[Call], todo: deque[int], take: Callable) -> dict[int, list[int]]:
        """Empties `todo`. Returns which calls each host that is still alive has done."""
        waiting: dict[ray.ObjectRef, tuple[int, int, list]] = {}
        done: dict[int, list[int]] = {}
        while todo or waiting:
            for host in list(self.hosts):
                while todo and sum(number == host.number for number, _, _ in waiting.values()) < _IN_FLIGHT:
                    position = self._next_for(host, calls, todo)
                    if position is None:
                        break
                    returns = calls[position].start(host.actor)
                    waiting[returns[0]] = (host.number, position, returns)
            ready, _ = ray.wait(list(waiting), num_returns=1)
            number, position, returns = waiting.pop(ready[0])
            try:
                take(position, [ray.get(returns[0]), *returns[1:]])
                done.setdefault(number, []).append(position)
            except RayActorError as error:
                todo.append(position)
                if any(host.number == number for host in self.hosts):
                    lost = [ref for ref, entry in waiting.items() if entry[0] == number]
                    todo.extend(waiting.pop(ref)[1] for ref in lost)
                    todo.extend(done.pop(number, []))
                    self._lost(self._host(number), error)
            except RayTaskError as error:
                raise told(error) from error
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
        ray.kill(host.actor)
        if host.restarts < retries:
            host.restarts += 1
            time.sleep(min(0.1 * 2**host.restarts, 5))
            host.actor = self._actor()
            self.faults.append(f"host {host.number} died ({_short(error)}); restart {host.restarts} of {retries}, its work is done again")
            return
        self.hosts.remove(host)
        self.faults.append(f"host {host.number} died after {retries} restarts; going on with {len(self.hosts)} hosts")
        if not self.hosts:
            raise RunError(f"the last client host died after {retries} restarts: {_short(error)}; `cfl-ray resume` goes on from the last checkpoint")

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


def _short(error: Exception) -> str:
    return str(error).strip().splitlines()[0][:160]
