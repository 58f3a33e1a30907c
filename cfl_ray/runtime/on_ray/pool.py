"""The client hosts of a run: started, given work as they become free, restarted when they die."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any

import ray
from ray.exceptions import RayError, RayTaskError

from cfl_ray.core.engine_names import SEQUENTIAL
from cfl_ray.data.federation import Federation
from cfl_ray.engine.choice import EngineChoice
from cfl_ray.errors import RunError, RunStopped, counted
from cfl_ray.results.environment import HostEnvironment
from cfl_ray.runtime.on_ray.connect import as_user_error, may_be_host, short_reason
from cfl_ray.runtime.on_ray.host_actor import StartedHost, start_host
from cfl_ray.runtime.on_ray.placement import alive, free, hosts_asked_for, room_left, room_of_cluster
from cfl_ray.runtime.on_ray.retry import RetryPolicy
from cfl_ray.runtime.on_ray.stall import StallRule, StartWatch
from cfl_ray.setup.engine_choice import engine_choice
from cfl_ray.setup.setup import Setup

_HOST_START_SECONDS = 300  # limit for a host to start while others are ready
_FIRST_HOST_SECONDS = 900  # runtime.wait_for_hosts: auto, before a run has had a host: machines take minutes to boot
_HOST_POLL_SECONDS = 1.0  # between two looks at hosts that the run waits for
# limit for the cluster to detect that a node is lost: five of Ray's health checks fail, each 10 s and a pause of 3 s
_LOST_NODE_SECONDS = 120
# a run that has waited so long for hosts tells the user (again); hosts start faster if the cluster has room
_NOTICE_SECONDS = (30, 120, 600, 1800, 3600, *range(4 * 3600, 90 * 86400, 4 * 3600))
_CHOICE_SECONDS = 3600  # limit for a host to choose the engine, which may compile a program first
_ANSWER_SECONDS = 1.0  # limit for a host to report the progress of its call
_ROOM_CHECK_SECONDS = 1.0  # between checks for new room on the cluster, which take about a millisecond


@dataclass
class Host:
    """The pool's record of a host."""

    number: int
    actor: Any
    starting: ray.ObjectRef[Any] | None  # resolved when the host is ready; None from then on
    retry: RetryPolicy
    start: StartWatch
    node: str = ""
    pid: int = 0
    device: str = ""
    added: bool = False  # whether it was added after the run began
    environment: HostEnvironment | None = None  # None until it is ready

    @property
    def is_ready(self) -> bool:
        """Whether the host can be given work."""
        return self.starting is None


@dataclass
class Pool:
    """The client hosts of one experiment.

    A host that dies is restarted after a growing pause, as often as its `RetryPolicy` allows; then the run continues
    without it. Raises RunError if the last host is given up. Hosts that were lost with their node are started again as
    soon as the cluster has room; if there is no host, the run waits up to `runtime.wait_for_hosts` seconds.
    """

    setup: Setup
    choice: EngineChoice | None = None
    kept_choice: EngineChoice | None = None  # of the run before it was interrupted
    hosts: list[Host] = field(default_factory=list)
    exchanges: int = 0  # number of exchanges that have begun
    finished: int = 0  # number of exchanges that have ended
    changes: int = 0  # grows whenever a host is added, becomes ready or is lost
    given_up: list[str] = field(default_factory=list)  # nodes of the hosts that were given up; "": not known
    notes: list[str] = field(default_factory=list)  # one line for each host that was lost or added, until read
    last_fault: tuple[float, str] | None = None  # (seconds since 1970, the fault)
    not_started: set[int] = field(default_factory=set)  # numbers of hosts that failed when they started
    had_hosts: bool = False  # whether any host of the run has been ready
    waiting: str = ""  # for the user of a run that waits for its first host; empty otherwise. Read by other threads
    stop_asked: Callable[[], bool] = lambda: False  # whether a user has asked to stop, which ends a wait for hosts
    slow: str = ""  # the hosts that make no progress, as text; read by other threads
    reported: str = ""  # `slow` as of the last report; the time between reports doubles
    polls: int = 0  # number of polls of work in progress, which grows while the thread of the rounds is alive
    kinds: dict[tuple[str, str], None] = field(default_factory=dict)  # (instructions, PyTorch) of hosts, in order
    no_gpu: set[str] = field(default_factory=set)  # nodes on which torch finds no GPU, though hosts reserve one
    federation_ref: ray.ObjectRef[Any] | None = None  # of the federation, if it is not that of `setup_ref`
    _next_check: float = 0.0

    def start(self, started: Sequence[StartedHost], setup_ref: ray.ObjectRef[Any]) -> None:
        """Adds these hosts and, once a host is ready, chooses the engine."""
        self.setup_ref = setup_ref
        self.hosts = [self._host(number, host) for number, host in enumerate(started)]
        self.ready()
        self.choice = engine_choice(self.setup, self._engine_by_rule, self.kept_choice)
        for host in self.hosts:
            host.actor.set_engine.remote(self.choice.engine, self.choice.last_batch)

    def use(self, federation: Federation) -> None:
        """Makes hosts use this federation from their next chunk on, including hosts that start later."""
        if federation is self.setup.federation:
            return
        self.setup, self.federation_ref = replace(self.setup, federation=federation), ray.put(federation)
        for host in list(self.hosts):
            host.actor.use.remote([self.federation_ref])

    def _host(self, number: int, started: StartedHost, added: bool = False) -> Host:
        retry = RetryPolicy(f"host {number}", self.setup.experiment.runtime.retries)
        return Host(number, started.actor, started.ready, retry, self._watched(number, started), added=added)

    def _watched(self, number: int, started: StartedHost, pause: float = 0.0) -> StartWatch:
        return StartWatch(number, started, self.stall_rule.for_start(), pause)

    def _engine_by_rule(self) -> EngineChoice:
        while True:
            host = self.ready()[0]
            try:
                choice: EngineChoice = ray.get(host.actor.engine_by_rule.remote(), timeout=_CHOICE_SECONDS)
                return choice
            except RayTaskError as error:
                if not may_be_host(error):
                    raise as_user_error(error) from error
                self.failed(host, as_user_error(error))
            except RayError as error:
                self.lost(host, error)

    def _start_another(self, pause: float = 0.0) -> StartedHost:
        engine, last_batch = (self.choice.engine, self.choice.last_batch) if self.choice else (SEQUENTIAL, 0)
        runtime = self.setup.experiment.runtime
        return start_host(runtime, self.setup_ref, engine, last_batch, pause, self.federation_ref)

    # ---- starting hosts: a host gets no work before it is ready, since it may wait for room on the cluster forever

    @property
    def ready_now(self) -> list[Host]:
        """The ready hosts; may be empty."""
        return [host for host in self.hosts if host.is_ready]

    def ready(self) -> list[Host]:
        """The ready hosts; waits for the first host.

        Raises RunError if the wait takes too long, RunStopped if a user asks to stop in the meantime.
        """
        while not (ready := self.ready_now):
            if not self.hosts:
                self._add()  # all were lost with their nodes
            self.wait([])
        return ready

    def _wait_for_hosts(self, starting: list[ray.ObjectRef[Any]]) -> list[ray.ObjectRef[Any]]:
        """The references in `starting` of hosts that have started; waits for the first host.

        Empty if a host was replaced meanwhile, or if the wait takes too long and other hosts are ready; then the
        starting hosts are given up. Otherwise raises as `ready`.
        """
        needed, began, notices = not self.ready_now, time.monotonic(), 0
        limit = self._limit() if needed else _HOST_START_SECONDS
        try:
            while (waited := time.monotonic() - began) < limit:
                ended, _ = ray.wait(starting, timeout=min(_HOST_POLL_SECONDS, limit - waited))
                self.polls += 1
                if ended:
                    return ended
                if self.watch_starts():
                    return []
                if needed and self.stop_asked():
                    raise RunStopped("stopped while it waited for client hosts, as asked")
                if needed and notices < len(_NOTICE_SECONDS) and waited >= _NOTICE_SECONDS[notices]:
                    notices += 1
                    self.waiting = self._what_is_missing(waited, limit)
        finally:
            if self.waiting:
                self.notes.append(f"waited {time.monotonic() - began:.0f} s for client hosts")
            self.waiting = ""
        if needed:
            raise RunError(f"{self._what_is_missing(limit, limit)}; start machines, or raise runtime.wait_for_hosts")
        for host in [host for host in self.hosts if not host.is_ready]:
            self._give_up(host, f"could not be placed within {_HOST_START_SECONDS} s (free: {free()})")
        return []

    def _limit(self) -> float:
        """Seconds that the run waits for a host while it has none."""
        seconds = self.setup.experiment.runtime.wait_for_hosts
        if seconds == "auto":
            seconds = None if self.had_hosts else _FIRST_HOST_SECONDS
        return float("inf") if seconds is None else seconds

    def _what_is_missing(self, waited: float, limit: float) -> str:
        runtime = self.setup.experiment.runtime
        gpus = f" and {runtime.gpus_per_host:g} GPU" if runtime.gpus_per_host else ""
        until = "for ever" if limit == float("inf") else f"up to {limit:g} s"
        return (
            f"no client host is ready after {waited:.0f} s: {len(self.hosts)} of {runtime.cpus_per_host:g} CPU{gpus} "
            f"each wait for room on the cluster or start (free: {free()}); the run waits {until} "
            "(runtime.wait_for_hosts)"
            + "".join(f"; {line}" for line in self.halted_starts())
            + (f"; the last fault: {self.last_fault[1]}" if self.last_fault else "")
        )

    def watch_starts(self) -> bool:
        """Notes hosts that make no progress while they start. Replaces them after the limit, and returns whether any.

        Raises RunError if the last host is given up.
        """
        over, now = False, time.monotonic()
        for host in list(self.hosts):
            if host.is_ready:
                continue
            if line := host.start.poll(now):
                self.notes.append(line)
            if host.start.is_over(now):
                over = True
                self.failed(host, RunError("it made no progress while it started"))
        return over

    def halted_starts(self) -> list[str]:
        """The hosts that make no progress while they start, as text; called by other threads."""
        return [host.start.reported for host in list(self.hosts) if not host.is_ready and host.start.reported]

    def nodes(self, seconds: float = 30) -> int:
        """Number of nodes that have a host, counting hosts that are ready within `seconds`."""
        deadline = time.monotonic() + seconds
        while (starting := [host.starting for host in self.hosts if host.starting]) and time.monotonic() < deadline:
            for ref in ray.wait(starting, timeout=1)[0]:
                self._take_in(next(host for host in self.hosts if host.starting == ref))
        return len({host.node for host in self.ready()})

    def wait(self, calls: list[ray.ObjectRef[Any]], seconds: float | None = None) -> list[ray.ObjectRef[Any]]:
        """The ended `calls`, as soon as a call ends; empty after `seconds`, or when a host has started."""
        starting = {host.starting: host for host in self.hosts if host.starting}
        refs = [*calls, *starting]
        ended, _ = ray.wait(refs, num_returns=len(refs), timeout=0)
        if not ended:
            ended = ray.wait(refs, timeout=seconds)[0] if calls else self._wait_for_hosts(refs)
        for ref in ended:
            if ref in starting:
                self._take_in(starting[ref])
        return [ref for ref in ended if ref not in starting]

    def _take_in(self, host: Host) -> None:
        """Records that a host has started, or failed to start."""
        ref, self.changes = host.starting, self.changes + 1
        assert ref is not None
        try:
            about = ray.get(ref)
        except RayTaskError as error:
            failed_to_start = as_user_error(error)
            self.not_started.add(host.number)
            nowhere = not self.had_hosts and all(other.number in self.not_started for other in self.hosts)
            if not may_be_host(error) or (nowhere and not isinstance(error.cause, RayError)):
                raise failed_to_start from error
            self.failed(host, failed_to_start)
            return
        except RayError as error:
            self.lost(host, error)
            return
        host.starting, host.node, host.pid, host.device = None, about["node"], about["pid"], about["device"]
        host.environment = about["environment"]
        self._note_other_environment(host)
        self._note_unused_gpu(host)
        self.had_hosts = True
        if host.added:
            nodes = len({other.node for other in self.ready_now})
            count = f"{len(self.ready_now)} on {counted(nodes, 'node')}"
            self.notes.append(f"host {host.number} was added: {count}")
            host.added = False

    @property
    def device(self) -> str:
        """The name of the device of the first ready host, for which the engine is chosen."""
        return next((host.device for host in self.ready_now), "cpu")

    def environments(self) -> list[HostEnvironment]:
        """The environments of the ready hosts."""
        return [host.environment for host in self.hosts if host.environment is not None]

    def _note_other_environment(self, host: Host) -> None:
        """Notes, once for each kind of environment, that a host may compute other last bits than the first host."""
        there = host.environment
        assert there is not None
        kind = (there.instructions, there.torch)
        if self.kinds and kind not in self.kinds:
            (instructions, torch), *_ = self.kinds
            self.notes.append(
                f"host {host.number} ({there}, PyTorch {there.torch}) may compute other last bits than others "
                f"({instructions}, PyTorch {torch}): results depend on which host trains which client"
            )
        self.kinds[kind] = None

    def _note_unused_gpu(self, host: Host) -> None:
        """Notes, once for each node, that a host computes on a CPU though it reserves a share of a GPU."""
        runtime = self.setup.experiment.runtime
        if runtime.gpus_per_host and runtime.device == "auto" and host.device == "cpu" and host.node not in self.no_gpu:
            self.no_gpu.add(host.node)
            self.notes.append(
                f"host {host.number} reserves {runtime.gpus_per_host:g} GPU and computes on the CPU, for torch finds "
                f"no GPU on node {host.node[:8]}: install a PyTorch with CUDA, and its driver, or set "
                "runtime.gpus_per_host=0"
            )

    # ---- exchanges

    @property
    def stall_rule(self) -> StallRule:
        """The limits after which hosts that make no progress are reported and replaced."""
        runtime = self.setup.experiment.runtime
        return StallRule(runtime.stall_warning, runtime.stall_limit)

    def progress(self, host: Host) -> tuple[int, float] | None:
        """As `ClientHost.progress`; None if the host does not answer."""
        try:
            progress: tuple[int, float] = ray.get(host.actor.progress.remote(), timeout=_ANSWER_SECONDS)
            return progress
        except RayError:
            return None

    def next_exchange(self) -> int:
        """A new exchange number. Starts hosts if the cluster has new room."""
        if time.monotonic() >= self._next_check:
            self._next_check = time.monotonic() + _ROOM_CHECK_SECONDS
            self._refill()
            self.watch_starts()
        self.exchanges += 1
        return self.exchanges

    def _refill(self) -> None:
        """Starts missing hosts: as many as the config asks for, or as fit. The round does not wait for them.

        Hosts that the config asks for are started even without room, so that an autoscaler adds machines.
        """
        runtime, asked_for = self.setup.experiment.runtime, hosts_asked_for(self.setup)
        wanted = asked_for or room_of_cluster(runtime)
        missing = wanted - self._written_off() - len(self.hosts)
        if missing > 0 and not asked_for:
            starting = sum(not host.is_ready for host in self.hosts)
            missing = min(missing, room_left(runtime) - starting)
        for _ in range(missing):
            self._add()

    def _add(self) -> None:
        number = next(number for number in count() if all(host.number != number for host in self.hosts))
        self.hosts.append(self._host(number, self._start_another(), added=True))
        self.changes += 1

    # ---- faults

    def host(self, number: int) -> Host:
        return next(host for host in self.hosts if host.number == number)

    def failed(self, host: Host, error: Exception) -> None:
        """Restarts a host whose work failed but may succeed elsewhere, or continues without the host."""
        self.lost(host, error, "failed")

    def lost(self, host: Host, error: Exception, what: str = "died") -> None:
        """Restarts a host that died, or continues without it."""
        decision = host.retry.decide(progress=self.finished)
        if not decision.granted:
            self.given_up.append(host.node)
            node_lost = len(self.hosts) == 1 and self._node_is_lost(host)
            self._give_up(host, f"{what} after {decision.limit} restarts ({short_reason(error)})", node_lost)
            return
        self._start_again(host, decision.pause_seconds)
        self.fault(f"host {host.number} {what} ({short_reason(error)}); {decision}, its work is done again")

    def _written_off(self) -> int:
        """Number of hosts given up on nodes that are alive or not known; hosts of lost nodes are started elsewhere.

        Computed late, because the cluster detects the loss of a node some time after the loss of its hosts.
        """
        there = alive(node for node in self.given_up if node)
        self.given_up = [node for node in self.given_up if not node or node in there]  # a node does not come back
        return len(self.given_up)

    def _node_is_lost(self, host: Host) -> bool:
        """Whether the last host was lost with its node. Waits up to `_LOST_NODE_SECONDS` for the cluster."""
        if not host.node or host.node == ray.get_runtime_context().get_node_id():
            return False
        deadline = time.monotonic() + _LOST_NODE_SECONDS
        while alive([host.node]) and time.monotonic() < deadline:
            time.sleep(_HOST_POLL_SECONDS)
        return not alive([host.node])

    def end(self, host: Host, why: str) -> None:
        """Restarts a host that may be alive; this does not count as a retry."""
        self._start_again(host)
        self.fault(f"host {host.number} {why} and was started again")

    def _start_again(self, host: Host, pause: float = 0.0) -> None:
        """Replaces the process of a host. pause: seconds that the new process waits first; other hosts do not wait."""
        self.changes += 1
        ray.kill(host.actor)
        started = self._start_another(pause)
        host.actor, host.starting, host.node, host.pid = started.actor, started.ready, "", 0
        host.start = self._watched(host.number, started, pause)
        host.retry.started()

    def _give_up(self, host: Host, why: str, node_lost: bool = False) -> None:
        """Continues without a host. Raises RunError for the last host, unless it was lost with its node."""
        self.changes += 1
        ray.kill(host.actor)
        self.hosts.remove(host)
        if not self.hosts and not node_lost:
            raise RunError(f"the last client host {why}")
        self.fault(f"host {host.number} {why}; going on with {counted(len(self.hosts), 'host')}")

    def fault(self, line: str) -> None:
        """Records a fault as a note for the user and as the last fault."""
        self.notes.append(line)
        self.last_fault = time.time(), line

    def stop(self) -> None:
        """Ends all hosts."""
        for host in self.hosts:
            ray.kill(host.actor)
        self.hosts = []
