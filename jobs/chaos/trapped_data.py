"""A federation whose data source stops answering: read from the file by the hosts, as a user's own would be."""

import time
from contextlib import suppress
from os import getpid, rename

from cfl_ray.data.federation import TensorSamples
from cfl_ray.data.synthetic import SyntheticFederation

CLIENTS = 24
READING = 0.03  # seconds for the data of a client, so that rounds do not end before they can be interrupted


class TrappedFederation(SyntheticFederation):
    """Synthetic data. While the file `trap` exists, the next read takes it (as `trap`.PID) and never ends.

    So does a read from a mount that one machine has lost: another machine, or a later try, has the data.
    """

    def __init__(self, trap: str):
        super().__init__(CLIENTS, input=(16,), samples=40)
        self.trap = trap

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return TrappedFederation, (self.trap,)

    def train(self, client: int) -> TensorSamples:
        with suppress(FileNotFoundError):
            rename(self.trap, f"{self.trap}.{getpid()}")
            while True:
                time.sleep(3600)
        time.sleep(READING)
        return super().train(client)


def load(trap: str) -> TrappedFederation:
    return TrappedFederation(trap)
