import random

import pytest
import torch
from torch import nn

from cfl_ray import models
from cfl_ray.errors import ConfigError
from cfl_ray.models import REGISTRY, recipe
from cfl_ray.models.factory import ModelRecipe
from cfl_ray.nn import network
from cfl_ray.nn.graph import Unsupported, graph_of

MNIST, CIFAR = (1, 28, 28), (3, 32, 32)


@pytest.mark.parametrize(
    "name, options, shape, classes, parameters",
    [
        ("mlp", {"hidden": 200}, MNIST, 10, 159_010),  # 784 * 200 + 200 + 200 * 10 + 10: IFCA
        ("mlp", {"hidden": 2048}, MNIST, 10, 1_628_170),  # 784 * 2048 + 2048 + 2048 * 10 + 10: StoCFL
        ("lenet5", {}, CIFAR, 10, 62_006),  # FedClust, PACFL
        ("lenet5", {}, MNIST, 10, 44_426),
        ("lenet5", {"batch_norm": True}, MNIST, 10, 44_426 + 2 * (6 + 16)),  # FL-bench
        ("femnist_cnn", {}, MNIST, 62, 1_206_590),  # StoCFL's FEMNIST
        ("leaf_cnn", {}, MNIST, 10, 582_026),  # CAM
        ("leaf_cnn", {}, CIFAR, 10, 878_538),
        ("autocfl_cnn", {}, MNIST, 10, 33_580),  # AutoCFL: MNIST, Fashion-MNIST, CIFAR-10
        ("autocfl_cnn", {"channels": [16, 32]}, MNIST, 10, 18_378),
        ("autocfl_cnn", {"channels": [6, 16]}, CIFAR, 10, 6_882),
        ("resnet9", {}, CIFAR, 100, 6_621_540),  # FedClust on CIFAR-100
        # convolutions of configuration D: 14,714,688; then 512 * 512 + 512 twice and 512 * 10 + 10
        ("vgg16", {}, CIFAR, 10, 14_714_688 + 2 * 262_656 + 5_130),
        ("digits_cnn", {}, (1, 8, 8), 10, 16 * 9 + 16 + 16 * 16 * 10 + 10),
    ],
)
def test_has_the_parameters_of_its_paper(name, options, shape, classes, parameters):
    module = recipe(name, options, shape, classes)()
    assert sum(parameter.numel() for parameter in module.parameters()) == parameters
    assert module(torch.zeros(3, *shape)).shape == (3, classes)


def test_every_registered_model_is_counted_above():
    counted = test_has_the_parameters_of_its_paper.pytestmark[0].args[1]
    assert {name for name, *_ in counted} == set(REGISTRY)


def test_a_process_tries_a_network_of_the_package_once_and_a_users_every_time(monkeypatch):
    name, options, made, seeds = "mlp", {"hidden": 4}, models.tried, []
    monkeypatch.setattr(models, "_TRIED", {})
    monkeypatch.setattr(models, "tried", lambda recipe, seed: seeds.append(seed) or made(recipe, seed))
    first, again = (recipe(name, options, MNIST, 10, seed=seed) for seed in (3, 4))
    assert seeds == [3] and again == first
    other = made(ModelRecipe(REGISTRY[name], MNIST, 10, options), 4)  # what it finds depends on no seed
    assert (again.warnings, again.constants) == (other.warnings, other.constants)
    recipe(name, options, MNIST, 11, seed=5)  # another network
    for seed in (6, 7):
        recipe(lambda: REGISTRY[name](MNIST, 10, **options), {}, MNIST, 10, seed=seed)
    assert seeds == [3, 5, 6, 7]


class Everything(nn.Module):
    """Dropout as a layer, as a layer called twice, and as a function; statistics; a pass that writes to its samples."""

    def __init__(self, functional: bool):
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Linear(5, 4)
        self.drop, self.twice, self.functional = nn.Dropout(0.5), nn.Dropout(0.3), functional

    def forward(self, x):
        x = self.norm(self.drop(self.first(x.mul_(2))))
        if self.functional:
            return self.last(nn.functional.dropout(x, 0.3, self.training))
        return self.last(self.twice(self.twice(x)))


def graph(of):
    """The graph of a network, or the reason why it has none."""
    try:
        return graph_of(of)
    except Unsupported as reason:
        return str(reason)


@pytest.mark.parametrize(
    "factory, shape",
    [
        (lambda: Everything(True), (6,)),
        (lambda: Everything(False), (6,)),
        (recipe("leaf_cnn", {}, MNIST, 4), MNIST),  # channels last
        (recipe("femnist_cnn", {}, MNIST, 4), MNIST),
    ],
)
def test_a_network_of_a_known_key_is_as_one_with_trial_passes_of_its_own(factory, shape, monkeypatch):
    monkeypatch.setattr(network, "_TRIALS", {})
    key = object()
    alone, first, other = (network.Network(factory, shape, seed=s, key=k) for s, k in enumerate((None, key, key)))
    assert len(network._TRIALS) == 1
    assert graph(alone) == graph(first) == graph(other)
    kept = ("output_shape", "last_layer", "random_forward", "batch_statistics", "side_effect", "channels_last", "spec")
    row_P, x = alone.new_model(0, 0), torch.rand(3, *shape)
    outputs = []
    for one in (alone, first, other):
        assert [getattr(one, name) for name in kept] == [getattr(alone, name) for name in kept]
        drops = {name: (layer.p, layer.sample_shape) for name, layer in one.dropouts.items()}
        assert drops == {name: (layer.p, layer.sample_shape) for name, layer in alone.dropouts.items()}
        assert torch.equal(one.new_model(0, 0), row_P), "of the seed that is asked for"
        one.load(row_P)
        one.module.train()
        for number, layer in enumerate(one.dropouts.values()):
            layer.mask = torch.full((3, *layer.sample_shape), 0.5 * (number + 1))
        with one.draws_from(1), torch.no_grad():
            outputs.append((one.trained_outputs(one.input(x)), one.row().clone()))
    assert all(torch.equal(a, b) for found in outputs[1:] for a, b in zip(found, outputs[0]))
    assert torch.equal(x, x.clamp(0, 1)), "a pass that writes to its samples has copies"


def test_femnist_cnn_starts_from_xavier():
    """Uniform in +-sqrt(6 / (fan in + fan out)) and biases of zero."""
    module = recipe("femnist_cnn", {}, MNIST, 62)()
    first, last = module[0], module[-1]
    assert (
        0.9 < first.weight.abs().max() / (6 / (1 * 9 + 32 * 9)) ** 0.5 <= 1
        and 0.9 < last.weight.abs().max() / (6 / (128 + 62)) ** 0.5 <= 1
    )
    assert not first.bias.any() and not last.bias.any()


@pytest.mark.parametrize("size", [28, 29, 30, 32])
@pytest.mark.parametrize("name", ["lenet5", "femnist_cnn", "leaf_cnn"])
def test_sizes_follow_the_images(name, size):
    assert recipe(name, {}, (2, size, size + 1), 7)()(torch.zeros(1, 2, size, size + 1)).shape == (1, 7)


@pytest.mark.parametrize("name, size", [("lenet5", 16), ("leaf_cnn", 16), ("femnist_cnn", 6), ("digits_cnn", 2)])
def test_the_smallest_images(name, size):
    assert recipe(name, {}, (1, size, size), 3)()(torch.zeros(2, 1, size, size)).shape == (2, 3)


def test_a_recipe_builds_a_new_module_every_time():
    made = recipe("mlp", {"hidden": 4}, (1, 2, 2), 3)
    assert made() is not made() and made().state_dict().keys() == made().state_dict().keys()


def test_a_factory_from_a_file(tmp_path):
    (tmp_path / "net.py").write_text(
        "from torch import nn\n\ndef Net(num_classes):\n"
        "    return nn.Sequential(nn.Flatten(), nn.Linear(12, num_classes))\n"
    )
    assert recipe(f"{tmp_path}/net.py:Net", {}, (3, 2, 2), 5)()[1].out_features == 5


@pytest.mark.parametrize(
    "name, options, shape, message",
    [
        ("lenet", {}, MNIST, r"unknown model 'lenet' \(did you mean 'lenet5'\?\)"),
        ("mlp", {"hiden": 5}, MNIST, r"model mlp has no option 'hiden' \(did you mean 'hidden'\?\)"),
        (lambda: nn.Linear(784, 10), {"wide": 5}, MNIST, r"test_models.py, .* has no option 'wide'; it has none"),
        ("mlp", {"hidden": -5}, MNIST, r"model mlp cannot be built with \(hidden=-5, .*\): RuntimeError"),
        ("mlp", {"hidden": "many"}, MNIST, r"model mlp cannot be built with \(hidden='many', .*\): TypeError"),
        ("lenet5", {}, (1, 16, 15), r"lenet5 takes .* at least 16, got .* \(1, 16, 15\); .* enlarge"),
        ("leaf_cnn", {}, (28, 28), r"leaf_cnn takes .* of shape \(28, 28\); .* x\[:, None\]"),
        ("autocfl_cnn", {}, (28, 30, 3), r"autocfl_cnn takes .* of shape \(28, 30, 3\); .* x.transpose\(0, 3, 1, 2\)"),
        ("femnist_cnn", {}, (1, 5, 6), r"femnist_cnn takes .* at least 6, got samples of shape \(1, 5, 6\)"),
        ("digits_cnn", {}, (64,), r"digits_cnn takes images .* of shape \(64,\); model mlp takes numbers of any shape"),
        ("resnet9", {}, (32, 32, 3), r"resnet9 takes .* at least 8, .* x.transpose\(0, 3, 1, 2\)"),
        ("vgg16", {}, (3, 31, 32), r"vgg16 takes .* at least 32, got samples of shape \(3, 31, 32\)"),
        (lambda: nn.Linear(784, 10), {}, MNIST, r"does not take samples of shape \(1, 28, 28\)"),
        (lambda: nn.BatchNorm1d(10), {}, MNIST, r"does not take samples of shape \(1, 28, 28\): ValueError"),
        (
            lambda: nn.Sequential(nn.Flatten(), nn.Linear(784, 7)),
            {},
            MNIST,
            r"answers 2 samples with shape \(2, 7\), but the data has 10 classes: its output size must be 10",
        ),
        (
            lambda: nn.Linear(28, 10),
            {},
            MNIST,
            r"answers 2 samples with shape \(2, 1, 28, 10\), but the data has 10 classes",
        ),
        (lambda: None, {}, MNIST, "returns NoneType, expected a torch.nn.Module"),
        (lambda: Changed(lambda y, net: y * random.random()), {}, MNIST, "answers the same samples differently"),
        (lambda: Changed(lambda y, net: y * net.number), {}, MNIST, "answers the same samples differently"),
        (
            lambda: Changed(lambda y, net: y.detach()),
            {},
            MNIST,
            "cannot be trained: ValueError: its outputs have no gra",
        ),
        (lambda: Changed(first_outputs), {}, MNIST, "cannot be trained: RuntimeError: Trying to backward th"),
        ("missing.py:Net", {}, MNIST, "model 'missing.py:Net': there is no file /"),
    ],
)
def test_what_cannot_work_is_refused_before_a_run(name, options, shape, message):
    with pytest.raises(ConfigError, match=message):
        recipe(name, options, shape, 10)


def test_token_ids_need_an_embedding():
    with pytest.raises(ConfigError, match="mlp does not take torch.int64 samples .* begins with nn.Embedding"):
        recipe("mlp", {}, (80,), 10, torch.int64)
    with pytest.raises(ConfigError) as error:
        recipe(lambda: nn.Sequential(nn.Embedding(2, 3), nn.Linear(4, 10)), {}, (80,), 10, torch.int64)
    assert "does not take torch.int64 samples" in str(error.value) and "begins with" not in str(error.value)


class Changed(nn.Module):
    """A linear layer whose outputs a function (outputs, module) changes."""

    def __init__(self, change):
        super().__init__()
        self.linear, self.change, self.number = nn.Linear(784, 10), change, 0

    def forward(self, x):
        self.number += 1
        return self.change(self.linear(x.flatten(1)), self)


def first_outputs(outputs, module):
    return vars(module).setdefault("first", outputs) if outputs.requires_grad else outputs


class Flat(nn.Sequential):
    def __init__(self, shape, count, width=3):
        super().__init__(nn.Flatten(), nn.Linear(torch.Size(shape).numel(), width), nn.Linear(width, count))


def positional(a, b, /, width):
    return Flat(a, b, width)


@pytest.mark.parametrize(
    "given, options",
    [
        (Flat, {}),  # one name of the documented ones, one by position
        (lambda first, second: Flat(first, second), {}),
        (lambda n_classes, in_shape: Flat(in_shape, n_classes), {}),
        (positional, {"width": 4}),
        (lambda: Flat((3, 2, 2), 5), {}),
        (lambda classes=7, **rest: Flat((3, 2, 2), classes, **rest), {"width": 6}),
        (lambda number: Flat((3, 2, 2), 5, number), {"number": 2}),
    ],
)
def test_a_factory_is_passed_what_its_signature_asks_for(given, options):
    module = recipe(given, options, (3, 2, 2), 5)()
    assert module[1].in_features == 12 and module[2].out_features == 5
    assert module[1].out_features == options.get("width", options.get("number", 3))


def test_a_lazy_module_has_its_sizes():
    made = recipe(
        lambda num_classes: nn.Sequential(
            nn.LazyConv2d(4, 2), nn.LazyBatchNorm2d(), nn.Flatten(), nn.LazyLinear(num_classes)
        ),
        {},
        (3, 4, 4),
        5,
    )
    assert [tuple(p.shape) for p in made().parameters()] == [(4, 3, 2, 2), (4,), (4,), (4,), (5, 36), (5,)]


def test_a_lazy_layer_without_a_call_is_named():
    class Idle(nn.Linear):
        def __init__(self):
            super().__init__(12, 5)
            self.idle = nn.LazyLinear(3)

    with pytest.raises(
        ConfigError, match=r"Idle \(.*test_models.py, line \d+\): idle.weight of a lazy layer has no size"
    ):
        recipe(Idle, {}, (12,), 5)


@pytest.mark.parametrize(
    "source, message",
    [
        (
            "def Net(a, b, c): ...",
            r"model Net \(.*net.py, line 2\) has a parameter 'c' without a value; .* set model.opt",
        ),
        ("def Net():\n    return 1 / 0", r"Net \(.*net.py, line 2\) cannot be built .* division by zero \(line 3\)"),
        ("Net = 5", "net.py:Net' is int, expected a function or class to call"),
        ("def Net(): return 5", "returns int, expected a torch.nn.Module"),
        ("def Net(): return nn.Flatten()", "has no parameter to train"),
        ("def Net(): return nn.Linear(3, 2).double()", "the parameter weight is float64, .* must be float32"),
        (
            "class Net(nn.Linear):\n    def __init__(self):\n        super().__init__(12, 5)\n"
            "        self.phase = nn.Parameter(self.bias.data.cfloat())",
            r"the parameter phase is complex64, .* must be float32; make it of .*: torch.view_as_complex\(parameter\)",
        ),
        ("def Net(): return nn.LSTM(12, 5)", "answers with tuple, expected one tensor"),
        (
            "class Net(nn.Linear):\n    def __init__(self): super().__init__(12, 5)\n    def forward(self, x):\n"
            "        assert not self.training\n        return super().forward(x)",
            r"in training mode: AssertionError \(line 5\)",
        ),
    ],
)
def test_errors_name_the_authors_file_and_line(source, message, tmp_path):
    (tmp_path / "net.py").write_text(f"from torch import nn\n{source}\n")
    with pytest.raises(ConfigError, match=message):
        recipe(f"{tmp_path}/net.py:Net", {}, (12,), 5)


def test_a_module_is_no_factory():
    with pytest.raises(ConfigError, match="model: Linear is given as a module, expected what makes new ones"):
        recipe(torch.nn.Linear(12, 5), {}, (12,), 5)


def test_an_entry_point_of_an_installed_package(tmp_path, monkeypatch):
    (tmp_path / "their_nets.py").write_text("from torch import nn\nNet = lambda: nn.Linear(12, 5)\n")
    info = tmp_path / "their_nets-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: their-nets\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[cfl_ray.models]\ntheirs = their_nets:Net\nbroken = their_nets:Absent\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert recipe("theirs", {}, (12,), 5)().out_features == 5
    with pytest.raises(ConfigError, match=r"'broken' of package their-nets \(their_nets:Absent\) cannot be imported"):
        recipe("broken", {}, (12,), 5)
    with pytest.raises(ConfigError, match=r"unknown model 'their' \(did you mean 'theirs'\?\)"):
        recipe("their", {}, (12,), 5)
