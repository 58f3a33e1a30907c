"""The tables of all methods in docs/choosing.md: the study heterogeneity/digits.yaml, on each of its data sets."""

from pathlib import Path

import pandas as pd

from cfl_ray.results.ranks import ranks_of
from jobs.official.page import table as markdown
from jobs.results.cells import ROOT

PAGE = ROOT / "docs" / "choosing.md"
FIGURES = {  # by data set
    "Digits": ROOT / "docs" / "results" / "heterogeneity-digits.csv",
    "Fashion-MNIST": ROOT / "docs" / "results" / "heterogeneity-fashion_mnist.csv",
}
SETTINGS = ("label_skew", "feature_shift", "concept_shift", "both", "drift", "mixtures")
BEGIN, END = "<!-- table: begin -->\n", "<!-- table: end -->\n"


def section() -> str:
    """The tables of all data sets, each under its name."""
    return "\n".join(f"### {name}\n\n{table(figures)}" for name, figures in FIGURES.items())


def table(figures: Path) -> str:
    """Mean accuracy of each method in each setting in percent, its mean rank and its costs; best rank first.

    Of the settings that the file has, and of the seeds that all methods have in all of them.
    """
    runs = pd.read_csv(figures).assign(mbit=lambda frame: frame.mbit_down + frame.mbit_up)
    settings = [name for name in SETTINGS if name in set(runs["setting"])]
    runs = runs[runs.groupby("seed")["seed"].transform("size") == len(settings) * runs["method"].nunique()]
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
        raise ValueError(f"{PAGE.name} needs the lines {BEGIN.strip()} and {END.strip()}")
    return f"{before}{begin}\n{table}\n{end}{after}"
