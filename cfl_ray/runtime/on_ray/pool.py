"""The client hosts of a run: started, given work as they become free, restarted when they die."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, NodeDiedError, ObjectLostError, OutOfMemoryError, RayActorError, RayTaskError

from cfl_ray.core.errors import RunError
from cfl_ray.data.federation import Federation
from cfl_ray.engine.autotune import EngineChoice
from cfl_ray.runtime.on_ray.connect import as_user_error, short_reason
from cfl_ray.runtime.on_ray.host_actor import StartedHost, start_host
from cfl_ray.runtime.on_ray.placement import alive, free, hosts_asked_for, room
from cfl_ray.runtime.on_ray.retry import RetryPolicy
from cfl_ray.runtime.prepare import Setup, engine_choice

_START_SECONDS = 300
_MEASURE_SECONDS = 600  # for a host to measure its engines
_LOOK_SECONDS = 1.0  # between looks for new room on the cluster, which take about a millisecond
HOST_LOST = (RayActorError, ObjectLostError, NodeDiedError, OutOfMemoryError)  # a host, or its results, are gone


@dataclass
class Host:
    """A host as the pool sees it."""

    number: int
    actor: Any
    starting: ray.ObjectRef[Any] | None  # answers when the host is ready; None from then on
    retry: RetryPolicy
    node: str = ""
    pid: int = 0
    added: bool = False  # after the run began


@dataclass
class Pool:
    """The client hosts of one experiment.

    A host that dies is restarted with a growing pause, as its `RetryPolicy` grants; then the run goes on without it.
    Raises RunError when none is left. Hosts that were lost with their node are started again as soon as there is room.
    """

    setup: Setup
    choice: EngineChoice | None = None
    device: str = "cpu"
    hosts: list[Host] = field(default_factory=list)
    exchanges: int = 0  # begun
    finished: int = 0  # exchanges
    changes: int = 0  # grows whenever a host is added, becomes ready or is lost
    written_off: int = 0  # hosts given up although their node is alive
    notes: list[str] = field(default_factory=list)  # one line for each host that was lost or added, until read
    last_fault: tuple[float, str] | None = None  # (seconds since 1970, the fault)
    _next_look: float = 0.0

    def start(self, started: Sequence[StartedHost], setup_ref: ray.ObjectRef[Any]) -> None:
        """Takes these hosts and, once one is ready, settles on an engine."""
        self.setup_ref = setup_ref
        self.hosts = [self._host(number, host) for number, host in enumerate(started)]
        self.ready()
        self.choice = engine_choice(self.setup, self.device, self._measure)
        for host in self.hosts:
            host.actor.set_engine.remote(self.choice.engine)

    def use(self, federation: Federation) -> None:
        """Makes hosts work on this federation from their next piece on, also those that start later."""
        if federation is self.setup.federation:
            return
        self.setup = replace(self.setup, federation=federation)
        self.setup_ref = ray.put(self.setup)
        for host in list(self.hosts):
            host.actor.use.remote([self.setup_ref])

    def _host(self, number: int, started: StartedHost, added: bool = False) -> Host:
        retry = RetryPolicy(f"host {number}", self.setup.experiment.runtime.retries)
        return Host(number, started.actor, started.ready, retry, added=added)

    def _measure(self) -> EngineChoice:
        while True:
            host = self.ready()[0]
            try:
                choice: EngineChoice = ray.get(host.actor.measure_engine.remote(), timeout=_MEASURE_SECONDS)
                return choice
            except (GetTimeoutError, *HOST_LOST) as error:
                self.lost(host, error)
            except RayTaskError as error:
                raise as_user_error(error) from error

    def _start_another(self) -> StartedHost:
        engine = self.choice.engine if self.choice else "sequential"
        return start_host(self.setup.experiment.runtime, self.setup_ref, engine)

    # ---- hosts that start: none gets work before it is ready, since it may wait for room on the cluster for ever

    def ready(self) -> list[Host]:
        """The hosts that are ready; waits for the first one."""
        while not (ready := [host for host in self.hosts if host.starting is None]):
            self.wait([])
        return ready

    def nodes(self, seconds: float = 30) -> int:
        """Number of nodes that have a host, counting hosts that are ready within `seconds`."""
        deadline = time.monotonic() + seconds
        while (starting := [host.starting for host in self.hosts if host.starting]) and time.monotonic() < deadline:
            for ref in ray.wait(starting, timeout=1)[0]:
                self._take_in(next(host for host in self.hosts if host.starting == ref))
        return len({host.node for host in self.ready()})

    def wait(self, calls: list[ray.ObjectRef[Any]], seconds: float | None = None) -> list[ray.ObjectRef[Any]]:
        """Those of `calls` that ended, as soon as there is one; none after `seconds`, or when a host has started."""
        starting = {host.starting: host for host in self.hosts if host.starting}
        refs = [*calls, *starting]
        ended, _ = ray.wait(refs, num_returns=len(refs), timeout=0)
        if not ended:
            ended, _ = ray.wait(refs, timeout=seconds if calls else _START_SECONDS)
        if not ended and not calls:
            for host in starting.values():
                self._give_up(host, f"could not be placed within {_START_SECONDS} s (free: {free()})")
        for ref in ended:
            if ref in starting:
                self._take_in(starting[ref])
        return [ref for ref in ended if ref not in starting]

    def _take_in(self, host: Host) -> None:
        """Takes note that a host has started, or failed to."""
        ref, self.changes = host.starting, self.changes + 1
        assert ref is not None
        try:
            about = ray.get(ref)
        except HOST_LOST as error:
            self.lost(host, error)
            return
        except RayTaskError as error:
            raise as_user_error(error) from error
        host.starting, host.node, host.pid, self.device = None, about["node"], about["pid"], about["device"]
        if host.added:
            ready = [other.node for other in self.hosts if other.starting is None]
            nodes = len(set(ready))
            self.notes.append(f"host {host.number} was added: {len(ready)} on {nodes} node{'s' * (nodes > 1)}")
            host.added = False

    # ---- exchanges

    def next_exchange(self) -> int:
        """A number that no exchange of these hosts had before. New room on the cluster is used from here on."""
        if time.monotonic() >= self._next_look:
            self._next_look = time.monotonic() + _LOOK_SECONDS
            self._refill()
        self.exchanges += 1
        return self.exchanges

    def _refill(self) -> None:
        """Starts hosts that the config asks for, or that there is room for. The round does not wait for them."""
        runtime = self.setup.experiment.runtime
        wanted = hosts_asked_for(self.setup) or room(runtime, ray.cluster_resources())
        missing = wanted - self.written_off - len(self.hosts)
        if missing <= 0:
            return
        free_room = room(runtime, ray.available_resources()) - sum(host.starting is not None for host in self.hosts)
        for _ in range(min(missing, free_room)):
            number = next(number for number in count() if all(host.number != number for host in self.hosts))
            self.hosts.append(self._host(number, self._start_another(), added=True))
            self.changes += 1

    # ---- faults

    def host(self, number: int) -> Host:
        return next(host for host in self.hosts if host.number == number)

    def lost(self, host: Host, error: Exception) -> None:
        """Restarts a host that died, or goes on without it."""
        decision = host.retry.decide(progress=self.finished)
        if not decision.granted:
            self.written_off += not host.node or alive(host.node)
            self._give_up(host, f"died after {decision.limit} restarts ({short_reason(error)})")
            return
        time.sleep(decision.pause_seconds)
        self._start_again(host)
        self.fault(f"host {host.number} died ({short_reason(error)}); {decision}, its work is done again")

    def end(self, host: Host, why: str) -> None:
        """Restarts a host that may well be alive; this does not count as a retry."""
        self._start_again(host)
        self.fault(f"host {host.number} {why} and was started again")

    def _start_again(self, host: Host) -> None:
        self.changes += 1
        ray.kill(host.actor)
        started = self._start_another()
        host.actor, host.starting, host.node, host.pid = started.actor, started.ready, "", 0
        host.retry.started()

    def _give_up(self, host: Host, why: str) -> None:
        self.changes += 1
        ray.kill(host.actor)
        self.hosts.remove(host)
        if not self.hosts:
            raise RunError(f"the last client host {why}")
        self.fault(f"host {host.number} {why}; going on with {len(self.hosts)} hosts")

    def fault(self, line: str) -> None:
        """Notes a fault for the user, and as the last one."""
        self.notes.append(line)
        self.last_fault = time.time(), line

    def stop(self) -> None:
        """Ends all hosts."""
        for host in self.hosts:
            ray.kill(host.actor)
        self.hosts = []
