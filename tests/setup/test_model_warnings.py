"""Warnings that depend on the model: methods that share or keep nothing of it, and the order of its layers."""

from functools import partial

import pytest
import torch
from federations import uneven
from torch import nn

from cfl_ray import Experiment, Task
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


class Squashed(nn.Module):
    def __init__(self, shape, classes, last):
        super().__init__()
        self.net, self.last = nn.Sequential(nn.Linear(6, 4), nn.ReLU(), nn.Linear(4, classes)), last

    def forward(self, x):
        return self.last(self.net(x))


@pytest.mark.parametrize(
    ("last", "text"),
    [
        (nn.Softmax(1), "come from softmax (layer 'last'), but the loss of task classification computes that itself"),
        (nn.Sigmoid(), "come from sigmoid (layer 'last')"),
        (lambda x: x.softmax(1), "come from softmax (its forward)"),
        (nn.LogSoftmax(1), None),  # the same loss
        (nn.Identity(), None),
        (nn.ReLU(), None),
    ],
)
def test_probabilities_in_the_place_of_logits(last, text):
    federation = uneven([20, 30], (6,))
    experiment = Experiment(data=federation, model=partial(Squashed, last=last), methods=["fedavg", "ifca"], rounds=1)
    of_model = setup_on(experiment, federation).of_model
    assert [line for line in of_model if text and text in line] == list(of_model) and len(of_model) == bool(text)
    own = Task(lambda outputs, targets: -outputs[torch.arange(len(targets)), targets], "class", name="own")
    assert not setup_on(experiment.model_copy(update={"task": own}), federation).of_model


def test_a_linear_head_is_missing_in_a_model_without_layers():
    spec = ParamSpec(names=("w", "b"), shapes=((6, 3), (3,)), num_params=2)
    with pytest.raises(ValueError, match=r"the last layer \(the model itself, .* \(C, F\); it has no weight"):
        Classifier.of(spec)
