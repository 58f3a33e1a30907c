"""Models of the end in MLflow: they load again without the code that made them, and survive an unreachable server."""

import pytest
import torch
from closeness import close

from cfl_ray import simulate
from cfl_ray.errors import ConfigError
from cfl_ray.lifecycle.driver import Watcher
from cfl_ray.tracking import deliver_pending, mlflow_tracker
from cfl_ray.tracking.mlflow import DEFAULTS

NET = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self, num_classes):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, num_classes))

    def forward(self, x):
        return self.layers(x)

class Branching(Net):
    def forward(self, x):
        return self.layers(x) if x.sum() > 0 else self.layers(-x)

class Recurrent(nn.LSTM):
    def __init__(self, num_classes):
        super().__init__(1, num_classes, batch_first=True)

    def forward(self, x):
        return super().forward(x[:, :, None])[0][:, -1]
"""


@pytest.fixture
def own(tmp_path):
    """A file with models."""
    path = tmp_path / "nets" / "own_net.py"
    path.parent.mkdir()
    path.write_text(NET)
    return path


@pytest.fixture
def tracked(experiment, tmp_path, monkeypatch):
    """Makes an experiment whose runs are in an SQLite store."""
    import mlflow  # here, because it takes two seconds

    for name in DEFAULTS:  # set and deleted, so that what a run sets is undone after the test
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    uri = f"sqlite:///{tmp_path / 'mlflow.db'}"
    before = mlflow.get_tracking_uri()

    def make(**changes):
        tracking = {"enabled": True, "uri": uri, "log_models": True}
        return experiment(**{"rounds": 2, "tracking": tracking} | changes)

    make.uri = uri
    yield make
    mlflow.set_tracking_uri(before)


def figures(results):
    """Metrics of the last round of each method, without times."""
    return {
        label: {name: value for name, value in result.final.items() if not name.endswith("_seconds")}
        for label, result in results.methods.items()
    }


def models_in(uri, label):
    """The models of the run of a method, by name."""
    from mlflow import MlflowClient

    client = MlflowClient(uri)
    (experiment,) = [one for one in client.search_experiments() if one.name == "cfl_ray"]
    (run,) = client.search_runs([experiment.experiment_id], f"tags.label = '{label}'")
    found = client.search_logged_models([experiment.experiment_id], f"source_run_id = '{run.info.run_id}'")
    models = {model.name: model for model in found}
    assert len(models) == len(found) and {one.status for one in found} <= {"READY"}
    assert run.info.status == "FINISHED" and run.data.metrics
    assert {one.model_id for one in run.outputs.model_outputs} == {one.model_id for one in found}
    return models


def test_the_model_of_each_cluster_loads_again_and_predicts_the_same(tracked, own, tmp_path):
    import mlflow  # here, because it takes two seconds

    methods = [{"ifca": {"num_clusters": 2}}, "ifca_cam"]
    changes = {"methods": methods, "model": {"name": f"{own}:Net", "options": {}}}
    results = simulate(tracked(**changes), tmp_path / "run")
    plain = simulate(tracked(**changes, tracking={"enabled": False}), tmp_path / "plain")
    assert figures(plain) == figures(results), "logging changes no result"
    own.unlink()
    mlflow.set_tracking_uri(tracked.uri)
    for label, result in results.methods.items():
        models = models_in(tracked.uri, label)
        assert models.keys() == {f"cluster-{k}" for k in range(result.trained.num_clusters)}
        for cluster in range(result.trained.num_clusters):
            uri = f"models:/{models[f'cluster-{cluster}'].model_id}"
            x = torch.rand(5, *result.trained.federation.shape.input)
            assert close(mlflow.pytorch.load_model(uri)(x), result.model(cluster)(x), 1e-5)
            described = mlflow.models.get_model_info(uri)
            assert [(one.shape, one.type.name) for one in described.signature.inputs] == [((-1, 8), "float32")]
            assert [one.shape for one in described.signature.outputs] == [(-1, 10)]
            assert described.run_id == models[f"cluster-{cluster}"].source_run_id
    assert not list((tmp_path / "run").rglob("*.pkl")) and not (tmp_path / "plain/ifca/models").exists()


def test_a_model_that_cannot_be_exported_is_named_and_the_run_goes_on(tracked, own, tmp_path):
    watcher, lines = Watcher(), []
    watcher.warn = lines.append
    changes = {"methods": ["fedavg"], "model": {"name": f"{own}:Branching", "options": {}}}
    changes["runtime"] = {"engine": "sequential"}
    simulate(tracked(**changes), tmp_path / "run", watcher)
    assert models_in(tracked.uri, "fedavg") == {}
    (line,) = lines
    assert line.startswith(
        "fedavg: the model of cluster 0 is not logged to MLflow, since torch.export cannot write it ("
    )


def test_a_recurrent_model_is_logged_without_warnings(tracked, own, tmp_path, recwarn):
    changes = {"model": {"name": f"{own}:Recurrent", "options": {}}, "runtime": {"engine": "sequential"}}
    simulate(tracked(methods=["fedavg"], **changes), tmp_path / "run")
    assert models_in(tracked.uri, "fedavg").keys() == {"cluster-0"}
    assert not [warning for warning in recwarn if "during export" in str(warning.message)]


def test_models_are_delivered_once_by_a_later_command(tracked, tmp_path, monkeypatch):
    import mlflow  # here, because it takes two seconds

    with monkeypatch.context() as unreachable:
        unreachable.setattr(mlflow_tracker, "accepts_connection", lambda uri: False)
        results = simulate(tracked(methods=["fedavg"]), tmp_path / "run")
    with monkeypatch.context() as broken:

        def fail(client, *arguments):
            raise ConnectionError("lost")

        broken.setattr(mlflow.MlflowClient, "finalize_logged_model", fail)
        assert [run_dir.name for run_dir in deliver_pending(tmp_path, seconds=60)] == ["run"], "the parent"
    assert [run_dir.name for run_dir in deliver_pending(tmp_path, seconds=60)] == ["fedavg"]
    assert deliver_pending(tmp_path, seconds=60) == {}
    mlflow.set_tracking_uri(tracked.uri)
    ((name, model),) = models_in(tracked.uri, "fedavg").items()
    x = torch.rand(3, 8)
    assert name == "cluster-0"
    loaded = mlflow.pytorch.load_model(f"models:/{model.model_id}")
    assert close(loaded(x), results["fedavg"].model()(x), 1e-5)


def test_the_tracker_that_logs_them_is_needed(tracked):
    with pytest.raises(ConfigError, match=r"log_models: true needs the tracker mlflow, got trackers \['csv'\]"):
        tracked(tracking={"log_models": True, "trackers": ["csv"]})
