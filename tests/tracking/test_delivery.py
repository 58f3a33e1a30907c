"""Delivery to an SQLite store: everything arrives once, also if a process dies before it has saved the cursor."""

import getpass
import json
import os
import re
import shlex
import shutil
import sqlite3
import subprocess
import sys
import threading
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
from filelock import FileLock

from cfl_ray.config import TrackingConfig
from cfl_ray.core.events import ClusterEvent
from cfl_ray.errors import DataError
from cfl_ray.run_directory import RunDirectory
from cfl_ray.tracking import (
    Delivery,
    Mlflow,
    RoundRecord,
    RunInfo,
    RunLog,
    deliver_earlier_results,
    deliver_pending,
    delivery,
    mlflow_tracker,
)
from cfl_ray.tracking import mlflow as adapter
from cfl_ray.tracking.mlflow_tracker import Destination

CURSOR = RunDirectory.mlflow.name
LOCK = RunDirectory.mlflow_lock.name


def mlflow(run_dir, uri, experiment="cut"):
    return Delivery(run_dir, "mlflow", Mlflow(uri, experiment))


def log_to(folder, info, records, status=None, trackers=None, summary=None):
    """Records rounds, and an end if a status is given, as a run that begins or goes on does."""
    log = RunLog(folder, trackers, lambda line: None, finish_seconds=120)
    log.start(info)
    for one in records:
        log.log(one)
    if status:
        log.finish(status, {"rounds_to_target": 3} if summary is None else summary)
    log.close()


@pytest.fixture
def deliver(tmp_path, info, record):
    """Returns a function that records rounds, and an end if a status is given, and delivers them like a new process."""

    def record_and_deliver(uri, experiment, rounds, status=None):
        log_to(tmp_path, info, map(record, rounds), status)
        return mlflow(tmp_path, uri, experiment).bring_up_to_date()

    return record_and_deliver


@pytest.mark.parametrize(
    "account, machine, user", [("alice", "bob", "alice"), ("", "bob", "bob"), ("", OSError("no name"), "unknown")]
)
def test_a_run_names_its_user(monkeypatch, account, machine, user):
    """The name on the server, else the login name, which a user id may lack."""

    def getuser():
        if isinstance(machine, OSError):
            raise machine
        return machine

    monkeypatch.setenv("MLFLOW_TRACKING_USERNAME", account)
    monkeypatch.setattr(getpass, "getuser", getuser)
    assert adapter._user_name() == user


def test_a_comparison_is_a_parent_with_nested_runs(sqlite, tmp_path, runs, record, expected):
    parent = RunLog(tmp_path, {"mlflow": Mlflow(sqlite, "comparison")}, finish_seconds=120)
    parent.start(RunInfo("comparison"))
    for method in ("fedavg", "ifca"):
        child = RunLog(tmp_path / method, {"mlflow": Mlflow(sqlite, "comparison", tmp_path)}, finish_seconds=120)
        params = {"local.lr": "0.1", "data.source": "digits"}
        child.start(RunInfo(method, method, tags={"seed": "7", "dataset": "digits"}, params=params))
        for round in range(3):
            child.log(record(round))
        (child.run_dir / "artifacts" / "config.yaml").write_text("seed: 7\n")
        child.finish("FINISHED", {"rounds_to_target": 2})
    for name in ("accuracy_by_round.png", "report.html"):
        (parent.run_dir / "artifacts" / name).write_text("")
    parent.finish("FINISHED", {"fedavg/accuracy": 0.5, "ifca/accuracy": 0.75, "ifca/ari": 1.0})

    by_name = {run.info.run_name: run for run in runs(sqlite, "comparison")}
    assert set(by_name) == {"comparison", "fedavg", "ifca"}
    assert {run.info.status for run in by_name.values()} == {"FINISHED"}
    ifca = by_name["ifca"]
    assert ifca.data.tags["mlflow.parentRunId"] == by_name["comparison"].info.run_id
    assert (ifca.data.tags["method"], ifca.data.tags["seed"], ifca.data.params) == ("ifca", "7", params)
    (dataset,) = (one.dataset for one in ifca.inputs.dataset_inputs)
    assert dataset.name == "digits" and len(dataset.digest) == 12 and "data.source" in dataset.profile
    assert ifca.data.tags["mlflow.source.name"] == "cfl-ray" and ifca.data.tags["mlflow.user"] == adapter._user_name()
    table = ["| method | accuracy | ari |", "| --- | --- | --- |", "| fedavg | 0.5 |  |", "| ifca | 0.75 | 1 |"]
    run_id, note = by_name["comparison"].info.run_id, by_name["comparison"].data.tags["mlflow.note.content"]
    image = f"![accuracy by round](get-artifact?path=accuracy_by_round.png&run_uuid={run_id})"
    client, experiment_id = adapter.connect(sqlite, "comparison")
    page, models = f"#/experiments/{experiment_id}/runs/{run_id}", "?workflowType=machine_learning"
    assert note.splitlines() == [
        *table,
        "",
        "**accuracy by round**",
        "",
        image,
        "",
        f"[Report]({page}/artifacts/report.html{models})",
    ]
    tags = client.get_experiment(experiment_id).tags
    assert tags["mlflow.experimentKind"] == "custom_model_development"
    assert tags["mlflow.note.content"] == f"Latest comparison: [comparison]({page}{models})\n\n{note}"
    assert ifca.histories == expected(range(3)) | {"rounds_to_target": [(2, 2, record(2).time_ms)]}
    assert ifca.files == {"config.yaml"}
    assert ifca.info.artifact_uri.startswith(adapter.sqlite_path(sqlite).with_name("mlartifacts").as_uri())
    assert "method" not in by_name["comparison"].data.tags


def test_the_end_of_a_run_names_its_reason_and_the_kept_round(sqlite, tmp_path, info, runs):
    log = RunLog(tmp_path, {"mlflow": Mlflow(sqlite, "early")}, finish_seconds=120)
    log.start(info)
    log.log(RoundRecord(3, {"best_round": 3.0, "accuracy": 0.9, "round_seconds": 1.0}))
    log.log(RoundRecord(4, {"best_round": 3.0, "accuracy": 0.5, "round_seconds": 1.0}))
    log.finish("FINISHED", {}, "stopped after round 4: for a reason")
    (run,) = runs(sqlite, "early")
    assert run.data.metrics["accuracy"] == 0.5 and run.data.metrics["kept/accuracy"] == 0.9
    assert {name for name in run.data.metrics if "/" in name} == {"kept/accuracy"}
    assert run.data.tags["ended"] == "stopped after round 4: for a reason" and run.data.tags["kept_round"] == "3"


def test_a_file_that_has_arrived_is_sent_again_only_if_it_changed(sqlite, tmp_path, info, runs, monkeypatch):
    """An upload fails, and another process goes on."""
    sent, send = [], adapter.MlflowRun._send

    def failing(run, file, folder):
        if len(sent) == 2:
            sent.append("failure")
            raise ConnectionError
        sent.append(f"{folder}/{file.name}")
        send(run, file, folder)

    monkeypatch.setattr(adapter.MlflowRun, "_send", failing)
    log_to(tmp_path, info, [], "FINISHED")
    artifacts = RunDirectory(tmp_path).artifacts
    (artifacts / "deep/er").mkdir(parents=True)
    for name in ("a", "b", "deep/er/c", "empty"):
        (artifacts / name).write_text("" if name == "empty" else name)
    with pytest.raises(ConnectionError):
        mlflow(tmp_path, sqlite, "files").bring_up_to_date()
    mlflow(tmp_path, sqlite, "files").bring_up_to_date()
    assert sent == ["None/a", "None/b", "failure", "deep/er/c", "None/empty"]
    (artifacts / "b").write_text("new")
    log_to(tmp_path, info, [], "FINISHED")
    mlflow(tmp_path, sqlite, "files").bring_up_to_date()
    assert sent[5:] == ["None/b"]
    (run,) = runs(sqlite, "files")
    assert run.files == {"a", "b", "deep", "empty"}
    assert (tmp_path / "artifacts/b").read_text() == "new"


def test_filters_of_the_documentation_find_a_run(sqlite, tmp_path, info):
    record = RoundRecord(1, {"accuracy": 0.9, "best_round": 1.0})
    log_to(tmp_path, info, [record, replace(record, round=2)], "FINISHED")
    mlflow(tmp_path, sqlite, "filters").bring_up_to_date()
    client, experiment_id = adapter.connect(sqlite, "filters")
    page = Path(__file__).parents[2].joinpath("docs/metrics.md").read_text()
    filters = re.findall("^metrics.* and .*", page, re.M)
    assert len(filters) == 2 and all(len(client.search_runs([experiment_id], each)) == 1 for each in filters)


def test_a_description_by_the_user_stays(sqlite, tmp_path):
    client, experiment_id = adapter.connect(sqlite, "described")
    client.set_experiment_tag(experiment_id, "mlflow.note.content", "mine")
    trackers = {"mlflow": Mlflow(sqlite, "described")}
    log_to(tmp_path, RunInfo("comparison"), [], "FINISHED", trackers, {"fedavg/accuracy": 0.5})
    assert client.get_experiment(experiment_id).tags["mlflow.note.content"] == "mine"


def test_phases_are_a_tag_and_a_metric_and_the_last_event_is_a_tag(sqlite, tmp_path, runs):
    split = ClusterEvent(2, "split", 0, (0, 1), {"mean": 0.25})
    change = ClusterEvent(1, "phase", before="cluster", phase="federate")
    first = RoundRecord(1, {"accuracy": 0.5}, 11, phase="cluster", events=(change,))
    second = RoundRecord(2, {"accuracy": 0.6}, 12, phase="federate", events=(split,))
    info = RunInfo("mine", "mine", tags={"phases": "cluster, federate"})
    log_to(tmp_path, info, [first, second], "FINISHED", {"mlflow": Mlflow(sqlite, "phases")})
    (run,) = runs(sqlite, "phases")
    assert run.histories["phase"] == [(1, 0.0, 11), (2, 1.0, 12)]
    assert run.data.tags["phase"] == "federate"
    assert run.data.tags["last_event"] == "round 2: cluster 0 split into 0, 1 (mean 0.25)"


def test_what_a_round_waits_for_is_a_tag_once_the_store_can_be_reached(sqlite, tmp_path, runs, monkeypatch):
    set_tag, refusals = adapter.MlflowRun.log_wait, iter([ConnectionError("down")])

    def refused_once(run, text):
        if (error := next(refusals, None)) is not None:
            raise error
        set_tag(run, text)

    monkeypatch.setattr(adapter.MlflowRun, "log_wait", refused_once)
    tracker = RunLog(tmp_path, {"mlflow": Mlflow(sqlite, "waits")}, lambda line: None, finish_seconds=120)
    tracker.start(RunInfo("mine", "mine"))
    tracker.log(RoundRecord(1, {"accuracy": 0.5}, 11))
    tracker.tell("mine round 2: host 1 has made no progress for 30 s")
    tracker.finish("FINISHED", {})
    (run,) = runs(sqlite, "waits")
    assert run.data.tags["last_wait"] == "mine round 2: host 1 has made no progress for 30 s"
    assert run.histories["accuracy"] == [(1, 0.5, 11)]


def test_a_resumed_run_continues_the_same_mlflow_run(sqlite, deliver, runs, expected):
    assert deliver(sqlite, "resumed", range(5), "KILLED") == 5
    assert [run.info.status for run in runs(sqlite, "resumed")] == ["KILLED"]
    assert deliver(sqlite, "resumed", range(3, 6)) == 1
    assert [run.info.status for run in runs(sqlite, "resumed")] == ["RUNNING"]
    assert deliver(sqlite, "resumed", [], "FINISHED") == 0
    (run,) = runs(sqlite, "resumed")
    assert run.info.status == "FINISHED"
    assert {name: run.histories[name] for name in expected([])} == expected(range(6))


@pytest.mark.parametrize(
    "store", ["sqlite", "files"]
)  # SQL stores drop a metric that is sent twice, the file store not
def test_a_delivery_without_a_saved_cursor_is_not_repeated(
    store, sqlite, tmp_path, deliver, runs, expected, monkeypatch
):
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    uri = sqlite if store == "sqlite" else (tmp_path / "mlruns").as_uri()
    deliver(uri, "repeated", range(2))
    cursor_before = (tmp_path / CURSOR).read_bytes()
    deliver(uri, "repeated", range(5), "FINISHED")
    (tmp_path / CURSOR).write_bytes(cursor_before)
    assert deliver(uri, "repeated", range(8), "FINISHED") == 6
    (run,) = runs(uri, "repeated")
    assert {name: run.histories[name] for name in expected([])} == expected(range(8))


def test_a_creation_without_a_saved_cursor_is_not_repeated(sqlite, tmp_path, deliver, runs, expected):
    deliver(sqlite, "created", range(2))
    (tmp_path / CURSOR).unlink()
    deliver(sqlite, "created", range(4))
    (run,) = runs(sqlite, "created")
    assert run.histories == expected(range(4))


def test_a_store_that_was_created_anew_receives_the_whole_run(sqlite, tmp_path, deliver, runs, expected):
    store = tmp_path / "copy.db"
    shutil.copy(adapter.sqlite_path(sqlite), store)
    deliver(f"sqlite:///{store}", "lost", range(3))
    with adapter.sqlite_path(sqlite).open("rb") as empty, store.open("r+b") as full:
        full.truncate()
        shutil.copyfileobj(empty, full)
    assert deliver(f"sqlite:///{store}", "lost", range(4)) == 4
    (run,) = runs(f"sqlite:///{store}", "lost")
    assert run.histories == expected(range(4))


def test_a_new_destination_receives_the_whole_run(sqlite, deliver, runs, expected):
    deliver(sqlite, "first", range(2))
    deliver(sqlite, "second", range(3))
    (run,) = runs(sqlite, "second")
    assert run.histories == expected(range(3))


def test_limits_of_mlflow(sqlite, tmp_path, runs, record):
    info = RunInfo("large" + "x" * 300, params={f"key{place}": "v" * 7000 for place in range(150)})
    log_to(tmp_path, info, (replace(record(round), metrics={"accuracy": 0.5, "ari": 0.1}) for round in range(1200)))
    assert mlflow(tmp_path, sqlite, "large").bring_up_to_date() == 1200
    (run,) = runs(sqlite, "large")
    assert len(run.histories["accuracy"]) == 1200
    assert {len(value) for value in run.data.params.values()} == {6000}
    assert len(run.data.params) == 150 and len(run.info.run_name) == 250


def test_keys_that_mlflow_would_refuse_have_other_characters(sqlite, tmp_path, runs):
    """Such as those with the names of settings of a study, whose runs all wait for their parent."""
    params = {
        "settings.lr=0.1,mu+1.local.lr": "0.1",
        "a.größe": "1",
        "x" * 300: "2",
        "a b:c": "3",
        "k.a": "4",
        "k.A": "5",
    }
    log_to(tmp_path, RunInfo("study", "", params=params), [], "FINISHED", {"mlflow": Mlflow(sqlite, "keys")}, {})
    (run,) = runs(sqlite, "keys")
    found = {
        "settings.lr_0.1_mu_1.local.lr": "0.1",
        "a.gr__e": "1",
        "x" * 240: "2",
        "a b:c": "3",
        "k.A": "5",
        "k.a_2": "4",
    }
    assert run.info.status == "FINISHED" and run.data.params == found


def test_a_long_table_is_cut_at_a_row_and_the_run_ends(sqlite, tmp_path, runs):
    summary = {f"{'m' * 60}_{number:03}/accuracy": 0.5 for number in range(150)}
    log_to(tmp_path, RunInfo("wide"), [], "FINISHED", {"mlflow": Mlflow(sqlite, "wide")}, summary)
    (run,) = runs(sqlite, "wide")
    client, experiment_id = adapter.connect(sqlite, "wide")
    notes = [run.data.tags, client.get_experiment(experiment_id).tags]
    for note, most in zip((tags["mlflow.note.content"] for tags in notes), (8000, 5000), strict=True):
        rows = re.findall(r"^\| m+_(\d+) \| 0.5 \|$", note, re.M)
        assert most - 200 < len(note) <= most and [*map(int, rows)] == [*range(len(rows))]
        assert f"and {150 - len(rows)} more, in the metrics of the run" in note
    assert run.info.status == "FINISHED" and len(run.data.metrics) == 150


def test_two_processes_create_the_same_store_at_the_same_time(tmp_path, runs):
    script = (
        "import sys; from cfl_ray.tracking import *; uri, name = sys.argv[1:]\n"
        "tracker = RunLog(name, {'mlflow': Mlflow(uri, 'parallel')}, finish_seconds=200)\n"
        "tracker.start(RunInfo(name)); tracker.log(RoundRecord(1, {'accuracy': 0.5})); tracker.finish('FINISHED', {})"
    )
    uri = f"sqlite:///{tmp_path}/runs/new.db"
    command = [sys.executable, "-c", script, uri]
    environment = os.environ | {"PYTHONPATH": os.getcwd()}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "cwd": tmp_path, "env": environment}
    processes = [subprocess.Popen([*command, name], **pipes) for name in ("one", "two")]
    assert [process.communicate()[0] for process in processes] == ["", ""]  # neither MLflow nor alembic prints
    assert {(run.info.run_name, run.info.status, len(run.histories["accuracy"])) for run in runs(uri, "parallel")} == {
        ("one", "FINISHED", 1),
        ("two", "FINISHED", 1),
    }


@pytest.mark.slow
def test_a_process_killed_while_it_creates_the_store(tmp_path):
    """At two moments; the next process finds no store or a complete one."""
    code = (
        "import sys; from cfl_ray.tracking.mlflow import connect; from mlflow import MlflowClient\n"
        "print('ready', flush=True); connect(sys.argv[1], 'killed')"
    )
    uri = f"sqlite:///{tmp_path}/runs/new.db"

    def written() -> int:
        with suppress(FileNotFoundError):  # SQLite creates and deletes journals
            return sum(file.stat().st_size for file in tmp_path.glob("runs/.new.db.new/*"))
        return 0

    for size in (1, 200_000):  # bytes of the draft when the process is killed
        process = subprocess.Popen([sys.executable, "-c", code, uri], stdout=subprocess.PIPE)
        try:
            process.stdout.readline()
            while process.poll() is None and written() < size:
                time.sleep(0.001)
        finally:
            process.kill()
            process.wait()
        assert size > 1 or not (tmp_path / "runs/new.db").exists(), (
            "the first process was killed before the store was complete"
        )
    _, experiment = adapter.connect(uri, "killed")
    assert adapter.connect(uri, "killed")[1] == experiment and not list(tmp_path.glob("runs/.*"))


def test_an_error_of_a_database_is_one_line_without_its_statement(tmp_path, info, record, capfd):
    uri, run_dir, warnings = f"sqlite:///{tmp_path}/mlflow.db", tmp_path / "run", []
    adapter.connect(uri, "damaged")
    with sqlite3.connect(tmp_path / "mlflow.db") as store:
        store.execute("DROP TABLE metrics")
    log = RunLog(run_dir, {"mlflow": Mlflow(uri, "damaged")}, warnings.append, finish_seconds=0)
    log.start(info)
    log.log(record(1))
    deadline = time.monotonic() + 120
    while not warnings and time.monotonic() < deadline:
        time.sleep(0.01)
    log.close()
    assert "(sqlite3.OperationalError) no such table: metrics; the run continues" in warnings[0]
    assert "INSERT" not in warnings[0] and "Background" not in warnings[0] and not any(capfd.readouterr())


def test_with_nothing_pending_mlflow_is_not_imported(sqlite, tmp_path, tmp_path_factory, deliver):
    deliver(sqlite, "nothing", range(2), "FINISHED")
    root = tmp_path_factory.mktemp("root")
    tmp_path.rename(root / "run")
    script = (
        "import sys; from cfl_ray.tracking import deliver_pending\n"
        "print(deliver_pending(sys.argv[1]), 'mlflow' in sys.modules, 'ray' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", script, root], capture_output=True, text=True)
    assert done.stdout == "{} False False\n", done.stderr


def test_a_run_that_another_process_delivers_is_skipped(sqlite, tmp_path, info, record):
    run_dir = tmp_path / "run"
    log_to(run_dir, info, [record(1)])
    Mlflow(sqlite, "locked").set_destination(run_dir)
    with FileLock(run_dir / LOCK):
        assert deliver_pending(tmp_path, seconds=120) == {}
    off, on = TrackingConfig(enabled=False), TrackingConfig(uri=sqlite)
    assert deliver_earlier_results(off, tmp_path) == []
    (line,) = deliver_earlier_results(on, tmp_path)
    assert line == f"Delivered 1 round of {run_dir} to MLflow, which was out of reach before."
    assert not delivery.lacks(run_dir, "mlflow") and deliver_pending(tmp_path, seconds=120) == {}


def test_a_damaged_run_directory_is_named_and_the_others_are_delivered(sqlite, tmp_path, info, record):
    for name in ("a", "b"):
        log_to(tmp_path / name, info, [record(1)])
        Mlflow(sqlite, "damaged").set_destination(tmp_path / name)
    (tmp_path / "a" / CURSOR).write_text("{")
    warnings = []
    assert [run_dir.name for run_dir in deliver_pending(tmp_path, seconds=120, warn=warnings.append)] == ["b"]
    (warning,) = warnings
    assert str(tmp_path / "a" / CURSOR) in warning


def test_a_run_deleted_in_mlflow_stays_deleted_and_the_others_are_delivered(sqlite, tmp_path, info, record, runs):
    for name in ("a", "b"):
        log_to(tmp_path / name, replace(info, name=name, uid=name), [])
        Mlflow(sqlite, "deleted").set_destination(tmp_path / name)
    assert len(deliver_pending(tmp_path, seconds=120)) == 2
    client, _ = adapter.connect(sqlite, "deleted")
    client.delete_run(next(run.info.run_id for run in runs(sqlite, "deleted") if run.info.run_name == "a"))
    for name in ("a", "b"):
        log_to(tmp_path / name, info, [record(1)])
    warnings = []
    assert [run_dir.name for run_dir in deliver_pending(tmp_path, seconds=120, warn=warnings.append)] == ["b"]
    (warning,) = warnings
    assert "was deleted in MLflow: restore it there, or remove mlflow.json" in warning
    assert [run.info.run_name for run in runs(sqlite, "deleted")] == ["b"]


def test_a_deleted_experiment_is_named_with_what_helps(sqlite, tmp_path, info, record, runs):
    client, experiment_id = adapter.connect(sqlite, "gone")
    client.delete_experiment(experiment_id)
    adapter._EXPERIMENTS.pop((sqlite, "gone"))  # as in another process
    warnings = []
    log = RunLog(tmp_path, {"mlflow": Mlflow(sqlite, "gone")}, warnings.append, finish_seconds=120)
    log.start(info)
    log.log(record(1))
    log.finish("FINISHED", {})
    advice = (
        rf"'gone' was deleted in MLflow: restore it there \(mlflow experiments restore .* {experiment_id}\), or set"
    )
    assert len(warnings) == 2 and all(re.search(advice, text) for text in warnings)
    assert re.search(r"lacks 1 round and the end .*tracking.experiment. Then the next cfl-ray command", warnings[1])
    client.restore_experiment(experiment_id)
    assert len(deliver_pending(tmp_path.parent, seconds=120)) >= 1
    assert [run.info.status for run in runs(sqlite, "gone")] == ["FINISHED"]


def test_an_experiment_deleted_during_a_run_is_named(sqlite, tmp_path, info, record):
    client, experiment_id = adapter.connect(sqlite, "going")
    client.delete_experiment(experiment_id)  # this process knows its id
    log_to(tmp_path, info, [record(1)])
    with pytest.raises(delivery.Undeliverable, match="'going' was deleted in MLflow"):
        mlflow(tmp_path, sqlite, "going").bring_up_to_date()


def test_a_folder_that_mlflow_does_not_take_is_named_with_what_helps(tmp_path, info, record):
    log_to(tmp_path / "run", info, [record(1)])
    for uri in (str(tmp_path / "mlruns"), (tmp_path / "mlruns").as_uri()):
        with pytest.raises(delivery.Undeliverable, match="keeps no runs in a folder: set MLFLOW_ALLOW_FILE_STORE=true"):
            mlflow(tmp_path / "run", uri).bring_up_to_date()


def test_a_run_without_a_destination_is_an_error(tmp_path):
    with pytest.raises(DataError, match="was not started with MLflow"):
        Destination.read(tmp_path)


@pytest.mark.parametrize("store", ["sqlite", "files"])
def test_a_cut_log_in_mlflow(store, sqlite, tmp_path, deliver, runs, expected, monkeypatch):
    """Rounds 3 and 4 are cut off and done again."""
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    uri = sqlite if store == "sqlite" else (tmp_path / "mlruns").as_uri()
    deliver(uri, "cut", range(5))
    log = tmp_path / "metrics.jsonl"
    lines = log.read_bytes().splitlines(keepends=True)
    log.write_bytes(b"".join(lines[:3]) + b"".join(line.replace(b": ", b":  ") for line in lines[3:]))
    assert deliver(uri, "cut", range(8), "FINISHED") == 3
    (run,) = runs(uri, "cut")
    assert {name: run.histories[name] for name in expected([])} == expected(range(8))


class Store:
    """In the place of MLflow: the entries of one run. Those that exist are found only by a run that is opened anew."""

    run_id, experiment_id = "one", "1"

    def __init__(self):
        self.entries, self.opened = [], 0

    def open(self, *_):
        self.opened, self.may_be_delivered = self.opened + 1, True
        return self

    def reopen(self):
        pass

    def log(self, records):
        there = {step for step, _ in self.entries} if self.may_be_delivered else set()
        self.entries += [(one.round, one.metrics["accuracy"]) for one in records if one.round not in there]


def test_a_log_that_a_power_failure_cut_is_delivered_again_and_no_round_twice(tmp_path, info, record, monkeypatch):
    """Cut at every fifth byte of its last two lines and around their ends; two longer lines and two more follow."""
    monkeypatch.setattr(mlflow_tracker, "accepts_connection", lambda uri: True)
    line = len(record(4).to_line())
    for cut in sorted({*range(0, 2 * line, 5), 1, 2, *range(line - 2, line + 3), 2 * line - 1}):
        folder, store = tmp_path / str(cut), Store()
        monkeypatch.setattr(mlflow_tracker, "MlflowRun", store)
        log_to(folder, info, map(record, range(6)))
        assert mlflow(folder, "sqlite:///x.db").bring_up_to_date() == 6
        store.may_be_delivered = False
        log = folder / "metrics.jsonl"
        os.truncate(log, log.stat().st_size - cut)
        again = [replace(record(round), time_ms=10**14) for round in range(4, 8)]
        log_to(folder, info, again)
        assert delivery.waiting_rounds(folder, "mlflow") == 2 and delivery.lacks(folder, "mlflow")
        assert mlflow(folder, "sqlite:///x.db").bring_up_to_date() == 2
        assert mlflow(folder, "sqlite:///x.db").bring_up_to_date() == 0
        assert [step for step, _ in store.entries] == list(range(8)), cut
        assert not delivery.lacks(folder, "mlflow")


def test_a_request_to_mlflow_has_at_most_1000_metrics(tmp_path, info):
    """Methods may report many diagnostics. A single round is never divided."""
    names = [f"value_{number}" for number in range(1001)]
    records = [
        RoundRecord(round, dict.fromkeys(names[:count], 1.0)) for round, count in enumerate((400, 400, 400, 1001, 1), 1)
    ]
    log_to(tmp_path, info, records)
    found = [[one.round for one in batch] for batch, _ in delivery.batches(tmp_path, delivery.Cursor(), 40)]
    assert found == [[1, 2], [3], [4], [5]]
    ends = [end for _, end in delivery.batches(tmp_path, delivery.Cursor(), 40)]
    lines = (tmp_path / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    assert ends == [sum(map(len, lines[:count])) for count in (2, 3, 4, 5)]


def test_the_log_is_on_the_disk_before_the_cursor_counts_it(tmp_path, info, record, monkeypatch):
    store, flushed, fsync, counted = Store(), {}, os.fsync, []

    def flushing(descriptor):
        fsync(descriptor)
        flushed[os.readlink(f"/proc/self/fd/{descriptor}")] = os.fstat(descriptor).st_size

    def saving(path, values):
        counted.append(values.get("delivered", 0))
        assert counted[-1] <= flushed.get(str(tmp_path / "metrics.jsonl"), 0)
        write_json(path, values)

    write_json = delivery.write_json
    monkeypatch.setattr(mlflow_tracker, "accepts_connection", lambda uri: True)
    monkeypatch.setattr(mlflow_tracker, "MlflowRun", store)
    monkeypatch.setattr(delivery, "BATCH_ROUNDS", 2)
    log_to(tmp_path, info, map(record, range(6)))
    monkeypatch.setattr(os, "fsync", flushing)
    monkeypatch.setattr(delivery, "write_json", saving)
    mlflow(tmp_path, "sqlite:///x.db").bring_up_to_date()
    size = (tmp_path / "metrics.jsonl").stat().st_size
    assert counted[-3:] == [size // 3, 2 * size // 3, size]


class TestDestinations:
    """The client of MLflow sends the user's token: results go only where the user sends them."""

    @pytest.fixture
    def pending(self, tmp_path, info, record):
        """Returns a function: a run below `output` that waits for this destination, chosen by this user or not."""

        def make(name, uri, own=True):
            log_to(tmp_path / name, info, [record(1)])
            Mlflow(uri, "destinations").set_destination(tmp_path / name)
            if not own:
                cursor = json.loads((tmp_path / name / CURSOR).read_text())
                (tmp_path / name / CURSOR).write_text(json.dumps(cursor | {"signature": "0" * 64}))
            return tmp_path / name

        return make

    @pytest.fixture
    def reached(self, monkeypatch):
        """The URIs that a delivery would have been sent to."""
        found = []
        monkeypatch.setattr(
            Delivery, "bring_up_to_date", lambda self, lock_seconds: found.append(self.tracker.uri) or 1
        )
        return found

    def test_of_a_run_from_elsewhere_is_not_sent_anything(self, pending, reached, tmp_path):
        pending("thief", "http://user:word@thief", own=False)
        warnings = []
        assert not deliver_pending(tmp_path, "http://server", warn=warnings.append) and not reached
        (warning,) = warnings
        assert f"{tmp_path / 'thief'} names MLflow at http://***@thief, where nothing is sent" in warning
        command = shlex.split(warning.partition("to send their results there: ")[2])
        assert command == ["cfl-ray", "check", "tracking.uri=http://***@thief", f"output={tmp_path}"]

    def test_of_the_config_the_environment_and_the_local_store_are_sent_to(
        self, pending, reached, tmp_path, monkeypatch
    ):
        monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://of-environment")
        local = f"sqlite:///{tmp_path / 'mlflow.db'}"
        uris = ["http://of-config", "http://of-environment", local]
        for number, uri in enumerate(uris):
            pending(str(number), uri, own=False)
        assert len(deliver_pending(tmp_path, "http://of-config")) == 3 and reached == uris

    def test_of_own_runs_are_sent_to_and_not_those_of_a_copy(self, pending, reached, tmp_path):
        shutil.copytree(pending("own", "http://elsewhere"), tmp_path / "copy")
        warnings = []
        assert len(deliver_pending(tmp_path, "http://server", warn=warnings.append)) == 1
        assert reached == ["http://elsewhere"] and "copy names MLflow at http://elsewhere" in warnings[0]

    def test_runs_that_lack_results_for_one_reason_are_one_warning(self, pending, reached, tmp_path, monkeypatch):
        for name in ("a", "b", "c"):
            pending(name, "http://down")

        def fails(self):
            raise RuntimeError(f"of {self.run_dir}: refused")

        monkeypatch.setattr(Delivery, "bring_up_to_date", lambda self, lock_seconds: fails(self))
        warnings = []
        assert not deliver_pending(tmp_path, "http://down", warn=warnings.append)
        (warning,) = warnings
        assert warning.startswith(f"MLflow at http://down lacks results of {tmp_path / 'a'} and 2 more (")

    def test_what_is_computed_before_the_first_answer_is_no_wait_for_a_server(
        self, pending, sqlite, tmp_path, monkeypatch
    ):
        """On a busy machine, the import of MLflow takes longer than the wait: no command would ever deliver."""
        run_dir, opened = pending("run", sqlite), Mlflow.open

        def computes_first(self, *arguments):
            began = time.process_time()
            while time.process_time() - began < 1.5:
                pass
            opened(self, *arguments)

        monkeypatch.setattr(Mlflow, "open", computes_first)
        monkeypatch.setattr(delivery, "_CPU_SECONDS", 0.01)
        warnings = []
        assert deliver_pending(tmp_path, sqlite, seconds=1.0, warn=warnings.append) == {run_dir: 1} and not warnings

    def test_runs_that_do_not_arrive_in_time_are_named(self, pending, tmp_path, monkeypatch):
        for name in ("a", "b", "c"):
            pending(name, "http://slow")
        answers = threading.Event()
        monkeypatch.setattr(Mlflow, "open", lambda *_: answers.wait(60))
        warnings = []
        assert not deliver_pending(tmp_path, "http://slow", seconds=0.2, warn=warnings.append)
        answers.set()
        (warning,) = warnings
        assert (
            f"MLflow at http://slow still lacks results of {tmp_path / 'a'} and 2 more after 0 s; the next" in warning
        )

    def test_a_run_in_another_place_than_the_output_is_delivered_when_it_is_named(self, pending, reached, tmp_path):
        run_dir = pending("elsewhere/run", "http://server")
        of_method = pending("elsewhere/run/fedavg", "http://server")
        assert not deliver_pending(tmp_path / "runs", "http://server")
        assert [*deliver_pending(tmp_path / "runs", "http://server", run_dir=run_dir)] == [run_dir, of_method]
        assert [*deliver_pending(tmp_path / "elsewhere", "http://server", run_dir=run_dir)] == [run_dir, of_method]

    def test_a_run_that_goes_on_is_signed_again_and_not_delivered_again(self, pending):
        run_dir = pending("run", "http://server", own=False)
        cursor = json.loads((run_dir / CURSOR).read_text()) | {"run_id": "abc", "delivered": 7}
        (run_dir / CURSOR).write_text(json.dumps(cursor))
        Mlflow("http://server", "destinations").set_destination(run_dir)
        again = json.loads((run_dir / CURSOR).read_text())
        assert again | {"signature": ""} == cursor | {"signature": ""} and again["signature"] != cursor["signature"]

    def test_the_parent_of_a_run_contains_it(self, pending):
        run_dir = pending("run", "sqlite:///x.db")
        for parent in ("../../elsewhere", "/etc", ".", "artifacts"):
            cursor = json.loads((run_dir / CURSOR).read_text()) | {"parent": parent}
            (run_dir / CURSOR).write_text(json.dumps(cursor))
            with pytest.raises(DataError, match="is no folder that contains"):
                Delivery(run_dir, "mlflow", Mlflow.of(run_dir, "sqlite:///x.db")).bring_up_to_date()

    def test_links_are_not_followed(self, pending, sqlite, tmp_path):
        run_dir = pending("run", sqlite)
        (tmp_path / "private").write_text("a key")
        (run_dir / "artifacts/figure.png").symlink_to(tmp_path / "private")
        log_to(run_dir, RunInfo("run"), [], "FINISHED")
        with pytest.raises(DataError, match="figure.png is a link, and is not sent to MLflow"):
            mlflow(run_dir, sqlite).bring_up_to_date()
