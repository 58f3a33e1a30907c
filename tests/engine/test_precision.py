"""Precision of local training: what is computed in it, and what stays float32."""

import pytest
import torch
import training_tasks
from federations import Stage, uneven
from torch import nn
from training_tasks import IMAGE, LONG, logits_of, long_mlp, tasks_of

from cfl_ray.core.local_sgd import LocalSGD
from cfl_ray.engine import sequential, vectorised
from cfl_ray.engine.engines import ENGINES
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


def cnn(norm=nn.Identity):
    return lambda: nn.Sequential(nn.Conv2d(1, 4, 3), norm(), nn.ReLU(), nn.Flatten(), nn.Linear(64, 3))


NETWORKS = {
    "MLP": (long_mlp, LONG),
    "CNN": (cnn(), IMAGE),
    "layer norm": (cnn(lambda: nn.LayerNorm([4, 4, 4])), IMAGE),
    "group norm": (cnn(lambda: nn.GroupNorm(2, 4)), IMAGE),
    "batch norm": (cnn(lambda: nn.BatchNorm2d(4)), IMAGE),
}


def rows(engine, network: Network) -> torch.Tensor:
    return training_tasks.rows(engine, network, tasks_of(network, [12] * 3, LOCAL, start_P=network.new_model(0, 0)))


@pytest.mark.parametrize("engine", [sequential, vectorised], ids=["sequential", "vectorised"])
@pytest.mark.parametrize("factory, shape", NETWORKS.values(), ids=NETWORKS)
def test_bf16_is_close_to_float32(engine, factory, shape):
    """bfloat16 has 8 significant bits: the change in training is within some 2^-8 of it, and not equal."""
    if refused := engine is vectorised and vectorised.why_not(Network(factory, shape, precision="bf16"), []):
        assert "batching rule" in refused and any(factory is NETWORKS[name][0] for name in ("batch norm", "layer norm"))
        return
    found, expected = (rows(engine, Network(factory, shape, precision=p)) for p in ("bf16", "float32"))
    change = (expected - Network(factory, shape).new_model(0, 0)).norm()
    assert found.dtype == torch.float32 and 1e-5 < (found - expected).norm() / change < 0.03
    assert torch.equal(rows(engine, Network(factory, shape, precision="tf32")), expected), "no effect by itself"


@pytest.mark.parametrize("engine", [sequential, vectorised], ids=["sequential", "vectorised"])
def test_bf16_passes_have_float32_parameters(engine):
    network = Network(lambda: nn.Sequential(Watched(36, 8), nn.ReLU(), nn.Linear(8, 3)), LONG, precision="bf16")
    Watched.seen.clear()
    rows(engine, network)
    assert Watched.seen == {(torch.bfloat16, torch.float32)}


def test_tests_are_float32():
    network, x = Network(long_mlp, LONG, precision="bf16"), torch.randn(5, 36)
    row_P = network.new_model(0, 0)
    assert torch.equal(logits_of(network, row_P, x), logits_of(Network(long_mlp, LONG), row_P, x))


@pytest.mark.parametrize("engine", [pytest.param("manual", marks=pytest.mark.cpu), "span"])
def test_engines_without_bf16_give_way_to_sequential(engine):
    found = {}
    for name in ("sequential", engine):
        stage = Stage(uneven([10, 6, 14], LONG), long_mlp, LOCAL, name)
        stage.network = stage.backend.worker.network = Network(long_mlp, LONG, precision="bf16")
        clients = stage.clients()
        updates = clients.train(clients.send(stage.model()[None]), average=torch.ones(1, 3))
        found[name] = updates.averaged(default=stage.model()[None])
    assert torch.equal(found["sequential"], found[engine])
    for precision in ("float32", "tf32", "bf16"):
        network = Network(long_mlp, LONG, precision=precision)
        reason = ENGINES[engine].why_not(network, tasks_of(network, [10], LOCAL))
        assert bool(reason) == (precision == "bf16")


@pytest.mark.parametrize("precision, allowed", [("float32", False), ("tf32", True), ("bf16", False)])
def test_tf32_is_allowed_where_it_is_configured(precision, allowed):
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    before = matmul.allow_tf32, cudnn.allow_tf32
    with products_in(precision):
        assert (matmul.allow_tf32, cudnn.allow_tf32) == (allowed, allowed)
    assert (matmul.allow_tf32, cudnn.allow_tf32) == before
