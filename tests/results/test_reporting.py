"""The report of real runs: seeds together, studies, the end of a run, and `cfl-ray report`."""

import itertools
import json
import os
import re
import shutil
from dataclasses import replace

import numpy as np
import pytest
from commands import call

import cfl_ray
from cfl_ray.errors import ConfigError, DataError
from cfl_ray.lifecycle import recorder
from cfl_ray.lifecycle.driver import Watcher
from cfl_ray.report import figures
from cfl_ray.results import reporting
from cfl_ray.results.arrow_log import DiagnosticsLog, read_diagnostics
from cfl_ray.results.comparison import compare_runs
from cfl_ray.results.published import load_published
from cfl_ray.results.published_comparison import compare_with
from cfl_ray.results.recorded_runs import find_runs
from cfl_ray.results.reporting import report_of, write_report
from cfl_ray.run_directory import RunDirectory

DIAGNOSTICS = RunDirectory.diagnostics.name


def experiment(folder, **changes):
    values = {
        "name": "small",
        "rounds": 3,
        "methods": ["fedavg", {"ifca": {"num_clusters": 2}}, "fedclust"],
        "model": {"options": {"hidden": 4}},
        "data": {"source": "digits", "shift": {"kind": "rotated"}, "partition": {"clients": 8, "samples": 30}},
        "local": {"epochs": 2, "batch_size": 10},
        "evaluation": {"tuned_epochs": 1, "target": 0.01},
        "tracking": {"enabled": False},
        "runtime": {"engine": "manual"},
        "output": str(folder),
    }
    return cfl_ray.Experiment(**(values | changes))


@pytest.fixture(scope="module")
def runs(tmp_path_factory, drawing):
    """Two seeds of three methods, in folders below one; the first has its page."""
    folder = tmp_path_factory.mktemp("reporting")
    with drawing():
        cfl_ray.simulate(experiment(folder), folder / "runs" / "run-0")
    cfl_ray.simulate(experiment(folder, seed=1), folder / "runs" / "run-1")
    return folder / "runs"


def test_runs_are_found_below_a_folder_each_once(runs):
    found = find_runs([runs, runs / "run-1"])
    assert [run.directory.name for run in found] == ["run-0", "run-1"]
    with pytest.raises(
        ConfigError, match=r"nothing-here holds no run: neither it nor a folder below it has config\.yaml"
    ):
        find_runs([runs / "nothing-here"])


def test_seeds_are_one_experiment_with_the_numbers_of_its_runs(runs):
    report = report_of(find_runs([runs]))
    (one,) = report.experiments
    assert report.title == one.name == "small" and one.seeds == [0, 1] and one.num_groups == 4
    assert report.columns == [
        *("accuracy", "accuracy_local", "accuracy_tuned", "accuracy_p10", "macro_f1", "ari", "num_clusters"),
        *("mbit", "rounds_to_target", "seconds"),
    ]
    for row in report.rows:
        values = [cfl_ray.load_run(runs / f"run-{seed}")[row["method"]].final["accuracy"] for seed in (0, 1)]
        assert row["accuracy"] == pytest.approx(np.mean(values)) and row["runs"] == 2
        assert row["accuracy_std"] == pytest.approx(np.std(values, ddof=1))
    for label, of_seeds in one.methods.items():
        for run in of_seeds:
            result = cfl_ray.load_run(runs / f"run-{run.seed}")[label]
            frame = result.client_metrics()
            last = frame[frame["round"] == 3]["accuracy"]
            assert np.array_equal(run.scores["accuracy"], last.to_numpy())
            assert run.is_clustered == (label != "fedavg")
    assert set(one.methods["fedclust"][0].matrices) == {"distance", "signatures"}
    assert one.methods["fedclust"][1].matrices == {}  # drawn of one seed
    assert one.run_info["clients"] == "8, 4 true groups" and one.run_info["local training"].startswith(
        "epochs 2, batch_size 10"
    )
    assert one.run_info["seeds"] == "0, 1" and one.command.splitlines()[1] == "cfl-ray run experiment.yaml seed=1"


def test_a_task_is_in_the_settings_by_its_name_or_its_parts(runs, tmp_path):
    task = {"loss": "cross_entropy", "metrics": ["micro_f1", "accuracy"]}
    cfl_ray.simulate(experiment(tmp_path, methods=["fedavg"], rounds=1, task=task), tmp_path / "run")
    shown = [report_of(find_runs([run])).experiments[0].run_info["task"] for run in (runs / "run-0", tmp_path / "run")]
    assert shown == ["classification", 'loss cross_entropy, metrics ["micro_f1", "accuracy"]']


def test_labels_of_compared_clients_are_on_record(runs, tmp_path):
    """Of runs without them, there is no figure of them."""
    title = "fedclust: distance of the clients, against their labels (round 1, seed 0)"
    (one,) = report_of(find_runs([runs])).experiments
    matrices = one.methods["fedclust"][0].matrices
    assert matrices["distance"].label_counts_SC.sum(1).tolist() == [30] * 8  # samples of each client
    assert matrices["signatures"].label_counts_SC is None
    assert title in write_report([runs], tmp_path / "page.html").read_text()
    shutil.copytree(runs / "run-0", tmp_path / "run")
    folder = tmp_path / "run" / "fedclust"
    reported = [one for one in read_diagnostics(folder / DIAGNOSTICS) if one.name != "label_counts"]
    (folder / DIAGNOSTICS).unlink()
    DiagnosticsLog(folder).add(3, {}, reported)
    text = write_report([tmp_path / "run"], tmp_path / "page.html").read_text()
    assert "against their labels" not in text and "fedclust: distance of the clients, ordered by cluster" in text


def test_the_same_seed_twice_is_refused(runs):
    twice = [*find_runs([runs / "run-0"]), *find_runs([runs / "run-0"])]
    with pytest.raises(ConfigError, match="another run has the same settings, method fedavg and seed 0"):
        report_of(twice)


def test_the_command_writes_one_page(runs, tmp_path, capsys):
    status, printed, _ = call(capsys, "report", runs, "-o", tmp_path / "page.html")
    assert status == 0 and str(tmp_path / "page.html") in printed
    text = (tmp_path / "page.html").read_text()
    final = cfl_ray.load_run(runs / "run-0")["fedclust"].final
    assert "fedclust: distance of the clients, ordered by cluster (round 1, seed 0)" in text
    assert "fedclust: signatures of the clients (round 1, seed 0)" in text
    assert re.search(rf"fedclust: the largest cluster holds {100 * final['largest_cluster_share']:.0f} %", text)
    assert json.loads(re.search(r'id="figure-1-data">(.*?)</script>', text)[1])["data"]
    assert list(tmp_path.iterdir()) == [tmp_path / "page.html"]


def test_a_run_ends_with_its_page_and_can_do_without(runs, tmp_path):
    page = runs / "run-0" / "artifacts" / "report.html"
    assert "<title>small</title>" in page.read_text()
    without = experiment(tmp_path, methods=["fedavg"], rounds=1, tracking={"enabled": False, "report": False})
    cfl_ray.simulate(without, tmp_path / "run")
    assert not (tmp_path / "run" / "artifacts" / "report.html").exists()


def test_a_page_that_cannot_be_drawn_ends_no_run(tmp_path, monkeypatch, drawn):
    def fails(*arguments):
        raise ZeroDivisionError("of the page")

    monkeypatch.setattr(reporting, "report_of", fails)
    warnings = []
    watcher = Watcher()
    watcher.warn = warnings.append
    results = cfl_ray.simulate(experiment(tmp_path, methods=["fedavg"], rounds=1), tmp_path / "run", watcher=watcher)
    assert results["fedavg"].final["accuracy"] > 0
    (warning,) = warnings
    assert "the report was not written: ZeroDivisionError: of the page; `cfl-ray report" in warning


@pytest.mark.parametrize("failures", [1, 100])
def test_a_figure_that_cannot_be_drawn_ends_no_run(tmp_path, monkeypatch, drawn, failures):
    """matplotlib fails while another thread imports IPython; the second attempt may succeed."""
    write, left = figures.write_figures, [failures]

    def fails(*arguments):
        left[0] -= 1
        if left[0] >= 0:
            raise AttributeError("partially initialized module 'IPython'")
        return write(*arguments)

    monkeypatch.setattr(figures, "write_figures", fails)
    monkeypatch.setattr(recorder, "_PAUSE_SECONDS", 0.01)
    warnings = []
    watcher = Watcher()
    watcher.warn = warnings.append
    given = experiment(tmp_path, methods=["fedavg"], rounds=1, tracking={"enabled": False, "report": False})
    results = cfl_ray.simulate(given, tmp_path / "run", watcher=watcher)
    assert results["fedavg"].final["accuracy"] > 0
    text = "were not written: AttributeError: partially initialized module 'IPython'"
    assert len(warnings) == 2 * (failures > 1) and all(text in warning for warning in warnings)  # method, comparison
    assert failures > 1 or left == [-1], "the figures of a single method are drawn once, and copied for the run"


def test_credentials_are_not_in_the_page(tmp_path):
    secret = {"enabled": False, "uri": "https://someone:hunter2@mlflow.example"}
    cfl_ray.simulate(experiment(tmp_path, methods=["fedavg"], rounds=1, tracking=secret), tmp_path / "run")
    text = write_report([tmp_path / "run"], tmp_path / "page.html").read_text()
    assert "hunter2" not in text and "https://***@mlflow.example" in text


def test_a_run_whose_data_change_has_the_recovery_of_its_clients(tmp_path):
    schedule = [{"round": round, "change": [{"clients": ids, "relabel": 1}]} for round, ids in ((2, [1, 4]), (9, 0))]
    changes = {"rounds": 4, "schedule": schedule, "evaluation": {"past": True, "local_samples": 1000}}
    cfl_ray.simulate(experiment(tmp_path, methods=["fedavg", "local"], **changes), tmp_path / "run")
    report = report_of(find_runs([tmp_path / "run"]))
    (one,) = report.experiments
    assert one.changes == {2: 2}, "the change before round 9 is not made"
    for label, (run,) in one.methods.items():
        result = cfl_ray.load_run(tmp_path / "run")[label]
        row = result.recovery().to_dict("records")[0]
        assert run.changed_scores[1] == pytest.approx(row["before"]) and list(run.changed_scores) == [1, 2, 3, 4]
        assert run.changed_scores[2] == pytest.approx(row["after"])
        assert run.recovery["backward_transfer"] == row["backward_transfer"]
    assert "backward_transfer" in report.columns
    assert {row["method"]: row["backward_transfer"] for row in report.rows} == {
        label: run.recovery["backward_transfer"] for label, (run,) in one.methods.items()
    }
    text = write_report([tmp_path / "run"], tmp_path / "page.html").read_text()
    assert "Accuracy, P-server, of the clients whose data change" in text and "Backward transfer" in text


@pytest.fixture(scope="module")
def regression(tmp_path_factory, drawing):
    """A run of another task."""
    folder = tmp_path_factory.mktemp("regression")
    draw = np.random.default_rng(0)
    x, client = draw.normal(size=(80, 3)).astype("float32"), np.repeat(np.arange(4), 20)
    federation = cfl_ray.federation_from_arrays(x, x[:, :1], client, targets="real")
    changes = {"task": "regression", "methods": ["fedavg"], "evaluation": {}, "local": {"lr": 0.01}}
    with drawing():
        cfl_ray.simulate(experiment(folder, data=federation, **changes), folder / "real")
    return folder / "real"


def test_another_task_has_its_own_columns(regression):
    page = (regression / "artifacts" / "report.html").read_text()
    for words in ("MSE, P-server", "MSE, 90th percentile of clients", "MSE, P-local: the model that a client holds"):
        assert words in page, words
    assert {"mae", "r2"} <= {*report_of(find_runs([regression])).columns}, "and metrics besides its score"


def test_runs_of_two_tasks_have_the_scores_of_both(runs, regression, tmp_path):
    for paths in ([runs / "run-0", regression], [regression, runs / "run-0"]):
        report = report_of(find_runs(paths))
        assert {"accuracy", "accuracy_local", "mse", "mse_local"} <= {*report.columns}
        assert {"accuracy", "mse"} <= {*compare_runs(paths).columns}
        page = write_report(paths, tmp_path / "page.html").read_text()
        assert "MSE, P-server" in page and "Accuracy, P-server" in page
    frame = compare_runs([regression])
    assert frame.columns[3] == "mse", "the score of the task, which methods are compared by"


@pytest.mark.parametrize(
    "settings, setting, command",
    [
        ("{}", "lr=0.1", "cfl-ray sweep study.yaml"),
        ("{slow: {}}", "slow,lr=0.1", "cfl-ray sweep study.yaml --setting slow"),
    ],
)
def test_the_command_of_a_trial_is_that_of_its_sweep(tmp_path, settings, setting, command):
    study = tmp_path / "study"
    cfl_ray.simulate(experiment(tmp_path, methods=["fedavg"], rounds=1), study / setting / "fedavg" / "seed-0")
    (study / "study.yaml").write_text(
        f"name: study\nexperiment: {{methods: [fedavg]}}\nsettings: {settings}\n"
        "sweep: {parameters: {local.lr: [0.1]}}\n"
    )
    assert report_of(find_runs([study])).experiments[0].command == command


@pytest.mark.parametrize(("sweep", "ranked"), [("null", True), ("{parameters: {local.lr: [0.1, 0.2]}}", False)])
def test_trials_of_a_sweep_are_no_settings_over_which_methods_are_ranked(sweep, ranked, tmp_path):
    cfl_ray.simulate(experiment(tmp_path, methods=["fedavg"], rounds=1), tmp_path / "run")
    study = tmp_path / "study"
    for setting, label in itertools.product(("lr=0.1", "lr=0.2"), ("a", "b", "c")):
        shutil.copytree(tmp_path / "run", study / setting / label / "seed-0")
    (study / "study.yaml").write_text(f"name: study\nexperiment: {{methods: [fedavg]}}\nsweep: {sweep}\n")
    assert (report_of(find_runs([study])).ranks is not None) == ranked


def test_runs_below_the_file_of_a_study_that_is_not_their_own_are_found_as_they_are(runs, tmp_path):
    """As with the file in the user's folder, and the runs in output folders below it."""
    (tmp_path / "study.yaml").write_text("name: study\nexperiment: {methods: [fedavg]}\n")
    for place in ("runs/run-0", "more/runs/run-1"):
        shutil.copytree(runs / "run-0", tmp_path / place)
    for path in (tmp_path, tmp_path / "runs", tmp_path / "more" / "runs" / "run-1"):
        found = find_runs([path])
        assert len(found) == (2 if path == tmp_path else 1)
        assert all(run.study is None and run.setting is None for run in found), path


def test_damaged_groups_are_named(runs, tmp_path):
    shutil.copytree(runs / "run-0", tmp_path / "run")
    scores = tmp_path / "run" / "ifca" / "client_metrics.arrow"
    os.truncate(scores, scores.stat().st_size - 8)
    methods = report_of(find_runs([tmp_path / "run"])).experiments[0].methods
    assert methods["fedavg"][0].scores and not methods["ifca"][0].scores, "those of an earlier round are not the last"
    path = tmp_path / "run" / "ifca" / "artifacts" / "assignments.parquet"
    path.write_bytes(path.read_bytes()[:50])
    with pytest.raises(DataError, match="assignments.parquet is damaged .* remove it to do without the true groups"):
        write_report([tmp_path / "run"], tmp_path / "page.html")


def test_the_folder_of_a_page_is_made_and_a_folder_is_no_page(runs, tmp_path):
    assert write_report([runs], tmp_path / "new" / "page.html").is_file()
    with pytest.raises(ConfigError, match="new is a folder; name a file in it"):
        write_report([runs], tmp_path / "new")


def test_settings_of_a_study_are_experiments_and_its_labels_methods(tmp_path, monkeypatch):
    cfl_ray.simulate(experiment(tmp_path, methods=["fedavg"], rounds=1), tmp_path / "run")
    settings = (tmp_path / "run" / "config.yaml").read_text()
    study = tmp_path / "study"
    for setting, label, seed in itertools.product(("fast", "slow"), ("fedavg", "fedavg-again"), (0, 1)):
        folder = study / setting / label / f"seed-{seed}"
        shutil.copytree(tmp_path / "run", folder)
        (folder / "config.yaml").write_text(settings.replace("\nseed: 0\n", f"\nseed: {seed}\n"))
    (study / "study.yaml").write_text(
        "name: study\nseeds: [0, 1]\nexperiment: {methods: [fedavg]}\nsettings: {slow: {}, fast: {}}\n"
    )
    monkeypatch.chdir(study)
    for paths in ([study], ["slow/fedavg/seed-0", ".", study]):  # a study that is named in two ways is one
        report = report_of(find_runs(paths))
        assert report.title == "study" and [one.name for one in report.experiments] == ["slow", "fast"]
        assert [row["runs"] for row in report.rows] == [2, 2, 2, 2]
    for one in report.experiments:
        assert list(one.methods) == ["fedavg", "fedavg-again"] and one.seeds == [0, 1]
    assert report.experiments[0].command == "cfl-ray compare study.yaml --setting slow"
    assert report_of(find_runs([study / "slow" / "fedavg" / "seed-0"])).experiments[0].name == "slow"
    stopped = study / "fast" / "fedavg" / "seed-1"
    (stopped / "fedavg" / "end.json").unlink()
    report = report_of(find_runs([study]))  # as in the study's tables: without runs that are not finished
    assert [row["runs"] for row in report.rows] == [2, 2, 1, 2] and str(stopped) in report.notes[0]
    assert report_of(find_runs([stopped])).notes == [f"Not finished: fedavg of {stopped} (round 1 of 1)."]


PUBLISHED = """
paper: {title: A paper, authors: "Some, Others", venue: Journal 2026, url: https://example.org/paper}
tables:
  table1:
    caption: Accuracy
    study: mine.yaml
    metric: accuracy_local
    unit: percent
    columns: [digits]
    rows:
      fedavg: {metric: accuracy, values: {digits: [50.5, 2.5]}}
      ifca: {values: {digits: 60}}
    misprints: [{row: ifca, column: digits, note: no deviation}]
"""


def test_ours_beside_published_numbers(runs, tmp_path):
    (tmp_path / "paper.yaml").write_text(PUBLISHED)
    found = find_runs([runs])
    fedavg, ifca = compare_with(found, load_published(tmp_path / "paper.yaml"))
    finals = {
        label: [cfl_ray.load_run(runs / f"run-{seed}")[label].final for seed in (0, 1)] for label in ("fedavg", "ifca")
    }
    ours = 100 * np.array([final["accuracy"] for final in finals["fedavg"]])
    assert (fedavg.row, fedavg.metric, fedavg.seeds, fedavg.misprint) == ("fedavg", "accuracy", 2, "")
    assert (fedavg.ours, fedavg.ours_std) == (pytest.approx(ours.mean()), pytest.approx(ours.std(ddof=1)))
    assert (fedavg.published, fedavg.published_std) == (50.5, 2.5)
    assert ifca.metric == "accuracy_local" and ifca.misprint == "no deviation" and np.isnan(ifca.published_std)
    assert ifca.ours == pytest.approx(100 * np.mean([final["accuracy_local"] for final in finals["ifca"]]))
    text = write_report([runs], tmp_path / "page.html", tmp_path / "paper.yaml").read_text()
    assert "table1, digits: ours and published" in text and "Misprints: ifca (no deviation)." in text
    assert (
        "Some, Others, A paper, Journal 2026, https://example.org/paper" in text
        and "<a " not in text.partition("<script")[0]
    )


def test_two_experiments_are_not_one_published_number(tmp_path):
    cfl_ray.simulate(experiment(tmp_path, methods=["fedavg"], rounds=1), tmp_path / "run")
    (tmp_path / "paper.yaml").write_text(PUBLISHED)
    published, (run,) = load_published(tmp_path / "paper.yaml"), find_runs([tmp_path / "run"])
    seed, longer = (
        replace(run, experiment=run.experiment.model_copy(update=change)) for change in ({"seed": 1}, {"rounds": 4})
    )
    assert [one.seeds for one in compare_with([run, seed], published)] == [2]
    with pytest.raises(ConfigError, match=r"column 'digits' stands .* fedavg: small \(rounds=1\) and small \(rounds=4"):
        compare_with([run, longer], published)


def test_errors_of_published_tables_say_what_is_there(runs, tmp_path):
    file = tmp_path / "paper.yaml"
    cases = {
        PUBLISHED.replace("digits: 60", "mnist: 60"): "rows.ifca: no column is called 'mnist'",
        PUBLISHED.replace("row: ifca", "row: cfl"): "row 'cfl' has no number in column 'digits'",
        PUBLISHED.replace("unit", "units"): "unknown key 'tables.table1.units'",
        PUBLISHED.replace("fedavg", "a").replace("ifca", "b"): "they have the methods a, b",
        PUBLISHED.replace("metric: accuracy,", "metric: acuracy,"): (
            r"tables.table1, row fedavg: no run has the metric 'acuracy' \(did you mean 'accuracy'\?\)"
        ),
        re.sub(
            "metric: accuracy[_a-z]*", "metric: newcomer_accuracy", PUBLISHED
        ): "newcomer_accuracy is not known with",
        PUBLISHED.replace("[digits]", "[digits, mnist]"): "name one with --column: digits, mnist",
    }
    for text, message in cases.items():
        file.write_text(text)
        with pytest.raises(ConfigError, match=message):
            write_report([runs], tmp_path / "page.html", file)
    write_report([runs], tmp_path / "page.html", file, column="digits")
    with pytest.raises(ConfigError, match=r"have no column 'digit' \(did you mean 'digits'\?\)"):
        write_report([runs], tmp_path / "page.html", file, column="digit")
    with pytest.raises(ConfigError, match="column 'digits' is one of published tables; name their file"):
        write_report([runs], tmp_path / "page.html", column="digits")


def test_a_study_is_compared_with_the_tables_that_it_repeats(tmp_path):
    """Other tables of the paper have the same methods and settings, under another partition."""
    study = tmp_path / "study"
    folder = study / "slow" / "fedavg" / "seed-0"
    cfl_ray.simulate(experiment(tmp_path, methods=["fedavg"], rounds=1), folder)
    row = "{fedavg: {values: {slow: 50.0}}}"
    table = f"{{caption: one, study: mine.yaml, columns: [slow], rows: {row}}}"
    published = tmp_path / "published.yaml"
    published.write_text(
        f"paper: {{title: T, authors: A, venue: V, url: U}}\ntables: {{table1: {table}, table2: {table}}}\n"
    )
    text = "name: study\nexperiment: {methods: [fedavg]}\nsettings: {slow: {}}\n"
    for tables, expected in (("[table2]", ["table2"]), ("[]", ["table1", "table2"])):
        (study / "study.yaml").write_text(f"{text}published: {published}\ntables: {tables}\n")
        assert [one.table for one in compare_with(find_runs([study]), load_published(published))] == expected
    shown = "table1, slow: ours and published"
    assert shown in write_report([study], tmp_path / "page.html").read_text(), "the tables that the study names"
    assert shown not in write_report([folder], tmp_path / "page.html").read_text()
    published.unlink()
    assert shown not in write_report([study], tmp_path / "page.html").read_text()


def test_a_page_that_is_asked_for_is_made_for_others(runs, tmp_path):
    """Those of runs themselves are for their user alone (tests/test_security.py)."""
    before = os.umask(0o022)
    try:
        assert write_report([runs], tmp_path / "page.html").stat().st_mode & 0o777 == 0o644
    finally:
        os.umask(before)
