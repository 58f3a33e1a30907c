"""Outputs in evaluation mode: written-out passes of narrow convolutions equal PyTorch's, all others are PyTorch's."""

from functools import partial

import pytest
import torch
from closeness import close
from torch import nn

from benchmarks.models import LeNet5
from cfl_ray.nn import outputs
from cfl_ray.nn.network import Network
from cfl_ray.nn.outputs import outputs_of, outputs_of_row
from cfl_ray.nn.passes import passes_of

SHAPE = (1, 28, 28)


@pytest.fixture
def by_pytorch(monkeypatch):
    """The numbers of samples of PyTorch's passes."""
    seen, logits = list[int](), Network.logits
    monkeypatch.setattr(Network, "logits", lambda self, x: [seen.append(len(x)), logits(self, x)][1])
    return seen


@pytest.mark.cpu
@pytest.mark.parametrize("samples", [1, outputs._BATCH, 2 * outputs._BATCH + 3])
def test_narrow_convolutions(samples, by_pytorch):
    network = Network(partial(LeNet5, 10), SHAPE)
    x = torch.rand(samples, *SHAPE, generator=torch.Generator().manual_seed(0))
    row_P = network.new_model(7, 0)
    found = outputs_of_row(network, row_P, x)
    assert not by_pytorch and torch.equal(network.row(), row_P)
    assert close(found, network.logits(x), 1e-6) and torch.equal(outputs_of(network, x), found)


@pytest.mark.cpu
def test_the_arrays_of_training_stay_as_they_are():
    network = Network(partial(LeNet5, 10), SHAPE)
    draw = torch.Generator().manual_seed(0)
    x, y = torch.rand(5, *SHAPE, generator=draw), torch.arange(5).numpy()
    passes = passes_of(network)
    passes.row_P.copy_(network.row())

    def gradient(between: bool) -> torch.Tensor:
        values = passes.forward(passes.arranged(x), None, [])
        if between:
            outputs_of_row(network, network.new_model(7, 0), torch.rand(9, *SHAPE, generator=draw))
        passes.backward(values, y, None)
        return passes.g_P.clone()

    assert torch.equal(gradient(False), gradient(True))


NORM = nn.BatchNorm2d(4), nn.Conv2d(4, 4, 3)


@pytest.mark.parametrize(
    "layers",
    [
        pytest.param([nn.Flatten(), nn.Linear(64, 3)], id="no convolutions"),
        pytest.param([nn.Conv2d(1, 40, 3), nn.Flatten(), nn.Linear(1440, 3)], id="of many channels"),
        pytest.param([nn.Conv2d(1, 4, 3), nn.Dropout(), nn.Flatten(), nn.Linear(144, 3)], id="another in training"),
        pytest.param([nn.Conv2d(1, 4, 3), *NORM, nn.Flatten(), nn.Linear(64, 3)], id="not all written out"),
    ],
)
def test_others_are_those_of_pytorch(layers, by_pytorch):
    network = Network(lambda: nn.Sequential(*layers), (1, 8, 8))
    x = torch.rand(7, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    assert torch.equal(outputs_of(network, x), network.logits(x)) and by_pytorch == [7, 7]


@pytest.mark.cpu
def test_no_samples():
    assert outputs_of(Network(partial(LeNet5, 10), SHAPE), torch.zeros(0, *SHAPE)).shape == (0, 10)
