"""Sums that are exact whatever the order of their terms.

A term is rounded to a multiple of 2^-32 once; multiples of 2^-32 below 2^20 add without error in float64. So the number of
hosts, the order of arrival, a retry or a stolen piece of work cannot change a bit of a sum.
"""

import torch
from torch import Tensor

LIMIT = float(2**20)  # of the absolute value of any sum; a client whose update is larger is left out
_GRID = 2.0**-32
_BLOCK = 1 << 15  # elements rounded at a time, so that the temporaries stay in cache


def add_(total: Tensor, term: Tensor) -> Tensor:
    """Adds `term` (float32 or float64), rounded to the grid, to the float64 `total` in place; both are (P,) or scalars.

    Exact as long as every |partial sum| stays below 2^20: weights of a mean that add up to 1 and |term| < LIMIT suffice.
    """
    total_blocks, term_blocks = total.reshape(-1).split(_BLOCK), term.reshape(-1).split(_BLOCK)
    for total_block, term_block in zip(total_blocks, term_blocks):
        rounded = term_block.to(torch.float64)
        rounded = rounded.clone() if rounded.data_ptr() == term_block.data_ptr() else rounded
        total_block.add_(rounded.mul_(1 / _GRID).round_().mul_(_GRID))  # powers of two: only the rounding changes anything
    return total
