"""Random draws by key: a draw depends on its random key alone, not on the process, the time or earlier draws.

The key has five parts: seed, round, exchange, client, purpose.

Nothing in this package draws from a global generator.
"""

import hashlib
import struct
from dataclasses import dataclass

import numpy as np
import torch

_FACTORS = (0xD2E7470EE14C6C93, 0xCA5A826395121157)  # of Philox
_WEYL = np.array([0x9E3779B97F4A7C15, 0xBB67AE8584CAA73B], np.uint64)
_BLOCK = 1 << 14  # clients whose words are in the cache together


def _key(seed: int, round: int, exchange: int, client: int, purpose: str) -> bytes:
    parts = struct.pack("<4q", seed, round, exchange, client) + purpose.encode()
    return hashlib.blake2b(parts, digest_size=16).digest()


def stream(seed: int, round: int, exchange: int, client: int, purpose: str) -> np.random.Generator:
    """A NumPy generator for a random key. -1 stands for a part of the key that does not apply."""
    key = _key(seed, round, exchange, client, purpose)
    return np.random.Generator(np.random.Philox(key=int.from_bytes(key, "little")))


def secret_stream(secret: bytes, round: int, exchange: int, index: int, purpose: str) -> np.random.Generator:
    """A NumPy generator for a random key that has a secret in place of the seed. index: an output row, or a client."""
    parts = secret + struct.pack("<3q", round, exchange, index) + purpose.encode()
    key = hashlib.blake2b(parts, digest_size=16).digest()
    return np.random.Generator(np.random.Philox(key=int.from_bytes(key, "little")))


def uniforms(seed: int, round: int, exchange: int, clients: np.ndarray, purpose: str) -> np.ndarray:
    """A number in [0, 1) for each of these clients, float64; it depends on the random key and the client alone.

    The client is the second word of the counter of one Philox stream: the first number of
    `Philox(key=key, counter=(0, client, 0, 0))`.
    """
    key = np.frombuffer(_key(seed, round, exchange, -1, purpose), "<u8")
    draw_M = np.empty(len(clients))
    for block in range(0, len(clients), _BLOCK):
        word_m = _philox(key, np.asarray(clients[block : block + _BLOCK]).astype(np.uint64))
        draw_M[block : block + _BLOCK] = (word_m >> np.uint64(11)) * 2.0**-53
    return draw_M


def _philox(key: np.ndarray, client_M: np.ndarray) -> np.ndarray:
    """The first word of Philox4x64-10 (J. Salmon et al., SC 2011) for each counter, as that of NumPy's generator."""
    zero, (first, second) = np.zeros(1, np.uint64), map(np.uint64, _FACTORS)
    counter = [zero + np.uint64(1), client_M, zero, zero]
    for round in range(8):
        key0, key1 = key + np.uint64(round) * _WEYL  # modulo 2^64
        high0, high1 = _high(counter[0], _FACTORS[0]), _high(counter[2], _FACTORS[1])
        counter = [high1 ^ counter[1] ^ key0, counter[2] * second, high0 ^ counter[3] ^ key1, counter[0] * first]
    # of the last two rounds, what the first word depends on
    last = _high(counter[0], _FACTORS[0]) ^ counter[3] ^ (key + np.uint64(8) * _WEYL)[1]
    return _high(last, _FACTORS[1]) ^ counter[2] * second ^ (key + np.uint64(9) * _WEYL)[0]


def _high(a: np.ndarray, factor: int) -> np.ndarray:
    """The high 64 bits of a product."""
    mask, half = np.uint64(0xFFFFFFFF), np.uint64(32)
    factor_low, factor_high = np.uint64(factor & 0xFFFFFFFF), np.uint64(factor >> 32)
    low, high = a & mask, a >> half
    middle = low * factor_low
    middle >>= half
    middle += high * factor_low
    low *= factor_high
    low += middle & mask
    low >>= half
    middle >>= half
    high *= factor_high
    high += middle
    high += low
    return high


def torch_stream(seed: int, round: int, exchange: int, client: int, purpose: str) -> torch.Generator:
    """A PyTorch generator on the CPU for a random key, as `stream`."""
    return torch.Generator().manual_seed(word(seed, round, exchange, client, purpose) >> 1)


def word(seed: int, round: int, exchange: int, client: int, purpose: str) -> int:
    """A number below 2^64 for a random key."""
    return int.from_bytes(_key(seed, round, exchange, client, purpose)[:8], "little")


@dataclass(frozen=True)
class Draws:
    """The random draws of a method in one round."""

    seed: int
    round: int

    def stream(self, purpose: str, client: int = -1) -> np.random.Generator:
        """A generator for a purpose of the method; cohorts and batches have other random keys."""
        return stream(self.seed, self.round, -1, client, "method/" + purpose)
