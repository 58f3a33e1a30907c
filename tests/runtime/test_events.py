"""Phases and events of clusters in the records of runs: of a split what decided it, and each once after a fault."""

import io
import json
from math import isfinite

import pytest
from rich.console import Console
from small_runs import PLANTED, merged, simulate_until

from cfl_ray import Experiment, load_run, resume, simulate
from cfl_ray.cli.live_client import status
from cfl_ray.cli.printed_tables import describe_method
from cfl_ray.cli.progress import Display
from cfl_ray.methods import REGISTRY
from cfl_ray.run_directory import RunDirectory

CFL = {"cfl": {"eps1": 0.6, "eps2": 0.95, "min_rounds": 5}}


def planted(**changes) -> Experiment:
    return Experiment(**merged(PLANTED, {"data": {"synthetic_samples": 200}} | changes))


def test_a_split_of_cfl_is_explained_by_its_record(tmp_path):
    result = simulate(planted(methods=[CFL], rounds=10), tmp_path / "run")["cfl"]
    (split,) = result.events
    record = result.records[split.round - 1]
    assert record.round > 5 and record.events == (split,) and (split.cluster, split.into) == (0, (0, 1))
    because = split.because
    assert list(because) == ["mean", "eps1", "max", "eps2", "cosine_across"]
    assert because["mean"] < because["eps1"] == 0.6 and because["max"] > because["eps2"] == 0.95
    assert -1 <= because["cosine_across"] < 0
    clusters = [one.metrics["num_clusters"] for one in result.records]
    assert clusters == [1.0] * (split.round - 1) + [2.0] * (11 - split.round) and result.final["ari"] == 1
    lines = (tmp_path / "run" / "cfl" / "metrics.jsonl").read_text().splitlines()
    assert json.loads(lines[split.round - 1])["events"] == [
        {"round": split.round, "event": "split", "cluster": 0, "into": [0, 1], "because": dict(because)}
    ]
    assert {json.loads(line)["phase"] for line in lines} == {"federate"}
    artifact = RunDirectory(tmp_path / "run").method("cfl").cluster_events
    assert json.loads(artifact.read_text()) == split.to_fields()
    assert load_run(tmp_path / "run")["cfl"].events == [split]
    found = status(tmp_path / "run")
    assert (found.phase, found.last_event) == ("federate", f"round {split.round}: {split.text}")


OPTIONS = {
    "autocfl": {"min_rounds": 1, "max_rounds": 2},
    "cfl": {"eps1": 10.0, "eps2": 0.0, "min_rounds": 1},
    "feroma": {"warmup_rounds": 1},
    "fl_hc": {"cluster_round": 2},
    "flux": {"cluster_round": 2},
    "fedgroup": {"num_clusters": 2, "pretrain_steps": 5},
    "ifca": {"num_clusters": 2, "warmup_rounds": 2},
    "ifca_cam": {"num_clusters": 2, "warmup_rounds": 1},
    "clove": {"num_clusters": 2, "stable_rounds": 2},
    "fesem": {"num_clusters": 2},
    "fesem_cam": {"num_clusters": 2},
    "cgpfl": {"num_clusters": 2},
    "cflgp": {"num_clusters": 2, "cluster_rounds": 1},
    "fedac": {"num_clusters": 2},
}
ROUNDS_OF_FIRST_PHASE = {"autocfl": 2, "clove": 3, "fl_hc": 2, "flux": 2, "ifca": 2}  # 1 of the others with two phases


def test_every_method_goes_through_its_phases_and_reports_how_its_clusters_came(notes):
    """The odd clients, one true group, join before round 2; from then on all clients are served."""
    methods = [{name: OPTIONS.get(name, {})} for name in REGISTRY]
    joins, watcher = [{"round": 2, "join": [1, 3, 5, 7]}], notes()
    results = simulate(
        planted(methods=methods, rounds=4, data={"synthetic_samples": 20}, schedule=joins), watcher=watcher
    )
    assert watcher.lines.count("joined: clients 1, 3, 5, 7") == len(methods)
    for name, cls in REGISTRY.items():
        records, final = results[name].records, results[name].final
        assert [record.metrics["clients_online"] for record in records] == [4, 8, 8, 8], name
        assert isfinite(final["accuracy"]) and isfinite(results[name].summary["newcomer_accuracy"]), name
        names = list(cls.phases)
        first = ROUNDS_OF_FIRST_PHASE.get(name, 1) if len(names) > 1 else 4
        assert [record.phase for record in records] == names[:1] * first + names[1:2] * (4 - first), name
        changes = [event.to_fields() for event in results[name].events if event.event == "phase"]
        expected = {"round": first, "event": "phase", "before": names[0], "phase": names[-1]}
        assert changes == [expected] * (len(names) > 1), name
        # clusters that have members: births and splits add, merges and deaths take away
        has_births = any(event.event == "birth" for event in results[name].events) or name == "local"
        counted = 0 if has_births else 1  # all clients are in one cluster before the first round
        for record in records:
            for event in record.events:
                counted += {"birth": len(event.into), "split": len(event.into) - 1, "phase": 0}.get(event.event, -1)
                assert event.because or event.event == "phase", name
            assert record.metrics.get("num_clusters", 0) == counted, (name, record)


@pytest.mark.parametrize("lost", [False, True])
def test_after_a_fault_every_event_is_there_once(tmp_path, lost):
    """The driver is killed in round 2: before it recorded the round, which has a checkpoint, or after."""
    experiment = planted(methods=[{"fl_hc": {"cluster_round": 2}}], rounds=4)
    expected = simulate(experiment, tmp_path / "whole")["fl_hc"]
    assert [event.event for event in expected.events] == ["birth", "phase"]
    simulate_until(2, experiment, tmp_path / "run")
    log = tmp_path / "run" / "fl_hc" / "metrics.jsonl"
    if lost:
        log.write_bytes(log.read_bytes().splitlines(keepends=True)[0])
    result = resume(tmp_path / "run", on_ray=False, experiment=experiment)["fl_hc"]
    assert result.events == expected.events
    assert [record.phase for record in result.records] == ["warmup", "warmup", "federate", "federate"]


def test_clients_that_leave_may_take_their_cluster_along():
    leave = [{"round": 3, "leave": [1, 3, 5, 7]}]
    console = Console(record=True, width=120, file=io.StringIO())
    with Display(console, 3) as display:
        result = simulate(planted(methods=["stocfl"], rounds=3, schedule=leave), watcher=display)["stocfl"]
    birth, death = result.events
    assert (birth.event, birth.into) == ("birth", (0, 1)) and birth.because["cosine"] < birth.because["tau"] == 0.5
    assert (death.event, death.round, death.cluster) == ("death", 3, 1)
    assert death.because == {"members_before": 4, "clients_left": 4}
    shown = [line.partition(": ")[2] for line in console.export_text().splitlines() if "stocfl round 3:" in line]
    assert shown == ["left: clients 1, 3, 5, 7", death.text]


def test_the_commands_show_phases_and_events():
    console = Console(record=True, width=120, file=io.StringIO())
    with Display(console, 2) as display:
        simulate(planted(methods=["fedclust"], rounds=2), watcher=display)
    lines = console.export_text().splitlines()
    assert any(line.startswith("fedclust round 1: new clusters 0, 1 (clients 8, highest_merge 0.") for line in lines)
    assert "fedclust round 1: phase cluster -> federate" in lines
    describe_method(REGISTRY["fedclust"], console, "fedclust")
    assert "Phases: cluster -> federate\n    cluster    the clients are compared" in console.export_text()
