"""Precision of local training: what is computed in it, and what stays float32."""

import pytest
import torch
from federations import Stage, uneven
from torch import nn

from cfl_ray.core.local_sgd import LocalSGD
from cfl_ray.core.work import Address
from cfl_ray.engine import manual, sequential, span, vectorised
from cfl_ray.engine.task import TrainingTask
from cfl_ray.nn.network import Network
from cfl_ray.nn.precision import products_in

LOCAL = LocalSGD(epochs=3, lr=0.2, momentum=0.5)


class Watched(nn.Linear):
    """A linear layer that notes the types of its outputs in training, and of its weights."""

    seen: set[tuple[torch.dtype, torch.dtype]] = set()

    def forward(self, x):
        y = super().forward(x)
        Watched.seen.add((y.dtype, self.weight.dtype)) if self.training else None
        return y


def mlp():
    return nn.Sequential(nn.Linear(36, 8), nn.ReLU(), nn.Linear(8, 3))


def cnn(norm=nn.Identity):
    return lambda: nn.Sequential(nn.Conv2d(1, 4, 3), norm(), nn.ReLU(), nn.Flatten(), nn.Linear(64, 3))


NETWORKS = {
    "MLP": (mlp, (36,)),
    "CNN": (cnn(), (1, 6, 6)),
    "layer norm": (cnn(lambda: nn.LayerNorm([4, 4, 4])), (1, 6, 6)),
    "group norm": (cnn(lambda: nn.GroupNorm(2, 4)), (1, 6, 6)),
    "batch norm": (cnn(lambda: nn.BatchNorm2d(4)), (1, 6, 6)),
}


def rows(engine, network: Network, shape=(36,)) -> torch.Tensor:
    federation, start_P = uneven([12] * 3, shape), network.new_model(0, 0)
    tasks = [TrainingTask(i, start_P, *federation.train(i), 3, LOCAL, Address(0, 1, 1)) for i in range(3)]
    return torch.stack([result.row_P.clone() for result in engine.train(network, tasks)])


@pytest.mark.parametrize("engine", [sequential, vectorised], ids=["sequential", "vectorised"])
@pytest.mark.parametrize("factory, shape", NETWORKS.values(), ids=NETWORKS)
def test_bf16_is_close_to_float32(engine, factory, shape):
    """bfloat16 has 8 significant bits: the change in training is within some 2^-8 of it, and not equal."""
    if refused := engine is vectorised and vectorised.why_not(Network(factory, shape, precision="bf16"), []):
        assert "batching rule" in refused and any(factory is NETWORKS[name][0] for name in ("batch norm", "layer norm"))
        return
    found, expected = (rows(engine, Network(factory, shape, precision=p), shape) for p in ("bf16", "float32"))
    change = (expected - Network(factory, shape).new_model(0, 0)).norm()
    assert found.dtype == torch.float32 and 1e-5 < (found - expected).norm() / change < 0.03
    assert torch.equal(rows(engine, Network(factory, shape, precision="tf32"), shape), expected), "no effect on a CPU"


@pytest.mark.parametrize("engine", [sequential, vectorised], ids=["sequential", "vectorised"])
def test_bf16_passes_have_float32_parameters(engine):
    network = Network(lambda: nn.Sequential(Watched(36, 8), nn.ReLU(), nn.Linear(8, 3)), (36,), precision="bf16")
    Watched.seen.clear()
    rows(engine, network)
    assert Watched.seen == {(torch.bfloat16, torch.float32)}


def test_tests_are_float32():
    network, x = Network(mlp, (36,), precision="bf16"), torch.randn(5, 36)
    row_P = network.new_model(0, 0)
    assert torch.equal(network.logits_of(row_P, x), Network(mlp, (36,)).logits_of(row_P, x))


@pytest.mark.parametrize("engine", ["manual", "span"])
def test_engines_without_bf16_give_way_to_sequential(engine):
    found = {}
    for name in ("sequential", engine):
        stage = Stage(uneven([10, 6, 14], (36,)), mlp, LOCAL, name)
        stage.network = stage.backend.worker.network = Network(mlp, (36,), precision="bf16")
        clients = stage.clients()
        updates = clients.train(clients.send(stage.model()[None]), average=torch.ones(1, 3))
        found[name] = updates.averaged(default=stage.model()[None])
    assert torch.equal(found["sequential"], found[engine])
    (x, y), bf16 = uneven([10], (36,)).train(0), Network(mlp, (36,), precision="bf16")
    task = TrainingTask(0, bf16.new_model(0, 0), x, y, 3, LOCAL, Address(0, 1, 1))
    for module in (manual, span):
        assert module.why_not(bf16, [task])
        assert not any(module.why_not(Network(mlp, (36,), precision=p), [task]) for p in ("float32", "tf32"))


@pytest.mark.parametrize("precision, allowed", [("float32", False), ("tf32", True), ("bf16", False)])
def test_tf32_is_allowed_where_it_is_configured(precision, allowed):
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    before = matmul.allow_tf32, cudnn.allow_tf32
    with products_in(precision):
        assert (matmul.allow_tf32, cudnn.allow_tf32) == (allowed, allowed)
    assert (matmul.allow_tf32, cudnn.allow_tf32) == before
