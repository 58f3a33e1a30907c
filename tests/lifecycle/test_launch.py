"""Checks of the run directory, which are made before Ray starts."""

import json

import numpy as np
import pytest

from cfl_ray import ConfigError, Experiment, load_run, resume, run, simulate
from cfl_ray.config import load
from cfl_ray.errors import DataError
from cfl_ray.lifecycle.driver import Watcher
from cfl_ray.lifecycle.extension import check_extension
from cfl_ray.lifecycle.launch import _with_current_cluster
from cfl_ray.results.run_record import _short
from cfl_ray.run_directory.session_file import ServerAddress, publish_server
from cfl_ray.runtime.journal import Journal, JournalEvent


def test_directory_of_another_config(experiment, run_dir):
    before = (run_dir / "ditto/metrics.jsonl").read_bytes()
    other = experiment(rounds=2, seed=7)
    with pytest.raises(ConfigError, match=r"run belongs to another config: seed \(0 there, 7 here\); choose another"):
        run(other, run_dir)
    assert (run_dir / "ditto/metrics.jsonl").read_bytes() == before


def test_what_is_no_experiment_is_named():
    for start in (run, simulate):
        with pytest.raises(ConfigError, match=r"expected an Experiment, got \{'rounds': 1\}; write Experiment\("):
            start({"rounds": 1})


def test_events_after_the_last_round_are_worth_a_warning_in_python(experiment, caplog):
    simulate(experiment(rounds=1, schedule=[{"round": 5, "leave": [1]}]))
    assert "the events of the schedule in round 5 are ignored: the last round is 1" in caplog.messages


def test_a_long_value_is_shown_where_it_differs():
    one, other = f"{'a' * 70}1{'b' * 70}", f"{'a' * 70}2"
    assert _short(one, other) == f"...{'a' * 30}1{'b' * 29}..." and _short(other, one) == f"...{'a' * 30}2"


def test_directory_of_the_same_config(experiment, run_dir):
    message = "already holds a run of this config; continue it with `cfl-ray resume .*run` or choose another folder"
    with pytest.raises(ConfigError, match=message):
        run(experiment(rounds=2), run_dir)


def test_directory_without_a_run(tmp_path):
    with pytest.raises(ConfigError, match="nothing holds no run: there is no .*config.yaml"):
        resume(tmp_path / "nothing")


def test_resuming_a_finished_run_does_nothing(experiment, figures, run_dir):
    before = (run_dir / "ditto/metrics.jsonl").read_bytes()
    assert figures(resume(run_dir, on_ray=False)) == figures(simulate(experiment(rounds=2)))
    assert (run_dir / "ditto/metrics.jsonl").read_bytes() == before


@pytest.mark.parametrize("stopped", [False, True])
def test_a_config_that_was_edited_after_the_start_is_refused_with_the_keys_and_the_cure(run_dir, stopped):
    """Of a finished run, and of one that has something left to do."""
    if stopped:
        (run_dir / "ditto/end.json").unlink()
        (run_dir / "end.json").unlink()
    file, whole = run_dir / "config.yaml", (run_dir / "config.yaml").read_text()
    file.write_text(whole.replace("lr: 0.1\n", "lr: 0.2\n", 1))
    with pytest.raises(ConfigError) as error:
        resume(run_dir, on_ray=False)
    assert "config.yaml was edited after the run began: local.lr (0.1 there, 0.2 here); " in str(error.value)
    assert f"new run with: cfl-ray run {file}" in str(error.value)
    file.write_text(whole.replace("\nrounds: 2\n", "\nrounds: 5\n", 1))
    with pytest.raises(
        ConfigError, match=rf"undo the edit to go on; for more rounds: cfl-ray run {file} rounds=5 --extend {run_dir}$"
    ):
        resume(run_dir, on_ray=False)
    check_extension(run_dir, load(file))  # the command that the message names
    file.write_text(whole.replace("hosts: 2\n", "hosts: 1\n", 1))  # where and how it runs may change
    assert resume(run_dir, on_ray=False)["ditto"].final


def test_only_keys_that_differ_are_named_as_edited(tmp_path):
    """Of a run of a user's function and own options, whose other keys have other defaults than the built-in example."""
    (tmp_path / "my.py").write_text(
        "import numpy as np\n\n\ndef load():\n    x = np.random.default_rng(0).normal(size=(40, 3))\n"
        '    return {"x": x, "y": (x[:, 0] > 0).astype(int), "clients": np.arange(40) // 10}\n'
    )
    source, attack = f"{tmp_path / 'my.py'}:load", {"kind": "sign_flip", "clients": [0]}
    here = Experiment(methods=["fedavg"], rounds=1, data={"source": source}, attack=attack, output=tmp_path)
    simulate(here, tmp_path / "run")
    file = tmp_path / "run/config.yaml"
    assert "fraction: 0.1" in file.read_text(), "a key without effect here"
    file.write_text(file.read_text().replace("clip_norm: null\n", "clip_norm: 2.0\n"))
    with pytest.raises(
        ConfigError, match=r"was edited after the run began: local.clip_norm \(null there, 2.0 here\); a run"
    ):
        resume(tmp_path / "run", on_ray=False)


@pytest.mark.parametrize("source", ["arrays", "digits"])
def test_a_file_that_was_edited_after_the_start_is_refused(tmp_path, source):
    """Data of their own folder are no part of the hash, so they are not named."""
    file = tmp_path / ("data.npz" if source == "arrays" else "trace.csv")

    def write(last):
        if source == "arrays":
            x = np.full((40, 3), last, np.float32)
            np.savez(file, x=x, y=np.arange(40) % 2, clients=np.arange(40) // 10)
        else:
            file.write_text("client,from,to\n" + "".join(f"{client},0,{last}\n" for client in range(4)))

    changes = {"data": {"source": "arrays", "root": file}}
    if source == "digits":
        trace = {"availability": {"kind": "trace", "file": file}}
        changes = {"data": {"root": tmp_path, "partition": {"clients": 4}}, "cohort": trace}
    write(9)
    simulate(Experiment(methods=["fedavg"], rounds=1, output=tmp_path, **changes), tmp_path / "run")
    write(8)
    key = "content.data.root" if source == "arrays" else "content.cohort.availability.file"
    message = rf"config.yaml or a file that it names was edited after .* began: {key} \(\w+ there, \w+ here\); a run"
    with pytest.raises(ConfigError, match=message):
        resume(tmp_path / "run", on_ray=False)
    write(9)
    assert resume(tmp_path / "run", on_ray=False)["fedavg"].final


def test_the_session_file_of_a_driver_that_was_killed_is_withdrawn(run_dir):
    """When the run goes on, before anything is prepared: commands must not ask the server of a process that is gone."""
    publish_server(run_dir, ServerAddress.here("127.0.0.1:6379", "server"))
    (run_dir / "ditto/end.json").unlink()
    (run_dir / "end.json").unlink()
    found = []

    class Looking(Watcher):
        def preparing(self, what, done=0, total=0):
            found.append((run_dir / "session.json").exists())

    resume(run_dir, Looking(), on_ray=False)
    assert found and not any(found)


def test_replay_of_another_config_is_refused(experiment, run_dir, tmp_path):
    other, same = experiment(rounds=2, seed=1), experiment(rounds=2)
    with pytest.raises(ConfigError, match=r"replay: .*run belongs to another config: seed \(0 there, 1 here\); run"):
        simulate(other, tmp_path / "other", replay=run_dir)
    with pytest.raises(ConfigError, match="replay: .*nothing holds no run"):
        simulate(other, tmp_path / "other", replay=tmp_path / "nothing")
    with pytest.raises(ConfigError, match="replay: name a run_dir"):
        simulate(same, replay=run_dir)
    assert not (tmp_path / "other").exists()


def test_replay_repeats_joins_and_leaves_and_not_the_stop(experiment, run_dir, tmp_path, figures):
    Journal(run_dir / "ditto").add(JournalEvent(2, leave=(3,)), JournalEvent(1, stop="session"))
    again = simulate(experiment(rounds=2), tmp_path / "again", replay=run_dir)
    assert Journal(tmp_path / "again/ditto").events == [JournalEvent(2, leave=(3,))]
    scheduled = simulate(experiment(rounds=2, schedule=[{"round": 2, "leave": [3]}]))
    assert figures(again) == figures(scheduled)


def test_replay_of_a_damaged_journal_is_refused_before_anything_starts(experiment, run_dir, tmp_path):
    (run_dir / "ditto/events.jsonl").write_text("nonsense\n")
    with pytest.raises(DataError, match=r"events.jsonl is damaged"):
        simulate(experiment(rounds=2), tmp_path / "again", replay=run_dir)
    assert not (tmp_path / "again/config.yaml").exists()


def test_a_run_with_files_of_its_own_goes_on_from_any_folder(tmp_path, monkeypatch, figures):
    """Its config.yaml names them by absolute paths; hash and labels are those of the config as written."""
    start, elsewhere = tmp_path / "start", tmp_path / "elsewhere"
    start.mkdir()
    elsewhere.mkdir()
    (start / "floor_beside.py").write_text("SCALE = 0.5\n")
    (start / "mine.py").write_text(
        "import numpy as np\nfrom floor_beside import SCALE\n\n\nclass Rule:\n"
        "    def scale(self, distance_n, weight_n):\n        return np.full(len(weight_n), SCALE)\n\n\n"
        "def top2(outputs, y):\n    return (outputs.topk(2).indices == y[:, None]).any(1).float().mean()\n"
    )
    (start / "houses.csv").write_text("a,b,kind\n" + "1,2,pear\n4,1,plum\n0,2,pear\n5,1,plum\n" * 10)
    (start / "mine.yaml").write_text(
        "rounds: 2\nmethods: [fedavg, {fedavg: {aggregation: 'mine.py:Rule'}}]\ntracking: {enabled: false}\n"
        "evaluation: {metrics: ['mine.py:top2']}\n"
        "data: {source: csv, train_files: houses.csv, columns: {label: kind}, partition: {clients: 4}}\n"
    )
    monkeypatch.chdir(start)
    experiment = load("mine.yaml")
    whole = simulate(experiment)
    simulate(experiment, "run")
    before = (start / "run/config.yaml").read_text()
    for label in whole.methods:
        for file in (start / "run" / label / "checkpoints").glob("000002*"):
            file.unlink()
    monkeypatch.chdir(elsewhere)
    assert load(start / "run/config.yaml").config_hash == experiment.config_hash
    assert figures(resume(start / "run", on_ray=False)) == figures(whole)
    assert figures(simulate(load(start / "run/config.yaml"), "again")) == figures(whole)
    assert load_run(start / "run").methods.keys() == whole.methods.keys()
    assert (start / "run/config.yaml").read_text() == before
    there = f'# run directory "{elsewhere}/again"'
    assert (elsewhere / "again/config.yaml").read_text() == before.replace(f'# run directory "{start}/run"', there)


def test_a_resumed_run_goes_to_the_cluster_of_now(experiment, monkeypatch):
    """(runtime.address of the run, RAY_ADDRESS) -> the address that is used; clusters of a name stay."""
    for recorded, now, used in (
        ("10.0.0.1:6379", "10.0.0.2:6379", "10.0.0.2:6379"),
        ("10.0.0.1:6379", None, "10.0.0.1:6379"),
        (None, "10.0.0.2:6379", None),
        ("auto", "10.0.0.2:6379", "auto"),
        ("local", "10.0.0.2:6379", "local"),
    ):
        monkeypatch.delenv("RAY_ADDRESS", raising=False)
        if now:
            monkeypatch.setenv("RAY_ADDRESS", now)
        made = experiment(runtime={"address": recorded})
        assert _with_current_cluster(made, Watcher()).runtime.address == used


def test_a_shift_and_a_partition_made_in_python_are_named_in_the_record(tmp_path):
    def halves(labels, clients, draw):
        return np.array_split(draw.permutation(len(labels)), clients)

    def negated(x, y, group, draw):
        return (16 - x if group else x), y

    data = {"shift": {"kind": negated, "groups": 2}, "partition": {"kind": halves, "clients": 4, "samples": 10}}
    experiment = Experiment(data=data, rounds=1, methods=["fedavg"], tracking={"enabled": False})
    final = simulate(experiment, tmp_path / "run")["fedavg"].final
    assert load_run(tmp_path / "run")["fedavg"].final == final
    tags = json.loads((tmp_path / "run/run.json").read_text())["tags"]
    shift, partition = tags["partition"].split("/")
    assert shift.endswith(".negated") and partition.endswith(".halves")
