"""The table of the field: every method in every kind of heterogeneity of benchmarks/field.yaml, for docs/field.md.

`figures` reads the runs of the study; docs/results/field.csv keeps them, with the machine in its first line, and `page`
makes the page from that file. Kinds of methods are those of README's table.
"""

import importlib
import re
from collections import Counter
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import pandas as pd

from benchmarks.cpu_time import FILE
from cfl_ray.config.method_entries import listed_name, name_and_options
from cfl_ray.config.study import Study, load_study
from cfl_ray.errors import UserError
from cfl_ray.methods import REGISTRY
from cfl_ray.report.drawing import with_spread
from cfl_ray.report.ranks import ranks_of
from cfl_ray.results.comparison import collected, tests_of
from cfl_ray.results.significance import LEVEL
from cfl_ray.run_directory import RunDirectory
from jobs.official.page import table as markdown
from jobs.results.cells import ROOT

STUDY = ROOT / "benchmarks" / "field.yaml"
FIGURES = ROOT / "docs" / "results" / "field.csv"
PAGE = ROOT / "docs" / "field.md"
METRICS = {"accuracy": "accuracy", "accuracy_worst_10": "worst 10 %", "ari": "ARI", "mbit": "Mbit", "cpu": "CPU s"}
CLUSTERED = "clustered"
KINDS = (CLUSTERED, "soft", "one", "personalised")  # first words of README's table of methods
POINTS = 0.01  # a difference of accuracies that is worth a word


# ---- from the folder of the study to docs/results/field.csv


def figures(folder: Path) -> pd.DataFrame:
    """A row for each finished run: setting, method, seed, METRICS, and p and effect of the method in the setting.

    Only the settings and seeds for which every method of the study is finished, so that all have the same. p: of
    Wilcoxon's signed-rank test over the clients of these seeds against the best method of the setting, with Holm's
    correction. Raises UserError where no setting is complete.
    """
    of_runs, scores = collected([folder])
    methods = len(labels(load_study(RunDirectory(folder).study)))
    count = Counter((setting, seed) for (setting, _), of_seeds in of_runs.items() for seed in of_seeds)
    kept = {
        key: {seed: values for seed, values in of_seeds.items() if count[key[0], seed] == methods}
        for key, of_seeds in of_runs.items()
    }
    kept = {key: of_seeds for key, of_seeds in kept.items() if of_seeds}
    if not kept:
        raise UserError(f"{folder}: no setting has all of its {methods} methods with any seed; go on with the runs")
    scores.results = {key: {seed: scores.results[key][seed] for seed in of_seeds} for key, of_seeds in kept.items()}
    tests = tests_of(kept, "accuracy", "wilcoxon", "holm", scores)
    rows = []
    for (setting, method), of_seeds in kept.items():
        for seed, values in of_seeds.items():
            values = values | {"cpu": _cpu_seconds(RunDirectory(folder).run_of(setting, method, seed))}
            found = {name: float(f"{values[name]:.6g}") for name in METRICS if name in values}
            test = tests[setting, method]
            place = {"setting": setting, "method": method, "seed": seed}
            told = {"p": float(f"{test.p:.3g}"), "effect": float(f"{test.effect:.3g}"), "pairs": test.pairs}
            rows.append(place | found | told)
    return pd.DataFrame(rows, columns=["setting", "method", "seed", *METRICS, "p", "effect", "pairs"])


def _cpu_seconds(run: Path) -> float:
    """The CPU seconds that the tracker of benchmarks/cpu_time.py has written for the method of a run."""
    return float(next(run.glob(f"*/{FILE}")).read_text())


def labels(study: Study) -> dict[str, str]:
    """The registered name of each method of a study, by its label."""
    return {listed_name(entry): name_and_options(entry)[0] for entry in study.experiment["methods"]}


def write_figures(rows: pd.DataFrame, machine: str, file: Path = FIGURES) -> None:
    """Writes the rows below a line about the machine."""
    file.parent.mkdir(exist_ok=True)
    file.write_text(f"# {machine}\n{rows.to_csv(index=False)}")


def read_figures(file: Path = FIGURES) -> tuple[pd.DataFrame, str]:
    """The rows, and the line about the machine."""
    return pd.read_csv(file, comment="#"), file.read_text().partition("\n")[0].removeprefix("# ")


# ---- kinds of methods


def title(name: str) -> str:
    """The name of a registered method as its paper writes it: the beginning of its file."""
    return str(importlib.import_module(REGISTRY[name].__module__).__doc__).partition(":")[0].removesuffix(" training")


@cache
def kinds() -> dict[str, str]:
    """The first cell of README's table of methods, by title."""
    _, _, rest = (ROOT / "README.md").read_text().partition("## Methods\n")
    found: dict[str, str] = {}
    for line in rest.partition("\n## ")[0].splitlines():
        kind, _, names = line.strip("| ").partition(" | ")
        if names and not names.startswith("-"):
            found |= dict.fromkeys((name.strip() for name in re.sub(r"\([^)]*\)", "", names).split(",")), kind)
    return found


def kind_of(label: str, names: dict[str, str]) -> str:
    """The first word of a method's kind: clustered, soft, one, or personalised. names: as `labels`."""
    return re.split(r"[ ;]", kinds()[title(names[label])])[0]


# ---- from docs/results/field.csv to the page


def section(rows: pd.DataFrame, machine: str, file: Path = STUDY) -> str:
    """The part of the page that is written by command. file: the study of the rows."""
    study = load_study(file)
    settings = [name for name in study.setting_names if name in set(rows["setting"])]
    planned = len(study.setting_names) * len(labels(study)) * len(study.seeds)
    seeds = ", ".join(map(str, sorted(set(rows["seed"]))))
    lines = [f"{len(rows)} of {planned} runs; seeds: {seeds}. {machine}", ""]
    lines += ["## Where clustering helps, and where it does not", "", *_where(rows, settings, labels(study))]
    lines += ["## All kinds", "", *all_kinds(rows, settings, {"mbit": "Mbit", "cpu": "CPU s"})]
    for setting in settings:
        lines += [f"## {_in_words(setting)}", "", *_of_setting(rows[rows["setting"] == setting])]
    return "\n".join(lines)


def _in_words(setting: str) -> str:
    return setting.replace("_", " ").capitalize()


def _where(rows: pd.DataFrame, settings: Sequence[str], names: dict[str, str]) -> list[str]:
    """A table of the best methods of each kind by setting, and a sentence on each setting."""
    head = ["", "FedAvg", "Local", "best clustered", "best soft", "best of one model", "best personalised"]
    table, sentences = [[*head, "clustered above FedAvg"]], []
    for setting in settings:
        of = means(rows[rows["setting"] == setting])
        of_kind = {kind: [name for name in of.index if kind_of(name, names) == kind] for kind in KINDS}
        best = {kind: str(of.loc[of_kind[kind], "accuracy"].idxmax()) for kind in KINDS if of_kind[kind]}
        above = sum(of["accuracy"][of_kind[CLUSTERED]] > of["accuracy"]["fedavg"] + POINTS)
        shown = [f"{best[kind]} {100 * of['accuracy'][best[kind]]:.1f}" if kind in best else "-" for kind in KINDS]
        plain = [f"{100 * of['accuracy'][name]:.1f}" if name in of.index else "-" for name in ("fedavg", "local")]
        table.append([_in_words(setting), *plain, *shown, f"{above} of {len(of_kind[CLUSTERED])}"])
        sentences.append(f"- {_in_words(setting)}: {verdict(of, best)}")
    return [
        *markdown(*table),
        f"Accuracy in percent. Above FedAvg: by more than {100 * POINTS:.0f} point. The best of a kind is chosen by "
        "these test data, so these columns are a little too high, most of all where a kind has many methods.",
        "",
        *sentences,
        "",
    ]


def verdict(of: pd.DataFrame, best: dict[str, str]) -> str:
    """Whether clustering helps in a setting. of: means by method; best: the best method of each kind."""
    accuracy, ours = of["accuracy"], best[CLUSTERED]
    ranked = accuracy.sort_values(ascending=False, kind="stable").index
    first = ours if accuracy[ours] == accuracy.max() else ranked[0]
    next_ = next(name for name in ranked if name != ours)
    shown = {name: f"{name} {100 * value:.1f}" for name, value in accuracy.items()}
    if accuracy[ours] <= accuracy["fedavg"] + POINTS:
        return f"**clustering does not help**: {shown[ours]}, {shown['fedavg']}; the best of all: {shown[first]}."
    if first == ours:
        tests = f"{shown[next_]} ({_p(of['p'][next_])}) and {shown['fedavg']} ({_p(of['p']['fedavg'])})"
        untold = (
            "" if of["p"]["fedavg"] < LEVEL else f", which the test cannot tell with {of['pairs']['fedavg']:.0f} pairs"
        )
        return f"clustering helps: {shown[ours]} is the best of all, before {tests}{untold}."
    test = f"{shown[first]} before {shown[ours]} ({_p(of['p'][ours])}) and {shown['fedavg']}"
    if of["p"][ours] < LEVEL:
        return f"**clustering helps less than other methods**: {test}."
    return f"clustering helps no more than other methods, as far as the test tells: {test}."


def _p(p: float) -> str:
    return "no test" if p != p else f"p {'< 0.001' if p < 0.001 else f'= {p:.3f}'}"


def means(rows: pd.DataFrame) -> pd.DataFrame:
    """Means over the seeds of a setting by method, with the standard deviation of the accuracy as `accuracy_std`."""
    of_method = rows.groupby("method", sort=False)
    return of_method[[*METRICS, "p", "pairs"]].mean().assign(accuracy_std=of_method["accuracy"].std())


def _of_setting(rows: pd.DataFrame) -> list[str]:
    """Every method in a setting, the best first."""
    table = [["method", *METRICS.values(), "p"]]
    of = means(rows).sort_values("accuracy", ascending=False, kind="stable")
    for method, row in of.iterrows():
        accuracy = with_spread(100 * row["accuracy"], 100 * row["accuracy_std"])
        worst, ari = f"{100 * row['accuracy_worst_10']:.1f}", "-" if row["ari"] != row["ari"] else f"{row['ari']:.2f}"
        p = "-" if row["p"] != row["p"] else _p(row["p"]).removeprefix("p ").removeprefix("= ")
        p = f"**{p}**" if row["p"] >= LEVEL or method == of.index[0] else p
        table.append([str(method), accuracy, worst, ari, f"{row['mbit']:.1f}", f"{row['cpu']:.1f}", p])
    fewest, most = (f"{value:.0f}" for value in (of["pairs"].iloc[1:].min(), of["pairs"].iloc[1:].max()))
    return [f"Tests of {fewest if fewest == most else f'{fewest} to {most}'} pairs of clients.", "", *markdown(*table)]


def all_kinds(rows: pd.DataFrame, settings: Sequence[str], costs: dict[str, str]) -> list[str]:
    """Mean accuracy of each method in each setting in percent, its mean rank and its costs; best rank first.

    costs: heads by column of `rows`. Without ranks, in the order of the rows.
    """
    by_key: dict[tuple[str, str], dict[int, dict[str, float]]] = {}
    for run in rows.to_dict("records"):
        by_key.setdefault((run["setting"], run["method"]), {})[run["seed"]] = {"accuracy": run["accuracy"]}
    ranks = ranks_of(by_key, "accuracy")
    mean, cost = 100 * rows.pivot_table("accuracy", "method", "setting"), rows.groupby("method")[list(costs)].mean()
    table = [["method", *(name.replace("_", " ") for name in settings), "mean rank", *costs.values()]]
    for method in mean.index if ranks is None else ranks.mean_rank:
        shown = [f"{mean[name].get(method, float('nan')):.0f}" for name in settings]
        rank = "-" if ranks is None else f"{ranks.mean_rank[method]:.1f}"
        near = ranks is not None and ranks.is_near_best(str(method))
        digits = [f"{cost.loc[method, name]:.{0 if name == 'mbit' else 1}f}" for name in costs]
        table.append([str(method), *shown, f"**{rank}**" if near else rank, *digits])
    return [*([ranks.in_words, ""] if ranks else []), *markdown(*table)]
