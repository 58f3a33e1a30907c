"""The saved models of a method are tested as their users would test them, and give the recorded scores."""

import logging
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from small_runs import Notes, metrics_of, simulate_until
from torch import nn

from cfl_ray import Experiment, federation_from_arrays, load_run, resume, simulate
from cfl_ray.errors import ConfigError, NotReproduced
from cfl_ray.lifecycle import driver
from cfl_ray.results.results import divergence
from cfl_ray.results.verification import verify
from cfl_ray.tracking import read_end

NET = """
from torch import nn
{comment}

def make(shape, classes):
    return nn.Sequential(nn.Linear(shape[0], {width}), nn.{act}(), nn.Linear({width}, classes))
"""


def write_model(folder, comment="", width=16, act="ReLU"):
    (folder / "net.py").write_text(NET.format(comment=comment, width=width, act=act))


def write_data(folder, sign=1):
    draw = np.random.default_rng(0)
    x = draw.normal(size=(200, 6)).astype("float32")
    y = (x[:, 0] * x[:, 1] > 0).astype(int)
    np.savez(folder / "data.npz", x=sign * x, y=y, clients=np.arange(200) // 20)


@pytest.fixture
def files(tmp_path, monkeypatch):
    """A folder with a model and data, which is the working directory."""
    write_model(tmp_path)
    write_data(tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def of_files(rounds=3, **sections):
    sections = {"tracking": {"enabled": False}, "local": {"lr": 0.3}, "methods": ["fedavg"]} | sections
    data = {"source": "arrays", "root": "data.npz"}
    return Experiment(data=data, rounds=rounds, model={"name": "net.py:make"}, **sections)


class TestComparison:
    @pytest.fixture(scope="class")
    def result(self):
        draw = np.random.default_rng(0)
        x = draw.normal(size=(120, 5)).astype("float32")
        data = federation_from_arrays(x, (x[:, 0] > 0).astype(int), np.arange(120) // 20)
        experiment = Experiment(
            data=data, rounds=2, methods=["ifca"], model={"name": "mlp"}, tracking={"enabled": False}
        )
        return experiment, simulate(experiment)["ifca"]

    def changed(self, result, column, change):
        """The result with other recorded scores."""
        at = result.clients.schema.get_field_index(column)
        values = pa.array(change(result.clients[column].to_numpy().copy()))
        return replace(result, clients=result.clients.set_column(at, column, values))

    def test_scores_that_were_recorded_agree(self, result):
        experiment, of_method = result
        verify(of_method.trained, of_method, experiment)

    @pytest.mark.parametrize("factor", [1 + 1e-2, 1 - 1e-2, 2.0])
    def test_another_loss_is_an_error_with_client_and_both_values(self, result, factor):
        experiment, of_method = result
        other = self.changed(of_method, "loss", lambda values: values * np.float32(factor))
        with pytest.raises(
            NotReproduced, match=r"of client 0 are accuracy .* and loss \S+ \(recorded: \S+\).*register_b"
        ):
            verify(of_method.trained, other, experiment)
        verify(of_method.trained, other, skip(experiment))

    def test_rounding_is_no_error(self, result):
        experiment, of_method = result
        verify(of_method.trained, self.changed(of_method, "loss", lambda v: v * np.float32(1 + 1e-4)), experiment)

    def test_edited_files_are_the_cause(self, result):
        experiment, of_method = result
        other = self.changed(of_method, "loss", lambda values: values + 1)
        with pytest.raises(NotReproduced, match=r"edited since the run began: f/net.py; evaluation.verify: false"):
            verify(of_method.trained, other, experiment, ["f/net.py"])

    def test_scores_of_an_earlier_round_are_not_compared(self, result):
        experiment, of_method = result
        other = self.changed(of_method, "loss", lambda values: values + 1)
        verify(replace(of_method.trained, round=7), other, experiment)


def skip(experiment):
    """The experiment without verification."""
    return experiment.model_copy(update={"evaluation": experiment.evaluation.model_copy(update={"verify": False})})


def test_it_does_not_belong_to_the_experiment():
    assert Experiment(evaluation={"verify": False}).config_hash == Experiment().config_hash


def test_a_method_that_is_not_reproduced_fails_and_the_next_one_runs(files, monkeypatch):
    def fails(trained, result, experiment):
        if trained.label == "fedavg":
            raise NotReproduced("fedavg: other scores")

    monkeypatch.setattr(driver, "verify", fails)
    with pytest.raises(NotReproduced, match="fedavg: other scores"):
        simulate(of_files(methods=["fedavg", "ifca"]), run_dir="run")
    assert read_end(files / "run/fedavg").status == "FAILED"
    assert read_end(files / "run/ifca").status == "FINISHED"
    monkeypatch.undo()
    monkeypatch.chdir(files)
    results = resume("run", on_ray=False)  # verified again
    assert read_end(files / "run/fedavg").status == "FINISHED"
    assert results["fedavg"].final["accuracy"] > 0


class TestEditedCode:
    @pytest.fixture
    def run(self, files):
        simulate(of_files(), run_dir="run")
        return files / "run"

    @pytest.fixture(autouse=True)
    def said(self, caplog):
        caplog.set_level(logging.WARNING)
        return caplog

    def test_a_loaded_run_says_it_and_tests_its_models(self, run, files, said):
        write_model(files, comment="# a comment")
        assert load_run(run)["fedavg"].state_dict(cluster=0)
        assert f"{files}/net.py was edited:\n  @@ -3 +3 @@\n  -\n  +# a comment" in said.text
        write_model(files, act="Tanh")
        assert load_run(run)["fedavg"].model(cluster=0)  # of the run's copy
        with pytest.raises(NotReproduced, match=rf"edited since the run began: {files.name}/net.py"):
            load_run(run, code="now")["fedavg"].model(cluster=0)

    def test_recorded_metrics_need_no_model(self, run, files):
        write_model(files, act="Tanh")
        write_data(files, sign=-1)
        assert load_run(run)["fedavg"].final["accuracy"] > 0

    def test_a_longer_run_says_it_and_tests_its_start(self, run, files):
        write_model(files, comment="# a comment")
        watcher = Notes()
        simulate(of_files(rounds=4), run_dir="longer", extend=run, watcher=watcher, code="now")
        assert any(f"{files.name}/net.py was edited since this run began" in line for line in watcher.warnings)
        write_model(files, act="Tanh")
        with pytest.raises(NotReproduced, match=r"fedavg: the saved models do not give .* of client 0 are"):
            simulate(of_files(rounds=4), run_dir="other", extend=run, code="now")
        copied = simulate(of_files(rounds=4), run_dir="copied", extend=run, watcher=watcher)
        assert any(f"its copy in {run}/user_code is used" in line for line in watcher.warnings)
        assert "nn.ReLU()" in (files / "copied/user_code" / files.name / "net.py").read_text()
        write_model(files)
        longer = load_run("longer")["fedavg"]
        assert metrics_of(copied["fedavg"]) == metrics_of(longer)

    def test_another_number_of_parameters_names_the_model(self, run, files):
        write_model(files, width=32)
        with pytest.raises(Exception, match=r"the model make \(.*net.py, line \d+\) has 290 .* of the run have 146"):
            load_run(run, code="now")["fedavg"].model(cluster=0)

    def test_files_that_the_model_imports_count(self, files, said):
        (files / "layers.py").write_text("from torch import nn\nACT = nn.ReLU\n")
        (files / "net.py").write_text(
            "from torch import nn\nfrom layers import ACT\n\ndef make(shape, classes):\n"
            "    return nn.Sequential(nn.Linear(shape[0], 16), ACT(), nn.Linear(16, classes))\n"
        )
        simulate(of_files(), run_dir="run")
        (files / "layers.py").write_text("from torch import nn\nACT = nn.Sigmoid\n")
        with pytest.raises(NotReproduced, match=rf"edited since the run began: {files.name}/layers.py"):
            load_run("run", code="now")["fedavg"].model(cluster=0)
        sys.modules.pop("layers", None)


class TestWhatCodeReads:
    """A network that depends on an environment variable or a file is another one without any edit of its code."""

    SCALED = """
import os
from pathlib import Path
from torch import nn

class Scaled(nn.Sequential):
    def forward(self, x):
        return super().forward(x * float(os.environ.get("SCALE") or Path("scale.txt").read_text()))

def make(shape, classes):
    return Scaled(nn.Linear(shape[0], 16), nn.ReLU(), nn.Linear(16, classes))
"""

    @pytest.fixture
    def run(self, files):
        (files / "net.py").write_text(self.SCALED)
        (files / "scale.txt").write_text("1.0")
        simulate(of_files(), run_dir="run")
        return files / "run"

    def by_variable(self, files, monkeypatch):
        monkeypatch.setenv("SCALE", "-1.0")

    def by_file(self, files, monkeypatch):
        (files / "scale.txt").write_text("-1.0")

    @pytest.mark.parametrize("change", [by_variable, by_file])
    def test_a_longer_run_and_saved_models_are_refused(self, run, files, monkeypatch, change):
        change(self, files, monkeypatch)
        with pytest.raises(NotReproduced, match=r"of client 0 are"):
            simulate(of_files(rounds=4), run_dir="longer", extend=run)
        with pytest.raises(NotReproduced, match=r"of client 0 are"):
            load_run(run)["fedavg"].model(cluster=0)

    def test_an_interrupted_run_does_not_go_on(self, files, monkeypatch):
        (files / "net.py").write_text(self.SCALED)
        (files / "scale.txt").write_text("1.0")
        simulate_until(2, of_files(rounds=4, runtime={"checkpoint_every": 1}), files / "run")
        monkeypatch.setenv("SCALE", "-1.0")
        with pytest.raises(NotReproduced, match=r"in round 2: .* of client 0 are"):
            resume("run", on_ray=False)
        monkeypatch.setenv("SCALE", "1.0")
        assert len(resume("run", on_ray=False)["fedavg"].records) == 4

    def test_a_finished_method_needs_no_checkpoint(self, run, files):
        shutil.rmtree(run / "fedavg/checkpoints")
        assert len(resume("run", on_ray=False)["fedavg"].records) == 3


class TestReplacedData:
    @pytest.mark.parametrize("use", ["test", "predict", "model"])
    def test_a_loaded_run_refuses_other_data(self, files, use):
        simulate(of_files(), run_dir="run")
        write_data(files, sign=-1)
        result = load_run("run")["fedavg"]
        with pytest.raises(ConfigError, match=r"data.npz|content.data.root"):
            {
                "test": lambda: result.test(0),
                "predict": lambda: result.predict(np.zeros((1, 6), np.float32), like=0),
                "model": lambda: result.model(cluster=0),
            }[use]()

    def test_other_rows_of_a_function_are_refused(self, files):
        write = "import numpy as np\n\ndef load():\n    draw = np.random.default_rng({seed})\n"
        write += "    x = draw.normal(size=(200, 6)).astype('float32')\n"
        write += "    return {{'x': x, 'y': (x[:, 0] > 0).astype(int), 'clients': np.arange(200) // 20}}\n"
        (files / "own.py").write_text(write.format(seed=0))
        experiment = of_files().model_copy(update={"data": Experiment(data={"source": "own.py:load"}).data})
        simulate(experiment, run_dir="run")
        load_run("run")["fedavg"].test(0)
        (files / "own.py").write_text(write.format(seed=1))
        with pytest.raises(ConfigError, match=r"the data of .*run have changed since the run began \(digest"):
            load_run("run", code="now")["fedavg"].test(0)
        assert load_run("run")["fedavg"].test(0)  # of the copy of the function
        with pytest.raises(ConfigError, match=r"the data of .* have changed since the run began"):
            simulate(experiment.model_copy(update={"rounds": 4}), run_dir="longer", extend="run", code="now")


def test_divergence_is_said_in_python(files, caplog):
    with caplog.at_level(logging.WARNING):
        results = simulate(of_files(local={"lr": 100, "epochs": 30}))
    assert divergence(results) in caplog.text
    assert "fedavg diverged: " in caplog.text and "lower local.lr, or set local.clip_norm" in caplog.text


def test_every_kind_of_model_is_verified(monkeypatch):
    """Mixtures, personal columns, additive models, training before predictions."""
    tested = []

    def noting(trained, result, experiment):
        tested.append(trained.label)
        verify(trained, result, experiment)

    monkeypatch.setattr(driver, "verify", noting)
    methods = ["fedem", "fedper", "ifca_cam", "per_fedavg", "ditto", "stocfl"]
    simulate(Experiment(rounds=2, methods=methods, tracking={"enabled": False}))
    assert tested == methods


def scaffold(folder):
    """The first program of docs/extend/client_program.md, which keeps a control variate of each client."""
    text = (Path(__file__).parents[2] / "docs/extend/client_program.md").read_text()
    (folder / "scaffold.py").write_text(text.split("```python\n")[1].split("```")[0])
    return "scaffold.py:Scaffold"


@pytest.mark.parametrize("method", ["scaffold", "apfl", "fedrc", "pfedme", "fedrep"])
def test_state_of_clients_is_verified_and_no_bit_depends_on_it(files, monkeypatch, method):
    """With a part of the clients in a round. Predictions with the state of another client are an error."""
    experiment = Experiment(
        data={
            "partition": {"kind": "classes", "clients": 8, "samples": 60, "classes_per_client": 2},
            "test": {"view": "holdout"},
        },
        rounds=3,
        methods=[scaffold(files) if method == "scaffold" else method],
        cohort={"fraction": 0.75},
        local={"lr": 0.1, "epochs": 2},
        tracking={"enabled": False},
    )
    tested, contents = [], []
    monkeypatch.setattr(driver, "verify", lambda *given: tested.append(verify(*given)))
    for number, of_run in enumerate((experiment, skip(experiment))):
        result = simulate(of_run, run_dir=f"{number}")[method]
        models = [result.trained.personal_model(client) for client in range(8)]
        values = [value.tolist() for model in models for value in model.state_dict().values()]
        contents.append(repr([values, [without_times(record.metrics) for record in result.records]]))
    assert tested and contents[0] == contents[1]
    result = load_run("0")[method]
    other = [result.trained.personal_model((client + 1) % 8) for client in range(8)]
    monkeypatch.setattr(type(result.trained), "served_model", lambda self, client, serving: other[client])
    if method != "scaffold":  # whose clients have one model
        with pytest.raises(NotReproduced, match="of client"):
            verify(result.trained, result, experiment)


def without_times(metrics):
    return {name: value for name, value in metrics.items() if "seconds" not in name}


class TestTokens:
    def test_a_text_model_is_verified(self):
        tokens = np.random.default_rng(0).integers(0, 6, (40, 3))
        data = federation_from_arrays(tokens, tokens[:, 0] // 3, np.arange(40) // 10, vocabulary=6)

        def model(shape, classes):
            return nn.Sequential(nn.Embedding(6, 4), nn.Flatten(), nn.Linear(12, classes))

        simulate(Experiment(data=data, rounds=1, methods=["fedavg"], model=model, tracking={"enabled": False}))
