"""The text of docs/results.md and of a page for each paper: published numbers and the runs that repeat them."""

import inspect
import math
import textwrap
from collections.abc import Callable
from pathlib import Path
from statistics import fmean
from string import Formatter
from types import SimpleNamespace

import pandas as pd
from scipy.stats import binomtest

from cfl_ray import Experiment
from cfl_ray.methods import REGISTRY
from cfl_ray.results.published import PublishedTable, PublishedTables, load_published
from jobs.official.page import table as markdown
from jobs.results.cells import (
    FIGURES,
    SEEDS,
    STATES,
    STUDIES,
    Compared,
    cells_of,
    heading_of,
    read_reasons,
    runs_of,
    study_of,
    trains_as_recipe,
)

_PROTOCOLS = {"accuracy": "P-server", "accuracy_local": "P-local", "newcomer_accuracy_tuned": "P-tune"}
_OTHER_ROUNDS = {"_last10": "mean of the last ten rounds", "_best": "best round"}
_BESIDE = {  # metric of a table: further metrics of its runs and their columns
    "accuracy_local": {
        "accuracy": "P-server here",
        "accuracy_local_trained": "P-local here, sampled clients",
        "num_clusters": "clusters",
    },
    "newcomer_accuracy_tuned": {"newcomer_accuracy": "here before tuning", "num_clusters": "clusters"},
}
FIGURE = "images/results.svg"  # below docs
MAIN, OTHERS = "results.md", "results/without_numbers.md"
OWN = {  # paper: its own methods
    "autocfl": ("autocfl",),
    "cam": ("ifca_cam", "fesem_cam"),
    "clove": ("clove",),
    "fedac": ("fedac",),
    "fedclust": ("fedclust",),
    "fedem": ("fedem",),
    "moon": ("moon",),
    "scaffold": ("scaffold",),
    "stocfl": ("stocfl", "stocfl_chain"),
}
TITLES = {
    "fedclust": "FedClust",
    "fedac": "FedAC",
    "stocfl": "StoCFL",
    "autocfl": "AutoCFL",
    "cam": "CAM",
    "clove": "CLoVE",
    "fedem": "FedEM",
    "moon": "MOON",
    "scaffold": "SCAFFOLD",
}
CLAIMS = {  # of the five systems
    "fedclust": "clusters by the weights of the last layer, made once before training, are more accurate than others",
    "fedac": "a global and a cluster model in each client are more accurate than clustered and personal models",
    "stocfl": "clusters that merge by the cosine of gradients at an anchor are more accurate than others",
    "autocfl": "clusters whose number is found are more accurate than a fixed number, in fewer rounds",
    "cam": "a global model that is added to the cluster models makes IFCA and FeSEM more accurate",
}
RIVALS = {"ifca_cam": "ifca", "fesem_cam": "fesem"}  # whom a claim names; all others: the best other method
_VALUES: tuple[Callable[[Compared], float], ...] = (  # published, here, here by P-server
    lambda cell: cell.number.mean or 0.0,
    lambda cell: cell.here or 0.0,
    lambda cell: float(cell.runs["accuracy"].mean()) * 100,
)
_COLOURS = {
    "autocfl": "#1f77b4",
    "cam": "#d62728",
    "clove": "#17becf",
    "fedac": "#2ca02c",
    "fedclust": "#9467bd",
    "fedem": "#8c564b",
    "moon": "#7f7f7f",
    "scaffold": "#bcbd22",
    "stocfl": "#e69f00",
}
_LINES = ((0, 0, 100, 100, ""), (2, 0, 100, 98, "3"), (0, 2, 98, 100, "3"), (0, 0, 100, 0, ""), (0, 0, 0, 100, ""))
_Pair = tuple[Compared, list[Compared]]  # a cell of a paper's own method and those of its rivals
_ENDS = ("accuracy_low", "accuracy_high")  # least and greatest of the last quarter of the rounds
_TESTED = 6  # fewest cells of a sign test: with fewer, its p-value is above 0.05 whatever the signs
_LONG = 150  # characters of a text from which on it is not repeated
_KINDS = {"```": "Commands: ", "Recipe: ": "Recipe: ", "Assumed: ": "Assumed: ", "Open: ": "Open: ", "": "Remark: "}
_RANGE = "accuracy in the last quarter of the rounds"
_READING = ["How to read this page: [results](../results.md).", ""]


def pages(cells: list[Compared]) -> dict[str, str]:
    """The Markdown of the pages by their place below docs: the main one, and one for each paper."""
    papers = {file.stem: load_published(file) for file in sorted((STUDIES / "published").glob("*.yaml"))}
    texts = {f"results/{name}.md": _of_paper(name, published, cells) for name, published in papers.items()}
    texts = {MAIN: _main(cells, papers), **texts, OTHERS: _without_numbers(set(papers))}
    return {place: "\n".join(lines).rstrip() + "\n" for place, lines in texts.items()}


def _main(cells: list[Compared], papers: dict[str, PublishedTables]) -> list[str]:
    """The main page: how to read the others, what was run, the conclusions, and the cost of what was not run."""
    lines = [
        "# Results of the published experiments",
        "",
        "Published numbers beside those of runs with the recipe of their paper, on a page for each:",
        "",
        *(f"- [{TITLES.get(name, name)}](results/{name}.md): {papers[name].paper.title}" for name in papers),
        f"- [Papers without numbers]({OTHERS}): the order of the methods alone",
        "",
        "[jobs/results](../jobs/results) writes these pages from the metrics of the runs in `docs/results` and",
        "[the published numbers](../jobs/experiments/published); no number in a table is typed by hand. Accuracies",
        "are in percent, with several seeds as mean ± standard deviation. Most runs have one seed, the papers three",
        "to five, so read differences of a point or two with care. P-server, P-local and P-tune are the protocols of",
        "[Evaluation](concepts/evaluation.md). The papers seldom name the protocol of a number, and their tables mix",
        "protocols: each number is compared in the protocol that we take it to be in, with P-server beside it, the",
        "model that the server would give each client next (for Per-FedAvg after one epoch of adaptation).",
        "",
        "The commands above a table repeat its runs, shortened where they have `rounds=50` and the like. Each ends",
        "with a report of its study beside the published numbers, `runs/STUDY/artifacts/report.html`. If data are",
        "missing, add `data.download=true`. Minutes are those of one core; many runs had other work beside them.",
        "",
        "In evaluation a personal model, or the model that a client holds (P-local), is tested on 500 images, and",
        "IFCA chooses on 256, unless a recipe says otherwise; those of AutoCFL, CAM, FedAC, FedClust and StoCFL use",
        "all. Numbers are those of the last round. PACFL's code, on which FedClust is probably built, prints the best",
        "round so far, so the mean of the last ten rounds and the best tested round are shown beside the last one,",
        "for runs that have them.",
        "",
        "## Coverage",
        "",
        *_headline(cells),
        "",
        *_in_words(cells),
        "",
        "A published cell is a method in a setting of a table. *Unchanged*: run with all rounds and every value of",
        "the recipe on which its metric depends. *Within*: at most 2 points apart (of percent; rounds and Mbit 2 %,",
        "or the rounds between two evaluations; counts of clients and clusters are equal). *Explained*: further",
        "apart, and a run shows why. *Open*: further apart, and the note says what was not examined. *Not",
        "comparable*: the paper does not print enough to repeat it. *Not run*: also if our run is too short to reach",
        "or to miss the target, or, for accuracies, has less than a quarter of the recipe's rounds (counts of clients",
        "and clusters are compared after any number). A published number that two of our rows repeat (StoCFL with",
        "either global model, a CAM baseline without K in the settings of each K) counts twice.",
        "",
        *_count(cells),
        "",
        f"![Published and our accuracies]({FIGURE})",
        "",
        "Filled: unchanged recipe, all rounds. Hollow: shortened or changed. Dashed: two points to either side.",
        "",
        *_conclusions(cells),
        "",
    ]
    return lines + _missing()


def _of_paper(name: str, published: PublishedTables, cells: list[Compared]) -> list[str]:
    """The page of a paper: its tables, and the studies of its own that repeat a figure or answer a question."""
    lines = [f"# {published.paper.title}", "", f"{published.paper.authors}, {published.paper.venue}", "", *_READING]
    shown: set[str] = set()  # studies
    tables: dict[str, list[str]] = {}
    for table_name, table in published.tables.items():
        of_table = [cell for cell in cells if (cell.paper, cell.table) == (name, table_name)]
        if any(cell.is_run for cell in of_table):
            tables[_title(table_name)] = _table(table_name, table, of_table, table.study not in shown)
            shown.add(table.study)
    lines += _without_repeats(tables)
    lines += _figures(name)
    missing = [t for t in published.tables if not any(c.is_run for c in cells if (c.paper, c.table) == (name, t))]
    return [*lines, f"Not run: {', '.join(map(_title, missing))}."] if missing else lines


def _without_numbers(published: set[str]) -> list[str]:
    """The other studies that are named after a method and have runs, each under the reference to its paper."""
    lines = [
        "# Papers without numbers",
        "",
        *_READING,
        "The main experiment of papers whose numbers are not at hand: only the order of the methods can be compared.",
        "Runs are shortened if the command above their table has other values.",
        "",
    ]
    for folder in sorted(path.name for path in STUDIES.iterdir()):
        if folder in REGISTRY and folder not in published and (figures := _figures(folder, "###")):
            reference = inspect.getdoc(inspect.getmodule(REGISTRY[folder])).partition("\n\n")[0]
            lines += [f"## {reference.partition(':')[0]}", "", *reference.splitlines(), "", *figures]
    return lines


def _figures(paper: str, level: str = "##") -> list[str]:
    """Tables of a paper's studies without published numbers: they repeat a figure, or answer a question of our own."""
    lines = []
    for file in sorted((STUDIES / paper).glob("*.yaml")):
        study, runs = study_of(file), runs_of(f"{paper}-{file.stem}")
        if study.published or not len(runs):
            continue
        several = runs["method"].nunique() > 1
        metrics = [name for name in study.metrics or ("accuracy", "accuracy_local", "ari") if name in runs]
        lines += [f"{level} {_title(file.stem)}", "", *_commands(f"{paper}/{file.name}", runs)]
        lines += [f"Expected: {expected}", ""] if (expected := _from_header(file, "Expected")) else []
        found = str((read_reasons().get(paper) or {}).get(file.stem) or "").strip()
        lines += [f"Found: {found}", ""] if found else []
        ranged = "accuracy" in metrics and {*_ENDS} <= {*runs} and runs[_ENDS[0]].ne(runs[_ENDS[1]]).any()
        head = ["setting", *(["method"] if several else []), *metrics, *([_RANGE] if ranged else []), "seeds"]
        rows = [head]
        order = {cell: place for place, cell in enumerate((cell.setting, cell.method) for cell in cells_of(file))}
        groups = sorted(runs.groupby(["setting", "method"]), key=lambda one: order.get(one[0], len(order)))
        for (setting, method), own in groups:
            values = [
                _number(*_mean_and_std(own[name]), _unit(name)) if own[name].notna().all() else "-" for name in metrics
            ]
            values += [_range(own)] if ranged else []
            rows.append([setting, *([method] if several else []), *values, str(len(own))])
        lines += markdown(*rows)
    return lines


def _range(runs: pd.DataFrame) -> str:
    """Least and greatest accuracy of runs in the last quarter of their rounds, in percent."""
    low, high = runs[_ENDS[0]].min(), runs[_ENDS[1]].max()
    return "-" if math.isnan(low) else f"{low * 100:.1f} to {high * 100:.1f}"


def _header_of(recipe: Path) -> list[str]:
    """The lines of a recipe's header."""
    return [line.removeprefix("#").strip() for line in recipe.read_text().splitlines() if line.startswith("#")]


def _from_header(recipe: Path, word: str) -> str:
    """The paragraphs of a recipe's header that begin with `word:`."""
    found, inside = [], False
    for line in _header_of(recipe):
        inside = line.startswith(f"{word}:") or (inside and not line.startswith(("Expected:", "Assumed:", "Cost")))
        if inside and line:
            found.append(line.removeprefix(f"{word}:").strip())
    return " ".join(found)


def _protocol(recipe: Path, settings: list[str]) -> list[str]:
    """How the recipe trains and tests in these settings, and what it assumes that the paper does not say."""
    values: dict[str, list[str]] = {}  # by the words around them
    for cell in cells_of(recipe):
        if cell.setting in settings:
            for words, value in _parts(cell.experiment).items():
                values.setdefault(words, []).append(value)
    parts = [words.format(" or ".join(dict.fromkeys(of_runs))) for words, of_runs in values.items()]
    assumed = _from_header(recipe, "Assumed")
    return [f"Recipe: {', '.join(parts)}.", "", *([f"Assumed: {assumed}", ""] if assumed else [])]


def _parts(experiment: Experiment) -> dict[str, str]:
    """The parts of an experiment that a reader of a paper asks for first, by the words around them."""
    local, cohort, model = experiment.local, experiment.cohort, experiment.model
    options = ", ".join(f"{name} {value}" for name, value in model.options.items())
    return {
        "{} clients": str(experiment.data.partition.clients or "all"),
        "of which {} take part in a round": str(cohort.clients or f"{100 * cohort.fraction:g} %"),
        "{} rounds": str(experiment.rounds),
        "model {}": f"{model.name} ({options})" if options else model.name,
        "{} of local training": f"{local.steps} steps"
        if local.steps
        else f"{local.epochs} epoch{'s' * (local.epochs != 1)}",
        "batch size {}": str(local.batch_size or "n (all samples)"),
        "learning rate {}": f"{local.lr:g}",
        "momentum {}": f"{local.momentum:g}",
        "test view {}": str(experiment.data.test.view),
    }


def _unit(metric: str) -> str:
    if metric.startswith(("num_", "correct_", "rounds_")):
        return "count"
    return "share" if metric in ("ari", "nmi", "purity") else "percent"


def _mean_and_std(values: pd.Series) -> tuple[float, float]:
    scale = 100 if _unit(str(values.name)) == "percent" else 1
    return float(values.mean()) * scale, float(values.std(ddof=1)) * scale


def _missing() -> list[str]:
    """The runs that were not made, and the time that they would take at the measured rates."""
    table = read_costs()
    if not len(table):
        return []
    table["done"] = [_whole(runs_of(a), b) for a, b in zip(table["study"], table["setting"], strict=True)]
    table["hours"] = (table["runs"] - table["done"]) * table["hours_of_one"]
    lines = [
        "## The cost of what was not run",
        "",
        "Core hours of the runs of each study that were not made: the floating-point operations of local training",
        "with federated averaging (`python -m jobs.results costs`), divided by the operations per second that one core",
        "reached in the runs above, evaluation and all methods included: in runs of the study, else of the paper, else",
        "in all. FEMNIST is counted with the writers at hand. *Done*: with all rounds, and trained as the recipe says.",
        "*One run*: on one core, as the recipe says, also where data are not at hand. Short runs take more than their",
        "operations, so the recipe's cost is nearer for them. `python -m jobs.experiments --core-hours 6` runs the",
        "next of those that [an order](../jobs/experiments/order.txt) names, and adds each to these pages.",
        "",
    ]
    shown = [["study", "runs", "done", "not counted: data not at hand", "GFLOP/s", "core hours", "one run"]]
    for study, rows in table.groupby("study", sort=False):
        runs, done, known = rows["runs"].sum(), rows["done"].sum(), rows["gigaflop"].notna()
        if done < runs:
            cost = [f"{rows['rate'].iloc[0]:.1f}", f"{rows['hours'].sum():.1f}"] if known.any() else ["", ""]
            recipe = STUDIES / f"{str(study).replace('-', '/', 1)}.yaml"
            shown.append([study, runs, done, (rows["runs"] - rows["done"])[~known].sum() or "", *cost, _cost(recipe)])
    left = table["runs"] - table["done"]
    uncounted, hours = left[table["gigaflop"].isna()].sum(), table["hours"].sum()
    shown.append(["all", table["runs"].sum(), table["done"].sum(), uncounted, "", f"{hours:.0f}", ""])
    return lines + markdown(*shown)


def read_costs() -> pd.DataFrame:
    """A row for each setting of each study, with the core hours of one run at the measured rates; empty without any.

    NaN where the data are not at hand.
    """
    file = FIGURES / "costs.csv"
    if not file.is_file():
        return pd.DataFrame()
    table = pd.read_csv(file)
    table["rate"] = table["study"].map(_rates(table))
    table["hours_of_one"] = table["gigaflop"] / table["rate"] / 3600
    return table


def _cost(recipe: Path) -> str:
    """The cost of one run, from the end of a recipe's header: `Cost of one run on one CPU core: 20 minutes.`"""
    text = " ".join(_header_of(recipe)).partition(" Cost")[2]
    return text.partition(": ")[2].removesuffix(".")


def _whole(runs: pd.DataFrame, setting: str) -> int:
    """How many runs of a setting have all rounds and train as their recipe says."""
    return sum(
        run["rounds"] >= run["of_rounds"] and trains_as_recipe(run["changed"])
        for run in runs[runs["setting"] == setting].fillna({"changed": ""}).to_dict("records")
    )


def _rates(costs: pd.DataFrame) -> dict[str, float]:
    """Gigaflop a second of the runs of each study, or else of the studies of its paper, or of all; 20 without any."""
    amounts, seconds = {}, {}
    for study, rows in costs.groupby("study"):
        runs, of_setting = runs_of(str(study)), rows.set_index("setting")["gigaflop"]
        if len(runs):
            runs = runs[runs["changed"].fillna("").map(trains_as_recipe).astype(bool) & runs["seconds"].notna()]
        if len(runs):
            amounts[study] = float((runs["setting"].map(of_setting) * runs["rounds"] / runs["of_rounds"]).sum())
            seconds[study] = float(runs["seconds"].sum())
    found = {}
    for study in costs["study"].unique():
        of_paper = [name for name in amounts if name.partition("-")[0] == study.partition("-")[0]]
        measured = [study] if study in amounts else of_paper or list(amounts)
        time = sum(seconds[name] for name in measured)
        found[study] = sum(amounts[name] for name in measured) / time if time else 20.0
    return found


def _headline(cells: list[Compared]) -> list[str]:
    """The share of accuracies within two points, of those that were run as their recipe says."""
    whole = [cell for cell in cells if cell.number.unit == "percent" and cell.is_unchanged]
    close = sum(cell.is_close for cell in whole)
    published = sum(cell.number.unit == "percent" for cell in cells)
    several = sum(len(cell.runs) >= SEEDS for cell in whole)
    return [
        f"**Of {published} published accuracies and F1 scores, {len(whole)} were run with the unchanged recipe and all",
        f"its rounds, {several} of them with {SEEDS} seeds or more. Of these {len(whole)}, {close} are within two",
        "points.**",
    ]


def _count(cells: list[Compared]) -> list[str]:
    """Cells by paper and state: a table of accuracies and F1 scores, and one of rounds, Mbit and counts."""
    lines = []
    for kind, units in (
        ("accuracy, F1", {"percent"}),
        ("rounds, Mbit, counts", {"rounds", "mbit", "clients", "count"}),
    ):
        head = [kind, "published", "unchanged", f"{SEEDS} seeds", "of the unchanged within", "run in any way", *STATES]
        rows = [head]
        for paper in [*dict.fromkeys(cell.paper for cell in cells), "all"]:
            own = [cell for cell in cells if paper in ("all", cell.paper) and cell.number.unit in units]
            whole = [cell for cell in own if cell.is_unchanged]
            counts = [len(own), len(whole), sum(len(cell.runs) >= SEEDS for cell in whole)]
            counts += [sum(cell.is_close for cell in whole), sum(cell.is_run for cell in own)]
            counts += [sum(cell.state == state for cell in own) for state in STATES]
            if own:
                rows.append([paper, *counts])
        lines += markdown(*rows)
    return lines[:-1]


def _in_words(cells: list[Compared]) -> list[str]:
    """For each of the five systems: what its paper claims, whether that was repeated, and how much was run."""
    lines = []
    for paper, claim in CLAIMS.items():
        own = [cell for cell in cells if cell.paper == paper and cell.number.unit == "percent"]
        whole = [cell for cell in own if cell.is_unchanged]
        close = sum(cell.is_close for cell in whole)
        ran = f"{len(whole)} of {len(own)} accuracies were run unchanged, of which {close} are within two points"
        found = [_verdict(method, _pairs(cells, paper, method)) for method in OWN[paper]]
        text = f"- **{TITLES[paper]}**: {claim}. {' '.join(found)} {ran}."
        lines += textwrap.wrap(text, 110, subsequent_indent="  ")
    return lines


def _verdict(method: str, against: dict[str, list[_Pair]]) -> str:
    """Whether a paper's own method is above the rival of its claim here, and how it compares with FedAvg."""
    claimed = RIVALS.get(method, "the best other")
    texts, word = [], ""
    for name in dict.fromkeys((claimed, "fedavg")):
        gaps = [[of(cell) - max(map(of, rivals)) for of in _VALUES[:2]] for cell, rivals in against.get(name, [])]
        if not gaps:
            continue
        published, here = (sum(gap[at] > 0 for gap in gaps) for at in (0, 1))
        if name == claimed:
            kept = sum(gap[0] > 0 and gap[1] > 0 for gap in gaps)
            word = "Not repeated" if not kept else "Repeated" if kept == published else "Repeated in part"
        points = fmean(gap[1] for gap in gaps)
        texts.append(f"above {name} in {here} of {len(gaps)} cells, published {published} ({points:+.1f} points)")
    if not word:
        return f"Not tested for {method}: no cell of it has as many rounds as one of another method."
    return f"{word} for {method}: {', '.join(texts)}."


def _pairs(cells: list[Compared], paper: str, own: str) -> dict[str, list[_Pair]]:
    """The cells of a paper's own method with those of the best other, and of each other method, of the same rounds."""
    at = {(cell.table, cell.column, cell.row): cell for cell in cells if cell.paper == paper and _is_accuracy(cell)}
    others = list(dict.fromkeys(row for _, _, row in at if row not in OWN[paper]))
    found: dict[str, list[_Pair]] = {}
    for name, rows in [("the best other", others), *((other, [other]) for other in others)]:
        for (table, column, row), cell in at.items():
            rivals = [rival for other in rows if (rival := at.get((table, column, other)))]
            rivals = [rival for rival in rivals if set(rival.runs["rounds"]) == set(cell.runs["rounds"])]
            if row == own and rivals:
                found.setdefault(name, []).append((cell, rivals))
    return found


def _conclusions(cells: list[Compared]) -> list[str]:
    """Each paper's own method against every other row: how often and how far it is above, as published and here."""
    lines = [
        "## Conclusions of the papers",
        "",
        "The paper's own method against the best other method (whether it is first) and against each of them, over",
        "the cells of its accuracy tables in which both were run with the same number of rounds, whether or not as",
        "the recipe says: in how many cells it is above, by how many points on average, and from six cells on the",
        "two-sided p-value of a sign test (with fewer, it cannot be below 0.05). *The best other*: of those that were",
        "run, also in the published column. *As compared*: with the metric that each published number is taken to",
        "have, which mixes P-local and P-server in FedClust's tables. *P-server*: all by the model that the server",
        "would give each client. *All*: the cells of all papers, against a method with six cells or more; cells of a",
        "paper have data in common, so these p-values are too small.",
        "",
    ]
    head = ["paper", "own method", "against", "cells", "published", "here, as compared", "here, P-server"]
    lead, total = [head], dict[str, list[_Pair]]()
    for paper, own in ((paper, own) for paper, methods in OWN.items() for own in methods):
        for name, pairs in _pairs(cells, paper, own).items():
            lead.append([paper, own, name, *_leads(pairs)])
            total.setdefault(name, []).extend(pairs)
    lead += [["all", "its own", name, *_leads(pairs)] for name, pairs in total.items() if len(pairs) >= _TESTED]
    return lines + markdown(*lead)[:-1]


def _leads(pairs: list[_Pair]) -> list[str]:
    """The number of cells, and by each of `_VALUES` in how many a cell is above the best of its rivals."""
    return [str(len(pairs)), *(_signs([of(cell) - max(map(of, rivals)) for cell, rivals in pairs]) for of in _VALUES)]


def _is_accuracy(cell: Compared) -> bool:
    return cell.is_run and cell.number.metric in ("accuracy", "accuracy_local") and cell.number.mean is not None


def _signs(gaps: list[float]) -> str:
    """In how many cells a difference is above zero, its mean, and, of six or more, a sign test without ties."""
    above, below = sum(gap > 0 for gap in gaps), sum(gap < 0 for gap in gaps)
    tested = f" (p = {binomtest(above, above + below).pvalue:.2g})" if above + below >= _TESTED else ""
    return f"{above} of {len(gaps)}, {fmean(gaps):+.1f}{tested}"


def scatter(cells: list[Compared]) -> str:
    """The accuracies that were run as an SVG figure, published ones from left to right, ours from bottom to top."""
    side, margin = 420, 40
    x, y = (lambda value: margin + value / 100 * side), (lambda value: margin + side - value / 100 * side)
    line = '<line x1="{}" y1="{}" x2="{}" y2="{}" stroke="#999" stroke-dasharray="{}"/>'
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{side + 2 * margin}" height="{side + 2 * margin}" '
        'font-family="sans-serif" font-size="12">',
        '<rect width="100%" height="100%" fill="white"/>',
        *(line.format(x(a), y(b), x(c), y(d), dash) for a, b, c, d, dash in _LINES),
    ]
    for tick in range(0, 101, 20):
        parts.append(f'<text x="{x(tick)}" y="{y(0) + 16}" text-anchor="middle">{tick}</text>')
        parts.append(f'<text x="{x(0) - 6}" y="{y(tick) + 4}" text-anchor="end">{tick}</text>')
    parts.append(f'<text x="{x(50)}" y="{y(0) + 32}" text-anchor="middle">published accuracy, F1 (%)</text>')
    parts.append(f'<text transform="translate(12 {y(50)}) rotate(-90)" text-anchor="middle">here (%)</text>')
    shown = [cell for cell in cells if cell.is_run and cell.number.unit == "percent" and cell.here is not None]
    for place, paper in enumerate(dict.fromkeys(cell.paper for cell in shown)):
        colour = _COLOURS[paper]
        parts.append(f'<text x="{x(3)}" y="{y(96) + 16 * place}" fill="{colour}">{paper}</text>')
        for cell in shown:
            if cell.paper == paper:
                fill = colour if cell.is_unchanged else "none"
                at = f'cx="{x(cell.number.mean):.1f}" cy="{y(cell.here):.1f}"'
                parts.append(f'<circle {at} r="3.5" fill="{fill}" stroke="{colour}"/>')
    return "\n".join([*parts, "</svg>"]) + "\n"


def _table(name: str, table: PublishedTable, cells: list[Compared], is_first: bool) -> list[str]:
    """A row for each cell that was run; reasons and misprints are notes below, by number.

    is_first: whether no table above is of the same study.
    """
    run = [cell for column in table.columns for cell in cells if cell.column == column and cell.is_run]
    metrics = {cell.number.metric for cell in run}
    beside = {column: metric for main in _BESIDE if main in metrics for metric, column in _BESIDE[main].items()}
    for metric in [name for name in ("accuracy", "accuracy_local") if name in metrics]:
        for suffix, column in _OTHER_ROUNDS.items():
            if any(metric + suffix in cell.runs and cell.runs[metric + suffix].notna().all() for cell in run):
                beside[f"{_PROTOCOLS[metric]}, {column}"] = metric + suffix
    head = ["setting", "method", "published", "here", *(["protocol"] if len(metrics) > 1 or beside else [])]
    head += ["difference", *beside, "seeds", "rounds", "notes"]
    runs = pd.concat([cell.runs for cell in run])
    lines = [
        *(f"## {_title(name)}", "", f"{table.caption}.", ""),
        *_commands(table.study, runs),
        *(_protocol(STUDIES / table.study, list(runs["setting"])) if is_first else []),
    ]
    about = (read_reasons().get(run[0].paper) or {}).get(name, {}).get("table", "")
    lines += [about.strip(), ""] if about else []
    rows = [head]
    notes: dict[str, int] = {}
    for cell in run:
        number, numbers = cell.number, []
        for note in _notes(cell):
            numbers.append(str(notes.setdefault(note, len(notes) + 1)))
        values = {
            "setting": cell.column,
            "method": cell.row,
            "published": _number(number.mean, number.std, number.unit),
            "here": _ours(cell, number.metric),
            "protocol": _PROTOCOLS.get(number.metric, number.metric),
            "difference": _difference(cell),
            "seeds": str(len(cell.runs)),
            "rounds": _rounds(cell),
            "notes": ", ".join(numbers),
        } | {column: _beside(cell, metric) for column, metric in beside.items()}
        rows.append([values[name] for name in head])
    return [
        *lines,
        *markdown(*rows),
        *(f"{number}. {note}" for note, number in notes.items()),
        *([""] if notes else []),
    ]


def _without_repeats(tables: dict[str, list[str]]) -> list[str]:
    """The lines of a paper's tables by title; a long text that an earlier table has is a reference to that table."""
    first: dict[str, str] = {}  # the place of a text
    blocks = []
    for title, lines in tables.items():
        for block in "\n".join(lines).strip().split("\n\n"):
            notes = block.startswith("1. ")
            parts = []
            for part in block.split("\n") if notes else [block]:
                place = title if not notes else f"note {part.partition('. ')[0]} of {title}"
                text = part.partition(". ")[2] if notes else part
                earlier = first.setdefault(text, place)
                if len(text) > _LONG and earlier != place and not text.startswith("Run with"):
                    kind, number = next(kind for kind in _KINDS if text.startswith(kind)), part.partition(". ")[0]
                    part = f"{number}. {_KINDS[kind]}as {earlier}." if notes else f"{_KINDS[kind]}as for {earlier}."
                parts.append(part)
            blocks.append("\n".join(parts))
    return "\n\n".join([*blocks, ""]).split("\n")[:-1]


def _commands(recipe: str, runs: pd.DataFrame) -> list[str]:
    """The commands that repeat these runs of a recipe, and the time that they took."""
    study, cells = study_of(STUDIES / recipe), cells_of(STUDIES / recipe)
    everything = [list(dict.fromkeys(getattr(cell, name) for cell in cells)) for name in ("base", "method", "seed")]
    selected: dict[tuple[str, tuple[str, ...], tuple[int, ...]], list[str]] = {}  # settings by changes, methods, seeds
    of_setting = runs["setting"].map({cell.setting: cell.base for cell in cells})
    for setting in (name for name in everything[0] if name in set(of_setting)):
        for changed, group in runs[of_setting == setting].groupby(runs["changed"].fillna("")):
            methods = tuple(name for name in everything[1] if name in set(group["method"]))
            seeds = tuple(seed for seed in everything[2] if seed in set(group["seed"]))
            selected.setdefault((str(changed), methods, seeds), []).append(setting)
    lines = ["```bash"]
    for (changed, methods, seeds), settings in selected.items():
        words = ["cfl-ray", "compare" if study.sweep is None else "sweep", f"jobs/experiments/{recipe}"]
        for option, chosen, of_all in zip(("--setting", "--method", "--seed"), (settings, methods, seeds), everything):
            if len(chosen) < len(of_all):
                words += [word for value in chosen for word in (option, str(value))]
        lines.append(" \\\n    ".join(textwrap.wrap(" ".join([*words, *changed.split()]), 110, break_long_words=False)))
    count = f"{len(runs)} run{'s' * (len(runs) > 1)}"
    measured = runs["seconds"].notna().all()
    minutes = f", {runs['seconds'].sum() / 60:.0f} core minutes" if measured else ""
    return [*lines, "```", "", f"{count}{minutes}.", ""]


def _notes(cell: Compared) -> list[str]:
    """Why a cell differs, what is doubtful of it, and in which settings its runs differ from the recipe."""
    notes = [f"Doubtful: {cell.number.misprint}."] if cell.number.misprint else []
    if cell.state == "open":
        notes.append(f"Open: {_with_figures(cell) or 'not examined.'}")
    elif cell.state in ("explained", "not comparable"):
        notes.append(_with_figures(cell))
    changes = {change for run in cell.runs["changed"].dropna() for change in run.split()}
    changes = {change for change in changes if cell.matters(key := change.partition("=")[0]) and key != "rounds"}
    if changes:
        notes.append(f"Run with {' '.join(sorted(changes))} instead of the recipe's values.")
    if "run_of" in cell.runs and (of := sorted(set(cell.runs["run_of"].dropna()))):
        notes.append(f"The same experiment as in another study, run there: {'; '.join(of)}.")
    return notes


def _rounds(cell: Compared) -> str:
    """Rounds of the runs: N, or N of those of the recipe."""
    shown = {
        f"{run.rounds}" if run.rounds == run.of_rounds else f"{run.rounds} of {run.of_rounds}"
        for run in cell.runs.itertuples()
    }
    return ", ".join(sorted(shown))


def _with_figures(cell: Compared) -> str:
    """The reason why a cell differs, with {METRIC} of its runs and {METHOD.METRIC} of another method's filled in."""
    if "{" not in cell.because.text:
        return cell.because.text
    named = {name for _, name, _, _ in Formatter().parse(cell.because.text) if name}
    wanted = {name.rpartition(".")[2] for name in named}
    others = {
        str(method): SimpleNamespace(**_means(runs, wanted))
        for method, runs in cell.others.groupby("method")
        if any(name.startswith(f"{method}.") for name in named)
    }
    return cell.because.text.format(**others, **_means(cell.runs, wanted))


def _means(runs: pd.DataFrame, names: set[str]) -> dict[str, str]:
    """The mean of each of these metrics that the runs have, in its unit."""
    means = {name: _mean_and_std(runs[name])[0] for name in runs.select_dtypes("number") if name in names}
    return {name: _number(mean, None, _unit(name)) for name, mean in means.items()}


def _title(name: str) -> str:
    return heading_of(name.replace("table", "Table ").replace("figure", "Fig. "))


def _number(mean: float | None, std: float | None, unit: str) -> str:
    if mean is None:
        return "not reached"
    digits = {"rounds": 0, "clients": 0, "count": 0, "share": 2}.get(unit, 1)
    return f"{mean:.{digits}f}" + ("" if std is None or math.isnan(std) else f" ± {std:.{digits}f}")


def _beside(cell: Compared, metric: str) -> str:
    """A further metric of a cell's runs; - unless all of them have it, as the mean beside it is over all."""
    if metric not in cell.runs or cell.runs[metric].isna().any():
        return "-"
    return _number(*_mean_and_std(cell.runs[metric]), _unit(metric))


def _ours(cell: Compared, metric: str) -> str:
    number = cell.number
    if metric not in cell.runs or cell.runs[metric].isna().all():
        return "not reached" if number.unit in ("rounds", "mbit") else "-"
    of_runs = cell.runs[metric] * number.scale
    return _number(of_runs.mean(), of_runs.std(ddof=1), number.unit)


def _difference(cell: Compared) -> str:
    if cell.here is None or cell.number.mean is None:
        return ""
    return f"{cell.here - cell.number.mean:+.1f}"
