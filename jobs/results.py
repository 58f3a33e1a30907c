"""The page docs/results.md: results of the published experiments beside the published numbers.

    cfl-ray compare jobs/experiments/fedclust/table1.yaml --setting fashion_mnist    runs, for hours
    python jobs/results.py collect runs/fedclust-table1    keeps their figures
    python jobs/results.py costs                           estimates what runs would take
    python jobs/results.py write                           writes the page

`collect` writes docs/results/STUDY.csv, one row for each finished run of a study: setting, method, seed, the metrics of
the last evaluation, seconds, and the settings in which the run differs from its recipe (a shortened one, which is not
compared with published accuracies where it has less than a quarter of the rounds). `write` makes
the page from these files, the estimates of `costs`, the published numbers (jobs/experiments/published) and
docs/results/explanations.yaml, which says in one sentence each why a cell differs by more than two points; {METRIC} in
it stands for that of the runs. No number of the page is typed by hand.
"""

import argparse
import math
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
import torch
import yaml
from torch.utils.flop_counter import FlopCounterMode

from cfl_ray import Experiment, UserError, data, load, models
from cfl_ray.config.published import PublishedNumber, PublishedTable, load_published
from cfl_ray.config.study import Study, load_study
from cfl_ray.core.errors import DataError
from cfl_ray.runtime.comparison import read_study, run_folders
from cfl_ray.runtime.study.cells import Cell, plan
from cfl_ray.tracking import flatten, read_info, read_records

ROOT = Path(__file__).parent.parent
STUDIES, PAGE, FIGURES = ROOT / "jobs" / "experiments", ROOT / "docs" / "results.md", ROOT / "docs" / "results"
FEWEST_ROUNDS = 0.25  # of a recipe, from which on a shortened run repeats a published accuracy
CLOSE = 2.0  # points, or percent of a number of rounds or Mbit
_NOT_COMPARED = ("runtime", "tracking", "output", "name", "methods")  # keys that change no result, or are the row
_KEPT = (
    "accuracy", "accuracy_std", "accuracy_p10", "accuracy_local", "accuracy_local_trained", "accuracy_tuned",
    "global_score", "macro_f1", "test_loss", "num_clusters", "largest_cluster_share", "ari", "correct_clients",
    "clients_online", "mbit_down", "mbit_up", "rounds_to_target", "mbit_to_target", "rounds_to_target_local",
    "mbit_to_target_local", "rounds_to_stable_clusters", "newcomer_accuracy", "newcomer_accuracy_tuned", "seconds",
)  # fmt: skip


def cells_of(study: Study) -> list[Cell]:
    """All runs of a study; of a sweep, those that do not depend on results."""
    trials = study.sweep.drawn() if study.sweep is not None and study.sweep.sampler != "tpe" else [{}]
    return plan(study, trials=trials)


# ---- collect: from folders of runs to docs/results/STUDY.csv


def collect(folder: Path, recipe: Path | None) -> Path:
    """Writes the figures of the finished runs of a study; runs that are in the file already are kept or replaced."""
    record = recipe or find_recipe(folder)
    planned = {(cell.setting, cell.method, cell.seed): cell.experiment for cell in cells_of(load_study(record))}
    rows = []
    figures = read_study(folder)
    for setting, method, run in run_folders(folder):
        seed = int(run.name.removeprefix("seed-"))
        values = figures.found.get((setting, method), {}).get(seed)
        if values is None:
            continue
        experiment = load(run / "config.yaml")
        expected = planned.get((setting, method, seed))
        changed = differences(experiment.to_dict(), expected.to_dict()) if expected else "not in the recipe"
        info = read_info(next(path.parent for path in sorted(run.glob("*/run.json"))))
        kept = {name: values[name] for name in _KEPT if name in values} | _last_quarter(run)
        rounds = {"rounds": experiment.rounds, "of_rounds": (expected or experiment).rounds}
        rows.append(
            {"setting": setting, "method": method, "seed": seed, **rounds, "changed": changed}
            | {name: float(f"{value:.6g}") for name, value in kept.items()}
            | {"config_hash": experiment.config_hash, "commit": info.tags.get("git_commit", "")[:10]}
        )
    file = FIGURES / f"{record.parent.name}-{record.stem}.csv"
    frame = pd.DataFrame(rows)
    if file.exists():
        before = pd.read_csv(file, keep_default_na=True, dtype={"changed": str, "commit": str, "config_hash": str})
        frame = pd.concat([before, frame]).drop_duplicates(["setting", "method", "seed"], keep="last")
    FIGURES.mkdir(exist_ok=True)
    frame.sort_values(["setting", "method", "seed"]).to_csv(file, index=False)
    return file


def _last_quarter(run: Path) -> dict[str, float]:
    """Least and greatest P-server accuracy of a run in the last quarter of its rounds."""
    records = [record for log in run.glob("*/metrics.jsonl") for record in read_records(log.parent)]
    last = max((record.round for record in records), default=0)
    found = [one.metrics["accuracy"] for one in records if one.round > 0.75 * last and "accuracy" in one.metrics]
    return {"accuracy_low": min(found), "accuracy_high": max(found)} if found else {}


def find_recipe(folder: Path) -> Path:
    """The recipe of a study's folder, by its name. Raises UserError where there is none."""
    for file in sorted(STUDIES.glob("*/*.yaml")):
        if file.parent.name != "published" and load_study(file).name == folder.name:
            return file
    raise UserError(f"{folder} is the folder of no study in {STUDIES}; name its recipe with --recipe")


def differences(found: dict[str, Any], expected: dict[str, Any]) -> str:
    """The settings in which a run differs from its recipe: KEY=VALUE, joined by spaces."""
    here, there = (flatten({k: v for k, v in one.items() if k not in _NOT_COMPARED}) for one in (found, expected))
    keys = [key for key in {**there, **here} if here.get(key) != there.get(key) and key != "data.root"]
    return " ".join(f"{key}={here.get(key)}" for key in keys)


# ---- costs: the arithmetic of each study


def costs() -> Path:
    """Writes the floating-point operations of one run of plain federated averaging in every setting of every study.

    Forward and backward passes of the local training alone, as three times those of a forward pass; methods that train
    two models in each client take twice that. A setting whose data are not at hand has none.
    """
    rows = []
    for file in sorted(STUDIES.glob("*/*.yaml")):
        if file.parent.name == "published":
            continue
        study = load_study(file)
        cells = cells_of(study)
        for setting in dict.fromkeys(cell.setting for cell in cells):
            of_setting = [cell for cell in cells if cell.setting == setting]
            amount = _operations(of_setting[0].experiment)
            name = f"{file.parent.name}-{file.stem}"
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
    shape, local = summary.shape, experiment.local
    network = models.recipe(experiment.model.name, experiment.model.options, shape.input, shape.num_classes)()
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        network.eval()(torch.zeros(1, *shape.input))
    clients = experiment.cohort.clients or max(1, int(experiment.cohort.fraction * summary.clients))
    _, median, _ = summary.samples
    batch = local.batch_size or median
    seen = local.steps * min(batch, median) if local.steps else local.epochs * median
    return float(f"{3 * counter.get_total_flops() * seen * clients * experiment.rounds / 1e9:.4g}")


# ---- write: the page


@dataclass(frozen=True)
class Compared:
    """A published cell and the runs that repeat it."""

    paper: str
    table: str
    row: str  # label of the method
    column: str  # setting
    number: PublishedNumber
    runs: pd.DataFrame  # of this cell
    because: str  # why it differs

    @property
    def is_run(self) -> bool:
        return self.here is not None or (len(self.runs) > 0 and self.number.unit in ("rounds", "mbit"))

    @property
    def here(self) -> float | None:
        """Mean over the seeds, in the unit of the table; None where no run has it."""
        metric = self.number.metric
        if not len(self.runs) or metric not in self.runs or self.runs[metric].isna().any():
            return None
        return float(self.runs[metric].mean()) * self.number.scale

    @property
    def is_close(self) -> bool:
        """Whether it is within two points of the published value, or both are not reached."""
        published = self.number.mean
        if self.here is None or published is None:
            return self.is_run and self.here is None and published is None
        scale = 1 if self.number.unit in ("percent", "clients", "count") else 100 / max(abs(published), 1e-9)
        return abs(self.here - published) * scale <= CLOSE + 1e-9

    @property
    def state(self) -> str:
        """One of: not run, within 2 points, explained, open."""
        if not self.is_run:
            return "not run"
        return "within 2 points" if self.is_close else "explained" if self.because else "open"


def compared(folder: Path = STUDIES) -> list[Compared]:
    """Every published cell."""
    reasons = read_reasons()
    cells = []
    for file in sorted((folder / "published").glob("*.yaml")):
        for name, table in load_published(file).tables.items():
            runs = _runs_of(table)
            for row, column, number in table.cells():
                at = runs[(runs["setting"] == column) & (runs["method"] == row)] if len(runs) else runs
                if len(at) and number.unit == "percent":
                    at = at[at["rounds"] >= FEWEST_ROUNDS * at["of_rounds"]]
                because = _reason(reasons, file.stem, name, row, column)
                cells.append(Compared(file.stem, name, row, column, number, at, because))
    return cells


def read_reasons() -> dict[str, Any]:
    """Why cells differ, by paper, table and ROW/COLUMN; * stands for every row or column."""
    return yaml.safe_load((FIGURES / "explanations.yaml").read_text()) or {}


def _runs_of(table: PublishedTable) -> pd.DataFrame:
    file = FIGURES / table.study.replace("/", "-").replace(".yaml", ".csv")
    return pd.read_csv(file, dtype={"changed": str}) if file.is_file() else pd.DataFrame()


def _reason(reasons: dict[str, Any], paper: str, table: str, row: str, column: str) -> str:
    """The explanation of a cell: that of the cell itself, or of its row, column or table (`*`)."""
    of_table = (reasons.get(paper) or {}).get(table) or {}
    for key in (f"{row}/{column}", f"{row}/*", f"*/{column}", "*/*"):
        if key in of_table:
            return str(of_table[key]).strip()
    return ""


def page(cells: list[Compared]) -> str:
    """The Markdown of the page."""
    lines = [
        "# Results of the published experiments",
        "",
        "[jobs/results.py](../jobs/results.py) writes this page from the figures of the runs in `docs/results` and",
        "[the published numbers](../jobs/experiments/published); no number is typed by hand. Accuracies in percent,",
        "mean ± standard deviation over the seeds, where there are several. P-server, P-local and P-tune are the",
        "protocols of [Evaluation](concepts/evaluation.md): a table of a paper often mixes them, so the protocol",
        "of the published cell stands beside P-server, which is the same for every method.",
        "",
        "## Count",
        "",
        *_count(cells),
        "",
    ]
    papers = {}
    for file in sorted((STUDIES / "published").glob("*.yaml")):
        papers[file.stem] = load_published(file)
    for name, published in papers.items():
        lines += [f"## {published.paper.title}", "", f"{published.paper.authors}, {published.paper.venue}", ""]
        for table_name, table in published.tables.items():
            of_table = [cell for cell in cells if (cell.paper, cell.table) == (name, table_name)]
            if any(cell.is_run for cell in of_table):
                lines += _table(table_name, table, of_table)
        lines += _figures(name)
        missing = [t for t in published.tables if not any(c.is_run for c in cells if (c.paper, c.table) == (name, t))]
        if missing:
            lines += [f"Not run: {', '.join(_title(one) for one in missing)}.", ""]
    lines += _missing(cells)
    return "\n".join(lines).rstrip() + "\n"


def _figures(paper: str) -> list[str]:
    """The runs of the studies of a paper that repeat a figure, or answer a question of our own: no published cells."""
    lines = []
    for file in sorted((STUDIES / paper).glob("*.yaml")):
        study, figures = load_study(file), FIGURES / f"{paper}-{file.stem}.csv"
        if study.published or not figures.is_file():
            continue
        runs = pd.read_csv(figures, dtype={"changed": str})
        several = runs["method"].nunique() > 1
        metrics = [name for name in study.metrics or ("accuracy", "accuracy_local", "ari") if name in runs]
        verb = "sweep" if study.sweep is not None else "compare"
        changes = runs["changed"].dropna().unique()
        lines += [f"### {_title(file.stem)}", "", f"`cfl-ray {verb} jobs/experiments/{paper}/{file.name}`", ""]
        lines += [f"Shortened: {'; '.join(sorted(changes))}.", ""] if len(changes) else []
        lines += [f"Expected: {expected}", ""] if (expected := _expected(file)) else []
        head = ["setting", *(["method"] if several else []), *metrics, "seeds"]
        lines += [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
        order = {cell: place for place, cell in enumerate((cell.setting, cell.method) for cell in cells_of(study))}
        groups = sorted(runs.groupby(["setting", "method"]), key=lambda one: order.get(one[0], len(order)))
        for (setting, method), own in groups:
            values = [
                _number(*_mean_and_std(own[name]), _unit(name)) if own[name].notna().all() else "-" for name in metrics
            ]
            lines.append(f"| {' | '.join([setting, *([method] if several else []), *values, str(len(own))])} |")
        lines.append("")
    return lines


def _expected(recipe: Path) -> str:
    """What the header of a recipe says to expect."""
    header = [line.removeprefix("#").strip() for line in recipe.read_text().splitlines() if line.startswith("#")]
    start = next((i for i, line in enumerate(header) if line.startswith("Expected:")), None)
    if start is None:
        return ""
    end = next(i for i, line in enumerate([*header, "Cost"]) if i > start and line.startswith(("Cost", "Assumed")))
    return " ".join(header[start:end]).removeprefix("Expected:").strip()


def _unit(metric: str) -> str:
    if metric.startswith(("num_", "correct_", "rounds_")):
        return "count"
    return "share" if metric in ("ari", "nmi", "purity") else "percent"


def _mean_and_std(values: pd.Series) -> tuple[float, float]:
    scale = 100 if _unit(str(values.name)) == "percent" else 1
    return float(values.mean()) * scale, float(values.std(ddof=1)) * scale


def _missing(cells: list[Compared]) -> list[str]:
    """The studies that were not run, and the time that they would take at the rate of those that were."""
    file = FIGURES / "costs.csv"
    if not file.is_file():
        return []
    table, rate = pd.read_csv(file), _rate(pd.read_csv(file))
    lines = [
        "## The cost of what was not run",
        "",
        f"Core hours of federated averaging, at {rate:.0f} GFLOP/s of one core, which the runs above reached, by",
        "`python jobs/results.py costs`; methods that train two models in each client take twice as long. A setting",
        "without a figure needs data that were not at hand.",
        "",
        "| study | setting | runs | of which run | core hours of the rest |",
        "|---|---|---|---|---|",
    ]
    for row in table.itertuples():
        done_file = FIGURES / f"{row.study}.csv"
        done = pd.read_csv(done_file) if done_file.is_file() else pd.DataFrame({"setting": []})
        count = int((done["setting"] == row.setting).sum())
        hours = "" if math.isnan(row.gigaflop) else f"{(row.runs - count) * row.gigaflop / rate / 3600:.2g}"
        if count < row.runs:
            lines.append(f"| {row.study} | {row.setting} | {row.runs} | {count} | {hours} |")
    return lines


def _rate(table: pd.DataFrame) -> float:
    """Gigaflop per second of all runs of FedAvg that are on record with the rounds of their recipe; 20 without any."""
    amount, seconds = 0.0, 0.0
    for row in table.itertuples():
        file = FIGURES / f"{row.study}.csv"
        if file.is_file() and not math.isnan(row.gigaflop):
            done = pd.read_csv(file)
            done = done[(done["setting"] == row.setting) & (done["method"] == "fedavg") & done["changed"].isna()]
            amount, seconds = amount + row.gigaflop * len(done), seconds + float(done["seconds"].sum())
    return amount / seconds if seconds else 20.0


def _count(cells: list[Compared]) -> list[str]:
    states = ("within 2 points", "explained", "open", "not run")
    lines = [f"| paper | published cells | run | {' | '.join(states)} |", "|---" * (3 + len(states)) + "|"]
    for paper in [*dict.fromkeys(cell.paper for cell in cells), None]:
        own = [cell for cell in cells if paper in (None, cell.paper)]
        run = sum(cell.is_run for cell in own)
        counts = [sum(cell.state == state for cell in own) for state in states]
        lines.append(f"| {paper or 'all'} | {len(own)} | {run} | {' | '.join(map(str, counts))} |")
    return lines


def _table(name: str, table: PublishedTable, cells: list[Compared]) -> list[str]:
    lines = [f"### {_title(name)}: {table.caption}", "", f"`cfl-ray compare jobs/experiments/{table.study}`", ""]
    for column in dict.fromkeys(cell.column for cell in cells):
        run = [cell for cell in cells if cell.column == column and cell.is_run]
        if not run:
            continue
        lines += [f"**{column}**{_shortened(run)}", ""]
        metrics = list(dict.fromkeys(cell.number.metric for cell in run))
        honest = table.unit == "percent" and metrics != ["accuracy"] and "accuracy" in run[0].runs
        head = ["method", "published", "here", *(["protocol"] if len(metrics) > 1 or honest else [])]
        head += [*(["P-server here"] if honest else []), "seeds", "difference"]
        lines += [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
        for cell in run:
            number = cell.number
            row = [cell.row, _number(number.mean, number.std, number.unit), _ours(cell, number.metric)]
            if "protocol" in head:
                row.append({"accuracy": "P-server", "accuracy_local": "P-local"}.get(number.metric, number.metric))
            if honest:
                row.append(_ours(cell, "accuracy"))
            row += [str(len(cell.runs)), _difference(cell)]
            lines.append(f"| {' | '.join(row)} |")
        lines.append("")
        lines += [f"- {one.row}: a misprint? {one.number.misprint}" for one in run if one.number.misprint]
        reasons: dict[str, list[str]] = {}
        for cell in run:
            if cell.state == "explained":
                reasons.setdefault(_with_figures(cell), []).append(cell.row)
        lines += [f"- {', '.join(rows)}: {because}" for because, rows in reasons.items()]
        if still := [cell.row for cell in run if cell.state == "open"]:
            lines.append(f"- open: {', '.join(still)}")
        lines += [""] if lines[-1] else []
    return lines


def _with_figures(cell: Compared) -> str:
    """The reason why a cell differs, with {METRIC} replaced by that of its runs, in percent."""
    numbers = cell.runs.select_dtypes("number").mean()
    percent = {name: f"{100 * value:.1f}" for name, value in numbers.items() if 0 <= value <= 1}
    return cell.because.format(**{name: f"{value:.4g}" for name, value in numbers.items()} | percent)


def _shortened(cells: list[Compared]) -> str:
    changes = {change for cell in cells for change in cell.runs["changed"].dropna()}
    return f" (shortened: {'; '.join(sorted(changes))})" if changes else ""


def _title(name: str) -> str:
    return name.replace("table", "Table ").replace("figure", "Fig. ").replace("_", " ").strip()


def _number(mean: float | None, std: float | None, unit: str) -> str:
    if mean is None:
        return "not reached"
    digits = {"rounds": 0, "clients": 0, "count": 0, "share": 2}.get(unit, 1)
    return f"{mean:.{digits}f}" + ("" if std is None or math.isnan(std) else f" ± {std:.{digits}f}")


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


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = parser.add_subparsers(dest="verb", required=True)
    collecting = verbs.add_parser("collect", help="keep the figures of finished runs")
    collecting.add_argument("folders", nargs="+", type=Path, metavar="STUDY_FOLDER")
    collecting.add_argument("--recipe", type=Path, help="the study's YAML file; default: found by the folder's name")
    verbs.add_parser("costs", help="estimate what runs would take")
    verbs.add_parser("write", help="write the page")
    given = parser.parse_args(arguments)
    if given.verb == "costs":
        print(f"wrote {costs()}")
        return
    if given.verb == "write":
        PAGE.write_text(page(compared()))
        print(f"wrote {PAGE}")
        return
    for folder in given.folders:
        print(f"wrote {collect(folder, given.recipe)}")


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        sys.exit(str(error))
