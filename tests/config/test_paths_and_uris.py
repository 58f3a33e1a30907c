"""A URI in place of a path: an error that names the key, and no folder of the name `s3:`."""

import re

import pytest

from cfl_ray import Experiment, simulate
from cfl_ray.config import load
from cfl_ray.config.study import load_study
from cfl_ray.errors import ConfigError

ONLY = "only data.shards and tracking.uri may be URIs"


@pytest.mark.parametrize("uri", ["s3://bucket/runs", "gs://bucket/runs", "https://host/runs", "file:///runs"])
def test_output_takes_no_uri(uri, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=f"output is a path on a file system, got the URI {uri}; {ONLY}"):
        load(None, [f"output={uri}"])
    with pytest.raises(ConfigError, match=f"the run directory is a path on a file system, got the URI {uri[:4]}"):
        simulate(Experiment(), run_dir=uri)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("key", "values"),
    [
        ("root", {"data": {"source": "csv", "root": "s3://bucket/data"}}),
        ("weights", {"model": {"weights": "s3://bucket/weights.pt"}}),
        ("file", {"clock": {"kind": "trace", "file": "https://host/trace.csv"}}),
        ("file", {"cohort": {"availability": {"kind": "trace", "file": "s3://bucket/trace.csv"}}}),
    ],
)
def test_other_paths_take_no_uri(key, values):
    with pytest.raises(ConfigError, match=f"{key} is a path on a file system, got the URI .*; {ONLY}"):
        Experiment(**values)


def test_shards_and_tracking_take_uris_and_paths_may_have_colons():
    experiment = Experiment(data={"shards": "s3://bucket/shards"}, tracking={"uri": "https://host"}, output="a:b/c")
    assert experiment.output == "a:b/c"


@pytest.mark.parametrize(
    ("key", "place"),
    [
        ("output", "$SCRATCH/runs"),
        ("output", "/scratch/${USER}/runs"),
        ("data.shards", "s3://bucket/$USER"),
        ("tracking.uri", "sqlite:///$HOME/mlflow.db"),
    ],
)
def test_a_variable_in_a_place_for_files_is_refused(key, place, tmp_path, monkeypatch):
    """A folder of the name `$SCRATCH` would be made."""
    monkeypatch.chdir(tmp_path)
    section, _, inner = key.partition(".")
    keys = f"{section}: {{{inner}: '{place}'}}" if inner else f"{section}: '{place}'"
    variable = place[place.index("$") :].partition("/")[0]
    expected = re.escape(f"{key}: {place} has the variable {variable}, which a config does not replace")
    (tmp_path / "mine.yaml").write_text(keys)
    (tmp_path / "study.yaml").write_text(f"name: study\nexperiment: {{{keys}}}")
    for act in (lambda: load("mine.yaml"), lambda: load(None, [f"{key}={place}"]), lambda: load_study("study.yaml")):
        with pytest.raises(ConfigError, match=expected):
            act()


def test_a_folder_with_the_sign_of_a_variable_and_the_password_of_a_server_are_taken(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "$SCRATCH").mkdir()
    overrides = ["output=$SCRATCH/runs", "data.shards=us$/shards", "tracking.uri=http://me:pa$word@host"]
    assert load(None, overrides).output == "$SCRATCH/runs"
    run = tmp_path / "$SCRATCH" / "run"
    simulate(load(None, [*overrides[:2], "rounds=1", "data.partition.clients=4", "methods=[fedavg]"]), run)
    (tmp_path / "$SCRATCH").rename(tmp_path / "moved")
    assert load(tmp_path / "moved" / "run" / "config.yaml").output.endswith("runs")  # a record
