"""Aggregation rules, which replace the weighted mean in every average of a method.

A rule has one of the methods `combine`, `weigh` and `scale`, for one output row of an average with n valid results: the
clients' uploads, without private columns. A client with weight 0 does not count. For one or two results, all rules
except clipping rules return their mean. The rules of this package, of which the first three weigh all clients equally:

median          D. Yin et al., ICML 2018, arXiv:1803.01498, Definition 1
trimmed_mean    the same, Definition 2
multi_krum      P. Blanchard et al., NeurIPS 2017, arXiv:1703.02757, Section 4
norm_clipping   Z. Sun et al., 2019, arXiv:1911.07963, Section 3
"""

from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, cast, runtime_checkable

import numpy as np

from cfl_ray.errors import ConfigError, RunError
from cfl_ray.plugins.calling import call_plugin, check_options, described, parse_choice, place_of, with_options
from cfl_ray.plugins.registry import Registry


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


@dataclass(frozen=True)
class Mean:
    """Weighted mean, computed on the hosts that train the clients."""

    name: ClassVar[str] = "mean"


@dataclass(frozen=True)
class Median:
    """Coordinate-wise median, without weights; of an even number of values, the mean of the middle two."""

    name: ClassVar[str] = "median"

    def combine(self, values_nF: np.ndarray, weight_n: np.ndarray) -> np.ndarray:
        return _mean_without(np.sort(values_nF, 0), (len(values_nF) - 1) // 2)


@dataclass(frozen=True)
class TrimmedMean:
    """Coordinate-wise mean without the b = floor(share n) least and the b greatest values, and without weights."""

    name: ClassVar[str] = "trimmed_mean"
    share: float = 0.3  # beta: share of the values to leave out at either end, in [0, 0.5)

    def __post_init__(self) -> None:
        if not _is_number(self.share) or not 0 <= self.share < 0.5:
            raise ValueError(f"trimmed_mean.share must be in 0 .. 0.5, without 0.5, got {self.share!r}")

    def combine(self, values_nF: np.ndarray, weight_n: np.ndarray) -> np.ndarray:
        # 1e-9: the product in float64 may be a little less than the whole number that it stands for.
        return _mean_without(np.sort(values_nF, 0), int(self.share * len(values_nF) + 1e-9))


@dataclass(frozen=True)
class MultiKrum:
    """Mean of the m results with the least s_i, without weights.

    s_i is the sum of ||W_i - W_j||^2 over the n - f - 2 results nearest to i. Krum requires n >= 2 f + 3: with fewer
    results, f is the largest number that allows this. Below 5 results it is 0; then the coordinate-wise median is
    used, unless `attackers` is 0.
    """

    name: ClassVar[str] = "multi_krum"
    attackers: float = 0.3  # f: share of the results in [0, 0.5), rounded down, or an int: their number
    keep: int | None = None  # m: number of results to average; None: n - f

    def __post_init__(self) -> None:
        limit = np.inf if isinstance(self.attackers, int) else 0.5
        if not _is_number(self.attackers) or not 0 <= self.attackers < limit:
            allowed = "a share in 0 .. 0.5, without 0.5, or a whole number"
            raise ValueError(f"multi_krum.attackers must be {allowed}, got {self.attackers!r}")
        if self.keep is not None and (not _is_number(self.keep) or not isinstance(self.keep, int) or self.keep < 1):
            raise ValueError(f"multi_krum.keep must be a whole number from 1 on, or null, got {self.keep!r}")

    def weigh(self, squared_nn: np.ndarray, weight_n: np.ndarray) -> np.ndarray:
        chosen_m = self.chosen(squared_nn)
        share_n = np.zeros(len(squared_nn))
        share_n[chosen_m] = 1 / len(chosen_m)
        return share_n

    def suspects(self, count: int) -> int:
        """The number f among `count` results: as configured, but at most the largest with n >= 2 f + 3."""
        wanted = self.attackers if isinstance(self.attackers, int) else int(self.attackers * count + 1e-9)
        return min(wanted, max((count - 3) // 2, 0))

    def chosen(self, squared_nn: np.ndarray) -> np.ndarray:
        """Indices of the m results with the least scores, ascending; the lowest indices on ties."""
        count = len(squared_nn)
        suspects = self.suspects(count)
        others_nn = np.sort(squared_nn + np.diag(np.full(count, np.inf)), 1)
        score_n = others_nn[:, : count - suspects - 2].sum(1)
        return np.sort(np.argsort(score_n, kind="stable")[: self.keep or count - suspects])


@dataclass(frozen=True)
class NormClipping:
    """Weighted mean of w + min(1, c / ||W_i - w||) (W_i - w), with the model w that the client was sent."""

    name: ClassVar[str] = "norm_clipping"
    bound: float | None = None  # c: largest norm of a change; None: the median norm of the row's changes

    def __post_init__(self) -> None:
        if self.bound is not None and (not _is_number(self.bound) or not 0 < self.bound < np.inf):
            raise ValueError(f"norm_clipping.bound must be above 0, or null, got {self.bound!r}")

    def scale(self, distance_n: np.ndarray, weight_n: np.ndarray) -> np.ndarray:
        bound = np.median(distance_n) if self.bound is None else self.bound
        return np.minimum(1, bound / np.maximum(distance_n, 1e-300))


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _mean_without(sorted_nF: np.ndarray, cut: int) -> np.ndarray:
    """Mean of sorted rows without the first and the last `cut`, float64 (F,)."""
    return sorted_nF[cut : len(sorted_nF) - cut].mean(0, dtype=np.float64)


AggregationRule = Mean | ColumnRule | WeightRule | ClippingRule
RULES: dict[str, type[Any]] = {rule.name: rule for rule in (Mean, Median, TrimmedMean, MultiKrum, NormClipping)}
AGGREGATION: Registry[Any] = Registry("aggregation rule", RULES, "cfl_ray.aggregation")


def parse_rule(value: Any) -> AggregationRule:
    """The rule for a name, `file.py:Class`, {name: {parameter: value}}, or a rule object.

    Raises ConfigError for a rule that cannot be used, and ValueError for a parameter out of range.
    """
    name, parameters = parse_choice("aggregation", value)
    if isinstance(name, list | int | float | None):  # from YAML; another object is a rule that was made in Python
        raise ValueError(
            f"aggregation must be one of {', '.join(AGGREGATION.names())}, or file.py:Class, got {value!r}"
        )
    part = AGGREGATION.resolve(name)
    if part in RULES.values():
        check_options("aggregation", part, parameters)
        return cast(AggregationRule, part(**parameters))
    rule = with_options(part, parameters, "aggregation rule")
    if not isinstance(rule, Mean):
        check_contract(rule)
    return cast(AggregationRule, rule)


_CONTRACTS = {"combine": ColumnRule, "weigh": WeightRule, "scale": ClippingRule}


def check_contract(rule: Any) -> None:
    """Raises ConfigError unless an object has exactly one of the three methods."""
    kinds = [name for name, contract in _CONTRACTS.items() if isinstance(rule, contract)]
    if len(kinds) != 1:
        raise ConfigError(
            f"aggregation rule {place_of(rule)} has {' and '.join(kinds) or 'no method of a rule'}; expected one of "
            "combine(values_nF, weight_n), weigh(squared_nn, weight_n), scale(distance_n, weight_n)"
        )


def result_of(
    rule: Any,
    method: str,
    values: np.ndarray,
    weight_n: np.ndarray,
    allowed: str = "",
    high: float = np.inf,
    trial: bool = False,
) -> np.ndarray:
    """The numbers that a method of a rule returns, float64 (F,) or (n,).

    Raises RunError, naming the author's line, for another type or shape, and for numbers that are not finite or not
    allowed. values: its first argument. allowed: the range in words, from 0 to `high`; empty for any finite values.
    trial: the values are random and may cause invalid numbers, which are no errors then.
    """
    function = getattr(rule, method)
    value = call_plugin("aggregation rule", function, values, weight_n)
    where, count = f"aggregation rule {place_of(function)}", values.shape[1] if method == "combine" else len(weight_n)
    try:
        array = np.asarray(value, np.float64)
    except (TypeError, ValueError, RuntimeError):
        array = None
    if array is None or array.shape != (count,):
        raise RunError(f"{where} returned {described(value)}, expected {count} numbers, shape ({count},)")
    invalid, expected = ~np.isfinite(array), "finite numbers"
    if allowed and not invalid.any():
        invalid, expected = (array < 0) | (array > high), allowed
    if invalid.any() and not trial:
        at = int(np.flatnonzero(invalid)[0])
        raise RunError(f"{where} returned {array[at]:g} at position {at} of {count}, expected {expected}")
    return array
