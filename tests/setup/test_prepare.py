"""The engine and the device that a run uses."""

import json
import math

import numpy as np
import pytest
import torch
from torch import nn

from cfl_ray import Experiment, simulate
from cfl_ray.cli.estimate import estimate
from cfl_ray.engine.choice import EngineChoice
from cfl_ray.errors import ConfigError
from cfl_ray.setup.checks import compared_clients
from cfl_ray.setup.engine_choice import compute_device, engine_choice
from cfl_ray.setup.prepare import prepare


def test_the_engine_is_the_configured_one_or_that_of_the_run_or_that_of_the_rule(experiment):
    by_rule = EngineChoice("vectorised", "vectorised: by the rule")
    for wanted, kept, expected in (
        ("manual", EngineChoice("span", ""), EngineChoice("manual", "manual: as configured")),
        ("auto", EngineChoice("manual", ""), EngineChoice("manual", "manual: as at the start of the run")),
        ("auto", EngineChoice("compiled", "", 8), EngineChoice("compiled", "compiled: as at the start of the run", 8)),
        ("compiled", EngineChoice("compiled", "", 8), EngineChoice("compiled", "compiled: as configured", 8)),
        ("compiled", None, by_rule),
        ("auto", None, by_rule),
    ):
        assert engine_choice(prepare(experiment(runtime={"engine": wanted})), lambda: by_rule, kept) == expected


def test_a_run_records_its_engine_with_the_reason(experiment, tmp_path):
    simulate(experiment(methods=["fedavg"], rounds=1, runtime={"engine": "auto"}), tmp_path / "run")
    record = json.loads((tmp_path / "run/environment.json").read_text())
    assert record["engine_reason"].startswith(f"{record['engine']}: estimated ")
    assert not list(tmp_path.glob("engine-choices.json*")), "of earlier versions, which kept measured choices"


def test_a_configured_engine_that_cannot_train_is_refused_with_the_reason(experiment):
    own = {"local": {"batch_size": 2}}
    prepare(experiment(runtime={"engine": "manual"}, **own))
    with pytest.raises(ConfigError, match=r"^runtime.engine: span cannot train these clients: batches are smaller"):
        prepare(experiment(runtime={"engine": "span"}, **own))


def test_the_device(experiment, monkeypatch):
    """(runtime.device, whether torch finds a GPU, whether the process has one) -> device."""
    for wanted, found, has_gpu, device in (
        ("auto", True, True, "cuda"),
        ("auto", True, False, "cpu"),
        ("auto", False, True, "cpu"),
        ("cpu", True, True, "cpu"),
        ("cuda", True, False, "cuda"),
    ):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: found)
        assert compute_device(experiment(runtime={"device": wanted}), has_gpu) == device
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match="runtime.device: cuda, but torch finds no GPU"):
        compute_device(experiment(runtime={"device": "cuda"}), has_gpu=True)


def test_precision_and_share_of_memory_reach_the_network(experiment):
    for precision in ("float32", "bf16"):
        for gpus, share in ((0, 1), (0.25, 0.25)):
            runtime = {"precision": precision, "engine": "sequential", "gpus_per_host": gpus}
            network = prepare(experiment(runtime=runtime)).worker().network
            assert (network.precision, network.memory.share) == (precision, share)


def test_a_run_trains_in_its_precision(experiment):
    """On a CPU, bf16 changes the figures and tf32 does not. Afterwards, PyTorch's settings are as before."""
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    before, losses = (matmul.allow_tf32, cudnn.allow_tf32), []
    for precision in ("float32", "tf32", "bf16"):
        runtime = {"precision": precision, "engine": "sequential"}
        results = simulate(experiment(methods=["fedavg"], rounds=1, runtime=runtime))
        losses.append(results["fedavg"].final["train_loss"])
    assert losses[0] == losses[1] != losses[2] == pytest.approx(losses[0], rel=0.05)
    assert (matmul.allow_tf32, cudnn.allow_tf32) == before


def test_an_option_that_does_not_fit_the_model_is_refused_before_any_method_trains(experiment):
    """The default model has two layers; FedAvg would train before FedClust."""
    message = r"fedclust.layer must be in 1 .. 2, the layers of this model with trained parameters, got 3"
    for methods in (["fedavg", {"fedclust": {"layer": 3}}], [{"fedclust": {"layer": 3}}]):
        with pytest.raises(ConfigError, match=message):
            prepare(experiment(methods=methods))
    prepare(experiment(methods=[{"fedclust": {"layer": 2}}]))


@pytest.mark.parametrize("stage", [prepare, estimate], ids=["run", "check"])
def test_a_batch_of_one_sample_is_refused_for_batchnorm_and_drop_last_cures_it(stage, tmp_path):
    x, y, owner = torch.randn(60, 4).numpy(), [0, 1, 1] * 20, [0] * 30 + [1] * 27 + [2] * 3
    np.savez(tmp_path / "own.npz", x=x, y=y, clients=owner, x_test=x, y_test=y)

    def with_norm(shape, classes):
        return nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, classes))

    def given(method="fedavg", **local):
        data = {"source": "arrays", "root": str(tmp_path / "own.npz"), "test": {"view": "cluster"}}
        sections = {"model": with_norm, "data": data, "local": local, "tracking": {"enabled": False}}
        return Experiment(rounds=1, methods=[method], **sections)

    displacement = {"signature": "displacement", "signature_batch": 29}  # a training of its own, of unseen clients
    for experiment, batches in (
        (given(batch_size=13), r"client 1 .*\(fedavg: 27 samples in batches of 13\)"),
        (given({"stocfl": displacement}), r"client 0 .*\(stocfl: 30 samples in batches of 29\)"),
        (given("per_fedavg"), r"client 2 .*\(per_fedavg: 3 samples in batches of 2\)"),  # two batches in a step
    ):
        with pytest.raises(ConfigError, match=batches + ".*local.drop_last: true"):
            stage(experiment)
    for local in ({"batch_size": 13, "drop_last": True}, {"batch_size": 13, "drop_last": "single"}, {"batch_size": 14}):
        stage(given(**local))
    assert math.isfinite(simulate(given(batch_size=13, drop_last=True))["fedavg"].final["accuracy"])


def test_more_models_than_the_memory_holds_are_refused_before_they_are_made(experiment):
    with pytest.raises(
        ConfigError, match=r"ifca.num_clusters is 10{12}: its models need .* GB .*; use at most \d+ clus"
    ):
        prepare(experiment(methods=[{"ifca": {"num_clusters": 10**12}}]))


@pytest.mark.parametrize(
    ("method", "count", "bytes_of_pair"),
    [  # of 40 clients, 8 in each of 4 rounds
        *((method, 40, 16) for method in ("fedclust", "fl_hc", "autocfl")),  # all that are reachable
        ("pacfl", 40, 20),
        *((method, 32, 16) for method in ("cfl", "fedamp", "feroma")),  # all that take part
        ("fedgwc", 32, 48),
        *((method, 8, 16) for method in ("fedcac", "pfedgraph", "fedccfa")),  # a cohort
    ],
)
def test_methods_whose_pairs_of_clients_do_not_fit_are_refused(experiment, monkeypatch, method, count, bytes_of_pair):
    small = experiment(
        methods=[method], data={"partition": {"clients": 40}}, cohort={"clients": 8}, local={"momentum": 0}
    )
    room = [bytes_of_pair * count**2]
    monkeypatch.setattr("cfl_ray.setup.checks.available_memory", lambda: room[0])
    for other in ("_check_memory", "_check_participants"):
        monkeypatch.setattr(f"cfl_ray.setup.checks.{other}", lambda *_: None)
    prepare(small)
    room[0] -= 1
    message = rf"{method} compares {count} clients with each other \(.*\): their pairs need 0.0 GB, .* has 0.0 GB of"
    with pytest.raises(ConfigError, match=f"{message} memory available, enough for {count - 1} clients"):
        prepare(small)


def test_methods_whose_models_of_clients_do_not_fit_on_the_server_are_refused(experiment, monkeypatch):
    """8 float32 copies of a model for 8 clients in each of 4 rounds, of 40."""
    changes = {"data": {"partition": {"clients": 40}}, "cohort": {"clients": 8}}
    room = [8 * 32 * 4 * prepare(experiment(**changes)).network().spec.size]
    monkeypatch.setattr("cfl_ray.setup.checks.available_memory", lambda: room[0])
    prepare(experiment(methods=["pfedgraph"], **changes))
    room[0] -= 1
    prepare(experiment(methods=["fedavg", "ditto"], **changes))
    for method in ("fedamp", "fedcac", "feroma", "pfedgraph"):
        message = f"{method} keeps a model.* on the server for each of up to 32 clients: .* enough for 31 clients"
        with pytest.raises(ConfigError, match=message):
            prepare(experiment(methods=[method], **changes))


def test_the_clients_that_a_method_compares_are_those_that_it_can_reach(experiment):
    changes = {"data": {"partition": {"clients": 1000}}, "cohort": {"fraction": 0.1}}
    few = changes | {"cohort": {"fraction": 0.1, "availability": {"kind": "bernoulli", "chance": 0.2}}}
    counts = [
        compared_clients(prepare(experiment(methods=["pacfl", "ifca"], **one)), "pacfl") for one in (changes, few)
    ]
    assert counts[0] == 1000 and 150 < counts[1] < 250
    assert compared_clients(prepare(experiment(methods=["ifca"])), "ifca") == 0


@pytest.mark.parametrize(
    ("layer", "norm", "cure"),
    [
        (nn.Identity, "local", "shared"),
        (nn.LayerNorm, "local", "shared or local_all"),
        (nn.LayerNorm, "local_all", ""),
        (nn.BatchNorm1d, "local", ""),
    ],
)
def test_norm_layers_cannot_stay_with_clients_if_there_are_none(experiment, layer, norm, cure):
    """LayerNorm keeps no statistics, so that only local_all keeps it with the clients; FedBN says that it does not."""

    def model(input_shape, num_classes, hidden):
        size = math.prod(input_shape)
        return nn.Sequential(nn.Flatten(), nn.Linear(size, hidden), layer(hidden), nn.Linear(hidden, num_classes))

    changes = {"methods": [{"fedavg": {"norm": norm}}, "fedbn"], "model": {"name": model}}
    if cure:
        message = f"fedavg.norm: {norm} keeps normalisation layers with the clients, .* has none; .* set norm: {cure}$"
        with pytest.raises(ConfigError, match=message):
            prepare(experiment(**changes))
    else:
        said = [
            text for text in prepare(experiment(**changes)).warnings if "fedbn: the model has no norm layer" in text
        ]
        assert len(said) == (layer is nn.LayerNorm)
