"""Tables of the study of all methods, heterogeneity/digits.yaml on each of its data sets.

docs/heterogeneity.md has a table for each data set, docs/choosing.md the best methods of each setting.
"""

from pathlib import Path

import pandas as pd

from cfl_ray.report.ranks import ranks_of
from jobs.official.page import table as markdown
from jobs.results.cells import ROOT

PAGE, CHOOSING = ROOT / "docs" / "heterogeneity.md", ROOT / "docs" / "choosing.md"
FIGURES = {  # by data set
    "Digits": ROOT / "docs" / "results" / "heterogeneity-digits.csv",
    "Fashion-MNIST": ROOT / "docs" / "results" / "heterogeneity-fashion_mnist.csv",
    "CIFAR-10": ROOT / "docs" / "results" / "heterogeneity-cifar10.csv",
}
SETTINGS = ("label_skew", "feature_shift", "concept_shift", "both", "drift", "mixtures")
BEGIN, END = "<!-- table: begin -->\n", "<!-- table: end -->\n"


def pages() -> dict[Path, str]:
    """The text of both pages, with the tables of the present figures."""
    tables = {PAGE: section(), CHOOSING: best_methods()}
    return {page: with_table(page.read_text(), table) for page, table in tables.items()}


def section() -> str:
    """The tables of all data sets, each under its name."""
    return "\n".join(f"## {name}\n\n{table(figures)}" for name, figures in FIGURES.items())


def best_methods() -> str:
    """The five methods of the least mean rank over seeds in each setting, by data set, with their ranks."""
    rows = [["clients differ in", *FIGURES]]
    runs_of = {name: complete_runs(figures) for name, figures in FIGURES.items()}
    for setting in SETTINGS:
        row = [setting.replace("_", " ")]
        for runs in runs_of.values():
            runs = runs[runs["setting"] == setting]
            ranks = runs.groupby("seed")["accuracy"].rank(ascending=False).groupby(runs["method"]).mean()
            best = ranks.sort_values(kind="stable").head(5)
            row.append(", ".join(f"{method} {rank:.1f}" for method, rank in best.items()) or "-")
        rows.append(row)
    return "\n".join(markdown(*rows))


def complete_runs(figures: Path) -> pd.DataFrame:
    """The runs in the file, of the seeds that all methods have in all of its settings."""
    runs = pd.read_csv(figures).assign(mbit=lambda frame: frame.mbit_down + frame.mbit_up)
    pairs = runs["setting"].nunique() * runs["method"].nunique()
    return runs[runs.groupby("seed")["seed"].transform("size") == pairs]


def table(figures: Path) -> str:
    """Mean accuracy of each method in each setting in percent, its mean rank and its costs; best rank first."""
    runs = complete_runs(figures)
    settings = [name for name in SETTINGS if name in set(runs["setting"])]
    metrics: dict[tuple[str, str], dict[int, dict[str, float]]] = {}
    for run in runs.itertuples():
        metrics.setdefault((run.setting, run.method), {})[run.seed] = {"accuracy": run.accuracy}
    ranks = ranks_of(metrics, "accuracy")
    assert ranks is not None
    accuracy = 100 * runs.pivot_table("accuracy", "method", "setting")
    costs = runs.groupby("method")[["mbit", "seconds"]].mean()
    rows = [["method", *(name.replace("_", " ") for name in settings), "mean rank", "Mbit", "seconds"]]
    for method, rank in ranks.mean_rank.items():
        shown = [f"{accuracy.loc[method, setting]:.0f}" for setting in settings]
        bold = f"**{rank:.1f}**" if ranks.is_near_best(method) else f"{rank:.1f}"
        cost = costs.loc[method]
        rows.append([method, *shown, bold, f"{cost.mbit:.0f}", f"{cost.seconds:.1f}"])
    seeds = ", ".join(map(str, sorted(set(runs.seed))))
    return "\n".join([f"Seeds: {seeds}. {ranks.in_words}", "", *markdown(*rows)])


def with_table(page: str, table: str) -> str:
    """The page with this table between its two marks. Raises ValueError for a page without them."""
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"the page needs the lines {BEGIN.strip()} and {END.strip()}")
    return f"{before}{begin}\n{table}\n{end}{after}"
