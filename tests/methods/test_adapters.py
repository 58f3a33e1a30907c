"""Networks of which a part is frozen: rows, traffic and client states hold what is trained; models are whole."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import nn

import cfl_ray
from cfl_ray.errors import ConfigError, RunError
from cfl_ray.methods import REGISTRY
from cfl_ray.nn.shared import digest_of
from cfl_ray.results.export import export_model
from cfl_ray.setup.prepare import prepare

TRAINED = 2 * (8 * 32) + 8 * 10 + 10
COLUMNS = TRAINED + 2 * 8  # and the running mean and variance
BIAS = [0.0]  # added to the frozen part by the factory


class LowRank(nn.Module):
    """A frozen layer and a trained product of two matrices beside it."""

    def __init__(self, layer: nn.Linear, rank: int):
        super().__init__()
        self.layer = layer.requires_grad_(False)
        self.lora_a = nn.Parameter(torch.randn(rank, layer.in_features) / layer.in_features**0.5)
        self.lora_b = nn.Parameter(torch.zeros(layer.out_features, rank))

    def forward(self, x):
        return self.layer(x) + x @ self.lora_a.T @ self.lora_b.T


class Adapted(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.adapter = nn.Linear(64, 32), LowRank(nn.Linear(32, 32, bias=False), 8)
        self.adapter.layer.weight = nn.Parameter(self.body.weight[:, :32].detach(), requires_grad=False)
        self.squeeze, self.norm, self.head = nn.AvgPool1d(4), nn.BatchNorm1d(8), nn.Linear(8, 10)
        self.body.requires_grad_(False)
        self.norm.requires_grad_(False)
        self.body.bias.data += BIAS[0]

    def forward(self, x):
        hidden = torch.relu(self.adapter(torch.relu(self.body(x.flatten(1)))))
        return self.head(self.norm(self.squeeze(hidden)))


def experiment(output, **changes) -> cfl_ray.Experiment:
    values = {
        "methods": ["ifca"],
        "rounds": 2,
        "model": Adapted,
        "data": {"source": "digits", "shift": {"kind": "rotated"}, "partition": {"clients": 8, "samples": 30}},
        "local": {"epochs": 1, "batch_size": 10, "drop_last": True},
        "cohort": {"fraction": 1.0},
        "tracking": {"enabled": False},
        "runtime": {"engine": "sequential", "checkpoint_every": 1},
        "output": str(output),
    }
    return cfl_ray.Experiment(**values | changes)


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """Of every method, and FedPer with private adapters."""
    methods = [*REGISTRY, {"fedper": {"private": ["lora_"], "label": "private"}}]
    data = {"source": "digits", "shift": {"kind": "rotated"}, "partition": {"clients": 4, "samples": 30}}
    return cfl_ray.simulate(experiment(tmp_path_factory.mktemp("adapters"), methods=methods, rounds=1, data=data))


@pytest.mark.parametrize("label", [*REGISTRY, "private"])
def test_every_method_trains_rows_without_the_frozen_part(label, results):
    trained = results[label].trained
    assert trained.state.models_KP.shape[1] == COLUMNS
    frozen = sum(tensor.numel() for tensor in Adapted().parameters() if not tensor.requires_grad)
    for key in list(
        trained.backend.client_states.keys()
    ):  # with numbers of a client program, such as weights of a head
        assert trained.backend.client_states[key].numel() < COLUMNS + frozen
    x = trained.federation.test(0)[0][:4]
    assert trained.outputs(0, x).shape == (4, 10)


def test_traffic_is_that_of_the_columns(results):
    record = results["fedavg"].records[-1]
    both = 2 * COLUMNS * 32 / 1e6  # each way, all clients
    assert record.metrics["mbit_down"] + record.metrics["mbit_up"] == pytest.approx(both)


def test_models_of_clusters_and_clients_are_whole(results, tmp_path):
    first, second = (results["ifca"].trained.state_dict(k) for k in (0, 1))
    assert first["body.weight"].equal(second["body.weight"]) and not first["head.weight"].equal(second["head.weight"])
    whole = Adapted().state_dict().keys()
    module = results["ditto"].trained.personal_model(3)
    assert module.state_dict().keys() == whole and module.body.weight.equal(first["body.weight"])
    export_model(results["ifca"].trained, tmp_path / "model.safetensors", cluster=1)
    file = load_file(tmp_path / "model.safetensors")
    assert file.keys() == whole and file["body.weight"].equal(first["body.weight"])
    again = Adapted()
    again.load_state_dict(file)
    x = results["ifca"].trained.federation.test(0)[0][:4]
    with torch.no_grad():
        assert again.eval()(x).equal(results["ifca"].trained.model(1)(x))


def test_frozen_parameters_of_a_mixture_are_held_once(tmp_path):
    """In memory and in files; files that have them once for each model, as before, can be loaded too."""
    result = cfl_ray.simulate(experiment(tmp_path, methods=[{"fedem": {"num_models": 3}}]), tmp_path / "run")["fedem"]
    x = result.trained.federation.test(2)[0][:4]
    model = result.personal_model(2)
    assert len({part.body.weight.data_ptr() for part in model.models}) == 1
    assert len({part.head.weight.data_ptr() for part in model.models}) == 3
    plain = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    torch.save(plain, tmp_path / "plain.pt")
    sizes = []
    for name in ("model.pt", "model.safetensors", "plain.pt"):
        if name != "plain.pt":
            export_model(result.trained, tmp_path / name, client=2)
        sizes.append((tmp_path / name).stat().st_size)
        tensors = load_file(tmp_path / name) if name.endswith("safetensors") else torch.load(tmp_path / name)
        other = result.personal_model(5)
        with torch.no_grad():
            assert not other(x).equal(model(x))
            other.load_state_dict(tensors)
            assert other(x).equal(model(x))
    once = 4 * 64 * 32  # bytes of the largest frozen parameter
    assert max(sizes[:2]) < sizes[2] - 2 * once
    with safe_open(tmp_path / "model.safetensors", "pt") as content:
        shared = json.loads(content.metadata()["shared"])
        found = {name: content.get_tensor(name) for name in content.keys()}  # noqa: SIM118
    assert shared["models.2.body.weight"] == "models.0.body.weight" and "models.2.head.weight" not in shared
    restored = found | {name: found[kept] for name, kept in shared.items()}
    assert restored.keys() == plain.keys() and all(restored[name].equal(plain[name]) for name in plain)


def test_a_run_goes_on_with_the_same_frozen_part_or_not_at_all(tmp_path, monkeypatch):
    whole = cfl_ray.simulate(experiment(tmp_path))
    few, more = experiment(tmp_path, rounds=1), experiment(tmp_path)
    cfl_ray.simulate(few, tmp_path / "run")
    resumed = cfl_ray.simulate(more, tmp_path / "more", extend=tmp_path / "run")
    assert resumed["ifca"].trained.state.models_KP.equal(whole["ifca"].trained.state.models_KP)
    opened = cfl_ray.load_run(tmp_path / "more", more)["ifca"].trained
    assert all(value.equal(resumed["ifca"].trained.state_dict(0)[name]) for name, value in opened.state_dict(0).items())
    monkeypatch.setattr(f"{__name__}.BIAS", [1.0])
    with pytest.raises(RunError, match=r"the model's frozen parameters \(digest \w+\) are not those of the run"):
        cfl_ray.load_run(tmp_path / "more", more)["ifca"].model(0)


def test_a_process_without_the_template_makes_the_same_frozen_part_or_says_so(tmp_path):
    """If the network cannot be pickled, its template is not sent."""
    whole = prepare(experiment(tmp_path))
    alone = replace(whole, template=None)
    assert digest_of(alone.network().frozen) == digest_of(whole.network().frozen) == whole.frozen

    def unseeded() -> nn.Module:
        module = Adapted()
        module.body.bias.data += float(np.random.default_rng().random())
        return module

    alone = replace(prepare(experiment(tmp_path, model=unseeded)), template=None)
    with pytest.raises(ConfigError, match="its factory initialises it differently every time"):
        alone.network()


def test_a_network_without_trained_parameters_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="has no parameter to train, expected at least 1"):
        cfl_ray.simulate(experiment(tmp_path, model=lambda: nn.Linear(64, 10).requires_grad_(False)))
