"""A client host that starts, watched from the time that it has a place on the cluster."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import ray
from ray.exceptions import RayError

from cfl_ray.runtime.on_ray.host_actor import StartedHost
from cfl_ray.runtime.on_ray.stall import Progress, ProgressWatch, StallRule


class StartWatch:
    """Says when a host that starts makes no progress. One that waits for room on the cluster is not watched.

    rule: the limits of a process that starts. pause: seconds that the process waits before it starts.
    """

    def __init__(self, number: int, started: StartedHost, rule: StallRule, pause: float = 0.0):
        self.number, self.started, self.rule, self.pause = number, started, rule, pause
        self.watch: ProgressWatch | None = None  # None: it has no place that is known
        self.looking: ray.ObjectRef[Any] | None = None  # its present progress
        self.told = ""  # what the user was told last

    def look(self, now: float) -> str:
        """A line for the user, each time that the host has made no progress for twice as long; does not wait."""
        if self.watch is None:
            self.watch = self._placed(now)
            return ""
        self.looking = self.looking or self.started.actor.progress.remote()
        if ray.wait([self.looking], timeout=0)[0]:
            with suppress(RayError):  # it died, which `started.ready` says as well
                self.watch.look(Progress("", (), cpu_seconds=ray.get(self.looking)[1]), now)
            self.looking = None
        line = self.watch.warning(now)
        self.told = line or (self.told if self.watch.is_slow(now) else "")
        return line

    def is_over(self, now: float) -> bool:
        """Whether the host is to be replaced."""
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
