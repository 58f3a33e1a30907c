"""Warnings that depend on the model: methods that share or keep nothing of it, and the order of its layers."""

import pytest
import torch
from federations import uneven
from torch import nn

from cfl_ray import Experiment
from cfl_ray.core.classifier import Classifier
from cfl_ray.core.params import ParamSpec
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


class Tied(nn.Module):
    """Its output layer has the weights of its first one, as language models have."""

    def __init__(self, shape, classes):
        super().__init__()
        self.first, self.body, self.output = nn.Linear(6, classes), nn.Linear(classes, 6), nn.Linear(6, classes)
        self.output.weight, self.output.bias = self.first.weight, self.first.bias

    def forward(self, x):
        return self.output(self.body(self.first(x).relu()))


class InNoLayer(nn.Module):
    def __init__(self, shape, classes):
        super().__init__()
        self.weight, self.shift = nn.Parameter(torch.rand(6, classes)), nn.Parameter(torch.zeros(classes))

    def forward(self, x):
        return x @ self.weight + self.shift


ITSELF = "(the model itself, whose parameters are in no layer)"


@pytest.mark.parametrize(
    ("model", "method", "text"),
    [
        (Tied, "fedper", "use 'body': output.weight is first.weight, so it is averaged as a part of that layer"),
        (HeadFirst, "fedper", "use 'body': assign the output layer last in __init__"),
        (InNoLayer, "moon", f"moon: the model has a single layer, {ITSELF}, whose inputs are those of the model"),
        (InNoLayer, "fedbn", f"no norm layer of this type ({ITSELF}): it is FedAvg"),
        (two_layers, "moon", None),
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


def test_a_linear_head_is_missing_in_a_model_without_layers():
    spec = ParamSpec(names=("w", "b"), shapes=((6, 3), (3,)), num_params=2)
    with pytest.raises(ValueError, match=r"the last layer \(the model itself, .* \(C, F\); it has no weight"):
        Classifier.of(spec)
