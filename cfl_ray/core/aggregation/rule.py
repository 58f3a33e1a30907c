"""The three contracts of an aggregation rule, for one output row of an average with n valid results.

A rule has one of the methods `combine`, `weigh` and `scale`. Results are the clients' uploads, without private columns.
"""

from typing import Any, Protocol, runtime_checkable

import numpy as np

from cfl_ray.errors import ConfigError, RunError
from cfl_ray.plugins.calling import call_plugin, described, place_of


@runtime_checkable
class ColumnRule(Protocol):
    """Combines the results column by column."""

    def combine(self, values_nF: np.ndarray, weight_n: np.ndarray) -> np.ndarray:
        """The aggregate, float64 (F,), of F columns of n results, float32 (n, F).

        It is called with some of the columns at a time, so each column must be combined independently.

        weight_n: the method's weights of the clients, float64; they add up to 1.
        """


@runtime_checkable
class WeightRule(Protocol):
    """Weighs the results by their distances to each other; the aggregate is their weighted mean."""

    def weigh(self, squared_nn: np.ndarray, weight_n: np.ndarray) -> np.ndarray:
        """The weights (n,) of the results, >= 0 and of any scale; 0 excludes a result.

        squared_nn: squared Euclidean distances between the results, float64 (n, n). weight_n: as in `ColumnRule`.
        """


@runtime_checkable
class ClippingRule(Protocol):
    """Shortens the changes W - w, with w the model that the client was sent; the aggregate is their weighted mean."""

    def scale(self, distance_n: np.ndarray, weight_n: np.ndarray) -> np.ndarray:
        """Factors (n,) in 0 .. 1 of the changes.

        distance_n: Euclidean norms of the changes, float64. weight_n: as in `ColumnRule`; the mean keeps these weights.
        """


_CONTRACTS = {"combine": ColumnRule, "weigh": WeightRule, "scale": ClippingRule}


def check_contract(rule: Any) -> None:
    """Raises ConfigError unless an object has exactly one of the three methods."""
    kinds = [name for name, contract in _CONTRACTS.items() if isinstance(rule, contract)]
    if len(kinds) != 1:
        raise ConfigError(
            f"aggregation rule {place_of(rule)} has {' and '.join(kinds) or 'no method of a rule'}; expected one of "
            "combine(values_nF, weight_n), weigh(squared_nn, weight_n), scale(distance_n, weight_n)"
        )


def try_rule(rule: ColumnRule | WeightRule | ClippingRule, count: int) -> None:
    """Calls a rule with `count` random results. Raises RunError if it fails, or returns another type or shape.

    Invalid numbers are not errors here, because the random results may cause them; the run checks them.
    """
    draw = np.random.default_rng(0)
    values_nF = draw.standard_normal((count, 8)).astype(np.float32)
    weight_n = draw.uniform(1, 2, count)
    weight_n /= weight_n.sum()
    if isinstance(rule, ClippingRule):
        result_of(rule, "scale", np.linalg.norm(values_nF, axis=1).astype(np.float64), weight_n)
    elif count >= 3:  # of fewer results these rules are their mean
        if isinstance(rule, ColumnRule):
            result_of(rule, "combine", values_nF, weight_n)
        else:
            squared_n = np.square(values_nF, dtype=np.float64).sum(1)
            gram_nn = values_nF.astype(np.float64) @ values_nF.T
            squared_nn = np.maximum(squared_n[:, None] + squared_n - 2 * gram_nn, 0)
            result_of(rule, "weigh", squared_nn, weight_n)


def result_of(rule: Any, method: str, values: np.ndarray, weight_n: np.ndarray) -> np.ndarray:
    """The numbers that a method of a rule returns, float64 (F,) or (n,). Raises RunError for another type or shape.

    values: its first argument.
    """
    function = getattr(rule, method)
    value = call_plugin("aggregation rule", function, values, weight_n)
    count = values.shape[1] if method == "combine" else len(weight_n)
    try:
        array = np.asarray(value, np.float64)
    except (TypeError, ValueError, RuntimeError):
        array = None
    if array is None or array.shape != (count,):
        where = f"aggregation rule {place_of(function)}"
        raise RunError(f"{where} returned {described(value)}, expected {count} numbers, shape ({count},)")
    return array


def checked_result(
    rule: Any, method: str, values: np.ndarray, weight_n: np.ndarray, allowed: str = "", high: float = np.inf
) -> np.ndarray:
    """As `result_of`. Also raises RunError, naming the author's line, for numbers that are not finite or not allowed.

    allowed: the range in words, from 0 to `high`; empty for any finite values.
    """
    array = result_of(rule, method, values, weight_n)
    where, count = f"aggregation rule {place_of(getattr(rule, method))}", len(array)
    invalid, expected = ~np.isfinite(array), "finite numbers"
    if allowed and not invalid.any():
        invalid, expected = (array < 0) | (array > high), allowed
    if invalid.any():
        at = int(np.flatnonzero(invalid)[0])
        raise RunError(f"{where} returned {array[at]:g} at position {at} of {count}, expected {expected}")
    return array
