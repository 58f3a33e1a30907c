"""When a checkpoint is due."""

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

_FAULT_SECONDS = 3600.0  # M, assumed mean time between faults


@dataclass
class CheckpointInterval:
    """The next checkpoint: after `every` rounds, or sqrt(2 C M) seconds after the last (J. Young, Communications of the
    ACM 17(9), 1974), which minimises the time for checkpoints plus the time lost by faults.

    C: the seconds that the last checkpoint took. M: one hour. If a checkpoint takes 3 ms, the next is due after 4.6 s;
    if it takes a minute, after 11 minutes. The first round is always saved, because C is not known before.
    """

    every: int | None = None  # runtime.checkpoint_every; None: by the time
    clock: Callable[[], float] = time.monotonic
    _due: float = -math.inf

    def is_due(self, round: int) -> bool:
        """Whether a checkpoint is due now, after this round."""
        return self.clock() >= self._due if self.every is None else round % self.every == 0

    @contextmanager
    def measured(self) -> Iterator[None]:
        """Context that measures the time for saving a checkpoint and sets when the next is due."""
        began = self.clock()
        yield
        ended = self.clock()
        self._due = ended + math.sqrt(2 * (ended - began) * _FAULT_SECONDS)
