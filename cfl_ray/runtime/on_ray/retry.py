"""The limit on restarts of a process that died."""

import logging
import time
from dataclasses import dataclass, field

logger = logging.getLogger(__name__)

# a process that lived so long regains all retries if the run advanced: on spot machines a long run loses many hosts
FORGIVEN_SECONDS = 600


@dataclass
class RetryPolicy:
    """The used and granted restarts of a process, a host or the server.

    A process regains all retries if it lived `forgiven_seconds` and the run has advanced since its last death. A
    process that always dies at the same point does not, however long it takes to get there.
    """

    process: str  # for the log: "host 3", "the server"
    limit: int
    forgiven_seconds: float = FORGIVEN_SECONDS
    used: int = 0
    since: float = field(default_factory=time.monotonic)  # when the process was started last
    progress: int = 0  # progress of the run when the process died last

    def decide(self, progress: int) -> "Decision":
        """Whether the process that just died is restarted. Counts the restart.

        progress: a number that grows as the run advances, such as the last round saved.
        """
        if progress > self.progress and time.monotonic() - self.since > self.forgiven_seconds:
            self.used = 0
        self.progress = max(self.progress, progress)
        granted = self.used < self.limit
        self.used += granted
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
    def pause_seconds(self) -> float:
        """Pause before the restart: doubles every time, at most 5."""
        return min(0.1 * 2**self.count, 5)

    def __str__(self) -> str:
        return f"restart {self.count} of {self.limit}" if self.granted else f"{self.limit} restarts were used up"
