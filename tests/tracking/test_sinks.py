"""Trackers beside MLflow: every record once, also after faults and in resumed runs."""

import csv
import sys
import types
from pathlib import Path

import pytest

import cfl_ray
from cfl_ray.config import Experiment, TrackingConfig
from cfl_ray.errors import ConfigError
from cfl_ray.tracking import FileTracker, Relay, RelayingTracker, RoundRecord, RunInfo, sinks
from cfl_ray.tracking.csv_file import CsvFile


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


def record(round: int) -> RoundRecord:
    return RoundRecord(round, {"accuracy": round / 10}, time_ms=1000 * round)


def tracked(run_dir: Path, sink, rounds, end=True, warn=lambda text: None):
    tracker = RelayingTracker(FileTracker(run_dir), [Relay("mine", sink, run_dir, warn)])
    tracker.start(RunInfo("run"))
    for round in rounds:
        tracker.log(record(round))
    if end:
        tracker.finish("FINISHED", {"rounds_to_target": 2.0})
    return sink


def test_a_run_is_delivered_in_order(tmp_path):
    assert tracked(tmp_path, Recording(), [1, 2]).calls == [
        ("open", "run", 0),
        ("log", 1, 0.1),
        ("log", 2, 0.2),
        ("close", "FINISHED", {"rounds_to_target": 2.0}),
    ]


def test_a_resumed_run_goes_on_after_its_cursor(tmp_path):
    tracked(tmp_path, Recording(), [1, 2], end=False)
    resumed = tracked(tmp_path, Recording(), [2, 3])
    assert [call[:2] for call in resumed.calls] == [("open", "run"), ("log", 3), ("close", "FINISHED")]
    assert resumed.calls[0][2] == 2


def test_what_failed_follows_and_is_warned_of_once(tmp_path):
    warnings = []
    sink = tracked(tmp_path, Recording(fails=2), [1, 2, 3], warn=warnings.append)
    assert [call[1] for call in sink.calls if call[0] == "log"] == [1, 2, 3]
    assert len(warnings) == 1
    assert (
        warnings[0].startswith("tracker mine (Recording (")
        and "failed: OSError: no connection; the run continues" in warnings[0]
    )


def test_one_that_always_fails_ends_nothing(tmp_path):
    tracked(tmp_path, Recording(fails=99), [1, 2])
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 2


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


def test_tensorboard_has_a_scalar_per_metric_and_round(tmp_path):
    pytest.importorskip("tensorboard", reason="an optional package: pip install 'cfl-ray[tensorboard]'")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    (sink,) = sinks(TrackingConfig(trackers=["tensorboard"])).values()
    tracked(tmp_path, sink, [1, 2], end=False)
    sink.writer.close()
    (again,) = sinks(TrackingConfig(trackers=["tensorboard"])).values()
    tracked(tmp_path, again, [3])
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(one.step, round(one.value, 6), one.wall_time) for one in events.Scalars("accuracy")] == [
        (1, 0.1, 1.0),
        (2, 0.2, 2.0),
        (3, 0.3, 3.0),
    ]
    assert [one.step for one in events.Scalars("rounds_to_target")] == [3]


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
        (sink,) = sinks(TrackingConfig(trackers=[{"wandb": {"project": "p"}}])).values()
        tracked(tmp_path, sink, [1, 2])
        (run,) = made
        assert (run.arguments["mode"], run.arguments["project"], run.arguments["resume"]) == ("offline", "p", "allow")
        assert run.logged == [(1, {"accuracy": 0.1}), (2, {"accuracy": 0.2})]
        assert run.summary == {"rounds_to_target": 2.0} and run.code == 0

    def test_without_records_there_is_no_run(self, made, tmp_path):
        (sink,) = sinks(TrackingConfig(trackers=["wandb"])).values()
        tracked(tmp_path, sink, [])
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

    def test_what_is_no_tracker_is_refused(self):
        with pytest.raises(ConfigError, match="is no tracker: expected a class with the methods open"):
            sinks(TrackingConfig(trackers=[Path]))
        with pytest.raises(ConfigError, match="tracking.trackers: 'csv' is listed twice"):
            sinks(TrackingConfig(trackers=["csv", "csv"]))
        with pytest.raises(ConfigError, match=r"tracker CsvFile has no option 'fil' \(did you mean 'file'\?\)"):
            sinks(TrackingConfig(trackers=[{"csv": {"fil": 1}}]))

    def test_mlflow_is_the_default_and_leaves_no_sink(self):
        assert TrackingConfig().uses_mlflow and sinks(TrackingConfig()) == {}
        assert not TrackingConfig(trackers=["csv"]).uses_mlflow
        assert sinks(TrackingConfig(trackers=["csv"], enabled=False)) == {}

    def test_classes_in_python_are_recorded_by_name(self):
        assert isinstance(sinks(TrackingConfig(trackers=[Recording]))["Recording"], Recording)
        written = Experiment(tracking={"trackers": [Recording]}).to_dict()
        assert written["tracking"]["trackers"] == [f"{__name__}.Recording"]
        with pytest.raises(ConfigError, match="is an object, expected a class: every method of a run has its own"):
            sinks(TrackingConfig(trackers=[Recording()]))
