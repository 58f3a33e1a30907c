"""Aggregation rules, which replace the weighted mean in every average of a method.

`rule` has the three contracts, `rules` the rules of this package, `apply` the application. Median, trimmed mean and
multi-Krum weigh all clients equally, as in their papers. A client with weight 0 does not count. For one or two results,
all rules except clipping rules return their mean.
"""

from typing import Any, cast

from cfl_ray.core.aggregation.apply import aggregate, range_cuts
from cfl_ray.core.aggregation.rule import ClippingRule, ColumnRule, WeightRule, check_contract
from cfl_ray.core.aggregation.rules import Mean, Median, MultiKrum, NormClipping, TrimmedMean
from cfl_ray.plugins.calling import check_options, parse_choice, with_options
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
