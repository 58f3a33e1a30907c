"""Exact samples of the discrete Gaussian: integers x with probabilities proportional to exp(-x^2 / (2 sigma^2)).

C. Canonne, G. Kamath, T. Steinke, The Discrete Gaussian for Differential Privacy, NeurIPS 2020, arXiv:2004.00010,
Algorithms 1 to 3, for an integer sigma, with t = sigma in Algorithm 3. No probability is rounded: integers are drawn
and compared. Deviations: many samples are drawn at a time; samples beyond 33 sigma, of a probability below 1e-236, are
rejected, so that squares fit into 64 bits.
"""

import numpy as np

_FAR = 32  # sigmas
_BLOCK = 1 << 15  # samples drawn at a time, so that they fit into the cache


def discrete_gaussian(draw: np.random.Generator, sigma: int, size: int) -> np.ndarray:
    """Samples, int64 (size,). sigma: 1 .. `core.secure_aggregation.LARGEST_SIGMA`."""
    parts, count = [np.zeros(0, np.int64)], 0
    while count < size:
        y_n = _laplace(draw, sigma, min(2 * (size - count) + 16, _BLOCK))
        from_sigma_n = np.abs(np.abs(y_n) - sigma)
        whole_n, rest_n = np.divmod(np.minimum(from_sigma_n, _FAR * sigma) ** 2, 2 * sigma**2)
        near_n = from_sigma_n < _FAR * sigma
        parts.append(y_n[near_n & _exp_of_whole(draw, whole_n) & _exp(draw, rest_n, 2 * sigma**2)])
        count += len(parts[-1])
    return np.concatenate(parts)[:size]


def _laplace(draw: np.random.Generator, scale: int, size: int) -> np.ndarray:
    """Samples (n <= size,) with probabilities proportional to exp(-|x| / scale): Algorithm 2 without its loop."""
    u_n = draw.integers(0, scale, size)
    x_n = u_n[_exp(draw, u_n, scale)]
    alive = np.arange(len(x_n))
    while len(alive := alive[_exp(draw, np.ones(len(alive), np.int64), 1)]):
        x_n[alive] += scale
    negative_n = draw.integers(0, 2, len(x_n)) == 1
    return np.where(negative_n, -x_n, x_n)[~negative_n | (x_n > 0)]


def _exp(draw: np.random.Generator, p_n: np.ndarray, q: int) -> np.ndarray:
    """True with probability exp(-p / q), bool (n,), for 0 <= p <= q: Algorithm 1."""
    odd_n, alive, k = np.ones(len(p_n), bool), np.arange(len(p_n)), 1
    while len(alive := alive[draw.integers(0, q * k, len(alive)) < p_n[alive]]):
        odd_n[alive] ^= True
        k += 1
    return odd_n


def _exp_of_whole(draw: np.random.Generator, p_n: np.ndarray) -> np.ndarray:
    """True with probability exp(-p), bool (n,), for integers p >= 0."""
    true_n, k = np.ones(len(p_n), bool), 1
    while len(alive := np.flatnonzero(true_n & (p_n >= k))):
        true_n[alive] = _exp(draw, np.ones(len(alive), np.int64), 1)
        k += 1
    return true_n
