"""Models of a run are those that were trained: with all their buffers, in this process and in others."""

import functools
import subprocess
import sys

import numpy as np
import pytest
import torch
from small_runs import PLANTED, merged
from torch import nn

from cfl_ray import Experiment, load_run, simulate
from cfl_ray.errors import ConfigError, DataError, RunError
from cfl_ray.results.export import export_model

NET = """
import random

import numpy as np
import torch
from torch import nn

OFFSET = 0.5


class Net(nn.Module):
    def __init__(self, shape, classes):
        super().__init__()
        size = int(np.prod(shape))
        self.body = nn.Linear(size, classes)
        self.norm = nn.BatchNorm1d(classes)
        self.register_buffer("order", torch.randperm(size))
        self.register_buffer("kept", torch.from_numpy(np.random.rand(size) < 0.8))
        self.register_buffer("scale", torch.tensor(random.random() + 0.5, dtype=torch.float64))
        self.register_buffer("coarse", torch.rand(size).bfloat16())
        self.register_buffer("wave", torch.polar(torch.ones(size), torch.rand(size)))
        self.register_buffer("hidden", torch.rand(size) + 0.5, persistent=False)
        self.register_buffer("shift", torch.rand(()))
        self.tied = nn.Linear(size, classes)
        self.tied.weight = self.body.weight

    def forward(self, x):
        x = x.flatten(1)[:, self.order] * self.kept * self.scale.float() * self.hidden * self.coarse.float()
        x = x * self.wave.real + self.shift + OFFSET
        return self.norm(self.body(x) + self.tied(x))
"""
CONSTANTS = ("order", "kept", "scale", "coarse", "wave", "norm.num_batches_tracked")


METHODS = ["fedavg", "ifca", "ditto"]


@pytest.fixture(scope="module")
def run_of(tmp_path_factory):
    """Returns a function: method -> its folder, its name, its result and the class of its model; made once."""

    @functools.cache
    def of(method: str):
        folder = tmp_path_factory.mktemp("saved")
        (folder / "net.py").write_text(NET)
        model, engine = {"name": f"{folder}/net.py:Net", "options": {}}, {"engine": "sequential"}
        changes = {"methods": [method], "rounds": 2, "model": model, "runtime": engine, "seed": 3}
        changes["evaluation"] = {"local_samples": 1000}
        values = merged(PLANTED, changes) | {"model": model}
        result = simulate(Experiment(**values), folder / "run")[method]
        return folder, method, result, result.model(cluster=0).__class__

    return of


@pytest.fixture(params=METHODS)
def trained(request, run_of):
    return run_of(request.param)


def accuracy(module, result, client):
    x, y = result.test(client)
    with torch.no_grad():
        return float((module(x).argmax(1) == y).float().mean())


def test_a_new_module_with_the_state_dictionary_predicts_what_was_recorded(trained):
    _, method, result, Net = trained
    torch.manual_seed(9)
    served = result.assignments()["served_by"]
    recorded = result.client_metrics()
    recorded = recorded[recorded["round"] == recorded["round"].max()].set_index("client")["accuracy"]
    for client in range(8):
        module = Net((1, 4, 4), 4)
        tensors = result.state_dict(cluster=int(served[client]))
        module.load_state_dict(tensors, strict=True)
        # the one buffer that PyTorch does not save
        module.hidden = result.model(cluster=0).hidden.clone()
        module.eval()
        own = result.personal_model(client)
        x, _ = result.test(client)
        if method != "ditto":
            assert torch.equal(module(x), own(x))
        assert accuracy(own, result, client) == pytest.approx(recorded[client])


def test_constants_are_those_of_the_first_model_under_the_seed(trained):
    _, _, result, _ = trained
    tensors = [result.state_dict(cluster=k) for k in range(result.trained.num_clusters)]
    for name in CONSTANTS:
        assert all(torch.equal(tensors[0][name], other[name]) for other in tensors)
    assert tensors[0]["scale"].dtype == torch.float64 and tensors[0]["coarse"].dtype == torch.bfloat16
    assert "hidden" not in tensors[0] and tensors[0]["tied.weight"].shape == (4, 16)


def test_another_process_predicts_the_same(run_of):
    runs = [run_of(method)[:3] for method in METHODS]
    program = (
        "import sys, numpy as np, torch, random\n"
        "torch.manual_seed(7), np.random.seed(7), random.seed(7)\n"
        "from cfl_ray import load_run\n"
        "for folder, method in zip(sys.argv[1::2], sys.argv[2::2]):\n"
        "    result = load_run(f'{folder}/run', trust=True)[method]\n"
        "    np.save(f'{folder}/y.npy', result.trained.outputs(1, np.load(f'{folder}/x.npy')).numpy())\n"
    )
    for folder, _, result in runs:
        np.save(folder / "x.npy", result.test(1)[0].numpy())
    folders_and_methods = [str(value) for folder, method, _ in runs for value in (folder, method)]
    subprocess.run([sys.executable, "-c", program, *folders_and_methods], check=True)
    for folder, method, result in runs:
        assert np.array_equal(np.load(folder / "y.npy"), result.trained.outputs(1, result.test(1)[0]).numpy()), method


def test_an_edited_constant_is_an_error_that_names_it(trained, tmp_path):
    folder, method, result, _ = trained
    result.trained.outputs(0, result.test(0)[0])
    source = folder / "net.py"
    for old, new, name in [
        ("torch.randperm(size)", "torch.randperm(size).flip(0)", "order"),
        ("torch.rand(size) + 0.5", "torch.rand(size) + 0.6", "hidden"),
    ]:
        source.write_text(NET.replace(old, new))
        try:
            with pytest.raises((ConfigError, DataError, RunError), match=f"constant {name} is"):
                load_run(folder / "run", trust=True, code="now")[method].model(cluster=0)
        finally:
            source.write_text(NET)


def test_exported_files_have_all_buffers(trained, tmp_path):
    from safetensors.torch import load_file

    _, _, result, Net = trained
    expected = result.state_dict(cluster=0)
    for ending, read in (("pt", torch.load), ("safetensors", load_file)):
        file = tmp_path / f"model.{ending}"
        export_model(result.trained, file, cluster=0)
        tensors = read(file)
        assert set(CONSTANTS) <= tensors.keys()
        assert all(torch.equal(tensors[name], expected[name]) for name in tensors)


def test_a_saved_statistic_that_no_row_can_hold_is_an_error():
    class Counted(nn.Module):
        def __init__(self, shape, classes):
            super().__init__()
            self.body = nn.Linear(16, classes)
            self.register_buffer("mean", torch.zeros(16, dtype=torch.float64))

        def forward(self, x):
            x = x.flatten(1)
            if self.training:
                self.mean.mul_(0.9).add_(0.1 * x.detach().mean(0))
            return self.body(x - self.mean.float())

    values = merged(PLANTED, {"methods": ["fedavg"], "rounds": 1, "runtime": {"engine": "auto"}}) | {"model": Counted}
    with pytest.raises(ConfigError, match="change the model's buffer mean, of float64"):
        simulate(Experiment(**values))


@pytest.mark.parametrize("method", [{"fedala": {"eta": 50}}, "fedbabu"])
def test_models_of_attackers_are_prepared_with_the_labels_that_they_train_on(method):
    """Models that are adapted before a test are adapted to the labels in reverse order."""
    attack = {"kind": "label_flip", "clients": [0, 1]}
    changes = {"attack": attack, "evaluation": {"verify": False, "local_samples": 10000}}
    experiment = Experiment(**merged(PLANTED, {"methods": [method], "rounds": 2, **changes}))
    (result,) = simulate(experiment).methods.values()
    recorded = result.client_metrics().query("round == 2").set_index("client")
    for client in range(3):
        x, y = result.test(client)
        loss = nn.functional.cross_entropy(result.personal_model(client)(x), y).item()
        assert loss == pytest.approx(recorded["loss"][client], rel=1e-4)
