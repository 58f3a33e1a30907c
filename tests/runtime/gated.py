"""A method whose rounds wait for the test: loaded by path, as a user's own file would be."""

import time
from dataclasses import dataclass
from pathlib import Path

from cfl_ray.core.method import option
from cfl_ray.methods.ditto import Ditto


@dataclass(frozen=True)
class Gated(Ditto, name="gated"):
    """Ditto, whose round n waits while the file `gate` holds a number below n; `gate`.waiting then holds n.

    It computes meanwhile: a server that only waits counts as one that hangs, and ends at once when asked to stop.
    """

    gate: str = option("", "file with the number of the last round that may pass")

    def round(self, state, clients, rng):
        while int(Path(self.gate).read_text()) < clients.round:
            Path(self.gate).with_suffix(".waiting").write_text(str(clients.round))
            begun = time.process_time()
            while time.process_time() < begun + 0.03:
                pass
            time.sleep(0.03)
        return super().round(state, clients, rng)
