"""The table of the field: every method in every kind of heterogeneity of benchmarks/field.yaml, for docs/field.md.

`figures` reads the runs of the study; docs/results/field.csv keeps them, with the machine in its first line, and
docs/results/field_clients.csv the accuracies of single clients. `section` makes the page from these files. Kinds of
methods are those of README's table.
"""

import importlib
import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

import pandas as pd

from benchmarks.cpu_time import FILE
from cfl_ray.config.method_entries import listed_name, name_and_options
from cfl_ray.config.study import Study, load_study
from cfl_ray.errors import UserError
from cfl_ray.methods import REGISTRY
from cfl_ray.report.drawing import p_in_words
from cfl_ray.report.ranks import Ranks, ranks_of
from cfl_ray.results.client_scores import ClientScores
from cfl_ray.results.comparison import collected, tests_of
from cfl_ray.results.significance import FEWEST_PAIRS, LEVEL, ChosenTest, holm
from cfl_ray.run_directory import RunDirectory
from jobs.official.page import table as markdown
from jobs.results.cells import ROOT, heading_of

STUDY = ROOT / "benchmarks" / "field.yaml"
FOLDER, RUNS, CLIENTS = ROOT / "docs" / "results", "field.csv", "field_clients.csv"
PAGE = ROOT / "docs" / "field.md"
METRICS = {"accuracy": "accuracy", "accuracy_worst_10": "worst 10 %", "ari": "ARI", "mbit": "Mbit", "cpu": "CPU s"}
KEYS = ("setting", "method", "seed")
TESTED = {"p": None, "p_fedavg": "fedavg", "p_local": "local"}  # the other method of each test; None: the best
BASELINES = ("fedavg", "local")
CLUSTERED = "clustered"
KINDS = (CLUSTERED, "soft", "one", "personalised")  # first words of README's table of methods


# ---- from the folder of the study to docs/results


def figures(folder: Path) -> tuple[pd.DataFrame, pd.DataFrame]:
    """A row for each finished run: setting, method, seed, METRICS, and tests of the method; and a row for each client.

    Only the settings and seeds for which every method of the study is finished, so that all have the same. p, p_fedavg
    and p_local: of Wilcoxon's signed-rank test over the clients of these seeds against the best method of the setting,
    FedAvg and Local, without a correction. The row of a client: setting, client, and its accuracy with each method,
    the mean over the seeds. Raises UserError where no setting is complete.
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
    chosen = {column: ChosenTest("wilcoxon", against=name) for column, name in TESTED.items()}
    against = {column: tests_of(kept, "accuracy", scores, test) for column, test in chosen.items()}
    rows = []
    for key, of_seeds in kept.items():
        tests = {column: float(f"{tests[key].p:.6g}") for column, tests in against.items()} | {
            "pairs": against["p"][key].pairs
        }
        for seed, values in of_seeds.items():
            values = values | {"cpu": _cpu_seconds(RunDirectory(folder).run_of(*key, seed))}
            found = {name: float(f"{values[name]:.6g}") for name in METRICS if name in values}
            rows.append(dict(zip(KEYS, (*key, seed), strict=True)) | found | tests)
    return pd.DataFrame(rows, columns=[*KEYS, *METRICS, *TESTED, "pairs"]), _by_client(kept, scores)


def _by_client(kept: Iterable[tuple[str, str]], scores: ClientScores) -> pd.DataFrame:
    """The accuracy of each client with each method: setting, client, then a column for each method."""
    of_client: dict[tuple[str, int], dict[str, float]] = {}
    for setting, method in kept:
        key = (setting, method)
        for client, accuracy in scores.pairs(key, key, "accuracy").ours.items():
            of_client.setdefault((setting, client), {})[method] = float(f"{accuracy:.6g}")
    rows = [{"setting": setting, "client": client, **of} for (setting, client), of in of_client.items()]
    return pd.DataFrame(rows)


def _cpu_seconds(run: Path) -> float:
    """The CPU seconds that the tracker of benchmarks/cpu_time.py has written for the method of a run."""
    return float(next(run.glob(f"*/{FILE}")).read_text())


def labels(study: Study) -> dict[str, str]:
    """The registered name of each method of a study, by its label."""
    return {listed_name(entry): name_and_options(entry)[0] for entry in study.experiment["methods"]}


def write_figures(rows: pd.DataFrame, clients: pd.DataFrame, machine: str, folder: Path = FOLDER) -> None:
    """Writes the tables of `figures`, that of the runs below a line about the machine."""
    folder.mkdir(exist_ok=True)
    (folder / RUNS).write_text(f"# {machine}\n{rows.to_csv(index=False)}")
    clients.to_csv(folder / CLIENTS, index=False)


def read_figures(folder: Path = FOLDER) -> tuple[pd.DataFrame, pd.DataFrame, str]:
    """The two tables, and the line about the machine."""
    file = folder / RUNS
    machine = file.read_text().partition("\n")[0].removeprefix("# ")
    return pd.read_csv(file, comment="#"), pd.read_csv(folder / CLIENTS), machine


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


# ---- from docs/results to the page


def section(rows: pd.DataFrame, clients: pd.DataFrame, machine: str, file: Path = STUDY) -> str:
    """The part of the page that is written by command. file: the study of the rows."""
    study = load_study(file)
    settings, names = [name for name in study.setting_names if name in set(rows["setting"])], labels(study)
    planned = len(study.setting_names) * len(names) * len(study.seeds)
    seeds = ", ".join(map(str, sorted(set(rows["seed"]))))
    kind = {name: kind_of(name, names) for name in dict.fromkeys(rows["method"])}
    means_of = {setting: means(rows[rows["setting"] == setting], kind) for setting in settings}
    rows = rows.assign(p=[means_of[run.setting].loc[run.method, "p"] for run in rows.itertuples()])
    lines = [f"{len(rows)} of {planned} runs; seeds: {seeds}. {machine}", ""]
    lines += ["## Where clustering helps, and where it does not", "", *_where(means_of)]
    lines += ["## All kinds", "", ALL_KINDS, ""]
    lines += all_kinds(rows, settings, {"mbit": "Mbit", "cpu": "CPU s"}, ranks_over_clients(clients), kind)
    for setting, of in means_of.items():
        lines += [f"## {heading_of(setting)}", "", *_of_setting(of)]
    return "\n".join(lines)


ALL_KINDS = (
    "Accuracy in percent; bold: the best of a kind, and those that the test does not tell from it. Bold ranks: those "
    "that Nemenyi's test does not tell from the best."
)


def means(rows: pd.DataFrame, kind: Mapping[str, str]) -> pd.DataFrame:
    """Means over the seeds of a setting by method, with Holm's corrections of the tests.

    accuracy_std: over the seeds. kind: of the method. TESTED: p corrected for all methods. clustered_fedavg and
    clustered_local: p of the clustered methods, corrected for these.
    """
    of_method = rows.groupby("method", sort=False)
    of = of_method[[*METRICS, *TESTED, "pairs"]].mean()
    of = of.assign(kind=kind, accuracy_std=of_method["accuracy"].std())
    clustered = of.index[of["kind"] == CLUSTERED]
    for name in BASELINES:
        of[f"clustered_{name}"] = pd.Series(holm(of.loc[clustered, f"p_{name}"].tolist()), clustered)
    for column in TESTED:
        of[column] = holm(of[column].tolist())
    return of


def _where(means_of: Mapping[str, pd.DataFrame]) -> list[str]:
    """A sentence on each setting, and a table of clustering against FedAvg, Local and the other methods."""
    heads = ["FedAvg", "Local", "best clustered", "best other"]
    heads += [f"clustered above / below {title(name)}" for name in BASELINES]
    table, sentences = [["clients differ by", *heads]], []
    for setting, of in means_of.items():
        ours, other = best_of(of)
        plain = [_percent(of.loc[name, "accuracy"]) for name in BASELINES]
        shown = [f"{name} {_percent(of.loc[name, 'accuracy'])}" for name in (ours, other)]
        told = [f"{sum(told_from(of, name, 1))} / {sum(told_from(of, name, -1))}" for name in BASELINES]
        table.append([heading_of(setting), *plain, *shown, *told])
        sentences.append(f"- **{heading_of(setting)}: {verdict(of)}.** {reasons(of)}")
    clustered = max(sum(of["kind"] == CLUSTERED) for of in means_of.values())
    note = (
        f"Accuracy in percent. Above and below: how many of the {clustered} clustered methods the test finds above and "
        "below FedAvg, and Local. Here p is corrected for the clustered methods, in the tables below for all. The best "
        "of many methods is chosen by these test data, so its accuracy is a little too high; the tests allow for the "
        "choice."
    )
    return [*sentences, "", *markdown(*table), note, ""]


def best_of(of: pd.DataFrame) -> tuple[str, str]:
    """The best clustered method and the best of the other methods by accuracy."""
    is_clustered = of["kind"] == CLUSTERED
    return str(of.loc[is_clustered, "accuracy"].idxmax()), str(of.loc[~is_clustered, "accuracy"].idxmax())


def told_from(of: pd.DataFrame, name: str, sign: int) -> pd.Series:
    """Whether the test finds each clustered method better (sign 1) or worse (-1) than FedAvg or Local (name)."""
    difference = sign * (of["accuracy"] - of.loc[name, "accuracy"])
    return (of["kind"] == CLUSTERED) & (difference > 0) & (of[f"clustered_{name}"] < LEVEL)


def verdict(of: pd.DataFrame) -> str:
    """Whether clustering helps in a setting, by the tests. of: `means` with the kind of each method as `kind`."""
    of_clusters = of[of["kind"] == CLUSTERED]
    if (of_clusters["clustered_fedavg"].isna() & (of_clusters["accuracy"] != of.loc["fedavg", "accuracy"])).all():
        return "no test of clustering"
    above_fedavg, above_local = (told_from(of, name, 1) for name in BASELINES)
    if not above_fedavg.any():
        return "clustering does not help, as far as the tests tell"
    if not (above_fedavg & above_local).any():
        return "clustering is better than one model, but not than training alone, as far as the tests tell"
    ours, other = best_of(of)
    if _p_of_two(of, ours, other) < LEVEL:
        is_best = of.loc[ours, "accuracy"] > of.loc[other, "accuracy"]
        return f"clustering helps {'most' if is_best else 'less than other methods'}"
    return "clustering helps, and the best of the other methods is not told apart from it"


def reasons(of: pd.DataFrame) -> str:
    """Sentences with the differences and tests behind `verdict`."""
    ours, other = best_of(of)
    shown = {name: f"{name} {_percent(of.loc[name, 'accuracy'])}" for name in (ours, other)}
    plain = [_difference(of, ours, name, title(name), of.loc[ours, f"clustered_{name}"]) for name in BASELINES]
    between = _difference(of, other, ours, "it", _p_of_two(of, ours, other))
    worst, worst_of_one = (_percent(of.loc[name, "accuracy_worst_10"]) for name in (ours, "fedavg"))
    return (
        f"The best clustered method, {shown[ours]}, is {' and '.join(plain)}. Its worst 10 % of clients have {worst}, "
        f"FedAvg's {worst_of_one}. The best of the others, {shown[other]}, is {between}."
    )


def _p_of_two(of: pd.DataFrame, ours: str, other: str) -> float:
    """The p of two methods of which one is the best of all; NaN without a test."""
    return float(of.loc[[ours, other], "p"].max())  # the best has none


def _difference(of: pd.DataFrame, first: str, second: str, words: str, p: float) -> str:
    """The difference of two methods in points, with its test. words: the name of the second in a sentence."""
    points = 100 * (of.loc[first, "accuracy"] - of.loc[second, "accuracy"])
    if math.isnan(p):
        is_few = points or of.loc[first, "pairs"] < FEWEST_PAIRS
        test = f"no test: {'too few clients' if is_few else 'equal for each client'}"
    else:
        test = f"p = {p_in_words(p)}{'' if p < LEVEL else ', not told apart'}"
    if f"{abs(points):.1f}" == "0.0":
        return f"level with {words} ({test})"
    return f"{abs(points):.1f} points {'above' if points > 0 else 'below'} {words} ({test})"


def _percent(share: float) -> str:
    return f"{100 * share:.1f}"


def _of_setting(of: pd.DataFrame) -> list[str]:
    """Every method in a setting, the best first."""
    table = [["method", "kind", *METRICS.values(), "p, best", "p, FedAvg", "p, Local"]]
    of = of.sort_values("accuracy", ascending=False, kind="stable")
    for method, row in of.iterrows():
        spread = "" if math.isnan(row["accuracy_std"]) else f" ± {_percent(row['accuracy_std'])}"
        ari = "-" if math.isnan(row["ari"]) else f"{row['ari']:.2f}"
        tests = ["-" if math.isnan(row[column]) else p_in_words(row[column]) for column in TESTED]
        if row["p"] >= LEVEL or math.isnan(row["p"]):
            tests[0] = f"**{tests[0]}**"
        cells = [row["kind"], _percent(row["accuracy"]) + spread, _percent(row["accuracy_worst_10"]), ari]
        table.append([str(method), *cells, f"{row['mbit']:.1f}", f"{row['cpu']:.1f}", *tests])
    pairs = of["pairs"][~of["p"].isna()]
    if not len(pairs):
        return ["No tests: too few clients, or all are equal.", "", *markdown(*table)]
    fewest, most = int(pairs.min()), int(pairs.max())
    return [f"Tests over {fewest if fewest == most else f'{fewest} to {most}'} clients.", "", *markdown(*table)]


def ranks_over_seeds(rows: pd.DataFrame) -> Ranks | None:
    """The ranks of methods by accuracy over pairs of setting and seed."""
    by_key: dict[tuple[str, str], dict[int, dict[str, float]]] = {}
    for run in rows.to_dict("records"):
        by_key.setdefault((run["setting"], run["method"]), {})[run["seed"]] = {"accuracy": run["accuracy"]}
    return ranks_of(by_key, "accuracy")


def ranks_over_clients(clients: pd.DataFrame) -> Ranks | None:
    """The ranks of methods by accuracy over the clients of all settings, each with its mean over the seeds."""
    of_client = clients.set_index(["setting", "client"])
    by_key: dict[tuple[str, str], dict[int, dict[str, float]]] = {}
    for (setting, client), accuracies in of_client.iterrows():
        for method, accuracy in accuracies.items():
            by_key.setdefault((setting, str(method)), {})[client] = {"accuracy": accuracy}
    ranks = ranks_of(by_key, "accuracy")
    return None if ranks is None else replace(ranks, of_blocks="clients, each with its mean over the seeds")


def all_kinds(
    rows: pd.DataFrame,
    settings: Sequence[str],
    costs: dict[str, str],
    ranks: Ranks | None,
    kind: Mapping[str, str] | None = None,
) -> list[str]:
    """Mean accuracy of each method in each setting in percent, its mean rank and its costs; best rank first.

    costs: heads by column of `rows`. Without ranks, in the order of the rows. kind: a column after the methods. With
    a column p, accuracies that its test does not tell from the best are bold.
    """
    mean, cost = 100 * rows.pivot_table("accuracy", "method", "setting"), rows.groupby("method")[list(costs)].mean()
    is_near = rows.assign(near=~(rows["p"] < LEVEL)) if "p" in rows else rows.assign(near=False)
    near = is_near.pivot_table("near", "method", "setting").astype(bool)
    heads = ["method", *(["kind"] if kind else []), *(name.replace("_", " ") for name in settings)]
    table = [[*heads, "mean rank", *costs.values()]]
    for method in mean.index if ranks is None else ranks.mean_rank:
        shown = [f"{mean[name].get(method, math.nan):.0f}" for name in settings]
        shown = [
            f"**{text}**" if near[name].get(method, False) else text for name, text in zip(settings, shown, strict=True)
        ]
        rank = "-" if ranks is None else f"{ranks.mean_rank[method]:.1f}"
        rank = f"**{rank}**" if ranks is not None and ranks.is_near_best(str(method)) else rank
        digits = [f"{cost.loc[method, name]:.{0 if name == 'mbit' else 1}f}" for name in costs]
        table.append([str(method), *([kind[method]] if kind else []), *shown, rank, *digits])
    return [*([ranks.in_words, ""] if ranks else []), *markdown(*table)]
