"""The end of a method is written beside the rounds of the next one, and its errors are not lost."""

import contextlib
import gc
import json
import os
import pickle
import re
import signal
import threading
import tracemalloc

import pytest

from cfl_ray import Experiment, simulate
from cfl_ray.engine.engines import ENGINES
from cfl_ray.errors import DataError, Interrupted, RunError
from cfl_ray.lifecycle import launch, recorder
from cfl_ray.results.run_record import params_of
from cfl_ray.setup.prepare import prepare
from cfl_ray.tracking import RoundRecord, RunInfo, RunLog, read_end, read_info


def status(folder) -> str:
    return json.loads((folder / "end.json").read_text())["status"]


def test_the_next_method_does_not_wait_for_the_end_of_one(experiment, notes, tmp_path, monkeypatch, drawn):
    """The figures of fedavg are drawn when ditto has done a round."""
    write, began = recorder.write_figures, threading.Event()

    def drawn(directory, records, warn):
        assert list(records) != ["fedavg"] or began.wait(60)
        write(directory, records, warn)

    def after_round(number):
        if number == 1 and (tmp_path / "run/ditto").exists():
            began.set()

    monkeypatch.setattr(recorder, "write_figures", drawn)
    simulate(experiment(methods=["fedavg", "ditto"], rounds=2), tmp_path / "run", notes(after_round))
    assert began.is_set() and [status(tmp_path / "run" / one) for one in ("fedavg", "ditto")] == ["FINISHED"] * 2
    assert (tmp_path / "run/fedavg/artifacts/accuracy_by_round.png").exists()


@pytest.mark.parametrize("methods", [["fedavg"], ["fedavg", "ditto"]])
def test_an_error_in_the_end_of_a_method_ends_the_run(methods, experiment, tmp_path, monkeypatch):
    def fail(path, text):
        raise OSError(28, "No space left on device", str(path))

    monkeypatch.setattr(recorder, "write_text", fail)
    with pytest.raises(RunError, match="No space left on device"):
        simulate(experiment(methods=methods, rounds=3), tmp_path / "run")
    assert status(tmp_path / "run/fedavg") == "FAILED" and status(tmp_path / "run") == "FAILED"
    monkeypatch.undo()
    launch.resume(tmp_path / "run", on_ray=False)
    assert {status(tmp_path / "run" / method) for method in methods} == {"FINISHED"}


def test_a_record_that_cannot_be_read_ends_its_method_and_the_run(experiment, tmp_path):
    simulate(experiment(methods=["ifca"], rounds=1), tmp_path / "run")
    method = tmp_path / "run/ifca"
    (method / "end.json").unlink()
    (method / "client_metrics.arrow").write_bytes((method / "reassignments.arrow").read_bytes())
    with pytest.raises(DataError, match=r"client_metrics.arrow has columns \['round', 'client', 'cluster'\]"):
        launch.resume(tmp_path / "run", on_ray=False)
    assert status(method) == status(tmp_path / "run") == "FAILED"


def test_runs_are_named_by_what_tells_them_apart_and_the_parent_holds_the_comparison(experiment, tmp_path):
    """Name: method, changed options, experiment, seed and time; a method's options are below `method.` only."""
    methods = ["fedavg", {"ifca": {"num_clusters": 2}}, {"ifca": {"num_clusters": 3}}]
    results = simulate(experiment(methods=methods, rounds=1, seed=7), tmp_path / "run")
    parent, *children = [read_info(tmp_path / "run" / label) for label in ("", *results.methods)]
    names = ("small", "fedavg, small", "ifca-num_clusters=2, small", "ifca-num_clusters=3, small")
    for info, name in zip((parent, *children), names, strict=True):
        assert re.fullmatch(re.escape(name) + r", seed 7, \d{4}-\d\d-\d\d \d\d:\d\d", info.name)
    assert [info.params.get("method.num_clusters") for info in children] == [None, "2", "3"]
    assert parent.params["session.engine"] in ENGINES
    assert "methods" in parent.params and not any("methods" in info.params for info in children)
    end = read_end(tmp_path / "run")
    for label, name in (("fedavg", "fedavg"), ("ifca-num_clusters=2", "ifca-num_clusters_2")):
        assert end.summary.metrics[f"{name}/accuracy"] == results[label].final["accuracy"]


def test_parameters_of_a_run_are_those_that_have_an_effect_on_it():
    plain = params_of(Experiment(output="/tmp/elsewhere"))
    of_data = ("data.source", "data.partition.kind", "data.partition.clients", "data.partition.min_samples")
    of_training = ("data.test.view", "model.name", "local.epochs", "local.lr", "local.optimizer")
    of_rounds = ("cohort.fraction", "cohort.sampling")
    assert [*plain] == ["seed", "rounds", "methods", "task", *of_data, *of_training, *of_rounds]
    assert plain["local.lr"] == "0.1" and plain["cohort.fraction"] == "0.5"
    changed = {
        "local": {"steps": 3, "clip_norm": 1.0},
        "cohort": {"clients": 4},
        "runtime": {"precision": "bf16"},
        "evaluation": {"every": 2},
    }
    found = params_of(Experiment(**changed))
    assert found.keys() - plain.keys() == {
        "local.steps",
        "local.clip_norm",
        "cohort.clients",
        "runtime.precision",
        "evaluation.every",
    }
    assert plain.keys() - found.keys() == {"local.epochs", "cohort.fraction"}  # others take their place
    for sections, keys in EFFECTS:
        found = params_of(Experiment(**sections))
        assert {key: found[key] for key in found.keys() - plain.keys()} == keys, sections


EFFECTS = [  # sections, and the parameters that a run has because of them
    (
        {"attack": {"kind": "sign_flip", "clients": [0]}},
        {"attack.kind": "sign_flip", "attack.clients": "[0]", "attack.from_round": "1", "attack.scale": "1.0"},
    ),
    (
        {"data": {"partition": {"kind": "dirichlet"}}},
        {"data.partition.alpha": "0.1", "data.partition.capped": "true", "data.test.fraction": "0.2"},
    ),
    (
        {"data": {"shift": {"kind": "rotated", "angles": [0, 90]}}},
        {"data.shift.kind": "rotated", "data.shift.angles": "[0, 90]"},
    ),
    (
        {"local": {"momentum": 0.9, "schedule": "cosine"}, "cohort": {"dropout": 0.1}},
        {"local.momentum": "0.9", "local.schedule": "cosine", "cohort.dropout": "0.1"},
    ),
    (
        {"data": {"source": "csv", "root": "a.csv", "test": {"view": "holdout"}}},
        {"data.columns.label": "label", "data.test.fraction": "0.2"},
    ),
    (
        {"clock": {"kind": "constant"}, "asynchronous": {"buffer": 3}},
        {
            "clock.kind": "constant",
            "clock.seconds_per_sample": "0.01",
            "clock.down_mbps": "20.0",
            "clock.up_mbps": "5.0",
            "asynchronous.buffer": "3",
            "asynchronous.mixing": "1.0",
            "asynchronous.mix": "changes",
            "cohort.over_selection": "1.0",
        },
    ),
]


def test_memory_does_not_grow_with_the_rounds(experiment, tmp_path):
    """Of the driver of a run with files, in bytes of Python and NumPy; 30 metrics of a round are 2 kB."""
    setup, names, bytes_after = prepare(experiment(methods=["fedavg"])), [f"own {n}" for n in range(30)], {}
    run_log = RunLog(tmp_path)
    run_log.start(RunInfo("run", "fedavg"))
    kept = recorder.MethodRecorder(setup, "fedavg", tmp_path, run_log)
    tracemalloc.start()
    try:
        for round in range(1, 302):
            metrics = dict.fromkeys(("accuracy", *names), round / 7)
            made = RoundRecord(round, metrics, numbers=tuple(names))
            kept.add(pickle.loads(pickle.dumps(made)))
            if round in (100, 300):
                gc.collect()
                bytes_after[round] = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
        run_log.close()
    assert bytes_after[300] - bytes_after[100] < 200 * 400
    kept.summarise(made)
    assert [record.round for record in kept.records] == list(range(1, 302))


def test_records_share_the_names_that_every_report_brings_anew(experiment):
    """As from a server in another process, whose reports are unpickled."""
    setup = prepare(experiment(methods=["fedavg"]))
    kept = recorder.MethodRecorder(setup, "fedavg", None, None)
    for round in (1, 2):
        made = RoundRecord(round, {"accuracy": 0.5, "own number": 1.0}, numbers=("own number",))
        kept.add(pickle.loads(pickle.dumps(made)))
    first, second = kept.records
    assert [id(name) for name in first.metrics] == [id(name) for name in second.metrics]


def test_ctrl_c_without_a_folder_names_what_keeps_rounds(experiment, notes):
    class Interrupting(notes):
        def round(self, label, report):
            raise KeyboardInterrupt

    with pytest.raises(Interrupted, match="Nothing was kept, since simulate was given no run_dir"):
        simulate(experiment(rounds=2, methods=["fedavg"]), watcher=Interrupting())


@pytest.mark.parametrize("preparing, rounds", [(True, 0), (False, 2)])
def test_ctrl_c_that_code_of_others_ignores_ends_the_run_soon(experiment, notes, tmp_path, preparing, rounds):
    """As in a module that ignores all errors of an import."""
    seen = []

    class Ignoring(notes):
        def preparing(self, what, done=0, total=0):
            if preparing:
                self.press()

        def round(self, label, report):
            seen.append(report.round)
            if report.round == 2:
                self.press()

        def press(self):
            with contextlib.suppress(KeyboardInterrupt):
                os.kill(os.getpid(), signal.SIGINT)
                signal.sigtimedwait([], 5)

    with pytest.raises(Interrupted, match="Nothing was kept" if preparing else "cfl_ray.resume"):
        simulate(experiment(rounds=5, methods=["fedavg"]), tmp_path / "run", Ignoring())
    assert len(seen) == rounds
