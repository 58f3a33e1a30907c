"""Commands on studies: tables that fit the terminal, status, resume, check, and messages that name a command."""

import io
import json
import re
import shlex
import shutil
from pathlib import Path
from types import SimpleNamespace

import pandas as pd
import pytest
import yaml
from commands import call
from rich.console import Console
from studies import InlinePool, small_study

from cfl_ray.cli.study_progress import StudyDisplay, show_tables, show_trials
from cfl_ray.results.recorded_runs import recorded_result
from cfl_ray.results.results import MethodResult
from cfl_ray.study import run
from cfl_ray.study.sweep import RankedTrial, best_of
from cfl_ray.study.worker_pool import RunOutcome


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(run, "WorkerPool", InlinePool)
    monkeypatch.setattr(InlinePool, "done", [])
    for name in ("MLFLOW_TRACKING_URI", "RAY_ADDRESS", "RAY_JOB_ID", "RAY_JOB_CONFIG_JSON_ENV_VAR"):
        monkeypatch.delenv(name, raising=False)


def write(name: str = "study.yaml", **changes) -> str:
    keys = small_study(Path("runs"), **changes).model_dump(mode="json", by_alias=True)
    Path(name).write_text(yaml.safe_dump(keys))
    return name


def test_a_study_from_check_to_resume(capsys, drawing):
    file = write(seeds=[0], settings={"a": {}, "b": {"local": {"lr": 0.5}}})
    status, printed, _ = call(capsys, "check", file)
    assert status == 0 and "setting a:" in printed and "4 runs: 4 with each of 1 seed" in printed
    assert printed.count("federation: ") == 1 and "like these: 1 further setting (b)" in printed, "the same sizes"
    assert printed.splitlines()[-1] == "The study is valid. Run it with: cfl-ray compare study.yaml"
    assert call(capsys, "compare", "--dry-run", file)[1].splitlines()[-1] == f"4 runs; folder: {Path.cwd()}/runs/small"
    assert not Path("runs").exists()
    status, printed, _ = call(capsys, "compare", file, "--method", "two")
    assert status == 0 and "2 runs, " in printed and len(InlinePool.done) == 2
    dry = call(capsys, "compare", "--dry-run", file)[1].splitlines()
    assert "a, two, seed 0: finished" in dry and "a, fedavg, seed 0" in dry
    status, printed, _ = call(capsys, "status", "runs/small")
    assert "2 of 4 finished, 2 left" in printed and "cfl-ray resume runs/small" in printed
    failed = Path("runs/small/a/fedavg/seed-0")
    failed.mkdir(parents=True)
    (failed / "failure.txt").write_text("an error")
    missing = "Not in the table: 2 of the 4 runs of runs/small, which are not finished, 1 failed; see cfl-ray status"
    for style, begin in (("md", "\n"), ("latex", "% "), ("html", "")):
        assert begin + missing in call(capsys, "table", "runs/small", "--metric", "accuracy", "--format", style)[1]
    _, printed, error = call(capsys, "table", "runs/small", "--format", "csv")
    assert missing in error and missing not in printed
    with drawing(run):  # the page of the study
        status, printed, _ = call(capsys, "resume", "runs/small")
    assert status == 0 and "4 runs, 2 finished before" in printed and len(InlinePool.done) == 4
    assert re.search(r"method .*a .*b ", printed)
    assert "(report.html, results.csv, table.md in artifacts/)" in printed
    found = json.loads(call(capsys, "status", "--json", "runs/small")[1])
    assert (found["state"], found["runs"], found["finished"], found["next"]) == ("finished", 4, 4, None)
    printed = call(capsys, "table", "runs/small", "--metric", "accuracy")[1]
    assert "| method | a | b |" in printed and "Not in the table" not in printed


def test_the_files_that_are_named_are_there(capsys):
    status, printed, _ = call(capsys, "compare", write(seeds=[0]), "tracking.report=false")
    assert status == 0 and "(results.csv, table.md in artifacts/)" in printed


def test_a_finished_run_that_lost_its_last_rounds_or_all_is_named(capsys):
    """Its table would show the figures of an earlier round."""
    file = write(seeds=[0])
    assert call(capsys, "compare", file)[0] == 0
    (cut,) = Path("runs/small").glob("*/fedavg/*/*/metrics.jsonl")

    def is_named(expected: str) -> None:
        for command in (["compare", file], ["table", "runs/small"], ["table", str(cut.parents[1])]):
            status, _, message = call(capsys, *command)
            assert status == 2 and f"{cut} {expected}, although the method has finished" in message

    whole = cut.read_text().splitlines(keepends=True)
    cut.write_text("".join(whole[:-1]) + whole[-1][:20])
    is_named(f"ends with round {len(whole) - 1} of {len(whole)}")
    shutil.rmtree(cut.parents[1])  # as the message says
    assert call(capsys, "compare", file)[0] == 0
    assert [json.loads(line)["round"] for line in cut.read_text().splitlines()] == list(range(1, len(whole) + 1))
    cut.unlink()
    is_named("is missing or empty")


def test_a_finished_run_that_lost_its_method_is_named_and_repeated(capsys):
    """Its table would have a seed less without a word."""
    file = write(seeds=[0, 1])
    assert call(capsys, "compare", file)[0] == 0

    def table() -> list[list[str]]:
        """Method, runs and accuracy."""
        printed = call(capsys, "table", "runs/small", "--metric", "accuracy")[1]
        return [line.split("|")[1:4] for line in printed.splitlines()]

    expected = table()
    lost = next(Path("runs/small").glob("*/fedavg/seed-0/fedavg"))
    shutil.rmtree(lost)
    for command in (["table", "runs/small"], ["table", str(lost.parent)], ["report", "runs/small"]):
        status, _, message = call(capsys, *command)
        assert status == 2 and f"{lost} is missing, although the run has finished" in message, message
        assert message.rstrip().endswith(f"{lost.parent}") and "repeat the method: cfl-ray resume" in message
    assert call(capsys, "compare", file)[0] == 0
    assert table() == expected and " 2 " in expected[-1]


def test_the_record_of_a_run_that_cannot_be_read_is_named(capsys):
    """One of many runs, of a version with other keys, or torn."""
    file = write(seeds=[0])
    assert call(capsys, "compare", file)[0] == 0
    record = next(Path("runs/small").glob("*/fedavg/seed-0/config.yaml"))
    whole = record.read_text()
    record.write_text(f"{whole}future: 1\n")
    for command in (["report", "runs/small"], ["table", str(record.parent)], ["resume", str(record.parent)]):
        status, _, message = call(capsys, *command)
        assert status == 2 and f"{record}: unknown key 'future'" in message, message
    record.write_text("")
    status, _, message = call(capsys, "compare", file)
    assert status == 2 and f"{record} is empty, so it is not known what this run is" in message


def test_a_part_of_a_study_is_checked_alone(capsys):
    """A setting whose data are not at hand does not stop the others."""
    file = write(seeds=[0, 1], settings={"a": {}, "gone": {"data": {"source": "csv", "train_files": ["gone.csv"]}}})
    assert call(capsys, "check", file)[0] == 2
    status, printed, _ = call(capsys, "check", file, "--setting", "a", "--method", "two", "--seed", "1")
    assert status == 0 and "1 run: 1 with each of 1 seed" in printed and "setting gone:" not in printed
    assert printed.splitlines()[-1].endswith("cfl-ray compare study.yaml --setting a --method two --seed 1")
    assert "the study has no setting 'b'" in call(capsys, "check", file, "--setting", "b")[2]
    Path("plain.yaml").write_text("rounds: 2\n")
    assert "an experiment is one run" in call(capsys, "check", "plain.yaml", "--seed", "1")[2]


def test_the_right_command_is_named(capsys):
    study, search = write(seeds=[0]), write("search.yaml", sweep={"parameters": {"local.lr": [0.1]}})
    Path("plain.yaml").write_text("rounds: 2\n")
    for command, file, expected in (
        ("compare", "plain.yaml", "an experiment alone is run by `cfl-ray run`"),
        ("run", study, "is a study, no experiment; run it with: cfl-ray compare study.yaml"),
        ("prepare", search, "is a study, no experiment; run it with: cfl-ray sweep search.yaml"),
        ("compare", search, "search.yaml is a sweep; run it with: cfl-ray sweep search.yaml"),
        ("sweep", study, "study.yaml has no `sweep`; run it with: cfl-ray compare study.yaml"),
        ("compare", "gone.yaml", "there is no config file gone.yaml"),
    ):
        status, _, message = call(capsys, command, file)
        assert status == 2 and expected in message and "Traceback" not in message, message
    assert call(capsys, "compare", study)[0] == 0
    for command in (["stop", "runs/small"], ["export", "runs/small", "-o", "model.pt"]):
        status, _, message = call(capsys, *command)
        assert status == 2 and "is the folder of a study; name one of its runs" in message


def test_invalid_studies_are_one_message(capsys):
    for changes, expected in (
        ({"experiment": {"model": "lenet6"}}, "all, fedavg, seed 0: unknown model 'lenet6'"),
        ({"settings": {"a": {"rounds": 0}}}, "small, a: rounds: Input should be greater than or equal to 1"),
        ({"experiment": {"model": {"options": {"hiden": 3}}}}, "all, fedavg, seed 0: "),
    ):
        status, _, message = call(capsys, "check", write(**changes))
        assert status == 2 and expected in message and "Traceback" not in message, message
    status, _, message = call(capsys, "compare", write(), "seeds=[3]")
    assert status == 2 and "seeds is a key of the study" in message


def test_a_failed_run_is_listed_and_the_status_is_1(capsys):
    settings = {"bad": {"model": {"options": {"hidden": "many"}}}, "good": {}}
    status, printed, message = call(capsys, "compare", write(seeds=[0], settings=settings))
    assert status == 1 and "2 of the runs are not finished; the same command tries them again" in message
    assert "failed: bad, fedavg, seed 0: " in printed and "good" in printed
    shown = call(capsys, "status", "runs/small")[1]
    assert "bad, fedavg, seed 0: " in shown and "2 of 4 finished, 2 left" in shown


def test_a_sweep_ends_with_overrides_that_can_be_pasted(capsys):
    sweep = {"parameters": {"local.lr": [0.001, 0.3], "methods.two.num_clusters": [2, 3]}}
    experiment = {"methods": [{"ifca": {"label": "two", "num_clusters": 2}}]}
    file = write(seeds=[0], sweep=sweep, experiment=experiment)
    status, printed, _ = call(capsys, "sweep", file)
    assert status == 0 and "best for two: accuracy" in printed and "trials.csv" in printed
    assert "so others may be better: two local.lr=" in printed
    again = "cfl-ray compare runs/small/artifacts/best_study.yaml"
    assert again in printed.replace(f"{Path.cwd()}/", "")
    assert "1 run; folder" in call(capsys, *again.split()[1:], "--dry-run")[1]
    overrides = shlex.split(printed[printed.index("best for two") :].splitlines()[1])
    assert [one.partition("=")[0] for one in overrides] == list(sweep["parameters"])
    best = pd.read_csv("runs/small/artifacts/trials.csv").iloc[0]
    assert overrides == [
        f"local.lr={best['local.lr']:g}",
        f"methods.two.num_clusters={best['methods.two.num_clusters']}",
    ]
    Path("plain.yaml").write_text(yaml.safe_dump({"methods": experiment["methods"], "rounds": 1}))
    assert call(capsys, "check", "plain.yaml", *overrides)[0] == 0


def test_results_of_a_job_are_not_in_its_working_directory(capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("RAY_JOB_CONFIG_JSON_ENV_VAR", "{}")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    printed = call(capsys, "compare", "--dry-run", write())[1]
    assert f"folder: {tmp_path}/home/runs/small" in printed
    printed = call(capsys, "compare", "--dry-run", write(), "--folder", "mine")[1]
    assert f"folder: {tmp_path}/home/mine" in printed
    (tmp_path / "home/mine").mkdir(parents=True)
    (tmp_path / "home/mine/study.yaml").touch()
    for arguments in (
        ["run", "rounds=1", "--in-process", "--run-dir", "mine"],
        ["run", "rounds=1", "--run-dir", "new", "--extend", "mine"],
        ["run", "rounds=1", "--run-dir", "new", "--replay", "mine"],
        ["status", "mine"],
        ["resume", "mine"],
        ["report", "mine", "-o", "mine/page.html"],
    ):
        assert f"{tmp_path}/home/mine" in "".join(call(capsys, *arguments)[1:]), arguments


# ---- tables that fit


def table(settings: int, methods: int) -> pd.DataFrame:
    rows = [(f"setting-{s}", f"method-{m}", 3, 0.5, 0.01) for s in range(settings) for m in range(methods)]
    return pd.DataFrame(rows, columns=["experiment", "method", "runs", "accuracy", "accuracy_std"])


def text_of(width: int, show) -> str:
    console = Console(file=io.StringIO(), width=width)
    show(console)
    return console.file.getvalue()


@pytest.mark.parametrize("width", [40, 80, 200])
@pytest.mark.parametrize("settings, methods", [(2, 3), (7, 3), (3, 12), (9, 12)])
def test_nothing_is_cut_off(width, settings, methods):
    printed = text_of(width, lambda console: show_tables(table(settings, methods), ["accuracy"], console))
    assert "…" not in printed and " ".join(printed.split()).count("0.500 ± 0.010") == settings * methods
    names = [*(f"setting-{number}" for number in range(settings)), *(f"method-{number}" for number in range(methods))]
    assert all(name in printed for name in names)


def test_many_settings_are_rows():
    printed = text_of(80, lambda console: show_tables(table(7, 3), ["accuracy"], console))
    assert re.search(r"setting .*method-0 .*method-1 .*method-2", printed)
    printed = text_of(80, lambda console: show_tables(table(3, 7), ["accuracy"], console))
    assert re.search(r"method .*setting-0 .*setting-1 .*setting-2", printed)


def test_means_of_fewer_runs_are_named():
    """As after another seed of some of the methods."""
    frame = table(2, 2)
    assert "The means are" not in text_of(80, lambda console: show_tables(frame, ["accuracy"], console))
    frame.loc[[0, 3], "runs"] = [1, 2]
    printed = " ".join(text_of(80, lambda console: show_tables(frame, ["accuracy"], console)).split())
    assert "The means are of 3 runs, but those of method-0 in setting-0 1, method-1 in setting-1 2." in printed


def test_trials_in_a_narrow_terminal():
    key = "methods.stocfl.a_very_long_option_of_some_method"
    ranked = [RankedTrial("a", "stocfl", {key: 0.1 * n, "local.lr": 1}, {0: 0.5}, n + 1) for n in range(40)]
    for width in (30, 80):
        printed = text_of(width, lambda console: show_trials(ranked, best_of(ranked), "accuracy", console))
        assert "…" not in printed and "and 10 more, in artifacts/trials.csv" in printed
        assert f"{key}=0.0 local.lr=1" in printed and "best for stocfl in a: accuracy 0.500 over 1 run, with" in printed


def test_a_table_of_nothing_says_so(capsys):
    folder = Path("runs/small")
    folder.mkdir(parents=True)
    (folder / "study.yaml").write_text(Path(write(seeds=[0])).read_text())
    for metric in ([], ["--metric", "accuracy"]):
        status, printed, error = call(capsys, "table", "runs/small", *metric)
        assert status == 2 and not printed
        assert "no run of runs/small is finished yet; see its progress with: cfl-ray status" in error


def test_every_number_is_of_the_best_round_and_every_table_says_so(capsys):
    keys = {"keep": "best", "data.validation": {"fraction": 0.3}, "local.lr": 30.0, "rounds": 3}
    file = write(seeds=[0], experiment={"methods": ["fedavg", "local"]})
    status, printed, _ = call(capsys, "compare", file, *(f"{key}={json.dumps(value)}" for key, value in keys.items()))
    found = {one.parents[1].name: result for one, result in of_methods("runs/small").items()}
    rounds = sorted(result.best_round for result in found.values())
    assert status == 0 and len(found) == 2
    for label, result in found.items():
        (line,) = [line for line in printed.splitlines() if f"all, {label}, seed 0:" in line]
        score = f"accuracy {result.final['accuracy']:.3f} "
        assert score in line and f"best round {result.best_round} of 3, " in line
    best = f"the best round of each run, whose models are kept (round {rounds[0]}"
    assert best in printed and best in Path("runs/small/artifacts/table.md").read_text()
    assert f"Of {best}" in call(capsys, "table", "runs/small", "--metric", "accuracy")[1]
    spread = ["--test", "wilcoxon", "--metric", "accuracy_std"]
    printed = call(capsys, "table", "runs/small", "--round", "last", *spread)[1]
    assert "p: none. The Wilcoxon signed-rank test over clients needs a metric of single" in printed
    assert "best round" not in printed
    printed = call(capsys, "table", "runs/small", "--format", "latex", "--metric", "accuracy", "--p-values")[1]
    assert "those of each run's best round" in printed and "$p$" in printed
    assert "--p-values is an option of --format latex" in call(capsys, "table", "runs/small", "--p-values")[2]
    against = ["--test", "wilcoxon", "--against", "local"]
    printed = call(capsys, "table", "runs/small", "--metric", "accuracy", *against)[1]
    assert "signed-rank test over clients against local, n = " in printed
    assert "--against is of the column p" in call(capsys, "table", "runs/small", "--format", "latex", *against)[2]


def of_methods(study: str) -> dict[Path, MethodResult]:
    return {
        log.parent: recorded_result(log.parents[2].name, log.parent)
        for log in Path(study).glob("*/*/*/*/metrics.jsonl")
    }


def test_metrics_of_a_study_are_those_of_its_tables(capsys):
    status, printed, _ = call(capsys, "compare", write(seeds=[0], metrics=["train_loss", "accuracy", "accuracy_std"]))
    titles = [line.strip() for line in printed.splitlines() if re.fullmatch(r" *(train_loss|acc[a-z_]+) *", line)]
    assert status == 0 and titles == ["train_loss", "accuracy", "accuracy_std_over_"], "the last one wraps"


def test_a_setting_may_be_called_as_a_column_of_a_table(capsys):
    settings = {"method": {}, "p": {"local": {"lr": 0.5}}}
    status, printed, _ = call(capsys, "compare", write(seeds=[0], settings=settings))
    assert status == 0 and re.search(r"method .*method .*p ", printed)


def test_status_of_a_study_that_was_edited_by_hand(capsys):
    call(capsys, "compare", write(seeds=[0]))
    file = Path("runs/small/study.yaml")
    file.write_text(
        re.sub(
            r"methods:.*?\n  model",
            "methods: [{fedavg: 3}, {ifca: {label: null}}, 4]\n  model",
            file.read_text(),
            flags=re.S,
        )
    )
    status, printed, _ = call(capsys, "status", "runs/small")
    assert status == 0 and "of 3 finished" in printed


def test_a_warning_of_many_runs_is_one_line_and_a_count(capsys):
    """Its paths, URIs and numbers differ between the runs."""
    display = StudyDisplay(Console(width=1000))
    for number in range(20):
        run = SimpleNamespace(name=f"run {number}")
        text = f"MLflow at http://server lacks {number} rounds and the end of out/{number}, which out/{number}/m keeps"
        display.ended(RunOutcome(run, "failed", 1.0, "why", (text, f"another: {number}") if number < 2 else (text,)))
    results = SimpleNamespace(
        study=SimpleNamespace(sweep=None, metrics=[]), run_metrics=[], failed=[], root=Path("out"), tracking=None
    )
    display.finish(results)
    printed = capsys.readouterr().out
    assert printed.count("MLflow at http://server") == 1 and printed.count("another: ") == 2
    assert "run 0 and 19 more runs had the warning: MLflow at ... lacks ... rounds and the end of ... which" in printed
    assert "run 0 and 1 more run had the warning: another: ..." in printed
