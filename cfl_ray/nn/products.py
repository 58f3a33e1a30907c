"""Products of narrow matrices on a CPU: by MKL on Intel's CPUs, by NumPy's OpenBLAS on others.

Measured on convolutions of LeNet-5 and of small networks for CIFAR-10: OpenBLAS copies the factors of all but the
smallest products and takes two to three times as long as MKL on an Intel CPU. On AMD's CPUs MKL is the slower one.
With runtime.cpu_capability, which makes CPUs compute alike, it is always OpenBLAS.
"""

import os
from typing import Any

import numpy as np
import torch

from cfl_ray.system.cpu_info import cpu_info

_MKL = torch.backends.mkl.is_available() and cpu_info("vendor_id") == "GenuineIntel" and "MKL_CBWR" not in os.environ
Factor = Any  # a matrix in the form that the products take: a tensor for MKL, else an array


def factor_of(matrix: np.ndarray[Any, np.dtype[Any]]) -> Factor:
    """A view of a matrix for `multiply` and `add_product`."""
    return torch.from_numpy(matrix) if _MKL else matrix


def multiply(a: Factor, b: Factor, out: Factor) -> None:
    """Sets out to a @ b."""
    if _MKL:
        torch.mm(a, b, out=out)
    else:
        np.matmul(a, b, out=out)


def add_product(a: Factor, b: Factor, total: Factor) -> None:
    """Adds a @ b to total."""
    if _MKL:
        total.addmm_(a, b)
    else:
        np.add(total, np.matmul(a, b), out=total)
