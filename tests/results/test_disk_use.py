"""The disk space of runs: what no run needs is dropped, and nothing else."""

import re
import shutil

import pytest
import torch
from commands import status_of
from small_runs import PLANTED, merged, metrics_of, simulate_until

from cfl_ray import Experiment, load_run, resume, simulate
from cfl_ray.errors import ConfigError
from cfl_ray.results.difference import differences_of
from cfl_ray.results.disk_use import KINDS, disk_use, droppable, other_files


def small(**changes):
    few = {"rounds": 2, "methods": ["fedavg"], "runtime": {"checkpoint_every": 1}}
    return Experiment(**merged(PLANTED, merged(few, changes)))


def digits(output, **changes):
    data = {"source": "digits", "partition": {"clients": 4}}
    return small(data=data, output=str(output), evaluation={"local": False}, **changes)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A folder with a finished and a stopped run, each with shards, and shards of neither."""
    folder = tmp_path_factory.mktemp("runs")
    simulate(digits(folder), folder / "finished")
    simulate_until(2, digits(folder, seed=1, rounds=3), folder / "stopped")
    simulate(digits(folder, seed=2, rounds=1), folder / "gone")
    shutil.rmtree(folder / "gone")
    return folder


@pytest.fixture
def copied(runs, tmp_path, monkeypatch):
    """The same in a folder of the test, whose runs are the user's."""
    monkeypatch.setenv("CFL_RAY_KEY", "0123456789abcdef")
    folder = tmp_path / "runs"
    shutil.copytree(runs, folder)
    return folder


def test_the_sizes_are_those_of_all_files(copied):
    found = disk_use(copied)
    files = [path for path in copied.rglob("*") if path.is_file()]
    assert sum(use.total for use in found) == sum(path.stat().st_size for path in files)
    states = {use.path.name: use.state for use in found if "shards" not in use.bytes}
    assert states == {"finished": "finished", "stopped": "unfinished"}
    assert sorted(use.state for use in found if "shards" in use.bytes) == ["needed", "needed", "not needed"]
    assert {kind for use in found for kind in use.bytes} == set(KINDS)
    with pytest.raises(ConfigError, match="has no runs and no shards"):
        disk_use(copied / "finished/fedavg")


def test_files_beside_runs_and_shards_are_named(copied, capsys):
    (copied / "notes").mkdir()
    (copied / "notes/a.txt").write_bytes(b"x" * 3_000_000)
    (copied / "mlflow.db").write_bytes(b"x" * 9_000_000)
    found = disk_use(copied)
    assert other_files(copied, found) == [(copied / "mlflow.db", 9_000_000), (copied / "notes", 3_000_000)]
    assert other_files(copied / "finished", disk_use(copied / "finished")) == []
    assert status_of("du", copied) == 0
    assert re.search(r"\d+\.\d+  other files: mlflow.db \d+\.\d+, notes \d+\.\d+\n", capsys.readouterr().out)


def test_only_what_no_run_needs_is_dropped_and_only_when_asked(copied, capsys):
    before = sorted(path for path in copied.rglob("*"))
    assert status_of("clean", copied) == 0
    assert "nothing was dropped yet: cfl-ray clean" in capsys.readouterr().out.replace("\n", " ")
    assert sorted(path for path in copied.rglob("*")) == before
    model = load_run(copied / "finished", trust=True)["fedavg"].state_dict(cluster=0)
    assert status_of("clean", copied, "--yes") == 0
    gone = {path.relative_to(copied).parts[:3] for path in set(before) - set(copied.rglob("*"))}
    assert {parts[0] for parts in gone} == {"finished", "shards"} and ("finished", "fedavg", "checkpoints") in gone
    assert len(list((copied / "shards").glob("*/manifest.json"))) == 2
    again = load_run(copied / "finished", trust=True)["fedavg"].state_dict(cluster=0)
    assert all((again[name] == model[name]).all() for name in model)
    assert not droppable(copied)


def test_the_models_of_the_best_round_stay(tmp_path, monkeypatch):
    """With and without the checkpoints of client states; the best round is the first of four."""
    monkeypatch.setenv("CFL_RAY_KEY", "0123456789abcdef")
    keep = {"which": "best", "metric": "test_loss", "goal": "maximize"}
    simulate(digits(tmp_path, rounds=4, methods=["fedavg", "ditto"], keep=keep), tmp_path / "run")
    before = load_run(tmp_path / "run")
    assert {before[name].best_round for name in ("fedavg", "ditto")} == {1}
    assert status_of("clean", tmp_path, "--yes") == 0
    after = load_run(tmp_path / "run")
    for name in ("fedavg", "ditto"):
        assert sorted(path.name for path in (tmp_path / "run" / name / "checkpoints").glob("*.json")) == [
            "000001.json",
            "000004.json",
        ]
        kept = after[name].model(cluster=0).state_dict()
        assert all(torch.equal(value, kept[key]) for key, value in before[name].model(cluster=0).state_dict().items())


def test_models_are_dropped_when_asked_and_records_stay(copied):
    metrics = metrics_of(load_run(copied / "finished", trust=True)["fedavg"])
    assert status_of("clean", "--models", "--figures", "--yes", copied) == 0
    left = load_run(copied / "finished", trust=True)["fedavg"]
    assert metrics_of(left) == metrics and not list((copied / "finished").rglob("*.html"))
    with pytest.raises(ConfigError, match="has no checkpoint any more, only its records"):
        left.model(cluster=0)
    resumed = resume(copied / "stopped", on_ray=False, trust=True)  # nothing of an unfinished run was dropped
    assert [record.round for record in resumed["fedavg"].records] == [1, 2, 3]


class TestDifferences:
    def test_of_a_run_and_itself_are_none(self, runs):
        assert not any(differences_of(runs / "finished", runs / "finished").values())

    def test_name_keys_data_rounds_and_metrics(self, runs):
        found = differences_of(runs / "finished", runs / "stopped")
        assert "seed: 0 -> 1" in found["config"] and "rounds: 2 -> 3" in found["config"]
        assert found["data"][0].startswith("digest: ") and not found["versions"] and not found["code"]
        assert found["results"][0] == "fedavg: metrics differ from round 1 on"
        assert any(line.startswith("fedavg: accuracy 0.") for line in found["results"])

    def test_show_the_lines_of_the_code(self, tmp_path, capsys):
        text = "def spread(outputs, targets):\n    return outputs.std() * {}\n"
        for number in (1, 2):
            (tmp_path / "mine.py").write_text(text.format(number))
            metric = f"{tmp_path}/mine.py:spread"
            simulate(small(rounds=1, evaluation={"metrics": [metric]}), tmp_path / str(number))
        (tmp_path / "mine.py").write_text("raise SystemExit('it is not imported')")
        assert status_of("diff", tmp_path / "1", tmp_path / "2") == 0
        printed = capsys.readouterr().out
        assert "config: equal" in printed and "-    return outputs.std() * 1" in printed
        assert "fedavg: spread " in printed
        with pytest.raises(ConfigError, match="is a folder above 2 runs"):
            differences_of(tmp_path / "1", tmp_path)

    def test_pair_the_files_of_two_folders(self, tmp_path):
        """A colleague's copy of the code lies in a folder of another name."""
        text = "def spread(outputs, targets):\n    return outputs.std()\n"
        for name, more in (("ours", ""), ("theirs", ""), ("third", "# edited\n")):
            (tmp_path / name).mkdir()
            (tmp_path / name / "mine.py").write_text(text + more)
            metric = f"{tmp_path}/{name}/mine.py:spread"
            simulate(small(rounds=1, evaluation={"metrics": [metric]}), tmp_path / f"run_{name}")
        assert differences_of(tmp_path / "run_ours", tmp_path / "run_theirs")["code"] == []
        (line,) = differences_of(tmp_path / "run_ours", tmp_path / "run_third")["code"]
        assert line.startswith("ours/mine.py -> third/mine.py:") and "+# edited" in line
