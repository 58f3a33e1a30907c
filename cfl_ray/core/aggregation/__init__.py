"""Aggregation rules, which replace the weighted mean of the clients' results in every average of a method.

One rule per file; `rule` has the three contracts, `apply` applies one. Median, trimmed mean and multi-Krum weigh all
clients equally, as in their papers. A client with weight 0 does not count. Of one or two results every rule that is not
a clipping rule is their mean.
"""

from dataclasses import fields
from typing import Any, cast

from cfl_ray.core.aggregation.apply import aggregate
from cfl_ray.core.aggregation.mean import Mean
from cfl_ray.core.aggregation.median import Median
from cfl_ray.core.aggregation.multi_krum import MultiKrum
from cfl_ray.core.aggregation.norm_clipping import NormClipping
from cfl_ray.core.aggregation.rule import ClippingRule, ColumnRule, WeightRule, check_contract
from cfl_ray.core.aggregation.trimmed_mean import TrimmedMean
from cfl_ray.core.errors import did_you_mean
from cfl_ray.core.own_parts import with_options
from cfl_ray.core.registry import Registry

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
]

AggregationRule = Mean | ColumnRule | WeightRule | ClippingRule
RULES: dict[str, type[Any]] = {rule.name: rule for rule in (Mean, Median, TrimmedMean, MultiKrum, NormClipping)}
AGGREGATION: Registry[Any] = Registry("aggregation rule", RULES, "cfl_ray.aggregation")


def parse_rule(value: Any) -> AggregationRule:
    """The rule for a name, `file.py:Class`, {name: {parameter: value}}, or a rule itself.

    Raises ValueError, or ConfigError where a user's own rule cannot be used.
    """
    if isinstance(value, Mean):
        return value
    name, given = next(iter(value.items())) if isinstance(value, dict) and len(value) == 1 else (value, {})
    if isinstance(name, str) and name not in RULES and name in [*AGGREGATION.names(), *([name] if ":" in name else [])]:
        return _own(AGGREGATION.find(name), given)
    if not isinstance(name, str | dict | list | int | float | None):
        return _own(name, given)
    if not isinstance(name, str) or name not in RULES or not isinstance(given or {}, dict):
        example = "{trimmed_mean: {share: 0.2}}"
        names = ", ".join(AGGREGATION.names())
        raise ValueError(
            f"aggregation must be one of {names}, or one with its parameters such as {example}, or file.py:Class, "
            f"got {value!r}"
        )
    valid = [item.name for item in fields(RULES[name])]
    for key in given or {}:
        if key not in valid:
            raise ValueError(f"aggregation {name} has no parameter {key!r}{did_you_mean(key, valid) if valid else ''}")
    return cast(AggregationRule, RULES[name](**(given or {})))


def _own(part: Any, given: Any) -> AggregationRule:
    """A rule that is not of this package. Raises ConfigError where it is none, or does not take these parameters."""
    if given is not None and not isinstance(given, dict):
        raise ValueError(f"parameters of an aggregation rule are names with values, got {given!r}")
    rule = with_options(part, given or {}, "aggregation rule")
    check_contract(rule)
    return cast(AggregationRule, rule)
