"""Trackers: every record once, also after faults and in resumed runs, and no round waits for them."""

import csv
import errno
import re
import sys
import tempfile
import threading
import time
import types
from pathlib import Path

import pytest

import cfl_ray
from cfl_ray.config import Experiment, TrackingConfig
from cfl_ray.errors import ConfigError, DataError
from cfl_ray.tracking import Delivery, RoundRecord, RunInfo, RunLog, delivery, new_trackers, trackers
from cfl_ray.tracking.trackers import CsvFile
from jobs.services import raising


class Recording:
    """Keeps what it is passed; `fails` deliveries raise first."""

    def __init__(self, fails=0):
        self.fails, self.calls = fails, []

    def open(self, run_dir, info, after):
        self.calls.append(("open", info.name, after))

    def log(self, record):
        if self.fails:
            self.fails -= 1
            raise OSError("no connection")
        self.calls.append(("log", record.round, record.metrics["accuracy"]))

    def close(self, end):
        self.calls.append(("close", end and end.status, end and dict(end.summary.metrics)))

    @property
    def rounds(self):
        return [call[1] for call in self.calls if call[0] == "log"]


def record(round: int) -> RoundRecord:
    return RoundRecord(round, {"accuracy": round / 10}, time_ms=1000 * round)


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch):
    monkeypatch.setattr(delivery, "PAUSES_SECONDS", (0.01,))
    monkeypatch.setattr(delivery, "PAUSES_AT_END_SECONDS", (0.01, 0.01))


def tracked(run_dir: Path, tracker, rounds, end=True, warn=lambda text: None):
    log = RunLog(run_dir, {"mine": tracker}, warn)
    log.start(RunInfo("run"))
    for round in rounds:
        log.log(record(round))
    if end:
        log.finish("FINISHED", {"rounds_to_target": 2.0})
    log.close()
    return tracker


def test_a_run_is_delivered_in_order(tmp_path):
    assert tracked(tmp_path, Recording(), [1, 2]).calls == [
        ("open", "run", 0),
        ("log", 1, 0.1),
        ("log", 2, 0.2),
        ("close", "FINISHED", {"rounds_to_target": 2.0}),
    ]


def test_a_resumed_run_goes_on_after_its_cursor(tmp_path):
    assert tracked(tmp_path, Recording(), [1, 2], end=False).calls[-1] == ("close", None, None)
    resumed = tracked(tmp_path, Recording(), [2, 3])
    assert [call[:2] for call in resumed.calls] == [("open", "run"), ("log", 3), ("close", "FINISHED")]
    assert resumed.calls[0][2] == 2


def test_a_run_that_is_resumed_after_its_end_ends_again(tmp_path):
    tracked(tmp_path, Recording(), [1])
    again = tracked(tmp_path, Recording(), [2])
    assert [call[0] for call in again.calls] == ["open", "log", "close"]


def test_the_cursor_of_an_earlier_version_is_known(tmp_path):
    tracked(tmp_path, Recording(), [1, 2], end=False)
    size = (tmp_path / "metrics.jsonl").stat().st_size
    (tmp_path / "tracker-mine.json").write_text(f'{{"delivered": {size}, "round": 2}}')
    assert tracked(tmp_path, Recording(), [3]).rounds == [3]


def test_no_round_is_sent_twice_after_a_power_failure_has_cut_the_log(tmp_path):
    tracked(tmp_path, Recording(), [1, 2, 3], end=False)
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "metrics.jsonl").write_text(lines[0] + lines[1].replace("2000", "2000000"))
    assert tracked(tmp_path, Recording(), [3], end=False).calls == [("open", "run", 3), ("close", None, None)]
    again = tracked(tmp_path, Recording(), [4])
    assert again.rounds == [4]


def test_what_failed_follows_and_is_warned_of_once(tmp_path):
    warnings = []
    tracker = tracked(tmp_path, Recording(fails=2), [1, 2, 3], warn=warnings.append)
    assert tracker.rounds == [1, 2, 3]
    assert [call[0] for call in tracker.calls].count("open") == 1
    assert len(warnings) == 1
    assert warnings[0].startswith("tracker mine (Recording (") and re.search(
        r"failed: OSError: no connection \(line \d+\); the run continues", warnings[0]
    )


def test_one_that_always_fails_ends_nothing_and_what_it_lacks_is_said(tmp_path):
    warnings = []
    tracker = tracked(tmp_path, Recording(fails=99), [1, 2], warn=warnings.append)
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 2
    assert "lacks 2 rounds and the end of" in warnings[1] and tracker.calls[-1] == ("close", None, None)
    resumed = tracked(tmp_path, Recording(), [2, 3])
    assert resumed.rounds == [1, 2, 3]


def test_one_that_failed_before_the_end_is_tried_twice_more(tmp_path, monkeypatch):
    """The end of every method would otherwise wait for all pauses."""
    monkeypatch.setattr(delivery, "PAUSES_AT_END_SECONDS", (0.01, 60.0, 60.0))
    failed = threading.Event()
    log = RunLog(tmp_path, {"mine": Recording(fails=99)}, lambda text: failed.set())
    log.start(RunInfo("run"))
    log.log(record(1))
    assert failed.wait(30)
    began = time.monotonic()
    log.finish("FINISHED", {})
    assert time.monotonic() - began < 20


def test_a_busy_tracker_is_tried_again_without_a_failure(tmp_path):
    warnings = []

    class Busy(Recording):
        def is_busy(self, error):
            return True

    tracker = Busy(fails=20)
    log = RunLog(tmp_path, {"mine": tracker}, warnings.append)
    log.start(RunInfo("run"))
    log.log(record(1))
    log.finish("FINISHED", {})
    assert tracker.rounds == [1]
    (warning,) = warnings
    assert "asks to come back later" in warning


def test_an_open_that_succeeds_again_is_no_progress(tmp_path):
    """One attempt and four more; the end would wait for `tracking.patience` otherwise."""

    class Half(Recording):
        needs_open = True

    tracker = Half(fails=10**6)
    log = RunLog(tmp_path, {"mine": tracker}, lambda text: None, finish_seconds=60, patience=60)
    log.start(RunInfo("run"))
    log.finish("FINISHED", {})
    assert 1 < [call[0] for call in tracker.calls].count("open") <= 2 + len(delivery.PAUSES_AT_END_SECONDS)


@pytest.mark.parametrize("computes", [True, False])
def test_the_end_waits_while_a_library_computes_and_not_while_it_only_waits(tmp_path, monkeypatch, computes):
    monkeypatch.setattr(delivery, "_CPU_SECONDS", 0.02)
    go_on = threading.Event()

    class First(Recording):
        def open(self, *arguments):
            until = time.process_time() + 0.7
            while computes and time.process_time() < until:
                sum(range(1000))
            if not computes:
                go_on.wait(60)
            super().open(*arguments)

    tracker, warnings = First(), []
    log = RunLog(tmp_path, {"mine": tracker}, warnings.append, finish_seconds=0.5, patience=60)
    log.start(RunInfo("run"))
    log.log(record(1))
    log.finish("FINISHED", {})
    assert tracker.rounds == [1] * computes and len(warnings) == (not computes)
    go_on.set()


def test_patience_ends_the_wait_for_a_tracker_that_makes_progress(tmp_path):
    class Endless(Recording):
        @property
        def progress(self):
            return time.monotonic()

        def log(self, record):
            time.sleep(60)

    warnings = []
    log = RunLog(tmp_path, {"mine": Endless()}, warnings.append, patience=0.5)
    log.start(RunInfo("run"))
    log.log(record(1))
    log.finish("FINISHED", {})
    assert len(warnings) == 1 and "lacks 1 round and the end" in warnings[0]


def test_no_round_waits_for_a_tracker_and_the_end_waits_while_there_is_progress(tmp_path):
    class Slow(Recording):
        waits = threading.Event()

        def log(self, record):
            self.waits.wait(60)
            time.sleep(0.03)
            super().log(record)

    tracker, other = Slow(), Recording()
    log = RunLog(tmp_path, {"slow": tracker, "other": other}, finish_seconds=2)
    log.start(RunInfo("run"))
    for round in range(1, 100):
        log.log(record(round))
    assert tracker.calls in ([], [("open", "run", 0)])
    tracker.waits.set()
    log.finish("FINISHED", {})
    for one in (tracker, other):
        assert one.rounds == list(range(1, 100))


def test_a_tracker_may_take_the_rounds_that_wait_together(tmp_path):
    class Together(Recording):
        def log_batch(self, records):
            self.calls.append(("batch", [record.round for record in records]))

    log = RunLog(tmp_path)
    log.start(RunInfo("run"))
    for round in range(1, 91):
        log.log(record(round))
    log.finish("FINISHED", {})
    tracker = Together()
    assert Delivery(tmp_path, "mine", tracker).bring_up_to_date() == 90
    assert [call[1] for call in tracker.calls[1:-1]] == [[*range(1, 41)], [*range(41, 81)], [*range(81, 91)]]


class TestCsv:
    def rows(self, run_dir):
        return list(csv.DictReader((run_dir / "metrics.csv").open()))

    def test_has_a_row_per_round_and_a_column_per_metric(self, tmp_path):
        tracked(tmp_path, CsvFile(), [1, 2])
        rows = self.rows(tmp_path)
        assert [(row["round"], row["accuracy"], row["time_ms"]) for row in rows] == [
            ("1", "0.1", "1000"),
            ("2", "0.2", "2000"),
        ]
        assert rows[0]["ari"] == ""

    def test_a_row_that_was_written_before_its_cursor_is_not_written_twice(self, tmp_path):
        tracked(tmp_path, CsvFile(), [1, 2], end=False)
        (tmp_path / "tracker-mine.json").unlink()
        tracked(tmp_path, CsvFile(), [3])
        assert [row["round"] for row in self.rows(tmp_path)] == ["1", "2", "3"]

    def test_a_metric_that_comes_later_has_a_column_too(self, tmp_path):
        file = CsvFile("m.csv")
        file.open(tmp_path, RunInfo("run"), 0)
        file.columns = ["round", "time_ms", "accuracy"]
        file.log(record(1))
        file.log(RoundRecord(2, {"accuracy": 0.2, "ari": 0.5}, time_ms=2000))
        rows = list(csv.DictReader((tmp_path / "m.csv").open()))
        assert rows == [
            {"round": "1", "time_ms": "1000", "accuracy": "0.1", "ari": ""},
            {"round": "2", "time_ms": "2000", "accuracy": "0.2", "ari": "0.5"},
        ]

    @pytest.mark.parametrize(
        "left, rounds",
        [
            ("", ["3", "4"]),
            ("round,ti", ["3", "4"]),
            ("round,time_ms,accuracy\r\n2,2000,0.2\r\n", ["2", "3", "4"]),
            ("round,time_ms,accuracy\r\n2,2000,0.2\r\n31,3", ["2", "3", "4"]),
        ],
        ids=["no line", "a part of the header", "fewer columns", "a part of a row"],
    )
    def test_a_file_that_a_crash_left_goes_on_with_whole_rows(self, left, rounds, tmp_path):
        (tmp_path / "metrics.csv").write_text(left)
        file = CsvFile()
        file.open(tmp_path, RunInfo("run"), 2)
        file.log(record(3))
        file.log(RoundRecord(4, {"accuracy": 0.4, "later": 2.0}, time_ms=4000))
        rows = self.rows(tmp_path)
        assert [row["round"] for row in rows] == rounds
        assert [row["accuracy"] for row in rows] == [str(int(round) / 10) for round in rounds]
        assert [row["later"] for row in rows] == [""] * (len(rounds) - 1) + ["2.0"] and None not in rows[-1]

    @pytest.mark.parametrize("other", ["client,accuracy\n", "round,accuracy\nmany,0.5\n"])
    def test_another_table_is_refused(self, other, tmp_path):
        (tmp_path / "metrics.csv").write_text(other)
        with pytest.raises(DataError, match=r"metrics\.csv is damaged .*; remove it"):
            CsvFile().open(tmp_path, RunInfo("run"), 0)

    def test_a_full_disk_at_its_first_row_leaves_room_for_the_header(self, tmp_path, monkeypatch):
        def full(file, line):
            raise OSError(errno.ENOSPC, "No space left on device")

        file = CsvFile()
        file.open(tmp_path, RunInfo("run"), 0)
        with monkeypatch.context() as patch, pytest.raises(OSError, match="No space left"):
            patch.setattr(trackers, "append_line", full)
            file.log(record(1))
        file.log(record(1))
        (row,) = csv.DictReader((tmp_path / "metrics.csv").read_text().splitlines())
        assert (row["round"], row["accuracy"]) == ("1", "0.1")


def test_an_error_of_a_thread_of_tensorboard_is_not_printed_and_others_are(capfd):
    """The writer raises it again in the tracker."""
    shown = threading.excepthook
    threading.excepthook = lambda error: print(error.exc_value, file=sys.stderr)
    try:
        for _ in range(2):
            trackers._hide_tracebacks_of_tensorboard()
        theirs = type("Thread", (threading.Thread,), {"__module__": "tensorboard.summary.writer.event_file_writer"})
        for kind, error in ((theirs, "hidden"), (threading.Thread, "shown")):
            thread = kind(target=lambda error=error: [].remove(error) or None, name=error)
            thread.start()
            thread.join()
    finally:
        threading.excepthook = shown
    assert capfd.readouterr().err.splitlines() == ["list.remove(x): x not in list"]


def test_tensorboard_has_a_scalar_per_metric_and_round(tmp_path):
    pytest.importorskip("tensorboard", reason="an optional package: pip install 'cfl-ray[tensorboard]'")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    (tracker,) = new_trackers(TrackingConfig(trackers=["tensorboard"])).values()
    tracked(tmp_path, tracker, [1, 2], end=False)
    (again,) = new_trackers(TrackingConfig(trackers=["tensorboard"])).values()
    tracked(tmp_path, again, [3])
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(one.step, round(one.value, 6), one.wall_time) for one in events.Scalars("accuracy")] == [
        (1, 0.1, 1.0),
        (2, 0.2, 2.0),
        (3, 0.3, 3.0),
    ]
    assert [one.step for one in events.Scalars("rounds_to_target")] == [3]


def test_validation_stopping_and_the_best_round_reach_every_tracker(tmp_path, sqlite):
    """A run that stops early, in csv, TensorBoard and MLflow: the values are those of the result."""
    pytest.importorskip("tensorboard", reason="an optional package: pip install 'cfl-ray[tensorboard]'")
    from mlflow import MlflowClient
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    experiment = Experiment(
        name="stops",
        rounds=9,
        methods=["fedavg"],
        data={"partition": {"clients": 3, "samples": 20}, "validation": {"fraction": 0.4}},
        model={"options": {"hidden": 2}},
        stopping={"patience": 2, "min_delta": 1.0},
        keep={"which": "best"},
        runtime={"engine": "manual"},
        tracking={"trackers": ["mlflow", "csv", "tensorboard"], "uri": sqlite, "experiment": "stops"},
    )
    result = cfl_ray.simulate(experiment, tmp_path / "run")["fedavg"]
    assert result.ended.startswith("stopped after round 3: validation/accuracy has not risen by more than 1 ")
    names = ("validation/accuracy", "validation/loss", "validation/accuracy_local", "validation/macro_f1", "best_round")
    frame = result.to_frame().set_index("round")[list(names)]
    rows = list(csv.DictReader((result.directory / "metrics.csv").read_text().splitlines()))
    events = EventAccumulator(str(result.directory / "tensorboard")).Reload()
    client = MlflowClient(sqlite)
    (run,) = client.search_runs(
        [client.get_experiment_by_name("stops").experiment_id],
        "tags.method = 'fedavg'",
    )
    for name in names:
        wanted = [(1, frame[name][1]), (2, frame[name][2]), (3, frame[name][3])]
        assert [(int(row["round"]), float(row[name])) for row in rows] == wanted, name
        assert [(one.step, one.value) for one in events.Scalars(name)] == [(r, pytest.approx(v)) for r, v in wanted]
        assert [(one.step, one.value) for one in client.get_metric_history(run.info.run_id, name)] == wanted, name
    assert run.data.tags["ended"] == result.ended and run.data.tags["kept_round"] == str(result.best_round)
    texts = {tag: events.Tensors(tag)[-1].tensor_proto.string_val[0].decode() for tag in events.Tags()["tensors"]}
    assert texts == {"ended/text_summary": result.ended, "kept_round/text_summary": str(result.best_round)}


class TestWandb:
    @pytest.fixture
    def made(self, monkeypatch):
        """A stand-in for the package, which keeps what it is told."""
        runs = []

        class Run:
            def __init__(self, **arguments):
                self.arguments, self.logged, self.summary, self.code = arguments, [], {}, None
                runs.append(self)

            def log(self, metrics, step):
                self.logged.append((step, metrics))

            def finish(self, exit_code):
                self.code = exit_code

        module = types.ModuleType("wandb")
        module.init = Run
        monkeypatch.setitem(sys.modules, "wandb", module)
        return runs

    def test_is_an_offline_run_with_the_id_of_ours(self, made, tmp_path):
        (tracker,) = new_trackers(TrackingConfig(trackers=[{"wandb": {"project": "p"}}])).values()
        tracked(tmp_path, tracker, [1, 2])
        (run,) = made
        assert (run.arguments["mode"], run.arguments["project"], run.arguments["resume"]) == ("offline", "p", "allow")
        assert run.logged == [(1, {"accuracy": 0.1}), (2, {"accuracy": 0.2})]
        assert run.summary == {"rounds_to_target": 2.0} and run.code == 0

    def test_a_full_disk_is_said_though_wandb_says_nothing(self, made, tmp_path, monkeypatch):
        def full(**options):
            raise OSError(errno.ENOSPC, "No space left on device")

        (tmp_path / "wandb").mkdir()
        monkeypatch.setattr(tempfile, "TemporaryFile", full)
        (tracker,) = new_trackers(TrackingConfig(trackers=["wandb"])).values()
        warnings = []
        tracked(tmp_path, tracker, [1], warn=warnings.append)
        assert "failed: OSError: [Errno 28] No space left on device: " in warnings[0] and "lacks 1 round" in warnings[1]

    def test_without_records_there_is_no_run(self, made, tmp_path):
        (tracker,) = new_trackers(TrackingConfig(trackers=["wandb"])).values()
        tracked(tmp_path, tracker, [])
        assert made == []


class TestConfig:
    @pytest.mark.parametrize("package, name", [("wandb", "wandb"), ("torch.utils.tensorboard", "tensorboard")])
    def test_a_package_that_is_absent_is_named_before_the_run(self, monkeypatch, package, name):
        monkeypatch.setitem(sys.modules, package, None)
        with pytest.raises(ConfigError, match=rf"^tracker {name}: .*; pip install 'cfl-ray\[{name}\]'$"):
            cfl_ray.simulate(Experiment(tracking={"trackers": [name]}))

    @pytest.mark.parametrize(
        "trackers, message",
        [
            (["cvs"], r"unknown tracker 'cvs' \(did you mean 'csv'\?\)"),
            ([{"csv": {}, "wandb": {}}], "an entry is one (name|tracker) with its options"),
            ([{"mlflow": {"uri": "x"}}], "mlflow takes no options; its keys are tracking.uri, experiment"),
            ([3], "a tracker is a name, file.py:Name or, in Python"),
        ],
    )
    def test_entries_are_checked(self, trackers, message):
        with pytest.raises(ConfigError, match=message):
            Experiment(tracking={"trackers": trackers})

    @pytest.mark.parametrize("name, least", [("", "at least 1 char"), ("x" * 501, "at most 500 char")])
    def test_an_experiment_that_no_server_takes_is_refused(self, name, least):
        with pytest.raises(ConfigError, match=rf"^tracking.experiment: .* {least}"):
            Experiment(tracking={"experiment": name})

    def test_what_is_no_tracker_is_refused(self):
        with pytest.raises(ConfigError, match="is no tracker: expected a class with the methods open"):
            new_trackers(TrackingConfig(trackers=[Path]))
        with pytest.raises(ConfigError, match="tracking.trackers: 'csv' is listed twice"):
            new_trackers(TrackingConfig(trackers=["csv", "csv"]))
        with pytest.raises(ConfigError, match=r"tracker CsvFile has no option 'fil' \(did you mean 'file'\?\)"):
            new_trackers(TrackingConfig(trackers=[{"csv": {"fil": 1}}]))

    def test_mlflow_is_the_default_and_needs_its_uri(self, tmp_path):
        assert TrackingConfig().uses_mlflow and new_trackers(TrackingConfig()) == {}
        mlflow = new_trackers(TrackingConfig(experiment="e"), "sqlite:///x.db", tmp_path)["mlflow"]
        assert (mlflow.uri, mlflow.experiment, mlflow.parent) == ("sqlite:///x.db", "e", tmp_path)
        assert not TrackingConfig(trackers=["csv"]).uses_mlflow
        assert new_trackers(TrackingConfig(trackers=["csv"], enabled=False)) == {}

    def test_classes_in_python_are_recorded_by_name(self):
        assert isinstance(new_trackers(TrackingConfig(trackers=[Recording]))["Recording"], Recording)
        written = Experiment(tracking={"trackers": [Recording]}).to_dict()
        assert written["tracking"]["trackers"] == [f"{__name__}.Recording"]
        with pytest.raises(ConfigError, match="is an object, expected a class: every method of a run has its own"):
            new_trackers(TrackingConfig(trackers=[Recording()]))


def test_trackers_learn_of_an_end_that_the_disk_has_no_room_for(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    tracker = Recording()
    log = RunLog(tmp_path, {"mine": tracker})
    log.start(RunInfo("run"))
    log.log(record(1))
    monkeypatch.setattr("cfl_ray.tracking.run_log.write_json", full)
    with pytest.raises(OSError, match="No space left"):
        log.finish("FINISHED", {"rounds_to_target": 2.0})
    assert tracker.calls[-2:] == [("log", 1, 0.1), ("close", "FAILED", {"rounds_to_target": 2.0})]


class Failing(Recording):
    """One whose optional attributes fail, too, with what leaves a process."""

    def log(self, record):
        raise SystemExit(3)

    def is_busy(self, error):
        raise RuntimeError("closed")

    progress = uri = property(lambda self: sys.exit(4))


def test_one_with_errors_everywhere_ends_nothing(tmp_path):
    warnings = []
    tracked(tmp_path, Failing(), [1, 2], warn=warnings.append)
    assert [line.count("SystemExit: 3") for line in warnings] == [1, 0] and "lacks 2 rounds" in warnings[1]


@pytest.mark.parametrize("error", ["SystemExit", "ImportError"])
def test_one_that_cannot_be_made_during_a_run_is_left_out(error, tmp_path):
    """It is made for the check of the config, for the comparison, and for the method, which fails."""
    calls = raising.Calls(raising.Target(f"{raising.__name__}:OwnTracker.__init__", "own"), 3, raising.ERRORS[error])
    tracking = {"report": False, "trackers": [raising.OwnTracker, "csv"]}
    outcome = raising.outcome(raising.experiment(tmp_path, "own", tracking=tracking), tmp_path / "run", calls)
    (warning,) = outcome.warnings
    assert outcome.is_whole and "the run continues without this tracker" in warning and calls.raised == 1
    assert len((tmp_path / "run/fedavg/metrics.csv").read_text().splitlines()) == 1 + raising.ROUNDS
