"""Recovery of clients after their data changed."""

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest

import cfl_ray
from cfl_ray.core.reported import Diagnostic
from cfl_ray.data.chained import ChainedFederation
from cfl_ray.results.results import recovery_frame, recovery_metrics


def frame(scores: dict[int, list[float]], name: str = "accuracy") -> pd.DataFrame:
    """scores: of the clients 0, 1 .. by round."""
    rows = [(round, client, value) for round, values in scores.items() for client, value in enumerate(values)]
    return pd.DataFrame(rows, columns=["round", "client", name])


def test_a_change_is_recovered_from_when_the_clients_are_within_two_points():
    scores = {
        3: [0.90, 0.80, 0.5],
        4: [0.30, 0.40, 0.9],
        5: [0.80, 0.80, 0.9],
        6: [0.84, 0.83, 0.9],
        7: [0.9, 0.9, 0.9],
    }
    (row,) = recovery_frame(frame(scores), {4: [0, 1]}, 0.02).to_dict("records")
    assert np.isnan(row.pop("backward_transfer"))
    assert row == {"round": 4, "clients": 2, "before": pytest.approx(0.85), "after": 0.35, "recovered": 6, "rounds": 3}
    (strict,) = recovery_frame(frame(scores), {4: [0, 1]}, 0.0).to_dict("records")
    assert (strict["recovered"], strict["rounds"]) == (7, 4)
    errors = {round: [1 - value for value in values] for round, values in scores.items()}
    (other,) = recovery_frame(frame(errors, "mse"), {4: [0, 1]}, 0.02, higher_is_better=False).to_dict("records")
    assert (other["recovered"], other["rounds"]) == (6, 3)


def test_without_recovery_or_evaluation_there_are_no_numbers():
    scores = {3: [0.9], 4: [0.3]}
    found = recovery_frame(frame(scores), {4: [0], 1: [0], 9: [0]}, 0.02)
    assert found["round"].tolist() == [1, 4, 9] and found["rounds"].isna().all()
    assert np.isnan(found["before"][0]) and found["after"][1] == 0.3 and np.isnan(found["after"][2])
    assert recovery_frame(frame(scores), {}, 0.02).empty


def test_backward_transfer_is_of_each_client_until_its_next_change():
    """Client 0 changes again before round 7: of its first change the scores of rounds 4 to 6 count."""
    scores = {3: [0.9, 0.8], 4: [0.3, 0.4], 6: [0.8, 0.7], 8: [0.5, 0.6]}

    def past(ids, values):
        return Diagnostic(np.array(values, np.float32), ("clients",), (np.array(ids),))

    reported = {4: past([0, 1], [0.9, 0.7]), 6: past([0, 1], [0.7, 0.6]), 8: past([0, 1], [0.2, 0.5])}
    found = recovery_frame(frame(scores), {4: [0, 1], 7: [0]}, 0.02, past_scores=reported)
    expected = [((0.7 - 0.9) + (0.5 - 0.8)) / 2, 0.2 - 0.8]
    assert found["backward_transfer"].tolist() == pytest.approx(expected, rel=1e-5)
    del reported[8]  # which is not recorded if it is equal to that of round 6
    found = recovery_frame(frame(scores), {4: [0, 1], 7: [0]}, 0.02, past_scores=reported)
    expected = [((0.7 - 0.9) + (0.6 - 0.8)) / 2, 0.7 - 0.8]
    assert found["backward_transfer"].tolist() == pytest.approx(expected, rel=1e-5)


@pytest.mark.filterwarnings("error")
def test_clients_without_a_model_after_the_change_have_no_backward_transfer():
    """FedGroup groups clients again after a change; until then they have no model, and their past score is NaN."""
    past = Diagnostic(np.array([np.nan, np.nan], np.float32), ("clients",), (np.array([0, 1]),))
    scores = {3: [0.9, 0.8], 4: [np.nan, np.nan]}
    found = recovery_frame(frame(scores), {4: [0, 1]}, 0.02, past_scores={4: past})
    assert found["backward_transfer"].isna().all() and recovery_metrics(found) == {}


def test_the_metrics_of_a_run_are_means_over_its_changes():
    scores = {3: [0.9, 0.8], 4: [0.3, 0.8], 5: [0.9, 0.8], 6: [0.9, 0.1], 7: [0.9, 0.5], 8: [0.9, 0.8]}
    changed = {1: [0], 4: [0], 6: [1], 9: [0]}  # the first and the last are not measured
    assert recovery_metrics(recovery_frame(frame(scores), changed, 0.02)) == {"rounds_to_recover": (2 + 3) / 2}
    del scores[8]  # not recovered from the second change
    past = {6: Diagnostic(np.array([0.7], np.float32), ("clients",), (np.array([0]),))}
    found = recovery_metrics(recovery_frame(frame(scores), changed, 0.02, past_scores=past))
    assert found == {"backward_transfer": pytest.approx(0.7 - 0.9)}
    assert recovery_metrics(recovery_frame(frame(scores), {}, 0.02)) == {}


def test_of_a_run_whose_schedule_changes_data(tmp_path):
    """Half of the clients of one concept come to another one, in which all labels differ."""
    schedule = [{"round": 5, "change": [{"clients": "0-2", "relabel": 1}, {"clients": [3], "swap": [0, 1]}]}]
    data = {"source": "synthetic", "synthetic_shape": [16], "synthetic_classes": 4, "partition": {"clients": 6}}
    experiment = cfl_ray.Experiment(
        rounds=8,
        methods=["local"],
        data=data,
        local={"epochs": 5, "lr": 0.5},
        cohort={"fraction": 1.0},
        schedule=schedule,
        evaluation={"past": True, "local_samples": 1000},
        tracking={"enabled": False},
        runtime={"engine": "manual"},
    )
    result = cfl_ray.simulate(experiment, tmp_path / "run")["local"]
    (row,) = result.recovery().to_dict("records")
    metrics = result.client_metrics()
    of_four = metrics[metrics["client"] < 4].groupby("round")["accuracy"].mean()
    assert (row["round"], row["clients"], row["before"], row["after"]) == (5, 4, of_four[4], of_four[5])
    assert row["after"] < row["before"] or row["rounds"] == 1
    past = result.diagnostics["past_scores"]
    assert min(past) == 5 and past[8].labels[0].tolist() == [0, 1, 2, 3]
    model, (x, y) = result.personal_model(0), result.test(0, round=4)
    assert (model(x).argmax(1) == y).float().mean().item() == pytest.approx(past[8].value[0].item())
    forgotten = past[8].value.mean() - row["before"]
    assert row["backward_transfer"] == pytest.approx(forgotten, rel=1e-5) and forgotten < -0.2
    assert result.records[-1].metrics["accuracy_past"] == pytest.approx(past[8].value.mean())
    assert "accuracy_past" not in result.records[3].metrics
    assert result.recovery({5: [4, 5]})["clients"].tolist() == [2]
    chained = replace(result.trained, federation=ChainedFederation((result.trained.federation,)))  # as with newcomers
    assert replace(result, open_trained=lambda: chained).recovery().equals(result.recovery())
    assert result.client_metrics([3]).equals(metrics[metrics["client"] == 3].reset_index(drop=True))
    without_files = cfl_ray.simulate(experiment)["local"]
    for found in (result, without_files, cfl_ray.load_run(tmp_path / "run")["local"]):
        assert found.summary["backward_transfer"] == row["backward_transfer"]
        assert np.isnan(row["rounds"]) and "rounds_to_recover" not in found.summary
    (compared,) = cfl_ray.compare_runs([tmp_path / "run"], ["backward_transfer"]).to_dict("records")
    assert compared["backward_transfer"] == row["backward_transfer"]
