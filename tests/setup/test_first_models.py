"""First models of methods that need several, of networks without random weights; pretrained starts."""

import re
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from cfl_ray import Experiment, federation_from_arrays, simulate
from cfl_ray.errors import ConfigError
from cfl_ray.methods import REGISTRY
from cfl_ray.nn.network import Network
from cfl_ray.setup.first_models import start_of
from cfl_ray.setup.prepare import prepare

DRAW = np.random.default_rng(0)
FEDERATION = federation_from_arrays(DRAW.normal(size=(60, 4)).astype("float32"), np.arange(60) % 3, np.arange(60) // 10)
SEVERAL = {"clove", "ifca", "ifca_cam", "fesem_cam", "fedem", "fedrc", "fedsoft", "fedavg_plus", "fedprox_plus"}


class Fixed(nn.Linear):
    """A model that begins with the same weights every time."""

    def __init__(self, width: int = 4):
        super().__init__(width, 3)
        with torch.no_grad():
            self.weight.copy_(torch.arange(3.0 * width).reshape(3, width) / 100)
            self.bias.zero_()


class Deep(nn.Sequential):
    """A model with a body and a head."""

    def __init__(self):
        super().__init__(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3))


def experiment(**sections) -> Experiment:
    values = {"rounds": 2, "methods": ["fedavg"], "model": Fixed, "data": FEDERATION, "cohort": {"fraction": 1.0}}
    return Experiment(**values | {"tracking": {"enabled": False}} | sections)


def test_methods_that_need_several_first_models_refuse_equal_ones():
    refusing = set()
    for name in REGISTRY.keys() - {"fedbabu"}:  # which refuses the single layer of the model
        try:
            prepare(experiment(methods=[name]))
        except ConfigError as error:
            assert str(error).startswith(f"{name} begins with several models that must differ")
            assert "start.noise=0.01" in str(error)
            refusing.add(name)
    assert refusing == SEVERAL
    page = (Path(__file__).parents[2] / "docs/extend/pretrained.md").read_text()
    (named,) = re.findall(r"If all weights are given, (.*?) refuse", page, re.S)
    assert set(re.findall(r"`(\w+)`", named)) == SEVERAL


def test_noise_moves_all_first_models_but_the_common_one():
    start = start_of(experiment(start={"noise": 0.1}), "ifca", Network(Fixed, (4,)), 6)
    first_P, second_P, third_P = (start.new_model(index) for index in (0, 1, 2))
    assert torch.equal(first_P, start.spec.row_of(Fixed()))
    assert torch.equal(second_P, start.new_model(1)) and not torch.equal(second_P, third_P)
    wide = start_of(experiment(start={"noise": 0.1}), "ifca", Network(lambda: Fixed(1000), (1000,)), 6)
    moved_P = wide.new_model(1) - wide.new_model(0)
    assert abs(moved_P.std() - 0.1) < 0.01 and abs(moved_P.mean()) < 0.01


def test_noise_changes_nothing_where_first_models_differ():
    network = Network(Deep, (4,))
    for noise in (None, 0.1):
        start = start_of(experiment(start={"noise": noise}), "ifca", network, 6)
        assert torch.equal(start.new_model(1), network.new_model(0, 1))


def test_models_that_noise_has_moved_separate():
    """Two groups of clients with swapped labels."""
    x = DRAW.normal(size=(240, 4)).astype("float32")
    owner = np.arange(240) // 20
    y = np.where(owner % 2, 2 - x.argmax(1) % 3, x.argmax(1) % 3)
    swapped = federation_from_arrays(x, y, owner, groups={client: client % 2 for client in range(12)})
    method, local = {"ifca": {"num_clusters": 2}}, {"epochs": 5, "batch_size": 5}
    given = experiment(methods=[method], data=swapped, rounds=6, local=local, start={"noise": 0.01})
    assert simulate(given)["ifca"].final["ari"] == 1


def test_models_begin_with_pretrained_weights(tmp_path):
    torch.manual_seed(1)
    tensors, file = Deep().state_dict(), tmp_path / "pretrained.safetensors"
    save_file(tensors, file)
    network = prepare(experiment(model={"name": Deep, "weights": str(file)})).network()
    row = network.spec.tensors(network.new_model(0, 3))
    assert all(torch.equal(row[name], tensor) for name, tensor in tensors.items())


def test_a_head_that_the_file_lacks_begins_at_random_so_that_first_models_differ(tmp_path):
    file = tmp_path / "body.safetensors"
    save_file({name: tensor for name, tensor in Deep().state_dict().items() if name.startswith("0.")}, file)
    given = experiment(model={"name": Deep, "weights": str(file)}, methods=["ifca"])
    first_KP = simulate(given)["ifca"].trained.state.models_KP
    assert first_KP.isfinite().all()
    network = prepare(given).network()
    one, other = (network.spec.tensors(network.new_model(0, index)) for index in (0, 1))
    assert torch.equal(one["0.weight"], other["0.weight"]) and not torch.equal(one["2.weight"], other["2.weight"])


def test_weights_that_do_not_fit_are_refused(tmp_path):
    for name, tensors, message in (
        ("a.safetensors", {"0.weigth": torch.zeros(5, 4)}, "has no tensor '0.weigth' (did you mean '0.weight'?)"),
        ("b.safetensors", {"2.bias": torch.zeros(10)}, "2.bias has shape (10,), but"),
        ("c.safetensors", None, "there is no file"),
    ):
        if tensors:
            save_file(tensors, tmp_path / name)
        with pytest.raises(ConfigError) as error:
            prepare(experiment(model={"name": Deep, "weights": str(tmp_path / name)}))
        assert message in str(error.value)
    (tmp_path / "e.safetensors").write_text("none")
    with pytest.raises(ConfigError, match="e.safetensors cannot be read as a safetensors file"):
        prepare(experiment(model={"name": Deep, "weights": str(tmp_path / "e.safetensors")}))


def test_other_weights_are_another_experiment(tmp_path):
    file, hashes = tmp_path / "weights.safetensors", [experiment(model="mlp").config_hash]
    for value in (0.0, 1.0):
        save_file({"x": torch.tensor(value)}, file)
        hashes.append(experiment(model={"weights": str(file)}).config_hash)
    assert len(set(hashes)) == 3
