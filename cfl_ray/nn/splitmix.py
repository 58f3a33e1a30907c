"""Random words by key, the same on every device: SplitMix64 (G. Steele et al., OOPSLA 2014).

Keys are uint64 arrays of NumPy for words on the CPU, and int64 tensors on another device for words there. Word i of a
key is mix(key + (i + 1) gamma) modulo 2^64.
"""

import numpy as np
import torch
from torch import Tensor

Keys = np.ndarray | Tensor  # (m,)

_GAMMA = 0x9E3779B97F4A7C15
_FACTORS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
_SHIFTS = (30, 27, 31)
_BLOCK = 1 << 13  # words that are in the cache together


def keys_on(device: torch.device, keys: list[int]) -> Keys:
    """Keys below 2^64 in the form for this device."""
    array = np.array(keys, np.uint64)
    return array if device.type == "cpu" else torch.from_numpy(array.view(np.int64)).to(device)


def split(key_m: Keys, number: int | Tensor) -> Keys:
    """New keys (m,): word `number` of each key. number: a tensor (1,) only if the keys are one."""
    if isinstance(number, Tensor):
        assert isinstance(key_m, Tensor)
        return _mixed(key_m + (number + 1) * _signed(_GAMMA))
    step = (number + 1) * _GAMMA % 2**64
    if isinstance(key_m, Tensor):
        return _mixed(key_m + _signed(step))
    word: np.ndarray = key_m + np.uint64(step)
    return _mixed_in_place(word)


def words(key_m: Keys, count: int) -> Tensor:
    """The first words of each key, int64 (m, count): their 64 bits, as two's complement."""
    if isinstance(key_m, Tensor):
        return _mixed(torch.arange(1, count + 1, device=key_m.device).mul_(_signed(_GAMMA)) + key_m[:, None])
    word_mc = np.empty((len(key_m), count), np.uint64)
    for word_c, key in zip(word_mc, key_m, strict=True):
        for first in range(0, count, _BLOCK):
            block = np.arange(first + 1, min(first + _BLOCK, count) + 1, dtype=np.uint64)
            block *= np.uint64(_GAMMA)
            block += key
            word_c[first : first + _BLOCK] = _mixed_in_place(block)
    return torch.from_numpy(word_mc.view(np.int64))


def _mixed_in_place(word: np.ndarray) -> np.ndarray:
    for shift, factor in zip(_SHIFTS, (*_FACTORS, None), strict=True):
        word ^= word >> np.uint64(shift)
        if factor is not None:
            word *= np.uint64(factor)
    return word


def _mixed(word: Tensor) -> Tensor:
    """The same for a tensor, in place; its shift repeats the sign."""
    for shift, factor in zip(_SHIFTS, (*_FACTORS, None), strict=True):
        word ^= (word >> shift).bitwise_and_((1 << (64 - shift)) - 1)
        if factor is not None:
            word *= _signed(factor)
    return word


def _signed(word: int) -> int:
    """The same 64 bits as two's complement."""
    return word - 2**64 if word >> 63 else word
