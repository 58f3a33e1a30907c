"""The time between checkpoints if the config does not set it."""

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

_FAULT_SECONDS = 3600.0  # M, assumed mean time between faults


@dataclass
class CheckpointInterval:
    """The time of the next checkpoint: sqrt(2 C M) seconds after the last (J. Young, Communications of the ACM 17(9),
    1974), which minimises the time for checkpoints plus the time lost by faults.

    C: the seconds that the last checkpoint took. M: one hour. If a checkpoint takes 3 ms, the next is due after 4.6 s;
    if it takes a minute, after 11 minutes. The first round is always saved, because C is not known before.
    """

    clock: Callable[[], float] = time.monotonic
    _due: float = -math.inf

    def is_due(self) -> bool:
        """Whether a checkpoint is due now."""
        return self.clock() >= self._due

    @contextmanager
    def measured(self) -> Iterator[None]:
        """Context that measures the time for saving a checkpoint and sets when the next is due."""
        began = self.clock()
        yield
        ended = self.clock()
        self._due = ended + math.sqrt(2 * (ended - began) * _FAULT_SECONDS)
