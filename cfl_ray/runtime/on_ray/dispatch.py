"""The calls of one exchange: made on hosts as they become free, and repeated if a host dies or takes too long."""

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import ray
from ray.exceptions import ObjectFetchTimedOutError, ObjectLostError, RayError, RayTaskError

from cfl_ray.config.client_ids import clients_in_words
from cfl_ray.engine.chunks import Chunk
from cfl_ray.errors import RunError, RunStopped, UserError, duration
from cfl_ray.runtime.on_ray.chunk_queue import ChunkQueue
from cfl_ray.runtime.on_ray.connect import as_user_error, may_be_host
from cfl_ray.runtime.on_ray.pool import Host, Pool
from cfl_ray.runtime.on_ray.stall import POLL_SECONDS, STOP_SECONDS

_CALLS_PER_HOST = 2  # one running, one queued, so that the host never waits for the server
# a chunk that fails on so many hosts, or so many times, ends the run; a single bad host cannot reach either limit
_FAILED_HOSTS, _FAILED_TIMES = 3, 6
_NAMED = 5  # most ranges of clients that a message names
_IDLE = 0.05  # a host that takes a smaller share of a CPU does not compute: hosts may share a busy CPU


class Calls(Protocol):
    """Makes calls from chunks, and receives their results: `ray_backend.Exchange`, which documents these."""

    @property
    def stays_on_hosts(self) -> bool: ...

    def start(self, host: Host, chunks: Sequence[Chunk]) -> list[ray.ObjectRef[Any]]: ...

    def receive(self, chunks: Sequence[Chunk], returns: list[Any]) -> None: ...

    def replacements(self, chunk: Chunk) -> list[Chunk]: ...

    def seconds(self, chunks: Sequence[Chunk]) -> float | None: ...

    def usual_seconds(self, chunks: Sequence[Chunk]) -> float | None: ...

    def clients(self, chunks: Sequence[Chunk]) -> list[int]: ...


@dataclass(eq=False)
class _Call:
    """A call in progress."""

    host: Host
    numbers: list[int]  # of the chunks
    chunks: list[Chunk]
    returns: list[ray.ObjectRef[Any]]
    seconds: float | None  # its time limit; None: no limit
    since: float  # time at which it could begin, or at which its host last made progress
    chunks_done: int = 0  # at the last query
    reported: str = ""  # its last report, if it is slow
    next_report: float = 0.0  # seconds without progress until it is reported (again)
    # time and CPU seconds of its host at the last query, made while a request to stop waits; None: not queried
    computed: tuple[float, float] | None = None


@dataclass
class Dispatch:
    """Makes calls until every chunk is done."""

    pool: Pool
    queue: ChunkQueue
    exchange: Calls
    in_progress: dict[ray.ObjectRef[Any], _Call] = field(default_factory=dict)  # by first return
    of_host: dict[int, deque[_Call]] = field(default_factory=dict)  # calls in progress by host number, in their order
    done: dict[int, list[int]] = field(default_factory=dict)  # chunks by number of the host that has done them
    failed: dict[int, list[int]] = field(default_factory=dict)  # by chunk: numbers of the hosts that it failed on
    _known: int = -1  # `pool.changes` when `_hosts` was made
    _hosts: list[int] = field(default_factory=list)  # numbers of all hosts
    _ready: list[int] = field(default_factory=list)  # numbers of the ready hosts

    def run(self) -> None:
        """Makes all calls. Afterwards `done` has the chunks whose results stay on each live host.

        Raises ObjectLostError if an object that the calls need (client state) was lost with its node.
        """
        free, polled = self._all_free(), time.monotonic()
        while self.queue or self.in_progress:
            self._hand_out(free)
            ended = self.pool.wait(list(self.in_progress), self._seconds_left())
            free = [call.host for ref in ended if (call := self._end(ref)) is not None]
            if not ended or time.monotonic() - polled > POLL_SECONDS:  # also if other hosts end calls all the time
                polled = time.monotonic()
                self._end_late()
                self.pool.watch_starts()
                self._watch()
            if not free or self._known != self.pool.changes:
                free = self._all_free()

    def lost(self, host: Host, error: Exception) -> None:
        """Restarts a host that died; the chunks that it was given or has done are put back."""
        self._take_back(host)
        self.pool.lost(host, error)

    # ---- handing out

    def _all_free(self) -> list[Host]:
        """The ready hosts by number of calls, ascending; waits for a host if no call is in progress."""
        hosts = [host for host in self.pool.hosts if host.is_ready] if self.in_progress else self.pool.ready()
        # hosts that were added later may wait for room for hours, so they are not the home of a chunk yet
        expected = [host for host in self.pool.hosts if host.is_ready or not host.added]
        self._known, self._hosts = self.pool.changes, [host.number for host in expected]
        self._ready = [host.number for host in hosts]
        return sorted(hosts, key=self._calls_of)

    def _calls_of(self, host: Host) -> int:
        return len(self.of_host.get(host.number, ()))

    def _hand_out(self, free: list[Host]) -> None:
        """Gives each of these hosts a first call, then each a second call."""
        for calls in range(_CALLS_PER_HOST):
            for host in free:
                if self._calls_of(host) > calls or not host.is_ready:
                    continue
                if not self.queue:
                    return
                if numbers := self.queue.next_for(host.number, self._ready, self._hosts, host.node):
                    self._start(host, numbers)

    def _start(self, host: Host, numbers: list[int]) -> None:
        chunks = [self.queue.chunks[number] for number in numbers]
        returns = self.exchange.start(host, chunks)
        call = _Call(host, numbers, chunks, returns, self.exchange.seconds(chunks), time.monotonic())
        self.in_progress[returns[0]] = call
        self.of_host.setdefault(host.number, deque()).append(call)

    # ---- ends

    def _end(self, ref: ray.ObjectRef[Any]) -> _Call | None:
        """Handles a call that ended and returns it; None if it was taken back before, failed, or its host died."""
        call = self.in_progress.pop(ref, None)
        if call is None:
            return None
        calls = self.of_host[call.host.number]
        calls.remove(call)
        if calls:
            calls[0].since = time.monotonic()
        try:
            self.exchange.receive(call.chunks, [ray.get(ref), *call.returns[1:]])
        except RayTaskError as error:  # before RayError: a lost argument makes an error that is both
            cause = error.cause
            # a fetch that timed out: the object exists, but this host did not get it
            if isinstance(cause, ObjectLostError) and not isinstance(cause, ObjectFetchTimedOutError):
                raise cause from error
            if not may_be_host(error):
                raise as_user_error(error) from error
            self.queue.put_back(call.numbers)
            self._count_failure(call, as_user_error(error))
            self._take_back(call.host)
            self.pool.failed(call.host, as_user_error(error))
            return None
        except RayError as error:  # the host or its result is lost
            self.queue.put_back(call.numbers)
            self.lost(call.host, error)
            return None
        if self.exchange.stays_on_hosts:
            self.done.setdefault(call.host.number, []).extend(call.numbers)
        return call

    def _count_failure(self, call: _Call, error: UserError) -> None:
        """Counts a failure for every chunk of the call. Raises RunError if a chunk has failed too often."""
        for number in call.numbers:
            hosts = self.failed.setdefault(number, [])
            hosts.append(call.host.number)
            if len(set(hosts)) >= _FAILED_HOSTS or len(hosts) >= _FAILED_TIMES:
                on = ", ".join(map(str, sorted(set(hosts))))
                raise RunError(f"{error}; the same work failed {len(hosts)} times, on hosts {on}") from error

    def _take_back(self, host: Host) -> None:
        """Puts back the chunks that were in progress or done on a lost host."""
        for call in self.of_host.pop(host.number, ()):
            del self.in_progress[call.returns[0]]
            self.queue.put_back(call.numbers)
        self.queue.put_back(self.done.pop(host.number, []))

    # ---- calls that take too long

    def _present(self) -> list[_Call]:
        """The call that runs on each host at work."""
        return [calls[0] for calls in self.of_host.values() if calls]

    def _due(self) -> list[tuple[float, _Call]]:
        """(due time, call) of every running call that has a time limit."""
        return [(call.since + call.seconds, call) for call in self._present() if call.seconds is not None]

    def _seconds_left(self) -> float:
        """Seconds until the first call reaches its limit, at most those until the next check for slow calls."""
        due = min((when for when, _ in self._due()), default=float("inf"))
        return min(POLL_SECONDS, max(0.0, due - time.monotonic()))

    def _end_late(self) -> None:
        """Ends the hosts whose time is up. The parts of their calls run first, so that little other work is wasted."""
        for when, call in self._due():
            if time.monotonic() < when or ray.wait(call.returns[:1], timeout=0)[0]:
                continue
            del self.in_progress[call.returns[0]]
            self.of_host[call.host.number].remove(call)
            self._take_back(call.host)
            for number, chunk in zip(call.numbers, call.chunks, strict=True):
                self.queue.add_urgent(self.exchange.replacements(chunk), self.queue.homes[number])
            self.pool.end(call.host, f"was at work for more than {call.seconds:g} s")

    # ---- calls that make no progress

    def _watch(self) -> None:
        """Reports slow hosts, and replaces hosts that make no progress.

        Raises RunStopped if a user asks to stop in the meantime, RunError for work that was given up too often.
        """
        rule, self.pool.polls = self.pool.stall_rule, self.pool.polls + 1
        slow, reported = [], []
        for call in self._present():
            usual, waited = self.exchange.usual_seconds(call.chunks), time.monotonic() - call.since
            stop = self.pool.stop_asked()
            if stop and waited > (STOP_SECONDS if self._idles(call) else rule.stop_after(usual)):
                raise RunStopped(f"stopped, as asked, while {self._doing(call, waited)}")
            if waited <= rule.slow_after(usual) or self._has_progressed(call):
                continue
            slow.append(f"{self._doing(call, waited)}{self._usually(usual)}")
            if waited >= call.next_report:
                call.reported, call.next_report = slow[-1], 2 * waited
                self.pool.notes.append(slow[-1])
            reported.append(call.reported)
            if waited > rule.given_up_after(usual):
                self._give_up(call, waited)
        self.pool.slow, self.pool.reported = "; ".join(slow), "; ".join(reported)

    def _has_progressed(self, call: _Call) -> bool:
        """Whether a host has done chunks of its call since the last query; if so, its time starts again."""
        progress = self.pool.progress(call.host)
        if progress is None or progress[0] <= call.chunks_done:
            return False
        call.chunks_done, call.since = progress[0], time.monotonic()
        return True

    def _idles(self, call: _Call) -> bool:
        """Whether a host does not answer, or has not computed since the last query."""
        progress, now = self.pool.progress(call.host), time.monotonic()
        if progress is None:
            return True
        (before, cpu_before), call.computed = call.computed or (now, 0.0), (now, progress[1])
        return progress[1] - cpu_before < _IDLE * (now - before)

    def _doing(self, call: _Call, waited: float) -> str:
        host, clients = call.host, clients_in_words(self.exchange.clients(call.chunks), _NAMED)
        return (
            f"host {host.number} (process {host.pid} on node {host.node[:8]}) has made no progress for "
            f"{duration(waited)} with {clients}"
        )

    def _usually(self, usual: float | None) -> str:
        rule = self.pool.stall_rule
        known = f"such work takes {duration(usual)}" if usual else "nothing is known of such work yet"
        limit = rule.given_up_after(usual)
        replaced = "never replaced" if limit == float("inf") else f"replaced after {duration(limit)}"
        return f"; {known}, and the host is {replaced} (runtime.stall_limit)"

    def _give_up(self, call: _Call, waited: float) -> None:
        """Replaces the host; its work is done again."""
        error = RunError(f"host {call.host.number} made no progress for {duration(waited)}")
        self._count_failure(call, error)
        self._take_back(call.host)
        self.pool.end(call.host, f"made no progress for {duration(waited)}")
