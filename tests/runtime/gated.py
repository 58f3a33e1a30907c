"""A method whose rounds wait until a test lets them pass: loaded by its path, as a user's own file would be."""

import time
from dataclasses import dataclass
from pathlib import Path

from cfl_ray.core.method import option
from cfl_ray.methods.ditto import Ditto


@dataclass(frozen=True)
class Gated(Ditto, name="gated"):
    """Ditto, whose round n waits while the file `gate` holds a number below n."""

    gate: str = option("", "file with the number of the last round that may pass")

    def round(self, state, clients, rng):
        while int(Path(self.gate).read_text()) < clients.number:
            time.sleep(0.05)
        return super().round(state, clients, rng)
