"""Random words by key, the same on every device: SplitMix64 (G. Steele et al., OOPSLA 2014).

Word i of a key is mix(key + (i + 1) gamma) modulo 2^64. Keys are numbers below 2^64 for words on the CPU, and an int64
tensor (m,) on another device for words there.
"""

import numpy as np
import torch
from torch import Tensor

Keys = list[int] | Tensor

_GAMMA, _MODULUS = 0x9E3779B97F4A7C15, 2**64
_SHIFTS, _FACTORS = (30, 27, 31), (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
_BLOCK = 1 << 13  # words that are in the cache together
_STEPS = np.arange(1, _BLOCK + 1, dtype=np.uint64) * np.uint64(_GAMMA)


def keys_on(device: torch.device, keys: list[int]) -> Keys:
    """Keys in the form for this device."""
    return keys if device.type == "cpu" else torch.tensor([_signed(key) for key in keys], device=device)


def split(keys: Keys, number: int | Tensor) -> Keys:
    """New keys: word `number` of each key. number: a tensor (1,), or of the shape of the keys, if they are one."""
    if not isinstance(keys, Tensor):
        return [_mixed_number((key + (int(number) + 1) * _GAMMA) % _MODULUS) for key in keys]
    if isinstance(number, Tensor):
        return _mixed(keys + (number + 1) * _signed(_GAMMA))
    return _mixed(keys + _signed((number + 1) * _GAMMA % _MODULUS))


def split_each(keys: Keys, numbers: range) -> Keys:
    """New keys of a single key: its words of these numbers."""
    if isinstance(keys, Tensor):
        return split(keys, torch.arange(numbers.start, numbers.stop, numbers.step, device=keys.device))
    return [split(keys, number)[0] for number in numbers]  # type: ignore[misc]  # a list, as `keys`


def words(keys: Keys, count: int) -> Tensor:
    """The first words of each key, int64 (m, count): their 64 bits, as two's complement."""
    if isinstance(keys, Tensor):
        return _mixed(torch.arange(1, count + 1, device=keys.device).mul_(_signed(_GAMMA)) + keys[:, None])
    word_mc, key_m1 = np.empty((len(keys), count), np.uint64), np.array(keys, np.uint64)[:, None]
    rows = max(_BLOCK // max(count, 1), 1)
    for first in range(0, count, _BLOCK):
        for row in range(0, len(keys), rows):
            block = word_mc[row : row + rows, first : first + _BLOCK]
            start_m1 = key_m1[row : row + rows] + np.uint64(first * _GAMMA % _MODULUS)
            _mix(np.add(_STEPS[: block.shape[1]], start_m1, out=block))
    return torch.from_numpy(word_mc.view(np.int64))


def _mix(word: np.ndarray) -> None:
    """In place."""
    shifted = np.empty_like(word)
    for shift, factor in zip(_SHIFTS, _FACTORS, strict=False):
        word ^= np.right_shift(word, shift, out=shifted)
        word *= np.uint64(factor)
    word ^= np.right_shift(word, _SHIFTS[-1], out=shifted)


def _mixed_number(word: int) -> int:
    for shift, factor in zip(_SHIFTS, _FACTORS, strict=False):
        word = (word ^ word >> shift) * factor % _MODULUS
    return word ^ word >> _SHIFTS[-1]


def _mixed(word: Tensor) -> Tensor:
    """The same for a tensor, in place; its shift repeats the sign."""
    for shift, factor in zip(_SHIFTS, (*_FACTORS, 1), strict=True):
        word ^= (word >> shift).bitwise_and_((1 << (64 - shift)) - 1)
        word *= _signed(factor)
    return word


def _signed(word: int) -> int:
    """The same 64 bits as two's complement."""
    return word - _MODULUS if word >> 63 else word
