"""Aggregation rules, which replace the weighted mean in every average of a method.

One rule per file; `rule` has the three contracts, `apply` the application. Median, trimmed mean and multi-Krum weigh
all clients equally, as in their papers. A client with weight 0 does not count. For one or two results, all rules
except clipping rules return their mean.
"""

from dataclasses import fields
from typing import Any, cast

from cfl_ray.core.aggregation.apply import aggregate, range_cuts
from cfl_ray.core.aggregation.mean import Mean
from cfl_ray.core.aggregation.median import Median
from cfl_ray.core.aggregation.multi_krum import MultiKrum
from cfl_ray.core.aggregation.norm_clipping import NormClipping
from cfl_ray.core.aggregation.rule import ClippingRule, ColumnRule, WeightRule, check_contract
from cfl_ray.core.aggregation.trimmed_mean import TrimmedMean
from cfl_ray.errors import did_you_mean
from cfl_ray.plugins.calling import with_options
from cfl_ray.plugins.registry import Registry

__all__ = [
    "AGGREGATION",
    "RULES",
    "AggregationRule",
    "ClippingRule",
    "ColumnRule",
    "Mean",
    "Median",
    "MultiKrum",
    "NormClipping",
    "TrimmedMean",
    "WeightRule",
    "aggregate",
    "parse_rule",
    "range_cuts",
]

AggregationRule = Mean | ColumnRule | WeightRule | ClippingRule
RULES: dict[str, type[Any]] = {rule.name: rule for rule in (Mean, Median, TrimmedMean, MultiKrum, NormClipping)}
AGGREGATION: Registry[Any] = Registry("aggregation rule", RULES, "cfl_ray.aggregation")


def parse_rule(value: Any) -> AggregationRule:
    """The rule for a name, `file.py:Class`, {name: {parameter: value}}, or a rule object.

    Raises ValueError, or ConfigError if a user's rule cannot be used.
    """
    name, given = next(iter(value.items())) if isinstance(value, dict) and len(value) == 1 else (value, {})
    given = given or {}
    if isinstance(name, Mean):
        return name
    if isinstance(name, str) and name in RULES and isinstance(given, dict):
        return _builtin(name, given)
    if isinstance(name, str) and name not in RULES and (":" in name or name in AGGREGATION.names()):
        return _own(AGGREGATION.find(name), given)
    if not isinstance(name, str | dict | list | int | float | None):  # made in Python
        return _own(name, given)
    example, names = "{trimmed_mean: {share: 0.2}}", ", ".join(AGGREGATION.names())
    raise ValueError(
        f"aggregation must be one of {names}, or one with its parameters such as {example}, or file.py:Class, "
        f"got {value!r}"
    )


def _builtin(name: str, given: dict[str, Any]) -> AggregationRule:
    """A rule of this package. Raises ValueError for an unknown parameter and for a value out of range."""
    valid = [item.name for item in fields(RULES[name])]
    for key in given:
        if key not in valid:
            raise ValueError(f"aggregation {name} has no parameter {key!r}{did_you_mean(key, valid) if valid else ''}")
    return cast(AggregationRule, RULES[name](**given))


def _own(part: Any, given: Any) -> AggregationRule:
    """A user's rule. Raises ConfigError if it is not a rule or does not take these parameters."""
    if not isinstance(given, dict):
        raise ValueError(f"parameters of an aggregation rule are names with values, got {given!r}")
    rule = with_options(part, given, "aggregation rule")
    check_contract(rule)
    return cast(AggregationRule, rule)
