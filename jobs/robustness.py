"""Accuracy of honest clients by attack, share of attackers, aggregation rule and method: a table and a CSV file.

    python jobs/robustness.py                  the recipe: 4 methods, 5 rules, 2 attacks by 10 % and 30 % of the clients
    python jobs/robustness.py --attacks gaussian colluders --rules median "{trimmed_mean: {share: 0.2}}" --methods ifca
    python jobs/robustness.py --on-ray --out runs/robust.csv rounds=50 attack.scale=5

Each run is appended to the file when it ends, and runs in the file are not repeated: after an interruption, the same
command continues.
"""

import argparse
import csv
import sys
from dataclasses import fields
from pathlib import Path

import yaml
from rich.console import Console
from rich.table import Table

from cfl_ray import Experiment, UserError, load, run, simulate
from cfl_ray.config.attack import ATTACK_KINDS
from cfl_ray.methods import resolve

RECIPE = Path(__file__).parent / "experiments" / "robust_fashion_mnist.yaml"
ATTACKS = ("label_flip", "sign_flip", "scaled", "gaussian", "colluders")
RULES = ("mean", "median", "trimmed_mean", "multi_krum", "norm_clipping")
FIELDS = ("method", "rule", "attack", "fraction", "accuracy_honest", "accuracy", "ari", "seconds", "config_hash")


def cell(base: Experiment, entry: dict, rule: str, attack: str, fraction: float) -> Experiment:
    """The experiment of one method with one aggregation rule; `fraction` 0: no attack."""
    ((name, options),) = entry.items()
    kind = attack if fraction else "none"
    changes = {"kind": kind, "fraction": fraction, "clients": None} if fraction else {"kind": kind}
    values = base.to_dict() | {
        "methods": [{name: options | {"aggregation": yaml.safe_load(rule)}}],
        "tracking": {"enabled": False},
    }
    ATTACK_KINDS.drop_others(values["attack"], kind)
    return Experiment(**values | {"attack": values["attack"] | changes})


def completed(file: Path) -> dict[str, dict[str, str]]:
    """Rows of the file by config hash."""
    if not file.is_file():
        return {}
    with file.open(newline="") as lines:
        return {row["config_hash"]: row for row in csv.DictReader(lines)}


def measure(experiment: Experiment, on_ray: bool) -> dict[str, float | str]:
    """Runs the experiment and returns its columns of the CSV file."""
    (result,) = (run if on_ray else simulate)(experiment).methods.values()
    final = result.final
    return {
        "accuracy_honest": final.get("accuracy_honest", final["accuracy"]),
        "accuracy": final["accuracy"],
        "ari": final.get("ari", ""),
        "seconds": result.seconds,
    }


def append(file: Path, row: dict[str, object]) -> None:
    """Appends a row to the CSV file, which is created with a header if it does not exist."""
    file.parent.mkdir(parents=True, exist_ok=True)
    fresh = not file.is_file()
    with file.open("a", newline="") as lines:
        writer = csv.DictWriter(lines, FIELDS)
        if fresh:
            writer.writeheader()
        rounded = {name: f"{row[name]:.4f}" for name in row if isinstance(row[name], float) and name != "fraction"}
        writer.writerow(row | rounded)


def table_of(rows: list[dict[str, object]]) -> Table:
    """One row per method and aggregation rule, one column per attack and share of attackers."""
    columns = list(dict.fromkeys((row["attack"], row["fraction"]) for row in rows))
    cells = {
        (row["method"], row["rule"], row["attack"], row["fraction"]): f"{float(row['accuracy_honest']):.3f}"
        for row in rows
    }
    table = Table(
        "method",
        "rule",
        *(f"{attack} {fraction:.0%}" if fraction else "no attack" for attack, fraction in columns),
        title="accuracy of honest clients",
    )
    for method, rule in dict.fromkeys((row["method"], row["rule"]) for row in rows):
        table.add_row(method, rule, *(cells.get((method, rule, *column), "") for column in columns))
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("overrides", nargs="*", help="changes to the recipe, such as rounds=30")
    parser.add_argument("--config", type=Path, default=RECIPE, help="the recipe, which names the methods")
    parser.add_argument("--methods", nargs="+", help="only these methods of the recipe")
    parser.add_argument("--attacks", nargs="+", choices=ATTACKS, default=["label_flip", "sign_flip"])
    parser.add_argument(
        "--fractions", nargs="+", type=float, default=[0.0, 0.1, 0.3], help="shares of attackers among the clients"
    )
    parser.add_argument(
        "--rules",
        nargs="+",
        default=RULES,
        help="aggregation rules, by name or as in a config: {trimmed_mean: {share: 0.2}}",
    )
    parser.add_argument("--out", type=Path, default=Path("runs/robustness.csv"))
    parser.add_argument(
        "--on-ray", action="store_true", help="run on Ray; default: in this process, with the same results"
    )
    arguments = parser.parse_intermixed_args()
    base = load(arguments.config, arguments.overrides)
    entries = [
        {method.name: {item.name: getattr(method, item.name) for item in fields(method) if item.name != "aggregation"}}
        for method in resolve(base.methods).values()
    ]
    entries = [entry for entry in entries if arguments.methods is None or {*entry} & {*arguments.methods}]
    columns = [(attack, fraction) for attack in arguments.attacks for fraction in arguments.fractions if fraction]
    columns = [("none", 0.0)] * (0.0 in arguments.fractions) + columns
    plan = [
        (*entry, rule, *column, cell(base, entry, rule, *column))
        for column in columns
        for entry in entries
        for rule in arguments.rules
    ]
    for *_, experiment in plan:
        resolve(experiment.methods)  # an invalid rule is an error before the first run
    known, rows, console = completed(arguments.out), [], Console()
    for number, (method, rule, attack, fraction, experiment) in enumerate(plan, 1):
        row = {
            "method": method,
            "rule": rule,
            "attack": attack,
            "fraction": fraction,
            "config_hash": experiment.config_hash,
        }
        if experiment.config_hash in known:
            row["accuracy_honest"] = known[experiment.config_hash]["accuracy_honest"]
        else:
            row |= measure(experiment, arguments.on_ray)
            append(arguments.out, row)
            console.print(
                f"{number} of {len(plan)}: {method}, {rule}, {attack} {fraction:.0%}: "
                f"{row['accuracy_honest']:.3f} ({row['seconds']:.0f} s)",
                soft_wrap=True,
            )
        rows.append(row)
    console.print(table_of(rows))
    console.print(f"all runs: {arguments.out}", soft_wrap=True)


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        sys.exit(f"error: {error}")
