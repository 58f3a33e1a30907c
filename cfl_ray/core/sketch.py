"""Random projection of long signatures, on the host that computes them.

A count sketch adds every coordinate, with a random sign, to one of F features. It is linear, so the mean of sketches is
the sketch of the mean, and it keeps the cosine of unit vectors with a standard error of at most sqrt(2 / F) (Charikar,
Chen and Farach-Colton, 2002; Weinberger et al., arXiv:0902.2206, Lemma 2): 1.1 % for F = 16,384.
"""

from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from cfl_ray.core.rng import stream


@lru_cache(maxsize=2)
def _plan(length: int, features: int, seed: int) -> tuple[Tensor, Tensor]:
    """Feature, int64 (L,), and sign, float32 (L,), of every coordinate."""
    draw = stream(seed, -1, -1, -1, "sketch")
    bucket = torch.from_numpy(draw.integers(0, features, length, dtype=np.int32)).long()
    sign = torch.from_numpy(draw.integers(0, 2, length, dtype=np.int8)).float().mul_(2).sub_(1)
    return bucket, sign


def sketch(vector: Tensor, features: int, seed: int) -> Tensor:
    """Projects a vector (L,) to float32 (features,); returns the vector unchanged if L <= features."""
    if len(vector) <= features:
        return vector
    bucket, sign = _plan(len(vector), features, seed)
    return torch.zeros(features).index_add_(0, bucket, vector.float() * sign)
