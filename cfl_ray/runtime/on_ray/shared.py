"""Tensors over objects in the object store."""

import warnings

import numpy as np
import torch
from torch import Tensor


def shared_tensor(array: np.ndarray) -> Tensor:
    """A tensor over shared memory, without a copy. Read-only by agreement: engines copy before they write."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        return torch.from_numpy(array)
