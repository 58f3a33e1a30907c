"""Client ids as arrays."""

import numpy as np

_BLOCK = 1 << 16


def ids_where(is_chosen_N: np.ndarray) -> np.ndarray:
    """Indices of the true entries of a mask (N,), int32, ascending; half the memory of `np.flatnonzero`."""
    blocks = [np.zeros(0, np.int32)]
    for at in range(0, len(is_chosen_N), _BLOCK):
        blocks.append((np.flatnonzero(is_chosen_N[at : at + _BLOCK]) + at).astype(np.int32))
    return np.concatenate(blocks)
