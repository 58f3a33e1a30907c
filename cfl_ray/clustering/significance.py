"""A significance test of whether vectors form two clusters rather than one.

Y. Liu, D. Hayes, A. Nobel, J. Marron. Statistical Significance of Clustering for High-Dimension, Low-Sample Size Data.
Journal of the American Statistical Association 103(483), 2008. The null distribution is one Gaussian with the principal
variances of the vectors; the statistic is the share of the vectors' spread that remains around two centres.
"""

from itertools import combinations

import numpy as np
import torch
from torch import Tensor

from cfl_ray.clustering.agglomerative import by_lowest_member
from cfl_ray.clustering.kmeans import kmeans

_DIRECTIONS = 3  # principal directions; 2-means starts from the two sides of each
_ITERATIONS = 30
_DRAWS = 99  # samples from the null distribution
_MOST = 8  # parts of a cluster, before insignificant parts are merged
_FEWEST = 4  # rows of a pair of clusters; with fewer, the test cannot tell two clusters from one


def two_clusters(feature_SF: Tensor, draw: np.random.Generator) -> tuple[float, np.ndarray]:
    """The p-value of the hypothesis that the rows are one cluster, and the half, 0 or 1, of each row, int64 (S,).

    feature_SF: float (S, F), finite. The lowest possible p-value is 1 / (`_DRAWS` + 1). For fewer than 3 rows, and for
    rows that are all equal, the p-value is 1.
    """
    not_split = 1.0, np.zeros(len(feature_SF), np.int64)
    if len(feature_SF) < 3:
        return not_split
    centred_SF = feature_SF.double() - feature_SF.double().mean(0)
    left_SQ, spread_Q, _ = torch.linalg.svd(centred_SF, full_matrices=False)
    coordinate_SQ = (left_SQ * spread_Q)[:, spread_Q > 1e-9 * max(float(spread_Q.max()), 1e-30)].numpy()
    if not coordinate_SQ.size:
        return not_split
    deviation_Q = coordinate_SQ.std(0)
    null_RSQ = draw.normal(size=(_DRAWS, *coordinate_SQ.shape)) * deviation_Q
    half_1S, index_1 = _two_means(coordinate_SQ[None])
    _, index_R = _two_means(_principal(null_RSQ))
    return (1 + int((index_R <= index_1[0]).sum())) / (_DRAWS + 1), half_1S[0]


def _principal(rows_RSQ: np.ndarray) -> np.ndarray:
    """The rows of each of R samples, centred, in coordinates along the sample's principal directions."""
    rows_RSQ = rows_RSQ - rows_RSQ.mean(1, keepdims=True)
    left_RSQ, spread_RQ, _ = np.linalg.svd(rows_RSQ, full_matrices=False)
    return left_RSQ * spread_RQ[:, None]


def _two_means(rows_RSQ: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """2-means of R samples at once: the half, 0 or 1, of each row, int64 (R, S), and the cluster index (R,).

    The cluster index is the sum of squares around two centres divided by the sum of squares around one centre.
    rows_RSQ: centred, along principal directions. Each sample has the result of its best start.
    """
    total_R = (rows_RSQ**2).sum((1, 2))
    best_R, half_RS = np.full(len(rows_RSQ), np.inf), np.zeros(rows_RSQ.shape[:2], np.int64)
    for direction in range(min(_DIRECTIONS, rows_RSQ.shape[2])):
        second_RS = rows_RSQ[:, :, direction] > 0
        for _ in range(_ITERATIONS):
            before_RS = second_RS
            first_RQ, second_RQ = _mean(rows_RSQ, ~second_RS), _mean(rows_RSQ, second_RS)
            # a row x is nearer to the second centre b than to the first centre a if (x - (a + b) / 2) . (b - a) > 0
            axis_RQ, middle_RQ = second_RQ - first_RQ, (first_RQ + second_RQ) / 2
            second_RS = np.einsum("rsq,rq->rs", rows_RSQ - middle_RQ[:, None], axis_RQ) > 0
            if np.array_equal(second_RS, before_RS):
                break
        # the sum of squares around one centre is W + m1 m2 / m ||b - a||^2, with W the sum around two
        sizes_R = second_RS.sum(1) * (~second_RS).sum(1) / rows_RSQ.shape[1]
        apart_R = ((_mean(rows_RSQ, second_RS) - _mean(rows_RSQ, ~second_RS)) ** 2).sum(1)
        index_R = 1 - sizes_R * apart_R / np.maximum(total_R, 1e-300)
        better_R = index_R < best_R
        best_R = np.where(better_R, index_R, best_R)
        half_RS = np.where(better_R[:, None], second_RS, half_RS)
    return half_RS.astype(np.int64), best_R


def _mean(rows_RSQ: np.ndarray, chosen_RS: np.ndarray) -> np.ndarray:
    """Mean (R, Q) of the chosen rows; 0 if there are none."""
    counts_R = np.maximum(chosen_RS.sum(1), 1)
    return np.einsum("rsq,rs->rq", rows_RSQ, chosen_RS.astype(np.float64)) / counts_R[:, None]


def merge_insignificant(
    feature_SF: Tensor, cluster_S: np.ndarray, draw: np.random.Generator, level: float
) -> tuple[np.ndarray, float]:
    """Clusters, int64 (S,), after merges, and the highest p-value of the pairs that remain; 1 if there is no pair.

    While a pair's p-value is above `level`, the pair with the highest p-value is merged and gets the lower of its two
    numbers; other numbers are kept. Rows of cluster -1 are left out. Pairs of fewer than 4 rows are not merged, because
    the test would always take them for one cluster.
    """
    cluster_S = cluster_S.copy()

    def p_value(pair: tuple[int, int]) -> float:
        in_pair_S = np.isin(cluster_S, pair)
        return two_clusters(feature_SF[torch.from_numpy(in_pair_S)], draw)[0] if in_pair_S.sum() >= _FEWEST else 0.0

    numbers = np.unique(cluster_S[cluster_S >= 0]).tolist()
    p_of = {pair: p_value(pair) for pair in combinations(numbers, 2)}
    while p_of and max(p_of.values()) > level:
        kept, gone = max(p_of, key=lambda pair: (p_of[pair], -pair[0], -pair[1]))
        cluster_S[cluster_S == gone] = kept
        numbers.remove(gone)
        p_of = {pair: p for pair, p in p_of.items() if gone not in pair and kept not in pair}
        p_of |= {pair: p_value(pair) for pair in combinations(numbers, 2) if kept in pair}
    return cluster_S, max(p_of.values(), default=1.0)


def significant_parts(feature_SF: Tensor, draw: np.random.Generator, level: float) -> tuple[np.ndarray, float]:
    """The clusters of the rows, int64 (S,), numbered from 0, and the highest p-value of a pair; 1 for a single cluster.

    k-means makes up to `_MOST` parts, which are then merged while a pair's p-value is above `level`. Splitting instead,
    with a test of one cluster against two, has little power if there are four clusters.
    """
    parts = min(_MOST, len(feature_SF) // 3)
    if parts < 2:
        return np.zeros(len(feature_SF), np.int64), 1.0
    part_S, _ = kmeans(feature_SF, parts, int(draw.integers(2**31)))
    part_S, p = merge_insignificant(feature_SF, part_S, draw, level)
    return by_lowest_member(part_S), p
