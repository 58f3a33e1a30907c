"""Runs that begin with the rounds of a shorter one give what they would have given without."""

import errno
import json
import shutil

import pytest
from small_runs import simulate_until

from cfl_ray import ConfigError, load_run, resume, run, simulate
from cfl_ray.errors import RunError
from cfl_ray.lifecycle import extension
from cfl_ray.results.arrow_log import read_reassignments
from cfl_ray.run_directory import RunDirectory
from cfl_ray.tracking import read_info, read_records

METHODS = [
    "fedavg",
    "ditto",  # states of clients
    {"fedavg": {"server_optimizer": "fedadam", "label": "adam"}},  # moments on the server
    {"stocfl": {"tau": 0.9}},
    "autocfl",
]


@pytest.fixture(scope="module")
def plain(module_experiment):
    """Makes an experiment of several methods, whose population changes."""

    def make(rounds, **changes):
        schedule = [{"round": 2, "leave": [0, 1]}, {"round": 5, "join": [0]}]
        of_few = {"data": {"partition": {"clients": 6}}, "local": {"epochs": 1}}
        return module_experiment(**{"rounds": rounds, "methods": METHODS, "schedule": schedule} | of_few | changes)

    return make


@pytest.fixture(scope="module")
def whole(plain, tmp_path_factory):
    """The results and the folder of a run of six rounds."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    return simulate(plain(6), folder), folder


@pytest.fixture(scope="module")
def short(plain, tmp_path_factory):
    """The folder of a run of the first four rounds, not to be changed."""
    folder = tmp_path_factory.mktemp("short") / "run"
    simulate(plain(4), folder)
    return folder


def without_times(directory, skip=()):
    """Every file of the rounds of a method, without times; skip: rounds to leave out."""
    records = [(record.round, record.metrics | {"round_seconds": 0.0}) for record in read_records(directory)]
    reassignments = read_reassignments(directory / "reassignments.arrow")
    return [one for one in records if one[0] not in skip], reassignments


def test_it_gives_what_a_run_of_all_rounds_gives(plain, whole, short, tmp_path):
    whole, whole_folder = whole
    before = {file: file.read_bytes() for file in short.rglob("*") if file.is_file()}
    longer = simulate(plain(6), tmp_path / "long", extend=short)
    assert list(longer.methods) == list(whole.methods) and len(longer.methods) == len(METHODS)
    for label in whole.methods:
        assert without_times(tmp_path / "long" / label) == without_times(whole_folder / label)
        assert longer[label].summary == whole[label].summary
        ours, theirs = (results[label].trained.personal_model(3) for results in (longer, whole))
        for name, tensor in theirs.state_dict().items():
            assert tensor.equal(ours.state_dict()[name])
    assert before == {file: file.read_bytes() for file in short.rglob("*") if file.is_file()}
    info = read_info(tmp_path / "long" / "fedavg")
    assert info.params["session.extends"] == str(short) and info.params["rounds"] == "6"


def test_the_last_evaluation_of_the_shorter_run_stays(plain, tmp_path):
    changes = {"evaluation": {"every": 2}, "methods": ["fedavg"]}
    simulate(plain(6, **changes), tmp_path / "whole")
    simulate(plain(3, **changes), tmp_path / "short")
    simulate(plain(6, **changes), tmp_path / "long", extend=tmp_path / "short")
    whole, long = tmp_path / "whole/fedavg", tmp_path / "long/fedavg"
    assert without_times(long, skip=[3]) == without_times(whole, skip=[3])
    assert "accuracy" in list(read_records(long))[2].metrics and "accuracy" not in list(read_records(whole))[2].metrics


def test_it_is_resumed_like_any_run(plain, tmp_path, figures):
    """Stopped in its own rounds; it needs the shorter run no more."""
    changes = {"methods": ["ditto", "fedavg"]}
    simulate(plain(2, **changes), tmp_path / "short")
    whole = simulate(plain(5, **changes))
    simulate_until(4, plain(5, **changes), tmp_path / "long", extend=tmp_path / "short")
    shutil.rmtree(tmp_path / "short")
    assert figures(resume(tmp_path / "long", on_ray=False)) == figures(whole)
    assert figures(load_run(tmp_path / "long")) == figures(whole)


def test_a_run_that_did_not_finish_is_extended_from_where_it_stopped(plain, whole, short, tmp_path, figures):
    """One method is finished, one has three of four rounds, one no checkpoint yet, the others have not begun."""
    shutil.copytree(short, tmp_path / "short")
    (tmp_path / "short/adam/end.json").unlink()
    shutil.rmtree(tmp_path / "short/adam/checkpoints")
    for label in ("stocfl", "autocfl"):
        shutil.rmtree(tmp_path / "short" / label)
    (tmp_path / "short/ditto/end.json").unlink()
    (tmp_path / "short/ditto/checkpoints/000004.json").unlink()
    assert figures(simulate(plain(6), tmp_path / "long", extend=tmp_path / "short")) == figures(whole[0])


def test_a_damaged_checkpoint_is_not_copied(plain, whole, tmp_path, figures):
    changes = {"methods": ["fedavg", "ditto"]}
    simulate(plain(4, **changes), tmp_path / "short")
    newest = tmp_path / "short/ditto/checkpoints/000004.json"
    newest.write_text(newest.read_text().replace('"round": 4', '"round": 5'))
    found = figures(simulate(plain(6, **changes), tmp_path / "long", extend=tmp_path / "short"))
    assert found == {label: figures(whole[0])[label] for label in changes["methods"]}
    for file in (tmp_path / "short/ditto/checkpoints").glob("*.json"):
        file.write_text("{}")
    with pytest.raises(RunError, match="no checkpoint in .*ditto/checkpoints can be used"):
        simulate(plain(6, **changes), tmp_path / "other", extend=tmp_path / "short")
    shutil.rmtree(tmp_path / "short/ditto/checkpoints")
    with pytest.raises(RunError, match="extend: .*short/ditto has no checkpoint any more"):
        simulate(plain(6, **changes), tmp_path / "other", extend=tmp_path / "short")
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith((".", "other"))] == []


@pytest.mark.parametrize(
    "rounds, changes, message",
    [
        (
            6,
            {"local": {"lr": 0.5}},
            r"only `rounds` may differ from those of .*run, and so do local.lr \(.* there, 0.5 h",
        ),
        (
            6,
            {"seed": 3, "methods": ["ifca"]},
            r"and so do methods \(.*ditto.* there, .*ifca.* here\), seed \(0 there, 3 here\)",
        ),
        (2, {}, "extend: .*run has 2 rounds and this run 2; give this run more"),
        (1, {}, "extend: .*run has 2 rounds and this run 1; give this run more"),
    ],
)
def test_what_cannot_be_extended_is_refused(experiment, run_dir, tmp_path, rounds, changes, message):
    with pytest.raises(ConfigError, match=message):
        simulate(experiment(rounds=rounds, **changes), tmp_path / "long", extend=run_dir)
    assert not (tmp_path / "long").exists()


def raise_no_space(*_):
    raise OSError(errno.ENOSPC, "No space left on device")


def test_where_it_cannot_be_made(experiment, run_dir, tmp_path, monkeypatch):
    longer = experiment(rounds=6)
    with pytest.raises(ConfigError, match="extend: .*nothing holds no run: there is no .*config.yaml"):
        simulate(longer, tmp_path / "long", extend=tmp_path / "nothing")
    with pytest.raises(ConfigError, match="extend: name a run_dir"):
        simulate(longer, extend=run_dir)
    with pytest.raises(ConfigError, match="run belongs to another config"):
        simulate(longer, run_dir, extend=run_dir)
    (tmp_path / "full").mkdir()
    (tmp_path / "full/notes.txt").write_text("mine")
    with pytest.raises(ConfigError, match="extend: .*full is not empty; choose another folder"):
        simulate(longer, tmp_path / "full", extend=run_dir)
    assert (tmp_path / "full/notes.txt").read_text() == "mine"
    with monkeypatch.context() as full:
        full.setattr(extension.shutil, "copyfile", raise_no_space)
        with pytest.raises(RunError, match="extend: .*long could not be made: No space left|No space left on device"):
            simulate(longer, tmp_path / "long", extend=run_dir)
    assert not (tmp_path / "long").exists() and not list(tmp_path.glob(".*"))
    with RunDirectory(run_dir).hold(), pytest.raises(RunError, match="extend: .*run is live; wait for its end"):
        simulate(longer, tmp_path / "long", extend=run_dir)
    with pytest.raises(ConfigError, match="replay and extend exclude each other"):
        run(longer, tmp_path / "long", replay=run_dir, extend=run_dir)


@pytest.mark.parametrize("schedule, allowed", [("cosine", False), ({"exponential": {"gamma": 0.9}}, True)])
def test_schedules_of_all_rounds_are_refused(experiment, tmp_path, figures, schedule, allowed):
    changes = {"local": {"epochs": 1, "batch_size": 8, "schedule": schedule}}
    simulate(experiment(rounds=2, **changes), tmp_path / "short")
    longer = experiment(rounds=4, **changes)
    if allowed:
        found = simulate(longer, tmp_path / "long", extend=tmp_path / "short")
        assert figures(found) == figures(simulate(longer))
        return
    message = r"local.schedule depends on the number of all rounds: in round 2 .* 0.5 of 2 rounds .* 0.8536 of 4"
    with pytest.raises(ConfigError, match=message):
        simulate(longer, tmp_path / "long", extend=tmp_path / "short")


def test_trackers_get_all_rounds(experiment, tmp_path):
    """MLflow has a run of its own for the longer one, with the rounds that were copied."""
    from mlflow import MlflowClient

    uri = f"sqlite:///{tmp_path / 'mlflow.db'}"
    changes = {"methods": ["fedavg"], "tracking": {"enabled": True, "uri": uri, "trackers": ["mlflow", "csv"]}}
    simulate(experiment(rounds=2, **changes), tmp_path / "short")
    simulate(experiment(rounds=3, **changes), tmp_path / "long", extend=tmp_path / "short")
    client = MlflowClient(uri)
    steps = {}
    for directory in ("short", "long"):
        run_id = json.loads((tmp_path / directory / "fedavg/mlflow.json").read_text())["run_id"]
        assert client.get_run(run_id).info.status == "FINISHED"
        steps[directory] = [point.step for point in client.get_metric_history(run_id, "accuracy")]
    assert steps == {"short": [1, 2], "long": [1, 2, 3]}
    assert len((tmp_path / "long/fedavg/metrics.csv").read_text().splitlines()) == 1 + 3
