"""Modules as users bring them: compiled, scripted, traced, exported, with sparse gradients; all engines train them."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from closeness import close
from federations import uneven
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from training_tasks import by_torch, logits_of, results, rows, tasks_of

from cfl_ray import Experiment, federation_from_arrays, simulate
from cfl_ray.core.local_sgd import ExampleNoise, LocalSGD
from cfl_ray.engine import compiled, manual, sequential, vectorised
from cfl_ray.engine.failure import ClientFailure
from cfl_ray.errors import ConfigError, RunError
from cfl_ray.nn.network import Network, template_of
from cfl_ray.setup.prepare import prepare

ENGINES = [sequential, manual, vectorised]
LOCAL = LocalSGD(2, None, 4, 0.1, momentum=0.9, weight_decay=0.01)


def plain():
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))


def with_norm():
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))


def in_place():
    module = plain()
    module.compile(backend="eager")
    return module


def with_compiled_part():
    module = plain()
    module[0] = torch.compile(module[0], backend="eager")
    return module


def exported():
    sizes = ({0: torch.export.Dim("n")},)
    return torch.export.export(plain(), (torch.zeros(5, 6),), dynamic_shapes=sizes).module()


def with_scripted_part():
    module = with_norm()
    return nn.Sequential(torch.jit.script(module[:2]), *module[2:])


COMPILED = [lambda: torch.compile(plain(), backend="eager"), in_place, with_compiled_part]
SCRIPTED = [
    (lambda: torch.jit.script(plain()), plain),
    (lambda: torch.jit.trace(plain(), torch.zeros(2, 6)), plain),
    (lambda: torch.jit.script(with_norm()), with_norm),
    (with_scripted_part, with_norm),
    (lambda: torch.fx.symbolic_trace(plain()), plain),
    (exported, plain),
]


def rows_of(engine, factory, **kinds):
    network = Network(factory, (6,), **kinds)
    return torch.stack([one.row_P for one in results(engine, network, tasks_of(network, [8, 8], LOCAL))]), network


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("factory", COMPILED, ids=["module", "in place", "part"])
def test_a_compiled_module_is_trained_as_without(factory, engine):
    """Bit for bit, since the compiled code is not used; names have no `_orig_mod.`."""
    trained, network = rows_of(engine, factory)
    expected, other = rows_of(engine, plain)
    assert network.spec == other.spec and torch.equal(trained, expected)


@pytest.mark.parametrize("factory, original", SCRIPTED)
def test_scripted_traced_and_exported_modules_are_trained_as_the_original(factory, original):
    trained, network = rows_of(sequential, factory)
    expected, _ = rows_of(sequential, original)
    assert close(trained, expected, 1e-5)
    rows_P = network.new_model(0, 0), network.new_model(0, 1)
    x = torch.rand(4, 6)
    first = logits_of(network, rows_P[0], x)
    assert not torch.equal(first, logits_of(network, rows_P[1], x)), "each row is another model"
    assert torch.equal(first, logits_of(network, rows_P[0], x))


@pytest.mark.parametrize("factory", [SCRIPTED[0][0], SCRIPTED[1][0], with_scripted_part])
@pytest.mark.parametrize("engine", [manual, vectorised])
def test_other_engines_say_that_they_cannot_train_torchscript(engine, factory):
    assert "is TorchScript" in engine.why_not(Network(factory, (6,)), [])


def test_dropout_of_torchscript_has_the_seeds_of_the_client():
    def factory():
        return torch.jit.script(nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.5), nn.Linear(8, 3)))

    network = Network(factory, (6,))
    assert network.random_forward
    tasks = tasks_of(network, [8, 8], LOCAL)
    once = torch.stack([one.row_P for one in results(sequential, network, tasks)])
    torch.manual_seed(5)
    again = torch.stack([one.row_P for one in results(sequential, network, tasks[1:])])
    assert torch.equal(once[1:], again)


@pytest.mark.parametrize(
    "model", [lambda shape, classes: torch.jit.script(nn.Sequential(nn.Flatten(), nn.Linear(6, classes)))]
)
@pytest.mark.parametrize("method", ["fedavg", {"ifca": {"num_clusters": 2}}, "ditto", "cfl"])
def test_runs_with_torchscript_give_its_models(model, method):
    experiment = Experiment(data=uneven([12, 16]), rounds=1, methods=[method], model=model, tracking={"enabled": False})
    result = next(iter(simulate(experiment).methods.values()))
    tensors = result.state_dict(cluster=0)
    module = model((6,), 3)
    module.load_state_dict(tensors, strict=True)
    x, _ = result.test(0)
    assert torch.equal(module(x), result.model(cluster=0)(x))


# ---- modules and tensors that a network has at several places, and hooks of gradients


def twice():
    block = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Tanh())
    return nn.Sequential(block, block, nn.Linear(6, 3))


def tied_statistics():
    first, second = nn.BatchNorm1d(6), nn.BatchNorm1d(6)
    second.running_mean, second.running_var, second.bias = first.running_mean, first.running_var, first.bias
    return nn.Sequential(nn.Linear(6, 6), first, nn.Tanh(), nn.Linear(6, 6), second, nn.Linear(6, 3))


def masked(frozen=False):
    module = nn.Sequential(nn.Linear(6, 6).requires_grad_(not frozen), *plain())
    module[1].weight.register_hook(lambda gradient: gradient * torch.arange(2, device=gradient.device).repeat(3))
    return module


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("factory", [twice, tied_statistics])
def test_modules_and_tensors_at_several_places_are_trained_as_in_pytorch(factory, engine):
    network = Network(factory, (6,))
    tasks, own = tasks_of(network, [8, 8, 8], LOCAL), dict(network.module.named_parameters())
    for task, row_P in zip(tasks, rows(engine, network, tasks), strict=True):
        assert close(row_P, by_torch(factory, network, task)[0], 1e-5)
        features, outputs = network.evaluated(row_P, task.x)
        assert close(outputs, logits_of(network, row_P, task.x), 1e-5) and features.shape == (8, 6)
    assert all(parameter is own[name] for name, parameter in network.module.named_parameters())


def test_hooks_of_gradients_act():
    network = Network(masked, (6,))
    for task, row_P in zip(tasks := tasks_of(network, [8, 8], LOCAL), rows(sequential, network, tasks), strict=True):
        assert close(row_P, by_torch(masked, network, task)[0], 1e-5)
    for engine in (manual, vectorised, compiled):
        assert engine.why_not(network, tasks) == "its parameter 1.weight has a gradient hook"


def test_hooks_of_gradients_act_beside_frozen_parameters():
    """Copies of a module have no hooks, so processes do not copy a template."""

    def factory():
        return masked(frozen=True)

    network = Network(factory, (6,), template=template_of(factory, 0, (6,)))
    task = tasks_of(network, [8], replace(LOCAL, weight_decay=0))[0]
    moved = network.spec.tensors(rows(sequential, network, [task])[0] - task.start_P)["1.weight"]
    assert not moved[:, ::2].any() and moved[:, 1::2].any()


class Checkpointed(nn.Sequential):
    def forward(self, x):
        return self[1](checkpoint(self[0], x, use_reentrant=False))


def checkpointed():
    return Checkpointed(nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Tanh()), nn.Linear(6, 3))


def test_checkpoints_update_batch_statistics_twice_as_in_pytorch():
    """The backward pass repeats the forward pass, also the update of running means."""
    network = Network(checkpointed, (6,))
    tasks = tasks_of(network, [8], LOCAL)
    assert close(rows(sequential, network, tasks)[0], by_torch(checkpointed, network, tasks[0])[0], 1e-5)
    for engine in (manual, vectorised):
        assert "its backward pass changes the buffer 0.1.running_mean" in engine.why_not(network, tasks)


def test_hooks_of_accumulated_gradients_are_refused():
    def factory():
        module = plain()
        module[0].weight.register_post_accumulate_grad_hook(lambda parameter: None)
        return module

    experiment = Experiment(data=uneven([8, 8]), rounds=1, methods=["fedavg"], model=factory)
    with pytest.raises(
        ConfigError, match="0.weight has a hook of register_post_accumulate_grad_hook.*; use register_hook"
    ):
        simulate(experiment)


def test_a_parameter_without_numbers_is_no_shared_one():
    class Empty(nn.Linear):
        def __init__(self):
            super().__init__(6, 3)
            self.rest = nn.Parameter(torch.zeros(0))

    experiment = Experiment(data=uneven([8, 8]), rounds=1, methods=["fedavg"], model=Empty, tracking={"enabled": False})
    assert "rest" in simulate(experiment)["fedavg"].state_dict()


# ---- sparse gradients


class Words(nn.Module):
    def __init__(self, sparse, functional=False):
        super().__init__()
        self.words, self.sparse, self.functional = nn.Embedding(9, 4, sparse=sparse), sparse, functional
        self.bag, self.out = nn.EmbeddingBag(9, 4, sparse=sparse), nn.Linear(4, 3)

    def forward(self, x):
        words = F.embedding(x, self.words.weight, sparse=self.sparse) if self.functional else self.words(x)
        return self.out(words.mean(1) + self.bag(x))


@pytest.mark.parametrize("functional", [False, True])
@pytest.mark.parametrize("engine", [sequential, vectorised])
@pytest.mark.parametrize("proximal", [[], [(0.5, None, 0, 1)]])
def test_sparse_gradients_are_those_of_dense_ones(engine, functional, proximal):
    def rows(sparse):
        network = Network(lambda: Words(sparse, functional), (5,), dtype=torch.int64)
        x = torch.arange(40).view(8, 5).remainder(9)
        fields = {"x": x, "y": torch.arange(8).remainder(3), "start_P": network.new_model(0, 0)}
        tasks = tasks_of(network, [8, 8], LocalSGD(2, None, 4, 0.1, momentum=0.9, clip_norm=0.5), (), **fields)
        return torch.stack([one.row_P for one in results(engine, network, tasks)])

    assert torch.equal(rows(True), rows(False))


RUNS = [("fedavg", {}), ({"fedprox": {}}, {}), ("ditto", {}), ("fedgroup", {}), ("per_fedavg", {})]
RUNS += [("fedavg", {"local": {"optimizer": "adam", "lr": 0.01}})]


def test_clipped_gradients_of_single_samples_are_those_of_dense_ones():
    def rows(sparse):
        network = Network(lambda: Words(sparse), (5,), dtype=torch.int64)
        x = torch.arange(40).view(8, 5).remainder(9)
        fields = {"x": x, "y": torch.arange(8).remainder(3), "start_P": network.new_model(0, 0)}
        local = LocalSGD(2, None, 4, 0.1, examples=ExampleNoise(1.0, 0.05))
        return torch.stack(
            [one.row_P for one in results(sequential, network, tasks_of(network, [8], local, (), **fields))]
        )

    assert torch.equal(rows(True), rows(False))


@pytest.mark.parametrize("method, keys", RUNS)
def test_runs_with_sparse_gradients_are_those_with_dense_ones(method, keys):
    draw = np.random.default_rng(0)
    x = draw.integers(0, 9, (80, 5))
    federation = federation_from_arrays(x, (x < 4).sum(1) % 3, np.arange(80) // 20, vocabulary=9, num_classes=3)
    losses = []
    for sparse in (False, True):
        experiment = Experiment(
            data=federation,
            rounds=1,
            methods=[method],
            model=lambda sparse=sparse: Words(sparse),
            tracking={"enabled": False},
            **keys,
        )
        losses.append(next(iter(simulate(experiment).methods.values())).final["test_loss"])
    assert losses[0] == losses[1]


# ---- what must stay


class Changing(nn.Module):
    """Freezes or thaws its first layer in its 30th pass in training."""

    def __init__(self, trains):
        super().__init__()
        self.first, self.last, self.trains, self.passes = (
            nn.Linear(6, 8).requires_grad_(trains),
            nn.Linear(8, 3),
            trains,
            0,
        )

    def forward(self, x):
        self.passes += self.training
        if self.passes == 30:
            self.first.requires_grad_(not self.trains)
        return self.last(self.first(x).relu())


@pytest.mark.parametrize(
    "trains, message", [(True, "first.weight is no longer trained"), (False, "first.weight is now trained")]
)
def test_a_layer_that_is_frozen_or_thawed_in_training_is_named(trains, message):
    experiment = Experiment(
        data=uneven([40, 40]),
        rounds=3,
        methods=["fedavg"],
        model=lambda: Changing(trains),
        runtime={"engine": "sequential"},
        local={"epochs": 4, "batch_size": 4},
        tracking={"enabled": False},
    )
    with pytest.raises((ClientFailure, RunError, ConfigError), match=message):
        simulate(experiment)


def test_an_error_in_training_names_the_layer():
    class Growing(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.passes = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 3)), 0

        def forward(self, x):
            self.passes += self.training
            return self.body(x if self.passes < 30 else x[:, :5])

    experiment = Experiment(
        data=uneven([40, 40]),
        rounds=3,
        methods=["fedavg"],
        model=Growing,
        runtime={"engine": "sequential"},
        local={"epochs": 4, "batch_size": 4},
        tracking={"enabled": False},
    )
    with pytest.raises(
        ClientFailure, match=r"in layer body.0 \(Linear\(in_features=6.* got an input of shape \(4, 5\)"
    ):
        simulate(experiment)


class Functional(nn.Module):
    """A cosine classifier: the weight of the last layer is used, the layer itself is not called."""

    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(6, 8), nn.Linear(8, 3, bias=False)

    def forward(self, x):
        return F.linear(F.normalize(self.body(x)), F.normalize(self.head.weight))


class Twice(Functional):
    """A classifier that is applied to the features and to their mirror image."""

    def forward(self, x):
        return self.head(self.body(x)) - self.head(-self.body(x))


@pytest.mark.parametrize(
    "model, reason",
    [
        (lambda: torch.jit.script(plain()), "TorchScript does not show"),
        (Functional, "it calls it on no inputs"),
        (Twice, r"it calls it on 2 inputs of shape \(2, 8\)"),
        (lambda: nn.Sequential(nn.Unflatten(1, (2, 3)), nn.Linear(3, 3), nn.Flatten(), nn.Linear(6, 3)), None),
    ],
)
@pytest.mark.parametrize(
    "method, reads",
    [("fedccfa", True), ("fedas", True), ({"fedas": {"align_epochs": 0}}, False), ("fedper", False)],
)
def test_methods_that_read_features_refuse_a_model_without_before_the_run(tmp_path, model, reason, method, reads):
    experiment = Experiment(data=uneven([12, 16]), rounds=1, methods=[method], model=model, output=str(tmp_path))
    if reason is None or not reads:
        prepare(experiment)
        return
    with pytest.raises(ConfigError, match=rf"^fed\w+: the inputs of the last layer .*{reason}"):
        prepare(experiment)
