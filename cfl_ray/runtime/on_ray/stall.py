"""Work that makes no progress: when it is reported, and when it is given up.

A call on a host is slow if it takes ten times as long as the same work took before, and `runtime.stall_warning` seconds
at least. It is reported then, and again each time that it has taken twice as long. After `runtime.stall_limit` seconds
(or ten times the slow time, if that is more) its host is replaced and the work is done again, with the same results.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import ray
from ray.exceptions import RayError

from cfl_ray.errors import duration
from cfl_ray.runtime.on_ray.host_actor import StartedHost

_FACTOR = 10  # work is slow once it takes this multiple of the usual seconds
_UNKNOWN_FACTOR = 6  # multiple of the limit for work of which no earlier time is known
STOP_SECONDS = 5.0  # after so long without progress, a request to stop does not wait for the end of the round
_COMPUTES = 0.2  # a process that takes this share of a CPU computes
POLL_SECONDS = 2.0  # between two polls of work in progress


@dataclass(frozen=True)
class Progress:
    """The progress of a server. `steps` differ from one poll to the next while it makes progress."""

    waits_for: str  # client hosts that are missing, or that make no progress; empty: none
    steps: tuple[object, ...]
    cpu_seconds: float = 0.0  # of the server's process so far
    stop_asked: bool = False  # whether a user asked to stop


@dataclass(frozen=True)
class StallRule:
    """The limits of a run; a `limit` of None replaces nothing."""

    warning: float  # runtime.stall_warning, seconds
    limit: float | None  # runtime.stall_limit, seconds

    def slow_after(self, usual: float | None) -> float:
        """Seconds after which work is slow. usual: seconds that such work takes; None: not known."""
        return max(self.warning, _FACTOR * (usual or 0.0))

    def given_up_after(self, usual: float | None) -> float:
        """Seconds after which a host that does the work is replaced; inf: never."""
        if self.limit is None:
            return float("inf")
        if usual is None:
            return _UNKNOWN_FACTOR * self.limit
        return max(self.limit, _FACTOR * self.slow_after(usual))

    def for_start(self) -> StallRule:
        """The limits of a process that starts: no earlier time of its start is known."""
        return replace(self, limit=self.limit and _UNKNOWN_FACTOR * self.limit)

    def stop_after(self, usual: float | None) -> float:
        """Seconds after which a request to stop ends the run within the round: the work takes far longer than usual."""
        return max(STOP_SECONDS, 3 * (usual or 0.0))


class ProgressWatch:
    """The progress of a process that another process waits for: the server, or a host that starts.

    It makes progress if its steps change, or if it takes CPU time: clustering may take long, but a process that hangs
    takes none. name: of the process, for messages. then: the end of messages, how a new process continues.
    """

    def __init__(self, rule: StallRule, now: float, name: str = "the server", then: str = ""):
        self.rule, self.since, self.updated, self.name, self.then = rule, now, now, name, then
        self.last: Progress | None = None
        self.warn_after = rule.warning

    def update(self, progress: Progress | None, now: float) -> None:
        """Records the answer to a poll; None: the process did not answer."""
        last, passed = self.last, now - self.updated
        if progress is not None:
            computed = last is not None and progress.cpu_seconds - last.cpu_seconds > _COMPUTES * passed
            if last is None or progress.steps != last.steps or computed:
                self.since, self.warn_after = max(self.since, now), self.rule.warning
            self.last, self.updated = progress, now

    def warning(self, now: float) -> str:
        """A line for the user whenever the wait for progress has doubled since the last line; empty otherwise."""
        silent = now - self.since
        if silent < self.warn_after:
            return ""
        self.warn_after = 2 * silent
        limit = self.rule.limit
        until = "never" if limit is None else f"after {duration(limit)}"
        return (
            f"{self.name} has made no progress for {duration(silent)}; another one is started {until} "
            f"(runtime.stall_limit){self.then}"
        )

    def stops(self, now: float, asked: bool = False) -> bool:
        """Whether a request to stop ends the run now, since there is no progress. asked: it may still be unanswered."""
        asked = asked or (self.last is not None and self.last.stop_asked)
        return asked and now - self.since > STOP_SECONDS

    def is_over(self, now: float) -> bool:
        """Whether the process must be replaced."""
        return self.rule.limit is not None and now - self.since > self.rule.limit


class StartWatch:
    """The progress of a host that starts, from the moment at which it has a place on the cluster.

    rule: the limits of a process that starts. pause: seconds that the process waits before it starts.
    """

    def __init__(self, number: int, started: StartedHost, rule: StallRule, pause: float = 0.0):
        self.number, self.started, self.rule, self.pause = number, started, rule, pause
        self.watch: ProgressWatch | None = None  # None: it may still wait for a place
        self.pending: ray.ObjectRef[Any] | None = None  # the progress that it was asked for
        self.reported = ""  # the last line for the user, while the host makes no progress

    def poll(self, now: float) -> str:
        """A line for the user whenever the time without progress has doubled since the last line. Does not wait."""
        if self.watch is None:
            self.watch = self._placed(now)
            return ""
        self.pending = self.pending or self.started.actor.progress.remote()
        if ray.wait([self.pending], timeout=0)[0]:
            with suppress(RayError):  # the host died; `started.ready` has the same error
                self.watch.update(Progress("", (), cpu_seconds=ray.get(self.pending)[1]), now)
            self.pending = None
        line = self.watch.warning(now)
        self.reported = line or (self.reported if now - self.watch.since >= self.rule.warning else "")
        return line

    def is_over(self, now: float) -> bool:
        """Whether the host must be replaced."""
        return self.watch is not None and self.watch.is_over(now)

    def _placed(self, now: float) -> ProgressWatch | None:
        if not ray.wait([self.started.placed], timeout=0)[0]:
            return None
        try:
            node, pid = ray.get(self.started.placed)
        except RayError:
            return None
        who = f"host {self.number} (process {pid} on node {node[:8]}), which starts,"
        return ProgressWatch(self.rule, now + self.pause, who)
