"""Results as objects: frames, models and predictions, from memory and from files."""

import re
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from closeness import close

import cfl_ray
from cfl_ray.errors import ConfigError, DataError
from cfl_ray.methods import REGISTRY
from cfl_ray.results.export import export_model
from cfl_ray.results.reporting import write_report
from cfl_ray.results.results import MethodResult
from cfl_ray.results.trained import Newcomer

KEPT = ["fedavg", "ifca", "ditto", "fedper", "ifca_cam", "per_fedavg", "autocfl", "fedem"]  # every way of predicting


@pytest.fixture(scope="module")
def experiment_(tmp_path_factory):
    folder = tmp_path_factory.mktemp("load")
    return cfl_ray.Experiment(
        name="load",
        methods=KEPT,
        rounds=3,
        model={"options": {"hidden": 8}},
        data={"source": "digits", "shift": {"kind": "rotated"}, "partition": {"clients": 8, "samples": 30}},
        local={"epochs": 1, "batch_size": 20},
        evaluation={"every": 2},
        tracking={"enabled": False},
        runtime={"engine": "manual", "checkpoint_every": 1},
        output=str(folder),
    )


@pytest.fixture(scope="module")
def in_memory(experiment_):
    return cfl_ray.simulate(experiment_)


@pytest.fixture(scope="module")
def kept(experiment_, tmp_path_factory):
    directory = tmp_path_factory.mktemp("kept") / "run"
    cfl_ray.simulate(experiment_, directory)
    return directory


@pytest.fixture(scope="module")
def run(kept):
    return cfl_ray.load_run(kept)


def test_a_frame_has_every_round_of_every_method(run, in_memory):
    frame = run.to_frame()
    assert list(frame.columns[:2]) == ["method", "round"] and frame["round"].tolist() == [1, 2, 3] * len(KEPT)
    assert frame["method"].tolist() == np.repeat(KEPT, 3).tolist()
    assert frame["accuracy"].notna().tolist() == [False, True, True] * len(KEPT)  # evaluated every 2, and the last
    other = in_memory.to_frame().drop(columns="round_seconds")
    assert frame.drop(columns="round_seconds").equals(other)
    assert run["ifca"].to_frame()["accuracy"].iloc[-1] == run["ifca"].final["accuracy"]


@pytest.mark.parametrize("label", KEPT)
def test_predictions_have_the_recorded_accuracy(label, run, in_memory):
    """Of every client, from files and from memory."""
    recorded = run[label].client_metrics()
    assert list(recorded.columns) == ["round", "client", "accuracy", "macro_f1", "loss"]
    assert recorded["round"].tolist() == [2] * 8 + [3] * 8
    last = recorded[recorded["round"] == 3].set_index("client")["accuracy"]
    assert in_memory[label].client_metrics().equals(recorded)
    for client in range(8):
        x, y = run[label].test(client)
        labels = run[label].predict(client, x)
        assert (labels == y.numpy()).mean() == pytest.approx(last[client])
        assert np.array_equal(labels, in_memory[label].predict(client, x.numpy()))


def test_the_model_of_a_cluster_is_that_of_its_members(run):
    ifca, x = run["ifca"], run["ifca"].trained.federation.test(0)[0]
    assignments = ifca.assignments()
    assert assignments["client"].tolist() == list(range(8)) and set(assignments["group"]) == {0, 1, 2, 3}
    placed = assignments[assignments["cluster"] >= 0]
    assert len(placed) > 4
    for client, cluster in zip(placed["client"], placed["cluster"]):
        assert torch.equal(ifca.model(cluster)(x), ifca.personal_model(client)(x))
    model = ifca.model(cluster=1)
    assert isinstance(model, torch.nn.Module) and not model.training
    for name, tensor in ifca.state_dict(cluster=1).items():
        assert torch.equal(tensor, model.state_dict()[name])


def test_what_does_not_exist_is_named(run, tmp_path):
    assert list(run) == list(run.methods) and len(run) == len(run.methods)
    with pytest.raises(ConfigError, match=r"no method 'ifka' in this run; it has fedavg, ifca"):
        run.method("ifka")
    with pytest.raises(ConfigError, match=r"ifca has clusters 0 .. 3, got 4"):
        run["ifca"].model(4)
    with pytest.raises(ConfigError, match=r"ifca has clusters 0 .. 3, got no number; give the number of a cluster"):
        run["ifca"].model()
    assert run["fedavg"].state_dict().keys() == run["fedavg"].model().state_dict().keys()  # one model needs no name
    with pytest.raises(ConfigError, match=r"client 8 does not exist; the federation has clients 0 .. 7"):
        run["ditto"].personal_model(8)
    with pytest.raises(DataError, match=r"inputs have shape \(3, 9, 9\), expected \(n, 1, 8, 8\)"):
        run["fedavg"].predict(0, np.zeros((3, 9, 9)))
    with pytest.raises(ConfigError, match="holds no run"):
        cfl_ray.load_run(tmp_path)
    for wrong in ("1", 0.5, True):
        with pytest.raises(ConfigError, match=rf"ifca has clusters 0 .. 3, got {wrong!r}"):
            run["ifca"].model(wrong)
        with pytest.raises(ConfigError, match=rf"ifca has rounds 1 .. 3, got {wrong!r}"):
            run["ifca"].test(0, wrong)
        with pytest.raises(ConfigError, match=rf"a client is named by its number, from 0, got {wrong!r}"):
            run["ifca"].train(wrong)


def test_a_run_is_opened_with_its_own_experiment_alone(kept, experiment_):
    """With the seed of another run, clients would have other samples, and the models other predictions."""
    assert cfl_ray.load_run(kept, experiment_)["fedavg"].assignments() is not None
    with pytest.raises(ConfigError, match=r"run belongs to another config: seed \(0 there, 1 here\)"):
        cfl_ray.load_run(kept, experiment_.model_copy(update={"seed": 1}))


def test_samples_are_those_of_the_last_round_or_of_a_given_one(experiment_):
    """After a change of labels, predictions have the recorded accuracy on the samples of the last round."""
    change = {"round": 3, "change": [{"clients": [0], "relabel": 5}]}
    changed = cfl_ray.Experiment(**experiment_.to_dict() | {"schedule": [change], "methods": ["fedavg"]})
    result = cfl_ray.simulate(changed)["fedavg"]
    (last,) = result.client_metrics().query("round == 3 and client == 0")["accuracy"]
    x, y = result.test(0)
    assert (result.predict(0, x) == y.numpy()).mean() == pytest.approx(last)
    for now, before in ((result.test(0), result.test(0, round=2)), (result.train(0), result.train(0, round=1))):
        assert torch.equal(now[0], before[0]) and torch.equal(now[1], (before[1] + 5) % 10)
    with pytest.raises(ConfigError, match=r"fedavg has rounds 1 .. 3, got 4"):
        result.train(0, round=4)


def test_a_finished_run_that_is_resumed_has_its_models(kept, run):
    again = cfl_ray.resume(kept)["ifca"]
    assert torch.equal(again.trained.state.models_KP, run["ifca"].trained.state.models_KP)


def test_every_method_of_a_result_gives_the_same_for_each_way_of_getting_it(experiment_, in_memory, tmp_path):
    """From `simulate` without and with files, `load_run`, and `resume` of the finished run."""
    alone = cfl_ray.Experiment(**experiment_.to_dict() | {"methods": ["ifca"]})
    ways = {"in memory": in_memory, "simulate": cfl_ray.simulate(alone, tmp_path / "run")}
    ways |= {"load_run": cfl_ray.load_run(tmp_path / "run"), "resume": cfl_ray.resume(tmp_path / "run", on_ray=False)}
    x, y = in_memory["ifca"].train(0)
    arguments = {"model": (0,), "state_dict": (0,), "personal_model": (1,), "test": (0,), "train": (0, 1)}
    arguments |= {"predict": (x, 1), "place": (x, y), "adapt": (x, y)}
    fields = {"directory", "open_trained", "clients", "reported", "trained", "seconds", "seconds_until"}
    fields |= {"validation"}  # which needs validation data: test_validation_data.py
    asked = [name for name in dir(MethodResult) if not name.startswith("_") and name not in fields]
    assert {*arguments, "client_metrics", "recovery", "diagnostics", "assignments", "events"} <= {*asked}

    def shown(value) -> str:
        if isinstance(value, Newcomer):
            return f"{value.cluster} {value.why} {shown(value.model)}"
        if isinstance(value, torch.nn.Module):
            return shown(value.state_dict())
        text = str(value.to_dict("list") if hasattr(value, "columns") else value)
        return re.sub(r"'round_seconds': (\[.*?\]|[\d.e-]+)", "", text)

    for name in asked:
        found = {}
        for way, results in ways.items():
            value = getattr(results["ifca"], name)
            found[way] = shown(value(*arguments.get(name, ())) if callable(value) else value)
        assert len(set(found.values())) == 1, (name, found)


def test_a_run_that_was_stopped_has_what_was_saved(kept, tmp_path):
    """A method that has not begun is there, without rounds and models."""
    import shutil

    shutil.copytree(kept, tmp_path / "run", ignore=shutil.ignore_patterns("ditto", "000003.json"))
    (tmp_path / "run/end.json").unlink()
    with pytest.raises(ConfigError, match="signature.json is of another folder"):
        cfl_ray.load_run(tmp_path / "run")["ifca"].trained  # noqa: B018
    with pytest.raises(DataError, match="the checkpoint of round 3, the last one, is missing or damaged"):
        cfl_ray.load_run(tmp_path / "run", trust=True)["ifca"].trained  # noqa: B018
    (tmp_path / "run" / "ifca" / "end.json").unlink()
    run = cfl_ray.load_run(tmp_path / "run")
    assert run["ditto"].records == [] and run["ditto"].final == {} and len(run["ditto"].to_frame()) == 0
    with pytest.raises(ConfigError, match="ditto has not begun"):
        run["ditto"].model(0)
    assert run["ifca"].trained.round == 2, "trusted once"
    assert cfl_ray.load_run(tmp_path / "run", trust=True)["ifca"].trained.round == 2


class TestExport:
    def test_safetensors_and_pt_hold_the_model(self, run, tmp_path):
        from safetensors import safe_open

        trained, file = run["ifca"].trained, tmp_path / "new" / "model.safetensors"
        assert export_model(trained, file, cluster=2) == f"ifca, cluster 2, after round 3: {file}"
        with safe_open(file, "pt") as content:
            found = {name: content.get_tensor(name) for name in content.keys()}  # noqa: SIM118
            assert content.metadata() == {
                "method": "ifca",
                "of": "cluster 2",
                "round": "3",
                "input": "[1, 8, 8]",
                "scale": "16.0",
                "normalize": "null",
            }
        expected = trained.state_dict(2)
        assert found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in found)
        export_model(run["ditto"].trained, tmp_path / "model.pt", client=3)
        model = run["ditto"].personal_model(3)
        model.load_state_dict(torch.load(tmp_path / "model.pt", weights_only=True))

    def test_the_names_of_classes_are_in_the_result_and_in_the_file(self, run, tmp_path):
        from safetensors import safe_open

        (tmp_path / "t.csv").write_text("a,b,kind\n" + "1,2,plum\n4,1,pear\n" * 20)
        columns, partition = {"label": "kind"}, {"clients": 2}
        data = {"source": "csv", "root": str(tmp_path), "columns": columns, "partition": partition}
        sections = {"data": data, "tracking": {"enabled": False}, "output": str(tmp_path)}
        cfl_ray.simulate(cfl_ray.Experiment(rounds=1, methods=["fedavg"], **sections), tmp_path / "run")
        result = cfl_ray.load_run(tmp_path / "run")["fedavg"]
        assert result.class_names == ("pear", "plum") and run["ifca"].class_names == ()
        export_model(result.trained, tmp_path / "model.safetensors", cluster=0)
        with safe_open(tmp_path / "model.safetensors", "pt") as content:
            assert content.metadata()["class_names"] == '["pear", "plum"]'

    def test_a_mixture_is_written_with_its_weights(self, run, tmp_path):
        """A file, loaded into the model of another client, predicts as the client of the file."""
        from safetensors.torch import load_file

        fedem, x = run["fedem"], run["fedem"].test(2)[0]
        for name, read in {"model.pt": torch.load, "model.safetensors": load_file}.items():
            export_model(fedem.trained, tmp_path / name, client=2)
            tensors, other = read(tmp_path / name), fedem.personal_model(5)
            assert tensors["weight_K"].numpy() == pytest.approx(fedem.trained.state.weight_NK[2], rel=1e-5)
            assert not torch.equal(other(x), fedem.trained.outputs(2, x))
            other.load_state_dict(tensors)
            assert torch.equal(other(x), fedem.trained.outputs(2, x))

    def test_every_other_request_is_refused(self, run, tmp_path):
        trained = run["ifca"].trained
        with pytest.raises(ConfigError, match=r"a model is written as .safetensors, .pt, .onnx, got '.h5'"):
            export_model(trained, tmp_path / "model.h5", cluster=0)
        with pytest.raises(ConfigError, match="name a cluster or a client, got cluster 0 and client 1"):
            export_model(trained, tmp_path / "model.pt", cluster=0, client=1)
        assert not list(tmp_path.iterdir())

    def test_onnx_gives_the_same_outputs(self, run, tmp_path):
        onnx = pytest.importorskip("onnx", reason="ONNX export needs the packages onnx and onnxscript")
        pytest.importorskip("onnxscript")
        from onnx.reference import ReferenceEvaluator

        for label in ("ifca_cam", "fedem"):
            export_model(run[label].trained, tmp_path / "model.onnx", client=1)
            x = run[label].trained.federation.test(1)[0][:5]
            (outputs,) = ReferenceEvaluator(onnx.load(tmp_path / "model.onnx")).run(None, {"x": x.numpy()})
            assert close(outputs, run[label].trained.outputs(1, x).numpy(), 1e-5), label


def test_a_function_that_no_longer_gives_the_data_is_named_when_models_are_opened(tmp_path, monkeypatch):
    source = "import os\nimport numpy as np\n\n\ndef load():\n    owner = np.arange(20) // 5\n"
    source += "    return {'x': np.eye(20) * float(os.environ['SCALE']), 'y': np.arange(20) % 2, 'clients': owner}\n"
    (tmp_path / "own.py").write_text(source)
    monkeypatch.setenv("SCALE", "1")
    sections = {"data": {"source": f"{tmp_path}/own.py:load"}, "tracking": {"enabled": False}, "output": str(tmp_path)}
    cfl_ray.simulate(cfl_ray.Experiment(rounds=1, methods=["fedavg"], **sections), tmp_path / "run")
    monkeypatch.delenv("SCALE")
    result = cfl_ray.load_run(tmp_path / "run")["fedavg"]
    assert len(result.client_metrics()) == 4
    with pytest.raises(ConfigError) as error:
        result.model()
    message = str(error.value)
    assert "need the run's data and network again" in message and "load (" in message and "own.py, line" in message
    assert "KeyError: 'SCALE'" in message


class Silent:
    """A tracker."""

    def open(self, run_dir, info, after): ...

    def log(self, record): ...

    def close(self, end): ...


def test_a_run_of_objects_made_in_python_is_read_without_them(tmp_path):
    """Its records: as results, as a table and as a report. Its models need the experiment."""

    @dataclass(frozen=True)
    class Mine(REGISTRY["fedavg"], name="mine_of_load"):
        """FedAvg by another name."""

    experiment = cfl_ray.Experiment(
        rounds=1,
        methods=[Mine(), "fedavg"],
        model=lambda shape, classes: torch.nn.Sequential(torch.nn.Flatten(), torch.nn.LazyLinear(classes)),
        data={"partition": {"clients": 4, "samples": 20}},
        tracking={"trackers": [Silent], "report": False},
    )
    cfl_ray.simulate(experiment, tmp_path / "run")
    results = cfl_ray.load_run(tmp_path / "run")
    assert list(results.methods) == ["mine_of_load", "fedavg"] and len(results["mine_of_load"].client_metrics()) == 4
    assert cfl_ray.compare_runs([tmp_path / "run"])["method"].tolist() == ["mine_of_load", "fedavg"]
    assert "mine_of_load" in write_report([tmp_path / "run"], tmp_path / "report.html").read_text()
    with pytest.raises(ConfigError, match=r"if the experiment has objects made in Python, pass it: load_run\(RUN, exp"):
        results["mine_of_load"].model()
    assert cfl_ray.load_run(tmp_path / "run", experiment)["mine_of_load"].model() is not None
    shown = repr(results)
    assert "mine_of_load" in shown and "RoundRecord" not in shown and len(shown) < 600
