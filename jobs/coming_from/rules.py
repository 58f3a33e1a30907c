"""The worth of each rule of PFLlib: our runs with `protocol: pfllib`, with one rule at a time as it is without."""

from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from torch import nn

from cfl_ray import Experiment, simulate
from jobs.official.page import table

METHODS, ROUNDS, SEEDS = ("fedavg", "fedper", "local"), 10, range(3)


def with_norm(input_shape: tuple[int, ...], num_classes: int) -> nn.Module:
    """A multilayer perceptron for digits with a norm layer."""
    size = int(np.prod(input_shape))
    return nn.Sequential(nn.Flatten(), nn.Linear(size, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, num_classes))


# keys that differ from the protocol, by what a row says
RULES: dict[str, dict[str, Any]] = {
    "all rules of PFLlib": {},
    "tests: the official test set (`view: cluster`)": {"data": {"test": {"view": "cluster"}}},
    "training images alone are divided (`pool: false`)": {"data": {"test": {"pool": False}}},
    "no cap (`capped: false`)": {"data": {"partition": {"capped": False}}},
    "last batches are used (`drop_last: single`)": {"local": {"drop_last": "single"}},
    "statistics are averaged (`norm: shared`)": {"methods": [{name: {"norm": "shared"}} for name in METHODS]},
    "clients count alike (`weights: uniform`)": {"evaluation": {"weights": "uniform"}},
    "scored after local training (`reported: local`)": {"evaluation": {"reported": dict.fromkeys(METHODS, "local")}},
    "last round (`keep: last`)": {"keep": "last"},
}

HEAD = f"""## What each rule is worth

`protocol: pfllib`, and each rule by itself as it is named, by `python -m jobs.coming_from rules`: digits, 10 clients, a
multilayer perceptron with BatchNorm, {ROUNDS} rounds, lr 0.05. Mean and standard deviation of the reported accuracy
over three seeds, which also draw the division.
"""


def merged(values: Any, changes: Any) -> Any:
    """The keys with changes, in inner sections too."""
    if not isinstance(values, dict) or not isinstance(changes, dict):
        return changes
    return values | {key: merged(values.get(key), change) for key, change in changes.items()}


def numbers(changes: dict[str, Any], seed: int, rounds: int = ROUNDS) -> list[float]:
    """The reported accuracy of each method with these keys beside those of the protocol."""
    values: dict[str, Any] = {
        "methods": list(METHODS),
        "data": {"partition": {"clients": 10, "min_samples": 20}, "test": {}},
        "local": {"lr": 0.05},
        "evaluation": {},
    }
    for key, change in changes.items():
        values[key] = merged(values.get(key), change)
    with TemporaryDirectory() as folder:
        experiment = Experiment(
            protocol="pfllib",
            seed=seed,
            rounds=rounds,
            model=with_norm,
            tracking={"enabled": False},
            output=folder,
            **values,
        )
        results = simulate(experiment).methods.values()
    return [result.final["reported"] for result in results]


def section() -> str:
    rows: list[list[str]] = [["rule", *METHODS]]
    for rule, changes in RULES.items():
        found_SM = np.array([numbers(changes, seed) for seed in SEEDS])
        pairs = zip(found_SM.mean(0), found_SM.std(0, ddof=1), strict=True)
        rows.append([rule, *(f"{mean:.3f} ± {spread:.3f}" for mean, spread in pairs)])
        print(rows[-1], flush=True)
    return "\n".join([HEAD, *table(*rows)])
