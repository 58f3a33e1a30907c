"""Random draws by address: the same draw whoever makes it, whenever, and however often.

Nothing in this package draws from a global generator or asks for "the next number".
"""

import hashlib
import struct
from dataclasses import dataclass

import numpy as np
import torch


def _key(seed: int, round: int, exchange: int, client: int, purpose: str) -> bytes:
    return hashlib.blake2b(struct.pack("<4q", seed, round, exchange, client) + purpose.encode(), digest_size=16).digest()


def stream(seed: int, round: int, exchange: int, client: int, purpose: str) -> np.random.Generator:
    """A generator that depends on its address alone. Use -1 for a part that does not apply."""
    return np.random.Generator(np.random.Philox(key=int.from_bytes(_key(seed, round, exchange, client, purpose), "little")))


def torch_stream(seed: int, round: int, exchange: int, client: int, purpose: str) -> torch.Generator:
    """The same for draws made by torch, on the CPU."""
    key = _key(seed, round, exchange, client, purpose)
    return torch.Generator().manual_seed(int.from_bytes(key[:8], "little") >> 1)


@dataclass(frozen=True)
class Draws:
    """The draws of one method in one round: an address with only the purpose left open."""

    seed: int
    round: int

    def stream(self, purpose: str, client: int = -1) -> np.random.Generator:
        """Generator for one purpose of the method itself (cohorts and batches have their own)."""
        return stream(self.seed, self.round, -1, client, "method/" + purpose)
