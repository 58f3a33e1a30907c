"""Tables of studies of many methods: heterogeneity/digits.yaml on each of its data sets, and the field.

docs/heterogeneity.md has a table for each data set, docs/choosing.md the best methods of each setting, docs/field.md
all methods (`jobs.results.field`).
"""

from pathlib import Path

import pandas as pd

from jobs.official.page import table as markdown
from jobs.results import field
from jobs.results.cells import ROOT, heading_of

PAGE, CHOOSING = ROOT / "docs" / "heterogeneity.md", ROOT / "docs" / "choosing.md"
DIGITS = heading_of("digits")
FIGURES = {  # by data set
    heading_of(name): ROOT / "docs" / "results" / f"heterogeneity-{name}.csv"
    for name in ("digits", "fashion_mnist", "cifar10")
}
SETTINGS = ("label_skew", "feature_shift", "concept_shift", "both", "drift", "mixtures")
SETTINGS_IN_WORDS = {  # the setting of these studies and that of the field; empty: none
    "label skew": ("label_skew", "dirichlet"),
    "feature shift": ("feature_shift", "rotated"),
    "feature shift and label skew": ("", "rotated_labels"),
    "writers": ("", "writer"),
    "concept shift": ("concept_shift", ""),
    "concept shift and label skew": ("both", ""),
    "drift of features": ("", "drift"),
    "drift of concepts": ("drift", ""),
    "mixtures": ("mixtures", ""),
}
BEGIN, END = "<!-- table: begin -->\n", "<!-- table: end -->\n"


def pages() -> dict[Path, str]:
    """The text of the three pages, with the tables of the present figures."""
    tables = {PAGE: section(), CHOOSING: best_methods(), field.PAGE: field.section(*field.read_figures())}
    return {page: with_table(page.read_text(), table) for page, table in tables.items()}


def section() -> str:
    """The tables of all data sets, each under its name."""
    return "\n".join(f"## {name}\n\n{table(figures)}" for name, figures in FIGURES.items())


def best_methods() -> str:
    """The five methods of the least mean rank over seeds in each setting, by data set, with their ranks.

    On digits, settings of the field are ranked by its runs, in which all methods are.
    """
    of_field, _, _ = field.read_figures()
    count, known = of_field["method"].nunique(), set(of_field["setting"])
    rows = [["clients differ in", f"Digits, {count} methods", *FIGURES]]
    runs_of = {name: complete_runs(figures) for name, figures in FIGURES.items()}
    for words, (setting, in_field) in SETTINGS_IN_WORDS.items():
        row = [words, _best_of(of_field, in_field)]
        row += [
            _best_of(runs, "" if in_field in known and name == DIGITS else setting) for name, runs in runs_of.items()
        ]
        rows.append(row)
    return "\n".join(markdown(*rows))


def _best_of(runs: pd.DataFrame, setting: str) -> str:
    """The five methods of the least mean rank in a setting, with their ranks."""
    runs = runs[runs["setting"] == setting]
    ranks = runs.groupby("seed")["accuracy"].rank(ascending=False).groupby(runs["method"]).mean()
    return ", ".join(f"{method} {rank:.1f}" for method, rank in ranks.sort_values(kind="stable").head(5).items()) or "-"


def complete_runs(figures: Path) -> pd.DataFrame:
    """The runs in the file, of the seeds that all methods have in all of its settings."""
    runs = pd.read_csv(figures).assign(mbit=lambda frame: frame.mbit_down + frame.mbit_up)
    pairs = runs["setting"].nunique() * runs["method"].nunique()
    return runs[runs.groupby("seed")["seed"].transform("size") == pairs]


def table(figures: Path) -> str:
    """Mean accuracy of each method in each setting in percent, its mean rank and its costs; best rank first."""
    runs = complete_runs(figures)
    settings = [name for name in SETTINGS if name in set(runs["setting"])]
    seeds = ", ".join(map(str, sorted(set(runs.seed))))
    lines = field.all_kinds(runs, settings, {"mbit": "Mbit", "seconds": "seconds"}, field.ranks_over_seeds(runs))
    return "\n".join([f"Seeds: {seeds}. {lines[0]}", *lines[1:]])


def with_table(page: str, table: str) -> str:
    """The page with this table between its two marks. Raises ValueError for a page without them."""
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"the page needs the lines {BEGIN.strip()} and {END.strip()}")
    return f"{before}{begin}\n{table}\n{end}{after}"
