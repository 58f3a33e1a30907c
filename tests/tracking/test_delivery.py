"""What reaches an SQLite store: everything, once, whatever died between doing a thing and noting that it was done."""

import os
import shutil
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import replace

import pytest
from filelock import FileLock

from cfl_ray.core.errors import DataError
from cfl_ray.tracking import MlflowTracker, RunInfo, Spool, deliver_pending
from cfl_ray.tracking import mlflow as ours
from cfl_ray.tracking.delivery import CURSOR, LOCK, Delivery, is_pending, point_at


@pytest.fixture
def deliver(tmp_path, info, record):
    """Returns a function that records rounds, and an end if one is given, and delivers them as a fresh process would."""

    def spool_and_deliver(uri, experiment, rounds, status=None):
        spool = Spool(tmp_path)
        spool.start(info)
        point_at(tmp_path, uri, experiment, None)
        for round in rounds:
            spool.log(record(round))
        if status:
            spool.finish(status, {"rounds_to_target": 3})
        return Delivery(tmp_path, uri).bring_up_to_date()

    return spool_and_deliver


def test_a_comparison_is_a_parent_with_nested_runs(sqlite, tmp_path, runs, record, expected):
    parent = MlflowTracker(tmp_path, sqlite, "comparison")
    parent.start(RunInfo("comparison"))
    for method in ("fedavg", "ifca"):
        child = MlflowTracker(tmp_path / method, sqlite, "comparison", parent=tmp_path)
        child.start(RunInfo(method, method, tags={"seed": "7"}, params={"local.lr": "0.1"}))
        for round in range(3):
            child.log(record(round))
        (child.run_dir / "artifacts" / "config.yaml").write_text("seed: 7\n")
        child.finish("FINISHED", {"rounds_to_target": 2})
    parent.finish("FINISHED", {})

    by_name = {run.info.run_name: run for run in runs(sqlite, "comparison")}
    assert set(by_name) == {"comparison", "fedavg", "ifca"}
    assert {run.info.status for run in by_name.values()} == {"FINISHED"}
    ifca = by_name["ifca"]
    assert ifca.data.tags["mlflow.parentRunId"] == by_name["comparison"].info.run_id
    assert (ifca.data.tags["method"], ifca.data.tags["seed"], ifca.data.params) == ("ifca", "7", {"local.lr": "0.1"})
    assert ifca.histories == expected(range(3)) | {"rounds_to_target": [(2, 2, record(2).time_ms)]}
    assert ifca.files == {"config.yaml"}
    assert ifca.info.artifact_uri.startswith(ours.sqlite_path(sqlite).with_name("mlartifacts").as_uri())
    assert "method" not in by_name["comparison"].data.tags


def test_a_resumed_run_goes_on_in_the_same_mlflow_run(sqlite, deliver, runs, expected):
    assert deliver(sqlite, "resumed", range(5), "KILLED") == 5
    assert [run.info.status for run in runs(sqlite, "resumed")] == ["KILLED"]
    assert deliver(sqlite, "resumed", range(3, 6)) == 1
    assert [run.info.status for run in runs(sqlite, "resumed")] == ["RUNNING"]
    assert deliver(sqlite, "resumed", [], "FINISHED") == 0
    (run,) = runs(sqlite, "resumed")
    assert run.info.status == "FINISHED"
    assert {name: run.histories[name] for name in expected([])} == expected(range(6))


@pytest.mark.parametrize("store", ["sqlite", "files"])  # MLflow's SQL stores drop a metric sent twice, its file store keeps both
def test_delivered_but_not_noted_is_not_delivered_twice(store, sqlite, tmp_path, deliver, runs, expected, monkeypatch):
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    uri = sqlite if store == "sqlite" else (tmp_path / "mlruns").as_uri()
    deliver(uri, "noted", range(2))
    noted_before = (tmp_path / CURSOR).read_bytes()
    deliver(uri, "noted", range(5), "FINISHED")
    (tmp_path / CURSOR).write_bytes(noted_before)
    assert deliver(uri, "noted", range(8), "FINISHED") == 6
    (run,) = runs(uri, "noted")
    assert {name: run.histories[name] for name in expected([])} == expected(range(8))


def test_created_but_not_noted_is_not_created_twice(sqlite, tmp_path, deliver, runs, expected):
    deliver(sqlite, "created", range(2))
    (tmp_path / CURSOR).unlink()
    deliver(sqlite, "created", range(4))
    (run,) = runs(sqlite, "created")
    assert run.histories == expected(range(4))


def test_a_store_that_was_set_up_anew_gets_everything_again(sqlite, tmp_path, deliver, runs, expected):
    store = tmp_path / "copy.db"
    shutil.copy(ours.sqlite_path(sqlite), store)
    deliver(f"sqlite:///{store}", "lost", range(3))
    with ours.sqlite_path(sqlite).open("rb") as empty, store.open("r+b") as full:
        full.truncate()
        shutil.copyfileobj(empty, full)
    assert deliver(f"sqlite:///{store}", "lost", range(4)) == 4
    (run,) = runs(f"sqlite:///{store}", "lost")
    assert run.histories == expected(range(4))


def test_another_store_than_before_gets_the_whole_run(sqlite, deliver, runs, expected):
    deliver(sqlite, "first", range(2))
    deliver(sqlite, "second", range(3))
    (run,) = runs(sqlite, "second")
    assert run.histories == expected(range(3))


def test_limits_of_mlflow(sqlite, tmp_path, runs, record):
    info = RunInfo("large", params={f"key{place}": "v" * 7000 for place in range(150)})
    spool = Spool(tmp_path)
    spool.start(info)
    point_at(tmp_path, sqlite, "large", None)
    for round in range(1200):
        spool.log(replace(record(round), metrics={"accuracy": 0.5, "ari": 0.1}))
    assert Delivery(tmp_path, sqlite).bring_up_to_date() == 1200
    (run,) = runs(sqlite, "large")
    assert len(run.histories["accuracy"]) == 1200
    assert {len(value) for value in run.data.params.values()} == {6000}
    assert len(run.data.params) == 150


def test_processes_that_create_the_same_store_at_once(tmp_path, runs):
    script = (
        "import sys; from cfl_ray.tracking import *; uri, name = sys.argv[1:]\n"
        "tracker = MlflowTracker(f'{name}', uri, 'parallel', finish_seconds=60)\n"
        "tracker.start(RunInfo(name)); tracker.log(RoundRecord(1, {'accuracy': 0.5})); tracker.finish('FINISHED', {})"
    )
    uri = f"sqlite:///{tmp_path}/runs/new.db"
    command = [sys.executable, "-c", script, uri]
    environment = os.environ | {"PYTHONPATH": os.getcwd()}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "cwd": tmp_path, "env": environment}
    processes = [subprocess.Popen([*command, name], **pipes) for name in ("one", "two")]
    assert [process.communicate()[0] for process in processes] == ["", ""]  # also: MLflow and alembic say nothing
    assert {(run.info.run_name, run.info.status, len(run.histories["accuracy"])) for run in runs(uri, "parallel")} == {
        ("one", "FINISHED", 1),
        ("two", "FINISHED", 1),
    }


def test_killed_while_the_store_is_created(tmp_path):
    """At several moments; whoever comes next finds no store, or a whole one."""
    code = "import sys; from cfl_ray.tracking.mlflow import connect; from mlflow import MlflowClient; print('begins', flush=True); connect(sys.argv[1], 'killed')"
    uri = f"sqlite:///{tmp_path}/runs/new.db"

    def written() -> int:
        with suppress(FileNotFoundError):  # SQLite's journals come and go
            return sum(file.stat().st_size for file in tmp_path.glob("runs/.new.db.new/*"))
        return 0

    for size in (1, 200_000):  # bytes of what is being made
        process = subprocess.Popen([sys.executable, "-c", code, uri], stdout=subprocess.PIPE)
        try:
            process.stdout.readline()
            while process.poll() is None and written() < size:
                time.sleep(0.001)
        finally:
            process.kill()
            process.wait()
        assert size > 1 or not (tmp_path / "runs/new.db").exists(), "the first was killed before it was done"
    _, experiment = ours.connect(uri, "killed")
    assert ours.connect(uri, "killed")[1] == experiment and not list(tmp_path.glob("runs/.*"))


def test_with_nothing_pending_mlflow_is_not_even_imported(sqlite, tmp_path, tmp_path_factory, deliver):
    deliver(sqlite, "nothing", range(2), "FINISHED")
    root = tmp_path_factory.mktemp("root")
    tmp_path.rename(root / "run")
    script = "import sys; from cfl_ray.tracking import deliver_pending; print(deliver_pending(sys.argv[1]), 'mlflow' in sys.modules, 'ray' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", script, root], capture_output=True, text=True)
    assert done.stdout == "[] False False\n", done.stderr


def test_a_run_that_another_process_delivers_is_left_to_it(sqlite, tmp_path, info, record):
    run_dir = tmp_path / "run"
    spool = Spool(run_dir)
    spool.start(info)
    spool.log(record(1))
    point_at(run_dir, sqlite, "locked", None)
    with FileLock(run_dir / LOCK):
        assert deliver_pending(tmp_path) == []
    assert [(done.run_dir, done.rounds) for done in deliver_pending(tmp_path)] == [(run_dir, 1)]
    assert not is_pending(run_dir)


def test_a_damaged_run_directory_is_named_and_holds_up_no_other(sqlite, tmp_path, info, record):
    for name in ("a", "b"):
        spool = Spool(tmp_path / name)
        spool.start(info)
        point_at(tmp_path / name, sqlite, "damaged", None)
        spool.log(record(1))
    (tmp_path / "a" / CURSOR).write_text("{")
    warnings = []
    assert [done.run_dir.name for done in deliver_pending(tmp_path, warn=warnings.append)] == ["b"]
    assert len(warnings) == 1
    assert str(tmp_path / "a" / CURSOR) in warnings[0]


def test_a_run_deleted_in_mlflow_stays_deleted_and_holds_up_no_other(sqlite, tmp_path, info, record, runs):
    spools = {name: Spool(tmp_path / name) for name in ("a", "b")}
    for name, spool in spools.items():
        spool.start(replace(info, name=name, uid=name))
        point_at(tmp_path / name, sqlite, "deleted", None)
    assert len(deliver_pending(tmp_path)) == 2
    client, _ = ours.connect(sqlite, "deleted")
    client.delete_run(next(run.info.run_id for run in runs(sqlite, "deleted") if run.info.run_name == "a"))
    for spool in spools.values():
        spool.log(record(1))
    warnings = []
    assert [done.run_dir.name for done in deliver_pending(tmp_path, warn=warnings.append)] == ["b"]
    assert len(warnings) == 1
    assert "was deleted in MLflow: restore it there, or remove mlflow.json" in warnings[0]
    assert [run.info.run_name for run in runs(sqlite, "deleted")] == ["b"]


def test_a_run_without_a_store_says_so(tmp_path):
    with pytest.raises(DataError, match="was not started with MLflow"):
        is_pending(tmp_path)
