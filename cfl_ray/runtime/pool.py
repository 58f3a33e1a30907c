"""The hosts of a run: started, given work as they become free, restarted when they die."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any

import ray
from ray.exceptions import NodeDiedError, ObjectLostError, OutOfMemoryError, RayActorError, RayTaskError

from cfl_ray.core.errors import RunError
from cfl_ray.data.federation import Federation
from cfl_ray.engine.choose import Choice
from cfl_ray.runtime.actors import begin_host
from cfl_ray.runtime.connect import first_line, told
from cfl_ray.runtime.placement import alive, free, hosts_asked_for, room
from cfl_ray.runtime.setup import Setup, engine_choice

_START_SECONDS = 300
_LOOK_SECONDS = 1.0  # between looks for new room on the cluster, which take about a millisecond
FORGIVEN_SECONDS = 600  # who lived this long has all its retries again: on machines that come and go a run of days loses many
LOST = (RayActorError, ObjectLostError, NodeDiedError, OutOfMemoryError)  # a host, or what it had found, is gone


@dataclass
class Host:
    """A host as the pool sees it."""

    number: int
    actor: Any
    starting: ray.ObjectRef | None  # answers when the host stands ready; None from then on
    node: str = ""
    pid: int = 0
    since: float = field(default_factory=time.monotonic)  # when it was started
    restarts: int = 0
    added: bool = False  # after the run began


@dataclass
class Pool:
    """Client hosts of one experiment.

    A host that dies is restarted with a growing pause, at most `retries` times, then the run goes on without it. Raises RunError
    when none is left. Hosts that went with their node come back as soon as there is room.
    """

    setup: Setup
    choice: Choice | None = None
    device: str = "cpu"
    hosts: list[Host] = field(default_factory=list)
    exchanges: int = 0
    written_off: int = 0  # hosts given up although their node is there
    notes: list[str] = field(default_factory=list)  # one line for each host that was lost or added, until read
    last_fault: tuple[float, str] | None = None  # when (seconds since 1970), and what it was
    _look: float = 0.0

    def start(self, begun: Sequence[tuple[Any, ray.ObjectRef]], setup_ref: ray.ObjectRef) -> None:
        """Takes these hosts (see `begin_host`) and, once one is ready, settles on an engine."""
        self.setup_ref = setup_ref
        self.hosts = [Host(number, *host) for number, host in enumerate(begun)]
        self.ready()
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
            host = self.ready()[0]
            try:
                return ray.get(host.actor.measure_engine.remote())
            except LOST as error:
                self.lost(host, error)
            except RayTaskError as error:
                raise told(error) from error

    def _another(self) -> tuple[Any, ray.ObjectRef]:
        return begin_host(self.setup.experiment.runtime, self.setup_ref, self.choice.engine if self.choice else "sequential")

    # ---- hosts that start: none gets work before it stands, since it may wait for room on the cluster for ever

    def ready(self) -> list[Host]:
        """The hosts that stand ready; waits for the first."""
        while not (ready := [host for host in self.hosts if host.starting is None]):
            self.wait([])
        return ready

    def nodes(self, seconds: float = 30) -> int:
        """Nodes that the hosts are on, those that are ready within `seconds`."""
        deadline = time.monotonic() + seconds
        while (starting := [host.starting for host in self.hosts if host.starting]) and time.monotonic() < deadline:
            for ref in ray.wait(starting, timeout=1)[0]:
                self._greet(ref)
        return len({host.node for host in self.ready()})

    def wait(self, calls: list[ray.ObjectRef], seconds: float | None = None) -> ray.ObjectRef | None:
        """The next of `calls` that ended; None after `seconds`, after news of a starting host, or after it was given up."""
        starting = [host.starting for host in self.hosts if host.starting]
        ended, _ = ray.wait(calls + starting, timeout=seconds if calls else _START_SECONDS)
        if not ended and calls:
            return None
        if not ended:
            for host in [host for host in self.hosts if host.starting]:
                self._give_up(host, f"could not be placed within {_START_SECONDS} s (free: {free()})")
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
            self.lost(host, error)
        except RayTaskError as error:
            raise told(error) from error
        else:
            host.starting, host.node, host.pid, self.device = None, about["node"], about["pid"], about["device"]
            if host.added:
                ready = [other.node for other in self.hosts if other.starting is None]
                self.notes.append(f"host {host.number} was added: {len(ready)} on {len(set(ready))} node{'s' * (len(set(ready)) > 1)}")
                host.added = False

    # ---- exchanges

    def next_exchange(self) -> int:
        """A number that no exchange of these hosts had before. New room on the cluster is used from here on."""
        if time.monotonic() >= self._look:
            self._look = time.monotonic() + _LOOK_SECONDS
            self._refill()
        self.exchanges += 1
        return self.exchanges

    def _refill(self) -> None:
        """Starts hosts where fewer are there than asked for, or than there is room for. Nobody waits for them but clients that have their own."""
        runtime = self.setup.experiment.runtime
        wanted = hosts_asked_for(self.setup) or room(runtime, ray.cluster_resources())
        missing = wanted - self.written_off - len(self.hosts)
        if missing <= 0:
            return
        free_room = room(runtime, ray.available_resources()) - sum(host.starting is not None for host in self.hosts)
        for _ in range(min(missing, free_room)):
            number = next(number for number in count() if all(host.number != number for host in self.hosts))
            self.hosts.append(Host(number, *self._another(), added=True))

    # ---- faults

    def host(self, number: int) -> Host:
        return next(host for host in self.hosts if host.number == number)

    def lost(self, host: Host, error: Exception) -> None:
        """Restarts a host that died, or goes on without it."""
        retries = self.setup.experiment.runtime.retries
        if time.monotonic() - host.since > FORGIVEN_SECONDS:
            host.restarts = 0
        if host.restarts >= retries:
            self.written_off += not host.node or alive(host.node)
            return self._give_up(host, f"died after {retries} restarts ({first_line(error)})")
        host.restarts += 1
        time.sleep(min(0.1 * 2**host.restarts, 5))
        self._start_again(host)
        self.fault(f"host {host.number} died ({first_line(error)}); restart {host.restarts} of {retries}, its work is done again")

    def end(self, host: Host, why: str) -> None:
        """Restarts a host that may well be alive; it keeps its retries."""
        self._start_again(host)
        self.fault(f"host {host.number} {why} and was started again")

    def _start_again(self, host: Host) -> None:
        ray.kill(host.actor)
        host.actor, host.starting = self._another()
        host.node, host.pid, host.since = "", 0, time.monotonic()

    def _give_up(self, host: Host, why: str) -> None:
        ray.kill(host.actor)
        self.hosts.remove(host)
        if not self.hosts:
            raise RunError(f"the last client host {why}")
        self.fault(f"host {host.number} {why}; going on with {len(self.hosts)} hosts")

    def fault(self, line: str) -> None:
        self.notes.append(line)
        self.last_fault = time.time(), line

    def stop(self) -> None:
        for host in self.hosts:
            ray.kill(host.actor)
        self.hosts = []
