"""The cells of the published tables, the runs that repeat them, and how far the two agree."""

import re
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import pandas as pd
import yaml

from cfl_ray.config.study import load_study
from cfl_ray.config.sweep import Trial
from cfl_ray.results.published import PublishedNumber, load_published
from cfl_ray.study.study_plan import StudyRun, plan

ROOT = Path(__file__).parents[2]
STUDIES, FIGURES = ROOT / "jobs" / "experiments", ROOT / "docs" / "results"
WORDS = {"changed": str, "commit": str, "config_hash": str, "run_of": str}  # types of columns
FEWEST_ROUNDS = 0.25  # share of a recipe's rounds that a shortened run needs to be compared with a published accuracy
CLOSE = 2.0  # points; percent of a number of rounds or Mbit; counts of clients and clusters are equal when rounded
STATES = ("within 2 points", "explained", "open", "not comparable", "not run")
DATA_SETS = {  # by their words in names of studies and settings
    "mnist": "MNIST",
    "fashion mnist": "Fashion-MNIST",
    "fashion mnist c": "Fashion-MNIST-C",
    "femnist": "FEMNIST",
    "cifar": "CIFAR",
    "cifar10": "CIFAR-10",
    "cifar100": "CIFAR-100",
}
_DATA_SET = re.compile(rf"\b({'|'.join(sorted(DATA_SETS, key=len, reverse=True))})\b")
SEEDS = 3  # from which on a cell counts as repeated
PERSONAL = (  # predict with models of single clients
    "local", "lg_fedavg", "ditto", "fedper", "fedrep", "apfl", "pfedme", "pfedgraph", "fedamp", "fedcac", "fedccfa",
    "fedas", "fedac", "cgpfl", "per_fedavg", "fedbabu", "fedbn", "feroma",
)  # fmt: skip


def heading_of(name: str) -> str:
    """The name of a study, a table or a setting as a heading, with data sets under their names."""
    words = _DATA_SET.sub(lambda found: DATA_SETS[found[0]], name.replace("_", " ").strip())
    return words[:1].upper() + words[1:]


# files are read and recipes planned once, which takes longer than what is done with them
study_of = cache(load_study)
_read_yaml = cache(lambda file: yaml.safe_load(file.read_text()))
_published = cache(load_published)
_read_runs = cache(lambda file, changed_ns: pd.read_csv(file, dtype=WORDS))


@cache
def cells_of(recipe: Path) -> list[StudyRun]:
    """All runs of a recipe; of a sweep, those that do not depend on results."""
    study = study_of(recipe)
    return plan(study, trials=[Trial()] if study.learns else study.drawn())


@dataclass(frozen=True)
class Reason:
    """Why a cell differs, as far as that is known."""

    text: str = ""
    state: str = "open"  # or explained: the sentence shows the cause; or not comparable: close or not, it means nothing


@dataclass(frozen=True)
class Compared:
    """A published cell and the runs that repeat it."""

    paper: str
    table: str
    row: str  # label of the method
    column: str  # setting
    number: PublishedNumber
    runs: pd.DataFrame  # of this cell
    because: Reason  # why it differs
    others: pd.DataFrame  # runs of all methods in the same setting

    @property
    def is_run(self) -> bool:
        """Whether runs have its metric; where it waits for an event that may still come, whether they go so far."""
        waits = "to_target" in self.number.metric and len(self.runs)
        if waits and any("evaluation.target" in keys_of(changed) for changed in self.runs["changed"].fillna("")):
            return False  # for another target, or none
        not_reached = self.here is None and self.number.unit in ("rounds", "mbit")
        may_change = self.number.metric == "rounds_to_stable_clusters"
        if not len(self.runs) or not (not_reached or may_change):
            return self.here is not None
        is_whole = bool((self.runs["rounds"] >= self.runs["of_rounds"]).all())
        in_rounds = self.number.unit == "rounds" and self.number.mean is not None
        return is_whole or (in_rounds and bool((self.runs["rounds"] >= self.number.mean).all()))

    @property
    def is_unchanged(self) -> bool:
        """Whether all its runs have the recipe's rounds and every key of the recipe on which its metric depends."""
        whole = len(self.runs) and bool((self.runs["rounds"] >= self.runs["of_rounds"]).all())
        if not whole or not self.is_run:
            return False
        return not any(self.matters(key) for changed in self.runs["changed"].fillna("") for key in keys_of(changed))

    def matters(self, key: str) -> bool:
        """Whether another value of a key can change the metric, which is of the last round."""
        metric = self.number.metric
        if key == "evaluation.every":
            return "to_target" in metric
        if key == "evaluation.local_samples":  # those that a model of a single client is tested on
            return "local" in metric or "tuned" in metric or self.row in PERSONAL
        return key != "evaluation.choice_samples" or self.row.startswith("ifca")

    @cached_property
    def here(self) -> float | None:
        """Mean over the seeds, in the unit of the table; None where no run has it."""
        metric = self.number.metric
        if not len(self.runs) or metric not in self.runs or self.runs[metric].isna().any():
            return None
        return float(self.runs[metric].mean()) * self.number.scale

    @property
    def is_close(self) -> bool:
        """Whether it is as close to the published value as `CLOSE` says, or both are not reached."""
        published = self.number.mean
        if self.here is None or published is None:
            return self.is_run and self.here is None and published is None
        difference = abs(self.here - published)
        if self.number.unit in ("clients", "count"):
            return difference < 0.5
        if published <= self.here < published + self._step:
            return True
        scale = 1 if self.number.unit == "percent" else 100 / max(abs(published), 1e-9)
        return difference * scale <= CLOSE + 1e-9

    @property
    def _step(self) -> float:
        """Rounds from one evaluation to the next, or what a client sends in them: a target is noticed that late."""
        metric = self.number.metric
        if "to_target" not in metric or "every" not in self.runs:
            return 0.0
        a_round = self.runs[metric] / self.runs[metric.replace("mbit_", "rounds_")]  # in the unit of the metric
        return float((self.runs["every"] * a_round).mean())

    @property
    def state(self) -> str:
        """One of `STATES`."""
        if not self.is_run:
            return "not run"
        if self.is_close and self.because.state != "not comparable":
            return "within 2 points"
        return self.because.state


def compared(folder: Path = STUDIES) -> list[Compared]:
    """Every published cell."""
    reasons = read_reasons()
    cells = []
    for file in sorted((folder / "published").glob("*.yaml")):
        for name, table in _published(file).tables.items():
            runs = runs_of(table.study.removesuffix(".yaml").replace("/", "-"))
            of_setting = dict(tuple(runs.groupby("setting")))
            for row, column, number in table.cells():
                others = of_setting.get(column, runs[:0])
                at = others[others["method"] == row] if len(runs) else runs
                if len(at) and number.unit == "percent":
                    at = at[at["rounds"] >= FEWEST_ROUNDS * at["of_rounds"]]
                because = reason_of(reasons, file.stem, name, row, column)
                cells.append(Compared(file.stem, name, row, column, number, at, because, others))
    return cells


def is_whole(study: str, setting: str, method: str, seed: int) -> bool:
    """Whether a run is on record with its recipe's rounds and every value that its published numbers depend on.

    study: PAPER-NAME. Without a published number, with every value of its training.
    """
    runs = runs_of(study)
    at = runs[(runs["setting"] == setting) & (runs["method"] == method) & (runs["seed"] == seed)] if len(runs) else runs
    if not len(at):
        return False
    if numbers := _numbers_of(study, setting, method):
        cells = [Compared("", "", method, setting, number, at, Reason(), at) for number in numbers]
        return all(cell.is_unchanged for cell in cells)
    is_as_planned = at["changed"].fillna("").map(trains_as_recipe).all()
    return bool(is_as_planned and (at["rounds"] >= at["of_rounds"]).all())


@cache
def _numbers_of(study: str, setting: str, method: str) -> list[PublishedNumber]:
    tables = [
        table for file in sorted((STUDIES / "published").glob("*.yaml")) for table in _published(file).tables.values()
    ]
    return [
        number
        for table in tables
        if table.study.removesuffix(".yaml").replace("/", "-") == study
        for row, column, number in table.cells()
        if (row, column) == (method, setting)
    ]


def read_reasons() -> dict[str, Any]:
    """Sentences by paper, table and ROW/COLUMN (* for every row or column); of a figure, and on a table as a whole."""
    return _read_yaml(FIGURES / "explanations.yaml") or {}


def runs_of(study: str) -> pd.DataFrame:
    """The runs of a study that are on record. study: PAPER-NAME."""
    file = FIGURES / f"{study}.csv"
    return _read_runs(file, file.stat().st_mtime_ns) if file.is_file() else pd.DataFrame({"setting": []})


def keys_of(changed: str) -> set[str]:
    """The keys in which a run differs from its recipe, of its column `changed`."""
    return {change.partition("=")[0] for change in changed.split()}


def trains_as_recipe(changed: str) -> bool:
    """Whether runs with these changes do the work of their recipe in each round."""
    return all(key == "rounds" or key.startswith("evaluation.") for key in keys_of(changed))


def reason_of(reasons: dict[str, Any], paper: str, table: str, row: str, column: str) -> Reason:
    """That of the cell itself, or of its row, column or table (`*`)."""
    of_table = (reasons.get(paper) or {}).get(table) or {}
    for key in (f"{row}/{column}", f"{row}/*", f"*/{column}", "*/*"):
        if key in of_table:
            found = of_table[key]
            ((state, text),) = found.items() if isinstance(found, dict) else (("explained", found),)
            return Reason(str(text).strip(), state)
    return Reason()
