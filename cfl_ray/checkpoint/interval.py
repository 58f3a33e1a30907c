"""The time between checkpoints if the config leaves it open."""

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

_FAULT_SECONDS = 3600.0  # M, assumed mean time between faults


@dataclass
class CheckpointInterval:
    """Says when the next checkpoint is due: sqrt(2 C M) seconds after the last one (J. Young, Communications of the ACM
    17(9), 1974), which minimises the time for checkpoints plus the time lost by faults.

    C: the seconds that the last checkpoint took. M: one hour. For 3 ms that is every 4.6 s, for a minute every 11
    minutes. The first round is always saved, since C is not known before.
    """

    clock: Callable[[], float] = time.monotonic
    _due: float = -math.inf

    def is_due(self) -> bool:
        """Whether a checkpoint is due now."""
        return self.clock() >= self._due

    @contextmanager
    def measured(self) -> Iterator[None]:
        """Context in which a checkpoint is saved."""
        began = self.clock()
        yield
        ended = self.clock()
        self._due = ended + math.sqrt(2 * (ended - began) * _FAULT_SECONDS)
