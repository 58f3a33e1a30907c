"""The pages docs/results.md and docs/results/PAPER.md: published experiments beside the published numbers.

    cfl-ray compare jobs/experiments/fedclust/table1.yaml --setting fashion_mnist    runs a study, for hours
    python -m jobs.results collect runs/fedclust-table1    stores the metrics of its runs
    python -m jobs.results share                           uses a run in every study that plans the same experiment
    python -m jobs.results costs                           estimates the cost of all runs
    python -m jobs.results write                           writes the pages, and the tables of all methods

`collect` writes docs/results/STUDY.csv, one row for each finished run of a study: setting, method, seed, the metrics of
the last evaluation, seconds, and the keys in which the run differs from its recipe. A run with less than a quarter of
the recipe's rounds is not compared with published accuracies. `write` makes the pages from these files, the estimates
of `costs`, the published numbers (jobs/experiments/published) and docs/results/explanations.yaml, which explains cells
that differ by more than two points; {METRIC} in it stands for the metric of the runs. No number in a table is typed by
hand.
"""

import argparse
import sys
from collections.abc import Collection
from dataclasses import fields
from pathlib import Path
from statistics import fmean
from typing import Any

import pandas as pd
import torch

from cfl_ray import Experiment, UserError, data, load, models
from cfl_ray.errors import DataError
from cfl_ray.methods import REGISTRY
from cfl_ray.results.comparison import read_study
from cfl_ray.results.study_folder import run_folders
from cfl_ray.run_directory import RunDirectory
from cfl_ray.study.study_plan import StudyRun
from cfl_ray.tracking import flatten, read_info, read_records
from jobs.results import heterogeneity
from jobs.results.cells import (
    FEWEST_ROUNDS,
    FIGURES,
    ROOT,
    STUDIES,
    WORDS,
    cells_of,
    compared,
    keys_of,
    study_of,
    trains_as_recipe,
)
from jobs.results.page import FIGURE, pages, scatter

DOCS = ROOT / "docs"
_NOT_COMPARED = ("runtime", "tracking", "output", "name", "methods")  # change no result, or are compared by themselves
_KEPT = (
    "accuracy", "accuracy_std", "accuracy_p10", "accuracy_local", "accuracy_local_trained", "accuracy_tuned",
    "global_score", "macro_f1", "test_loss", "num_clusters", "largest_cluster_share", "ari", "correct_clients",
    "clients_online", "mbit_down", "mbit_up", "rounds_to_target", "mbit_to_target", "rounds_to_target_local",
    "mbit_to_target_local", "rounds_to_recover", "backward_transfer", "rounds_to_stable_clusters", "newcomer_accuracy",
    "newcomer_accuracy_tuned", "seconds",
)  # fmt: skip


# ---- collect: from folders of runs to docs/results/STUDY.csv


def collect(folder: Path, recipe: Path | None, name: str | None = None) -> Path:
    """Writes the metrics of the finished runs of a study; runs that are in the file already are kept or replaced.

    name: of the file, for a recipe that was run on other data; None: that of the recipe.
    """
    record = recipe or find_recipe(folder)
    planned = {(cell.setting, cell.method, cell.seed): cell.experiment for cell in cells_of(record)}
    rows = []
    run_metrics = read_study(folder)
    for setting, method, run in run_folders(folder):
        seed = RunDirectory.seed_of(run)
        values = run_metrics.get((setting, method), {}).get(seed)
        if values is None:
            continue
        experiment = load(RunDirectory(run).config)
        expected = planned.get((setting, method, seed))
        changed = differences(experiment.to_dict(), expected.to_dict()) if expected else "not in the recipe"
        info = read_info(RunDirectory(run).of_methods(RunDirectory.info)[0].parent)
        kept = {name: values[name] for name in _KEPT if name in values} | _by_round(run)
        rounds = {
            "rounds": experiment.rounds,
            "of_rounds": (expected or experiment).rounds,
            "every": experiment.evaluation.every,
        }
        rows.append(
            {"setting": setting, "method": method, "seed": seed, **rounds, "changed": changed}
            | {name: float(f"{value:.6g}") for name, value in kept.items()}
            | {"config_hash": experiment.config_hash, "commit": info.tags.get("git_commit", "")[:10]}
        )
    file = FIGURES / (f"{name}.csv" if name else _csv(record))
    FIGURES.mkdir(exist_ok=True)
    if rows:
        _add(file, pd.DataFrame(rows))
    return file


def _csv(recipe: Path) -> str:
    return f"{recipe.parent.name}-{recipe.stem}.csv"


def _add(file: Path, rows: pd.DataFrame) -> None:
    """Writes rows, each in the place of that of the same setting, method and seed."""
    frame = pd.concat([pd.read_csv(file, dtype=WORDS), rows]) if file.exists() else rows
    frame = frame.drop_duplicates(["setting", "method", "seed"], keep="last")
    frame.sort_values(["setting", "method", "seed"]).to_csv(file, index=False)


def _by_round(run: Path) -> dict[str, float]:
    """Of the accuracies that cells are compared by: the least and the greatest P-server one in the last quarter of the
    rounds, the mean of the last ten rounds, and the best tested round.
    """
    records = [record for log in run.glob("*/metrics.jsonl") for record in read_records(log.parent)]
    last = max((record.round for record in records), default=0)
    found = {}
    for name in ("accuracy", "accuracy_local"):
        if values := {record.round: record.metrics[name] for record in records if name in record.metrics}:
            late = [value for round, value in values.items() if round > 0.75 * last]
            if name == "accuracy" and late:
                found |= {"accuracy_low": min(late), "accuracy_high": max(late)}
            found[f"{name}_last10"] = fmean(value for round, value in values.items() if round > last - 10)
            found[f"{name}_best"] = max(values.values())
    return found


def _recipes() -> list[Path]:
    return [file for file in sorted(STUDIES.glob("*/*.yaml")) if file.parent.name != "published"]


def find_recipe(folder: Path) -> Path:
    """The recipe of a study's folder, by its name. Raises UserError where there is none."""
    for file in _recipes():
        if study_of(file).name == folder.name:
            return file
    raise UserError(f"{folder} is the folder of no study in {STUDIES}; name its recipe with --recipe")


def differences(found: dict[str, Any], expected: dict[str, Any]) -> str:
    """The keys in which a run differs from its recipe: KEY=VALUE, joined by spaces."""
    here, there = (
        {key: _without_checkout(value) for key, value in flatten(_compared(values)).items()}
        for values in (found, expected)
    )
    keys = [key for key in {**there, **here} if here.get(key) != there.get(key) and key != "data.root"]
    return " ".join(f"{key}={here.get(key)}" for key in keys)


def _without_checkout(value: Any) -> Any:
    """A value; of a file beside a recipe its path from the top of the checkout, which may be another one."""
    _, folder, rest = str(value).rpartition("/jobs/experiments/")
    return f"jobs/experiments/{rest}" if folder else value


def _compared(config: dict[str, Any]) -> dict[str, Any]:
    """The keys that change the results of a run, with those of its method as `methods.NAME.OPTION`."""
    values = {key: value for key, value in config.items() if key not in _NOT_COMPARED}
    (entry,) = config["methods"]
    name, options = next(iter(entry.items())) if isinstance(entry, dict) else (entry, {})
    options = {key: value for key, value in (options or {}).items() if key != "label"}
    defaults = {field.name: field.default for field in fields(REGISTRY[name])} if name in REGISTRY else {}
    return values | {"methods": {name: defaults | options}}


# ---- share: a run in the place of the same experiment of another study


def share(papers: Collection[str] = ()) -> list[str]:
    """Copies rows of runs to studies of the paper, with runs, that plan the same experiment; returns what was copied.

    papers: folders of jobs/experiments; empty: all.

    Only runs as their own recipe says are copied, and only to a cell that has none with all rounds and values of its
    recipe. A run with fewer rounds or another evaluation is copied if nothing else differs, and the cell has no run or
    one that differs in more; in a study with published numbers also instead of a run of no more rounds that trains
    otherwise. It is not copied beside a longer run with another seed, since a cell is the mean of its seeds.
    """
    files = [file for file in _recipes() if not papers or file.parent.name in papers]
    files = [file for file in files if (FIGURES / _csv(file)).is_file()]
    pairs = [(a, b) for a in files for b in files if a != b and a.parent == b.parent]
    shared = dict.fromkeys(file for file, _ in pairs)
    cells = {file: [(cell, cell.experiment.to_dict()) for cell in cells_of(file)] for file in shared}
    copied = []
    for source, target in pairs:
        before, after = FIGURES / _csv(source), FIGURES / _csv(target)
        rows = pd.read_csv(before, dtype=WORDS)
        rows = rows[rows["changed"].isna() & (rows["rounds"] == rows["of_rounds"])]
        planned = {(cell.setting, cell.method, cell.seed): values for cell, values in cells[source]}
        for row in rows.to_dict("records"):
            given = planned.get((row["setting"], row["method"], row["seed"]))
            for cell, wanted in cells[target] if given else ():
                if cell.seed != row["seed"] or row["rounds"] > wanted["rounds"]:
                    continue
                if row["rounds"] < max(FEWEST_ROUNDS * wanted["rounds"], _rounds_of_other_seeds(after, cell)):
                    continue
                changed = differences(given, wanted)
                if _is_better(changed, row["rounds"] if study_of(target).published else 0, after, cell):
                    of = f"{_csv(source).removesuffix('.csv')}, {row['setting']}"
                    place = {"setting": cell.setting, "method": cell.method, "of_rounds": wanted["rounds"]}
                    copy = row | place | {"changed": changed or None, "run_of": row.get("run_of") or of}
                    _add(after, pd.DataFrame([copy]).dropna(axis=1))
                    copied.append(f"{of}, {row['method']} -> {_csv(target)}: {cell.setting}, {cell.method}")
    return copied


def _rounds_of_other_seeds(file: Path, cell: StudyRun) -> int:
    """The rounds of the longest run of a cell's setting and method with another seed; 0 without one."""
    rows = pd.read_csv(file, dtype=WORDS)
    beside = (rows["setting"] == cell.setting) & (rows["method"] == cell.method) & (rows["seed"] != cell.seed)
    return int(rows["rounds"][beside].max()) if beside.any() else 0


def _is_better(changed: str, rounds: int, file: Path, cell: StudyRun) -> bool:
    """Whether a run that differs in `changed` is nearer to the recipe of a cell than the run that the file has.

    rounds: of the run; up to so many, a run that trains otherwise is worse.
    """
    if not trains_as_recipe(changed):
        return False
    rows = pd.read_csv(file, dtype=WORDS)
    own = rows[(rows["setting"] == cell.setting) & (rows["method"] == cell.method) & (rows["seed"] == cell.seed)]
    if not len(own):
        return True
    before = own["changed"].fillna("").iloc[0]
    trains_otherwise = not trains_as_recipe(before) and own["rounds"].iloc[0] <= rounds
    return trains_otherwise or keys_of(changed) < keys_of(before)


# ---- costs: the arithmetic of each study


def costs() -> Path:
    """Writes the floating-point operations of one run of plain federated averaging in every setting of every study.

    Forward and backward passes of the local training alone, as three times those of a forward pass; methods that train
    two models in each client take twice that. A setting whose data are not at hand has none.
    """
    rows = []
    for file in _recipes():
        cells = cells_of(file)
        for setting in dict.fromkeys(cell.setting for cell in cells):
            of_setting = [cell for cell in cells if cell.setting == setting]
            amount = _operations(of_setting[0].experiment)
            name = _csv(file).removesuffix(".csv")
            rows.append({"study": name, "setting": setting, "runs": len(of_setting), "gigaflop": amount})
    file = FIGURES / "costs.csv"
    pd.DataFrame(rows).to_csv(file, index=False)
    return file


def _operations(experiment: Experiment) -> float | None:
    """Gigaflop of the local training of a whole run; None where the data are not at hand."""
    try:
        summary = data.describe(experiment.data, experiment.seed, experiment.targets)
    except DataError:
        return None
    from torch.utils.flop_counter import FlopCounterMode  # here, because it takes a second

    shape, local = summary.shape, experiment.local
    network = models.recipe(experiment.model.name, experiment.model.options, shape.input, shape.num_classes)()
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        network.eval()(torch.zeros(1, *shape.input))
    clients = experiment.cohort.clients or max(1, int(experiment.cohort.fraction * summary.clients))
    _, median, _ = summary.samples
    batch = local.batch_size or median
    seen = local.steps * min(batch, median) if local.steps else local.epochs * median
    return float(f"{3 * counter.get_total_flops() * seen * clients * experiment.rounds / 1e9:.4g}")


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = parser.add_subparsers(dest="verb", required=True)
    collecting = verbs.add_parser("collect", help="keep the metrics of finished runs")
    collecting.add_argument("folders", nargs="+", type=Path, metavar="STUDY_FOLDER")
    collecting.add_argument("--recipe", type=Path, help="the study's YAML file; default: found by the folder's name")
    collecting.add_argument(
        "--name", help="the file's name, for a recipe run on other data; default: that of the recipe"
    )
    sharing = verbs.add_parser("share", help="use runs in the other studies that plan the same experiment")
    sharing.add_argument("papers", nargs="*", metavar="PAPER", help="folders of jobs/experiments; default: all")
    verbs.add_parser("costs", help="estimate what runs would take")
    verbs.add_parser("write", help="write the pages")
    given = parser.parse_args(arguments)
    if given.verb == "share":
        print("\n".join(share(given.papers)) or "nothing to share")
        return
    if given.verb == "costs":
        print(f"wrote {costs()}")
        return
    if given.verb == "write":
        cells = compared()
        (DOCS / FIGURE).write_text(scatter(cells))
        written = {DOCS / place: text for place, text in pages(cells).items()} | heterogeneity.pages()
        for file, text in written.items():
            file.write_text(text)
        print(f"wrote {', '.join(map(str, written))}")
        return
    for folder in given.folders:
        print(f"wrote {collect(folder, given.recipe, given.name)}")


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        sys.exit(str(error))
