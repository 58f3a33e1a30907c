"""Sums that do not depend on the order of their terms.

A total has two bins. The coarse bin adds up the terms rounded to multiples of 2^-30, the fine bin the remainders,
rounded to multiples of 2^-63. A float64 represents up to 2^53 steps of a grid exactly, so neither bin has any further
rounding error while

    no partial sum exceeds 2^22 = LIMIT in absolute value    (2^52 steps of 2^-30), and
    there are at most 2^20 = MAX_TERMS terms                 (remainders of at most 2^-31: 2^52 steps of 2^-63).

Therefore the number of hosts, the order of arrival and the repetition of a chunk on another host do not change a bit of
a sum.

Error: each term is rounded once, by at most 2^-64; the sum of n terms is wrong by at most n 2^-64. For a million terms
that is 5.5e-14, or 7e-8 of a sum of 8e-7.

Source: binned summation; J. Demmel and H. D. Nguyen, "Parallel Reproducible Summation", IEEE Transactions on Computers
64(7), 2015.
"""

import torch
from torch import Tensor

LIMIT = 2.0**22  # of the absolute value of any partial sum; `engine.validation` excludes clients with larger updates
MAX_TERMS = 2**20
_BLOCK = 1 << 16  # elements at a time on a CPU, so that the temporaries stay in cache
_BLOCK_GPU = 1 << 24  # and on another device, to limit the memory of the temporaries
# Adding and subtracting 1.5 * 2^52 steps of a grid rounds a float64 to a multiple of that step.
_TO_COARSE, _TO_FINE = 1.5 * 2.0 ** (52 - 30), 1.5 * 2.0 ** (52 - 63)


def zeros(size: int, device: torch.device | None = None) -> Tensor:
    """An empty total, float64 (2, size): the coarse and the fine bin."""
    return torch.zeros(2, size, dtype=torch.float64, device=device)


def add_(total_2P: Tensor, term_P: Tensor) -> Tensor:
    """Adds a term (P,), float32 or float64 and below LIMIT / 2, to a total in place.

    All devices give the same bits: the operations are single additions of float64, which IEEE 754 defines.
    """
    block = _BLOCK if total_2P.device.type == "cpu" else _BLOCK_GPU
    for coarse, fine, term in zip(*(part.split(block) for part in (*total_2P, term_P)), strict=True):
        rest = term.to(coarse, copy=True)
        rounded = (rest + _TO_COARSE).sub_(_TO_COARSE)
        coarse.add_(rounded)
        fine.add_(rest.sub_(rounded).add_(_TO_FINE).sub_(_TO_FINE))
    return total_2P


def value(total_2P: Tensor) -> Tensor:
    """The sum, float32 (P,). Totals of different terms are merged before by adding them, bin by bin."""
    return (total_2P[0] + total_2P[1]).float()
