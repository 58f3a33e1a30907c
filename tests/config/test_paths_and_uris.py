"""A URI in place of a path: an error that names the key, and no folder of the name `s3:`."""

import pytest

from cfl_ray import Experiment, simulate
from cfl_ray.config import load
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
