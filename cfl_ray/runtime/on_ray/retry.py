"""How often a process that died is started again."""

import logging
import time
from dataclasses import dataclass, field

logger = logging.getLogger(__name__)

# of life, after which all retries are granted again: on spot machines a run of days loses many hosts
FORGIVEN_SECONDS = 600


@dataclass
class RetryPolicy:
    """Restarts of one process, a host or the server: how many there were, and how many are granted.

    A process that lived `forgiven_seconds` has all its retries again.
    """

    process: str  # for the log: "host 3", "the server"
    limit: int
    forgiven_seconds: float = FORGIVEN_SECONDS
    used: int = 0
    since: float = field(default_factory=time.monotonic)  # when the process was started last

    def decide(self) -> "Decision":
        """Whether the process that died now is started again. Counts the restart."""
        if time.monotonic() - self.since > self.forgiven_seconds:
            self.used = 0
        granted = self.used < self.limit
        if granted:
            self.used += 1
        decision = Decision(granted, self.used, self.limit)
        logger.info("%s died: %s", self.process, decision)
        return decision

    def started(self) -> None:
        """Notes that the process was started, by a retry or for another reason."""
        self.since = time.monotonic()


@dataclass(frozen=True)
class Decision:
    """The answer of a `RetryPolicy`: restart number `count` of `limit`, or none."""

    granted: bool
    count: int
    limit: int

    @property
    def left(self) -> int:
        """Restarts that remain before this one, at least 0."""
        return self.limit - self.count + self.granted

    @property
    def pause_seconds(self) -> float:
        """Pause before the restart: longer every time."""
        return min(0.1 * 2**self.count, 5)

    def __str__(self) -> str:
        return f"restart {self.count} of {self.limit}" if self.granted else f"{self.limit} restarts were used up"
