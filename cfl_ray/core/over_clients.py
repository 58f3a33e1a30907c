"""Numbers about the scores of all clients: how unequal they are, and how the worst and the best clients fare."""

from collections.abc import Callable

import numpy as np


def gini(score_M: np.ndarray, higher_is_better: bool = True) -> float:
    """Gini coefficient of the clients' scores, 0 (equal) to 1 - 1/M; NaN if they add up to 0 or less.

    C. Gini. Variabilita e mutabilita, 1912: sum over pairs (i, j) of |x_i - x_j|, over 2 M^2 times the mean.
    """
    count, total = len(score_M), score_M.sum()
    order_M = 2 * np.arange(1, count + 1) - count - 1  # the sum over pairs, from the scores in ascending order
    return float((order_M * np.sort(score_M)).sum() / (count * total)) if total > 0 else float("nan")


def jain(score_M: np.ndarray, higher_is_better: bool = True) -> float:
    """Jain's fairness index of the clients' scores, 1/M (one client has all) to 1 (equal); NaN if all are 0.

    R. Jain, D. Chiu, W. Hawe. A Quantitative Measure of Fairness and Discrimination for Resource Allocation in Shared
    Computer Systems. DEC-TR-301, 1984, Eq. (2): (sum x)^2 / (M sum x^2).
    """
    squares = len(score_M) * np.square(score_M).sum()
    return float(score_M.sum() ** 2 / squares) if squares > 0 else float("nan")


def worst_tenth(score_M: np.ndarray, higher_is_better: bool = True) -> float:
    """Mean of the worst tenth of the clients, rounded up to whole clients.

    T. Li, M. Sanjabi, A. Beirami, V. Smith. Fair Resource Allocation in Federated Learning. ICLR 2020, Table 1.
    """
    return best_tenth(score_M, not higher_is_better)


def best_tenth(score_M: np.ndarray, higher_is_better: bool = True) -> float:
    """Mean of the best tenth of the clients, rounded up to whole clients; source as of `worst_tenth`."""
    ascending_M, count = np.sort(score_M), -(-len(score_M) // 10)
    return float((ascending_M[-count:] if higher_is_better else ascending_M[:count]).mean())


# by the ending of their names in records; scores of the tested clients -> one number
OVER_CLIENTS: dict[str, Callable[[np.ndarray, bool], float]] = {
    "gini": gini,
    "jain": jain,
    "worst_10": worst_tenth,
    "best_10": best_tenth,
}
