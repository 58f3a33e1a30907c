"""Runs in which client data change, or in which a true group joins later."""

import pandas as pd
import pytest
from small_runs import PLANTED, Reports, merged

import cfl_ray


def experiment(methods, tmp_path, rounds=6, clients=12, **sections):
    base = {"data": {"partition": {"clients": clients}}, "local": {"epochs": 3}, "output": str(tmp_path)}
    return cfl_ray.Experiment(**merged(merged(PLANTED, base), {"methods": methods, "rounds": rounds, **sections}))


@pytest.mark.parametrize(
    "name, options",
    [("stocfl", {"tau": 0.5}), ("fedgroup", {"num_clusters": 2, "alpha": 10}), ("ifca", {"num_clusters": 2})],
)
def test_newcomers_of_a_group_that_is_known_are_placed_with_it(name, options, tmp_path):
    found = cfl_ray.simulate(experiment([{name: options}], tmp_path, schedule=[{"round": 4, "join": [10, 11]}]))[name]
    assert found.final["ari"] == 1.0 and found.summary["newcomer_accuracy"] > 0.9


@pytest.mark.parametrize("regroup", [True, False])
def test_fedgroup_regroups_a_client_when_its_data_changed(regroup, tmp_path):
    """Clients 0 and 1 swap their data, and so their true groups; a static grouping is wrong for two of twelve."""
    swap = [{"round": 3, "change": [{"clients": [0, 1], "data_of": [1, 0]}]}]
    watcher = Reports()
    method = {"fedgroup": {"num_clusters": 2, "alpha": 10, "regroup": regroup}}
    records = cfl_ray.simulate(experiment([method], tmp_path, 4, schedule=swap), watcher=watcher)["fedgroup"].records
    aris = [record.metrics["ari"] for record in records]
    assert aris[:2] == [1.0] * 2 and watcher.of["fedgroup"][2].notes == ("data changed: clients 0-1",)
    assert aris[2:] == [1.0] * 2 if regroup else max(aris[2:]) < 0.6


def test_flexcfl_migrates_a_client_whose_labels_changed(tmp_path):
    """Without a word from the simulation: by the shares of labels, which the client compares with those of before."""
    labels = {"kind": "classes", "clients": 12, "classes_per_client": 2}
    swap = [{"round": 3, "change": [{"clients": [0, 1], "data_of": [1, 0]}]}]
    method = {"fedgroup": {"num_clusters": 2, "alpha": 10, "regroup": False, "migrate": 0.2}}
    data = {"source": "digits", "partition": labels}
    run = experiment([method], tmp_path, 4, schedule=swap, data=data)
    found = cfl_ray.simulate(run)["fedgroup"]
    migrated = [record.metrics.get("migrated") for record in found.records]
    assert migrated == [0, 0, 2, 0]


def test_a_client_whose_data_changed_trains_and_is_tested_on_the_new_ones(tmp_path):
    """Local training alone: a client with new labels has to learn them, and does."""
    change = [{"round": 4, "change": [{"clients": "0-3", "relabel": 2}]}]
    local, found = {"epochs": 10, "batch_size": 20, "lr": 0.3}, []
    for sections in ({"schedule": change}, {}):
        result = cfl_ray.simulate(experiment(["local"], tmp_path, clients=4, local=local, **sections))["local"]
        found.append([record.metrics["accuracy"] for record in result.records])
        rounds = result.recovery()["rounds"].tolist()
        assert [result.summary["rounds_to_recover"]] == rounds if rounds else "rounds_to_recover" not in result.summary
    changed, constant = found
    assert changed[:3] == constant[:3] and changed[3] < constant[3] - 0.1 and changed[5] > 0.85


def test_swapped_labels_are_a_concept_drift_with_new_true_groups(tmp_path):
    """Half of one group has other labels from round 3 on: three true groups instead of two, and IFCA must follow."""
    swap = [{"round": 3, "change": [{"clients": [0, 2, 4], "swap": [0, 1]}]}]
    watcher = Reports()
    result = cfl_ray.simulate(experiment(["ifca"], tmp_path, 4, schedule=swap), watcher=watcher)["ifca"]
    assert watcher.of["ifca"][2].notes == ("data changed: clients 0, 2, 4",)
    now, before = (result.test(0, round=round)[1].tolist() for round in (3, 2))
    assert now == [{0: 1, 1: 0}.get(label, label) for label in before] and now != before
    groups = result.trained.federation.at(3).group_N
    assert len(set(groups.tolist())) == 3 and len(set(groups[[0, 2, 4]].tolist())) == 1


def test_without_a_shift_the_drift_makes_the_true_groups(tmp_path):
    """Of IID clients, half change their data before round 4: one group until then, two from then on."""
    data = {"source": "digits", "shift": {"kind": "none"}, "partition": {"clients": 8}}
    swap = [{"round": 4, "change": [{"clients": "0-3", "swap": [0, 1]}, {"clients": "0-3", "swap": [2, 3]}]}]
    methods = ["fedavg", {"ifca": {"num_clusters": 2}}]
    results = cfl_ray.simulate(experiment(methods, tmp_path, 8, data=data, schedule=swap), tmp_path / "run")
    aris = [record.metrics["ari"] for record in results["fedavg"].records]
    assert aris == [1.0] * 3 + [0.0] * 5  # one cluster
    assert results["ifca"].final["ari"] == 1.0
    assert results["ifca"].assignments()["group"].tolist() == [1] * 4 + [0] * 4
    written = pd.read_parquet(tmp_path / "run" / "ifca" / "artifacts" / "assignments.parquet")
    assert written.groupby("client")["group"].last().tolist() == [1] * 4 + [0] * 4
    constant = cfl_ray.simulate(experiment(["ifca"], tmp_path, 4, data=data))["ifca"]
    assert not any("ari" in record.metrics for record in constant.records)
    assert constant.assignments()["group"].tolist() == [-1] * 8


def test_a_round_without_reachable_clients_changes_nothing(tmp_path):
    (tmp_path / "trace.csv").write_text("client,from,to\n0,1,2\n1,1,2\n5,5,6\n")
    availability = {"kind": "trace", "file": str(tmp_path / "trace.csv")}
    watcher = Reports()
    records = cfl_ray.simulate(
        experiment(["fedavg", "stocfl"], tmp_path, cohort={"fraction": 1.0, "availability": availability}),
        watcher=watcher,
    )["fedavg"].records
    losses = [record.metrics["test_loss"] for record in records]
    assert losses[1] == losses[2] == losses[3] != losses[4] and "train_loss" not in records[2].metrics
    notes = [report.notes for report in watcher.of["fedavg"]]
    assert notes[2] == ("no client could be reached: a round without training",) and notes[4] == ()
