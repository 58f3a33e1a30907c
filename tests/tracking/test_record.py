import math

import numpy as np
import pytest

from cfl_ray.tracking import METRICS, RoundRecord, RunInfo, flatten


def test_an_unknown_metric_is_an_error_with_the_nearest_name():
    with pytest.raises(ValueError, match="unknown metric 'acuracy' .did you mean 'accuracy'"):
        RoundRecord(1, {"acuracy": 0.5})


def test_every_metric_has_a_description_and_can_be_recorded():
    assert set(RoundRecord(0, dict.fromkeys(METRICS, 1)).metrics) == set(METRICS)
    assert all(METRICS.values())


def test_a_record_equals_its_line_also_if_training_diverged():
    record = RoundRecord(3, {"accuracy": np.float32(0.5), "test_loss": math.inf, "train_loss": math.nan}, time_ms=17)
    again = RoundRecord.from_line(record.to_line())
    assert (again.round, again.time_ms, again.metrics["accuracy"], again.metrics["test_loss"]) == (3, 17, 0.5, math.inf)
    assert math.isnan(again.metrics["train_loss"])
    assert record.to_line().count("\n") == 1


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
