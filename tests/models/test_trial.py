"""Networks whose parameters and buffers are not all of them, and networks that answer differently every time."""

import copy
import functools
import itertools
import random
import re
import secrets
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations, prune, weight_norm

from cfl_ray.errors import ConfigError
from cfl_ray.models import recipe
from cfl_ray.models.factory import ModelRecipe

COUNT = itertools.count()
TABLE = torch.arange(4.0) + 1


def tried(factory, shape=(4,), dtype=torch.float32) -> ModelRecipe:
    return recipe(factory, {}, shape, 3, dtype)


def net(make=lambda module: None, forward=lambda module, x: x):
    """A factory of linear layers: `make` gives the module attributes, `forward` changes its inputs."""

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = nn.Linear(4, 3)
            make(self)

        def forward(self, x):
            return self.body(forward(self, x))

    return Net


@dataclass
class Settings:
    mask: torch.Tensor


class Slotted:
    __slots__ = ("mask",)

    def __init__(self):
        self.mask = torch.rand(4)


def sets(**values):
    """Gives a module attributes: the results of these functions."""

    def make(module):
        for name, value in values.items():
            setattr(module, name, value())

    return make


def closure():
    mask = torch.rand(4)
    return lambda x: x * mask


def defaulted(mask):
    def f(x, mask=mask):
        return x * mask

    return f


def hooked(module):
    mask = torch.rand(4)
    module.body.register_forward_pre_hook(lambda _, inputs: inputs[0] * mask)


class Product:
    def __init__(self):
        self.mask = torch.rand(4)

    def of(self, x):
        return x * self.mask


@pytest.mark.parametrize(
    "make, name",
    [
        (sets(mask=lambda: torch.rand(4)), "mask"),
        (sets(mask=lambda: np.random.rand(4)), "mask"),
        (sets(mask=lambda: torch.randperm(40)), "mask"),
        (sets(masks=lambda: [torch.ones(4), torch.rand(4)]), r"masks\[1\]"),
        (sets(masks=lambda: {"a": (torch.rand(4),)}), r"masks\['a'\]\[0\]"),
        (sets(settings=lambda: Settings(torch.rand(4))), "settings.mask"),
        (sets(slotted=Slotted), "slotted.mask"),
        (sets(f=closure), "variable mask of f"),
        (sets(f=lambda: functools.partial(torch.mul, torch.rand(4))), r"f.args\[0\]"),
        (sets(f=lambda: Product().of), "f.__self__.mask"),
        (sets(f=lambda: defaulted(torch.rand(4))), r"defaults of f\[0\]"),
        (sets(places=lambda: random.sample(range(1000), 100)), "places"),
        (sets(mask=lambda: torch.full((4,), float(next(COUNT)))), "mask"),
        (lambda module: setattr(module.body, "mask", torch.rand(4)), "body.mask"),
        (hooked, "variable mask of body.forward pre-hook"),
    ],
)
def test_a_tensor_that_is_no_buffer_is_an_error(make, name):
    with pytest.raises(ConfigError, match=f": {name} is a tensor or array with other values .*register_buffer"):
        tried(net(make))


@pytest.mark.parametrize(
    "make, forward, cause",
    [
        (sets(scale=random.random), lambda module, x: x * module.scale, "scale is 0"),
        (sets(shift=lambda: next(COUNT)), lambda module, x: x * module.shift, "shift is "),
        (
            sets(act=lambda: next(ACTIVATIONS)),
            lambda module, x: module.act(x - 0.5),
            "act is .*ReLU and .*Tanh|act is .*Tanh and .*ReLU",
        ),
    ],
)
def test_a_drawn_number_or_layer_that_changes_the_answer_is_an_error(make, forward, cause):
    with pytest.raises(ConfigError, match=f"built twice answers the same samples differently.*{cause}"):
        tried(net(make, forward))


ACTIVATIONS = itertools.cycle([nn.ReLU(), nn.Tanh()])


@pytest.mark.parametrize(
    "make, forward",
    [
        (sets(table=lambda: torch.linspace(0, 1, 4)), lambda module, x: x * module.table),
        (sets(number=lambda: next(COUNT), name=lambda: f"net {next(COUNT)}"), lambda module, x: x),
        (sets(part=object, rng=lambda: np.random.default_rng(), of=lambda: {object(): 1}), lambda module, x: x),
        (lambda module: setattr(module, "me", [module]), lambda module, x: x),
        (lambda module: setattr(module, "weights", [module.body.weight, module.body.weight[0]]), lambda module, x: x),
        (lambda module: weight_norm(module.body), lambda module, x: x),
        (lambda module: parametrizations.weight_norm(module.body), lambda module, x: x),
        (lambda module: nn.utils.spectral_norm(module.body), lambda module, x: x),
        (lambda module: prune.l1_unstructured(module.body, "weight", 0.5), lambda module, x: x),
        (lambda module: module.register_buffer("order", torch.randperm(4)), lambda module, x: x[:, module.order]),
        (
            lambda module: module.register_buffer("mask", torch.rand(4), persistent=False),
            lambda module, x: x * module.mask,
        ),
        (lambda module: None, lambda module, x: setattr(module, "last", x.mean(0)) or x),
        (lambda module: None, lambda module, x: x * TABLE),
        (lambda module: setattr(module, "lstm", nn.LSTM(4, 4)), lambda module, x: module.lstm(x)[0]),
        (lambda module: setattr(module, "pair", [module.body]), lambda module, x: x),
    ],
)
def test_constants_and_what_follows_from_parameters_are_no_error(make, forward):
    assert not tried(net(make, forward)).warnings


def test_constants_outside_rows_have_fingerprints():
    def make(module):
        module.register_buffer("order", torch.randperm(4))
        module.table = torch.linspace(0, 1, 4)

    made = tried(net(make, lambda module, x: x[:, module.order] * module.table * TABLE))
    assert made.constants.keys() == {"order", "table", "global TABLE of variable forward of forward"}
    assert not tried(lambda: nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))).constants


def layers(*sizes, drawn):
    """Linear layers with these output sizes: of 4 * size weights and `size` biases."""
    made = [nn.Linear(4, size) for size in sizes]
    for layer in made if not drawn else ():
        nn.init.ones_(layer.weight), nn.init.ones_(layer.bias)
    return made


@pytest.mark.parametrize(
    "parts, names",
    [
        (lambda drawn: layers(4, 4, drawn=drawn), r"parts\[0\] \(Linear\), parts\[1\] \(Linear\)"),
        (lambda drawn: {"a": nn.Sequential(*layers(8, drawn=drawn))}, r"parts\['a'\] \(Sequential\)"),
        (lambda drawn: (nn.Parameter(torch.rand(40) if drawn else torch.ones(40)),), r"parts\[0\]"),
        (lambda drawn: applied(*layers(8, drawn=drawn)), r"variable layer of parts \(Linear\)"),
    ],
)
@pytest.mark.parametrize("drawn", [False, True])
def test_layers_that_pytorch_does_not_find_are_named(parts, names, drawn):
    factory = net(sets(parts=lambda: parts(drawn)))
    expected = f"does not find {names}, .*: their 40 parameters are not trained, .*(ModuleList|ParameterList)"
    if drawn:
        with pytest.raises(ConfigError, match=expected):
            tried(factory)
    else:
        (warning,) = tried(factory).warnings
        assert re.search(expected, warning)


def applied(layer):
    return lambda x: layer(x)


NOISE = {
    "bernoulli": lambda module, x: x * torch.bernoulli(torch.full_like(x, 0.5)),
    "rand_like": lambda module, x: x + torch.rand_like(x),
    "rrelu": lambda module, x: F.rrelu(x - 0.5, training=True),
    "gumbel": lambda module, x: F.gumbel_softmax(x),
    "alpha dropout": lambda module, x: F.alpha_dropout(x, 0.5, training=True),
    "numpy": lambda module, x: x * np.random.rand(),
    "random": lambda module, x: x * random.random(),
    "permutation": lambda module, x: x[:, torch.randperm(4)],
    "secrets": lambda module, x: x * secrets.randbelow(1 << 20),
    "default_rng": lambda module, x: x * np.random.default_rng().random(),
    "own generator": lambda module, x: x * torch.rand(4, generator=module.generator),
    "counter": lambda module, x: x * next(module.count),
    "rare": lambda module, x: x * (1 if random.random() < 0.5 else 2),
}


@pytest.mark.parametrize("noise", NOISE)
def test_noise_in_evaluation_is_an_error(noise):
    make = sets(generator=lambda: torch.Generator().manual_seed(0), count=lambda: itertools.count(1))
    with pytest.raises(ConfigError, match="answers the same samples differently.* in evaluation"):
        tried(net(make, NOISE[noise]))


@pytest.mark.parametrize("noise", ["secrets", "default_rng", "own generator", "counter"])
def test_noise_in_training_that_no_seed_reaches_is_an_error(noise):
    make = sets(generator=lambda: torch.Generator().manual_seed(0), count=lambda: itertools.count(1))
    with pytest.raises(ConfigError, match="answers the same samples differently the second time, in training"):
        tried(net(make, lambda module, x: NOISE[noise](module, x) if module.training else x))


@pytest.mark.parametrize("noise", ["bernoulli", "rand_like", "gumbel", "numpy", "random", "permutation"])
def test_noise_in_training_that_has_a_seed_is_none(noise):
    tried(net(forward=lambda module, x: NOISE[noise](module, x) if module.training else x))


def test_draws_without_an_effect_are_none():
    """Layer drop draws a number in every pass, and ignores it in evaluation."""
    tried(net(forward=lambda module, x: x if torch.rand(()) < 0.5 or not module.training else x * 2))


@pytest.mark.parametrize("drawing", [torch.rand, np.random.rand, lambda n: [random.random() for _ in range(n)]])
def test_factories_draw_with_the_seed_of_the_run(drawing):
    def factory():
        layer = nn.Linear(4, 3)
        with torch.no_grad():
            layer.bias.copy_(torch.as_tensor(drawing(3)))
        return layer

    assert not tried(factory).warnings


def test_parameters_that_no_seed_reaches_are_a_warning():
    def factory():
        layer = nn.Linear(4, 3)
        with torch.no_grad():
            layer.bias.copy_(torch.from_numpy(np.random.default_rng().random(3)))
        return layer

    (warning,) = tried(factory).warnings
    assert "bias differs between two modules made under the same seed" in warning


def test_a_buffer_that_no_seed_reaches_is_an_error():
    make = lambda module: module.register_buffer("order", torch.from_numpy(np.random.default_rng().permutation(40)))
    with pytest.raises(ConfigError, match="the buffer order differs between two modules made under the same seed"):
        tried(net(make))


@pytest.mark.parametrize("layer", [nn.Embedding, nn.EmbeddingBag])
def test_sparse_gradients_are_dense(layer):
    class Words(nn.Module):
        def __init__(self):
            super().__init__()
            self.words = layer(5, 3, sparse=True)

        def forward(self, x):
            return self.words(x) if layer is nn.EmbeddingBag else self.words(x).mean(1)

    module = tried(Words, dtype=torch.int64)()
    module(torch.zeros(2, 4, dtype=torch.int64)).sum().backward()
    assert module.words.weight.grad.layout == torch.strided


@pytest.mark.parametrize(
    "factory, message",
    [
        (
            lambda: nn.Sequential(nn.Linear(4, 8), nn.Sequential(nn.ReLU(), nn.Linear(6, 3))),
            r"in layer 1.1 \(Linear\(in_features=6, out_features=3, .*which got an input of shape \(2, 8\)",
        ),
        (lambda: nn.Sequential(nn.Conv2d(4, 8, 3)), r"in layer 0 \(Conv2d\(4, 8, .*got an input of shape \(2, 4\)"),
        (lambda: nn.Sequential(nn.Linear(4, 3.5)), r"cannot be built .*TypeError.*, in Linear.__init__"),
        (net(forward=lambda module, x: x.requires_grad_(False).long()), r"in layer body \(Linear"),
    ],
)
def test_errors_of_pytorch_name_the_layer(factory, message):
    with pytest.raises(ConfigError, match=message):
        tried(factory)


class TestSharedParameters:
    def test_the_same_module_in_every_call_is_an_error(self):
        module = nn.Linear(4, 3)
        with pytest.raises(ConfigError, match=r"the same parameter weight in every call.*copy.deepcopy"):
            tried(lambda: module)

    def test_a_shared_part_is_an_error_unless_it_is_frozen(self):
        part = nn.Linear(4, 4)
        with pytest.raises(ConfigError, match=r"the same parameter 0.weight in every call"):
            tried(lambda: nn.Sequential(part, nn.Linear(4, 3)))
        part.requires_grad_(False)
        tried(lambda: nn.Sequential(part, nn.Linear(4, 3)))

    def test_copies_and_shared_constants_are_fine(self):
        module = nn.Linear(4, 3)
        tried(lambda: copy.deepcopy(module))
        tried(net(lambda own: own.register_buffer("table", TABLE), lambda own, x: x * own.table))


_PRETRAINED = nn.Linear(4, 4)


class _CopiesPretrained(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = copy.deepcopy(_PRETRAINED), nn.Linear(4, 3)

    def forward(self, x):
        return self.head(self.body(x))


def test_copies_of_a_global_module_in_init_are_no_untrained_parameters():
    assert tried(_CopiesPretrained).warnings == ()


class TestModulesThatPyTorchDoesNotFind:
    """eval() does not reach modules in plain lists, and their buffers are not saved, with or without parameters."""

    @staticmethod
    def listed(make):
        return net(sets(parts=lambda: [make()]), lambda module, x: module.parts[0](x))

    @pytest.mark.parametrize("layer", [nn.Dropout, nn.AlphaDropout])
    def test_dropout_is_an_error_that_names_the_list(self, layer):
        names_it = r"eval\(\) does not reach parts\[0\] \(Dropout\).*ModuleList|draws random numbers"
        with pytest.raises(ConfigError, match=names_it):
            tried(self.listed(lambda: layer(0.5)))

    @pytest.mark.parametrize("affine, number", [(False, "their tensors are not"), (True, "their 8 parameters are not")])
    def test_running_statistics_are_a_warning(self, affine, number):
        (warning,) = tried(self.listed(lambda: nn.BatchNorm1d(4, affine=affine))).warnings
        assert "does not find parts[0] (BatchNorm1d)" in warning and number in warning

    def test_frozen_layers_drawn_at_random_are_an_error_without_a_number(self):
        with pytest.raises(ConfigError, match=r"parts\[0\] \(Linear\).*their tensors are not trained"):
            tried(self.listed(lambda: nn.Linear(4, 4).requires_grad_(False)))

    def test_activations_are_fine(self):
        assert tried(self.listed(nn.ReLU)).warnings == ()


class Observed(nn.Module):
    """Keeps a running mean in evaluation too."""

    def __init__(self):
        super().__init__()
        self.body = nn.Linear(4, 3)
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x):
        self.mean.mul_(0.5).add_(0.5 * x.detach().mean(0))
        return self.body(x - self.mean)


class Ranged(Observed):
    """Keeps the largest value, as the observers of quantisation do: the same samples twice do not show it."""

    def forward(self, x):
        self.mean.copy_(torch.maximum(self.mean, x.detach().amax(0)))
        return self.body(x / (1 + self.mean))


@pytest.mark.parametrize("model", [Observed, Ranged])
def test_buffers_that_change_in_evaluation_are_named(model):
    with pytest.raises(ConfigError, match="in evaluation: its forward pass changes mean; change buffers only in train"):
        tried(model)


@pytest.mark.parametrize(
    "outputs, message",
    [
        (lambda module, y: (y, y) if module.training else y, "with tuple in training mode, .*auxiliary outputs"),
        (lambda module, y: {"logits": y, "loss": 0}, r"with dict, .*one of its entries \(logits, loss\)"),
        (lambda module, y: [y], "with list, .*return the tensor"),
    ],
)
def test_outputs_that_are_no_tensor_have_a_remedy(outputs, message):
    class Net(nn.Linear):
        def forward(self, x):
            return outputs(self, super().forward(x))

    with pytest.raises(ConfigError, match=message):
        tried(lambda: Net(4, 3))


@pytest.mark.parametrize(
    "forward, message",
    [
        (lambda module, x: x.view(2, 4), "takes a batch of 2 samples, but does not take a batch of 3: .*any size"),
        (lambda module, x: x[:2], r"answers a batch of 3 with shape \(2, 3\), expected \(3, 3\)"),
    ],
)
def test_a_fixed_number_of_samples_is_an_error(forward, message):
    with pytest.raises(ConfigError, match=message):
        tried(net(forward=forward))


def test_outputs_that_lose_the_axis_of_one_sample_are_a_warning():
    class Net(nn.Linear):
        def forward(self, x):
            return super().forward(x).squeeze()

    (warning,) = tried(lambda: Net(4, 3)).warnings
    assert "answers a batch of 1 with shape (3,), expected (1, 3)" in warning


def test_values_that_the_network_refuses_are_an_error_with_its_line():
    def forward(module, x):
        if x.sum() > 0 and len(x) == 2:
            raise ValueError("no positive numbers")
        return x

    with pytest.raises(ConfigError, match="does not take samples between 0 and 1: ValueError: no positive numbers"):
        tried(net(forward=forward))


class TestNumbersDrawnByTheFirstPass:
    """Values that a forward pass draws once and keeps are in no saved model."""

    CACHE: dict[str, torch.Tensor] = {}

    def attribute(module, x):
        module.mask = getattr(module, "mask", None) if hasattr(module, "mask") else torch.rand(4)
        return x * module.mask

    def by_size(module, x):
        masks = vars(module).setdefault("masks", {})
        if len(x) not in masks:
            masks[len(x)] = torch.rand(4)
        return x * masks[len(x)]

    def of_all_modules(module, x):
        if "mask" not in TestNumbersDrawnByTheFirstPass.CACHE:
            TestNumbersDrawnByTheFirstPass.CACHE["mask"] = torch.rand(4)
        return x * TestNumbersDrawnByTheFirstPass.CACHE["mask"]

    def by_numpy(module, x):
        module.scale = getattr(module, "scale", None) or np.random.rand()
        return x * module.scale

    @pytest.fixture(autouse=True)
    def empty(self):
        self.CACHE.clear()

    @pytest.mark.parametrize("forward", [attribute, by_size, of_all_modules, by_numpy])
    @pytest.mark.parametrize("only_training", [False, True])
    def test_it_is_an_error(self, forward, only_training):
        kept = lambda module, x: forward(module, x) if module.training or not only_training else x
        message = "draws random numbers in its first forward pass.*register_buffer|with other values in another call"
        with pytest.raises(ConfigError, match=message):
            tried(net(forward=kept))

    def test_a_cache_of_computed_values_is_fine(self):
        tried(net(forward=lambda module, x: x + vars(module).setdefault("places", torch.arange(4.0))))

    def test_a_buffer_that_the_first_pass_draws_is_fine(self):
        """Such as the codes of vector quantisation, which are averaged and saved."""

        def forward(module, x):
            if not module.is_drawn:
                module.codes.copy_(torch.rand(4))
                module.is_drawn.fill_(True)
            return x * module.codes

        def make(module):
            module.register_buffer("codes", torch.zeros(4))
            module.register_buffer("is_drawn", torch.tensor(False))

        tried(net(make, forward))
