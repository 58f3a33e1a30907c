import json
import math

import numpy as np
import pytest

from cfl_ray.core.events import ClusterEvent
from cfl_ray.core.reassigned import Reassigned
from cfl_ray.errors import DataError
from cfl_ray.run_directory import RunDirectory
from cfl_ray.system.files import write_json
from cfl_ray.tracking import METRICS, RoundRecord, RunInfo, check_metrics, flatten, read_end
from cfl_ray.tracking.record import metric_names


def test_an_unknown_metric_is_an_error_with_the_nearest_name():
    with pytest.raises(ValueError, match="unknown metric 'acuracy' .did you mean 'accuracy'"):
        check_metrics({"acuracy": 0.5})


def test_every_metric_has_a_description_and_can_be_recorded():
    check_metrics(METRICS)
    check_metrics(["mse"], of_task={"mse"})
    assert all(METRICS.values())


def test_a_record_equals_its_line_also_if_training_diverged():
    record = RoundRecord(3, {"accuracy": np.float32(0.5), "test_loss": math.inf, "train_loss": math.nan}, time_ms=17)
    again = RoundRecord.from_line(record.to_line())
    assert (again.round, again.time_ms, again.metrics["accuracy"], again.metrics["test_loss"]) == (3, 17, 0.5, math.inf)
    assert math.isnan(again.metrics["train_loss"])
    assert record.to_line().count("\n") == 1


def test_a_line_has_the_phase_and_the_events():
    split = ClusterEvent(3, "split", 0, (0, 1), {"mean": 0.25})
    change = ClusterEvent(3, "phase", before="cluster", phase="federate")
    record = RoundRecord(3, {"accuracy": 0.5}, 17, phase="cluster", events=(split, change))
    assert json.loads(record.to_line()) == {
        "round": 3,
        "time_ms": 17,
        "phase": "cluster",
        "events": [
            {"round": 3, "event": "split", "cluster": 0, "into": [0, 1], "because": {"mean": 0.25}},
            {"round": 3, "event": "phase", "before": "cluster", "phase": "federate"},
        ],
        "accuracy": 0.5,
    }
    assert RoundRecord.from_line(record.to_line()) == record and record.next_phase == "federate"
    old = RoundRecord.from_line('{"round": 3, "time_ms": 17, "phase": 0.5}')  # a diagnostic of that name
    assert (old.phase, old.events, old.metrics) == ("", (), {"phase": 0.5})
    with pytest.raises(ValueError, match="events"):
        RoundRecord.from_line('{"round": 3, "time_ms": 17, "events": [{"round": 3, "event": "war"}]}')


def test_a_line_has_nothing_of_other_files_and_a_record_is_the_same_without_them():
    moved = Reassigned.of([(2, 1)])
    whole = RoundRecord(
        3, {"a": 0.5}, 17, reassigned=moved, scores_MV=np.ones((2, 4)), notes=("note",), status="finished"
    )
    assert json.loads(whole.to_line()) == {"round": 3, "time_ms": 17, "a": 0.5}
    again = RoundRecord.from_line(whole.to_line())
    assert again == whole and (len(again.reassigned), again.scores_MV, again.notes) == (0, None, ())
    assert whole.finished and not again.finished
    as_metrics = (
        '{"round": 3, "time_ms": 17, "reassigned": 1.0, "notes": 2.0, "stop": 3.0}'  # diagnostics of such names
    )
    assert RoundRecord.from_line(as_metrics).metrics == {"reassigned": 1.0, "notes": 2.0, "stop": 3.0}


def test_flatten():
    config = {
        "seed": 0,
        "local": {"lr": 0.1, "steps": None},
        "methods": ["fedavg", {"ifca": {"num_clusters": 4}}],
        "options": {},
    }
    assert flatten(config) == {
        "seed": "0",
        "local.lr": "0.1",
        "local.steps": "null",
        "methods": '["fedavg", {"ifca": {"num_clusters": 4}}]',
        "options": "{}",
    }


def test_params_have_no_credentials():
    info = RunInfo("run", params={"tracking.uri": "http://bob:hunter2@host"})
    assert info.params == {"tracking.uri": "http://***@host"}


def test_a_line_of_other_types_is_no_record():
    values = {"round": 1, "time_ms": 2, "accuracy": 0.5}
    changes = [{"round": "1"}, {"round": -1}, {"round": None}, {"round": True}, {"round": 2**60}, {"time_ms": 1.5}]
    changes += [{"accuracy": one} for one in ("0.5", None, [], {}, True, 10**400)]
    for change in changes:
        with pytest.raises(ValueError, match=next(iter(change))):
            RoundRecord.from_line(json.dumps(values | change))
    for line in ("[]", "3", "null", "", "[" * 100_000):
        with pytest.raises(ValueError):
            RoundRecord.from_line(line)


def test_an_end_of_other_types_is_none(tmp_path):
    summary = {"round": 1, "time_ms": 2, "metrics": {"fedavg/accuracy": 0.5}}
    values = {"status": "FINISHED", "summary": summary, "time_ms": 3}
    file = RunDirectory(tmp_path).end
    write_json(file, values)
    assert read_end(tmp_path).summary.metrics == summary["metrics"]
    for change in (
        {"status": "DONE"},
        {"status": []},
        {"summary": None},
        {"time_ms": "3"},
        {"summary": {"metrics": 3}},
    ):
        write_json(file, values | change)
        with pytest.raises(DataError, match="end.json is damaged"):
            read_end(tmp_path)


def test_names_of_metrics_are_plain_and_differ_also_without_case():
    names = metric_names(["k=1", "k 1", "K_1", "ifca", "IFCA", "fedavg"])
    assert names == {"IFCA": "IFCA", "K_1": "K_1", "fedavg": "fedavg", "ifca": "ifca_2", "k 1": "k_1_2", "k=1": "k_1_3"}
    assert metric_names(["a b:c/d"], more=" :") == {"a b:c/d": "a b:c_d"} and metric_names(["]^"], "]") == {"]^": "]_"}
