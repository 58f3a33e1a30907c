"""What a run directory may be used for. Each is refused before anything starts, so none of these needs Ray."""

import pytest

from cfl_ray import ConfigError, resume, run, simulate


def test_directory_of_another_config(experiment, tmp_path):
    simulate(experiment(rounds=1), tmp_path / "run")
    before = (tmp_path / "run/ditto/metrics.jsonl").read_bytes()
    other = experiment(rounds=1, seed=7)
    with pytest.raises(ConfigError, match=f"run belongs to another config .hash {experiment(rounds=1).config_hash}, this one has {other.config_hash}."):
        run(other, tmp_path / "run")
    assert (tmp_path / "run/ditto/metrics.jsonl").read_bytes() == before


def test_directory_of_the_same_config(experiment, tmp_path):
    simulate(experiment(rounds=1), tmp_path / "run")
    with pytest.raises(ConfigError, match="holds a run of this config already; go on with it by `cfl-ray resume .*run` or choose another folder"):
        run(experiment(rounds=1), tmp_path / "run")


def test_directory_without_a_run(tmp_path):
    with pytest.raises(ConfigError, match="nothing holds no run: there is no .*config.yaml"):
        resume(tmp_path / "nothing")


def test_resuming_a_finished_run_does_nothing(experiment, figures, tmp_path):
    finished = figures(simulate(experiment(), tmp_path / "run"))
    before = (tmp_path / "run/ditto/metrics.jsonl").read_bytes()
    assert figures(resume(tmp_path / "run", on_ray=False)) == finished
    assert (tmp_path / "run/ditto/metrics.jsonl").read_bytes() == before
