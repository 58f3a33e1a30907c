"""Random draws by key: a draw depends on its random key alone, not on the process, the time or earlier draws.

The key has five parts: seed, round, exchange, client, purpose.

Nothing in this package draws from a global generator.
"""

import hashlib
import struct
from dataclasses import dataclass

import numpy as np
import torch


def _key(seed: int, round: int, exchange: int, client: int, purpose: str) -> bytes:
    parts = struct.pack("<4q", seed, round, exchange, client) + purpose.encode()
    return hashlib.blake2b(parts, digest_size=16).digest()


def stream(seed: int, round: int, exchange: int, client: int, purpose: str) -> np.random.Generator:
    """A NumPy generator for a random key. -1 stands for a part of the key that does not apply."""
    key = _key(seed, round, exchange, client, purpose)
    return np.random.Generator(np.random.Philox(key=int.from_bytes(key, "little")))


def torch_stream(seed: int, round: int, exchange: int, client: int, purpose: str) -> torch.Generator:
    """A PyTorch generator on the CPU for a random key, as `stream`."""
    key = _key(seed, round, exchange, client, purpose)
    return torch.Generator().manual_seed(int.from_bytes(key[:8], "little") >> 1)


@dataclass(frozen=True)
class Draws:
    """The random draws of a method in one round."""

    seed: int
    round: int

    def stream(self, purpose: str, client: int = -1) -> np.random.Generator:
        """A generator for one purpose of the method itself; cohorts and batches have random keys of their own."""
        return stream(self.seed, self.round, -1, client, "method/" + purpose)
