"""Warnings that depend on the model: methods that share or keep nothing of it, and the order of its layers."""

import pytest
from federations import uneven
from torch import nn

from cfl_ray import Experiment
from cfl_ray.setup.prepare import setup_on


def frozen_body(shape, classes):
    body = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4)).requires_grad_(False)
    return nn.Sequential(body, nn.ReLU(), nn.Linear(4, classes))


def two_layers(shape, classes):
    return nn.Sequential(nn.Linear(6, 4), nn.ReLU(), nn.Linear(4, classes))


class HeadFirst(nn.Module):
    def __init__(self, shape, classes):
        super().__init__()
        self.head, self.body = nn.Linear(4, classes), nn.Linear(6, 4)

    def forward(self, x):
        return self.head(self.body(x).relu())


@pytest.mark.parametrize(
    ("model", "method", "text"),
    [
        (frozen_body, "fedper", "fedper shares no trained parameter of this model"),
        (frozen_body, "lg_fedavg", "lg_fedavg shares no trained parameter of this model"),
        (two_layers, {"fedper": {"private_layers": 2}}, "fedper shares no trained parameter of this model"),
        (HeadFirst, "fedavg", "registered, 'body', but the last one that its forward pass calls is 'head'"),
        (two_layers, "fedper", None),
        (two_layers, "lg_fedavg", None),
        (frozen_body, "fedavg", None),
    ],
)
def test_warnings(model, method, text):
    federation = uneven([20, 30], (6,))
    setup = setup_on(Experiment(data=federation, model=model, methods=[method], rounds=1), federation)
    assert (any(text in line for line in setup.warnings)) if text else not setup.of_model
