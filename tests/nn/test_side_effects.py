"""Forward passes that change their inputs, parameters or buffers are trained as by a plain loop."""

import copy
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from closeness import close
from torch import nn
from training_tasks import logits_of, rows, tasks_of

from cfl_ray.core.local_sgd import LocalSGD
from cfl_ray.engine import manual, sequential, span, vectorised
from cfl_ray.engine.engines import ENGINES
from cfl_ray.errors import ConfigError
from cfl_ray.nn.network import Network

pytestmark = pytest.mark.cpu

LOCAL = LocalSGD(epochs=2, batch_size=4, lr=0.5)
OTHERS = {"manual": manual, "vectorised": vectorised, "span": span}
INPUTS, CLASSES = 6, 3


class Constrained(nn.Module):
    """The norm of each column of the weights is at most 0.2 (as in EEGNet)."""

    def __init__(self):
        super().__init__()
        self.first, self.head = nn.Linear(INPUTS, 5), nn.Linear(5, CLASSES)

    def forward(self, x):
        self.constrain(self.head.weight)
        return self.head(self.first(x).relu())

    def constrain(self, weight):
        weight.data = torch.renorm(weight.data, 2, 1, 0.2)


class ConstrainedInPlace(Constrained):
    def constrain(self, weight):
        with torch.no_grad():
            weight.copy_(torch.renorm(weight, 2, 1, 0.2))


class Clamped(Constrained):
    def constrain(self, weight):
        weight.data.clamp_(-0.6, 0.6)  # without an effect on the first weights


class Average(nn.Module):
    """Subtracts a moving average of its activations."""

    persistent = True

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(INPUTS, CLASSES)
        self.register_buffer("average", torch.zeros(CLASSES), persistent=self.persistent)

    def forward(self, x):
        h = self.head(x)
        if self.training:
            self.update(h.detach().mean(0))
        return h - self.average

    def update(self, mean):
        self.average.mul_(0.9).add_(0.1 * mean)


class AverageReplaced(Average):
    def update(self, mean):
        self.average = 0.9 * self.average + 0.1 * mean


class AverageOutsideTheRow(Average):
    persistent = False


class AverageReplacedOutsideTheRow(AverageReplaced):
    persistent = False


class Steps(nn.Module):
    """Activations are scaled by the number of the step, an integer buffer."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(INPUTS, CLASSES)
        self.register_buffer("step", torch.tensor(0))

    def forward(self, x):
        if self.training:
            self.step += 1
        return self.head(x) / (1 + self.step)


class Standardised(nn.Module):
    """Standardises its inputs in place."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(INPUTS, CLASSES)

    def forward(self, x):
        return self.head(x.sub_(0.5).div_(2.0))


class FunctionalBatchNorm(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.head = nn.Linear(INPUTS, 5), nn.Linear(5, CLASSES)
        self.register_buffer("mean", torch.zeros(5))
        self.register_buffer("var", torch.ones(5))

    def forward(self, x):
        return self.head(F.batch_norm(self.first(x), self.mean, self.var, training=self.training).relu())


class InstanceNorm(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.head = nn.InstanceNorm1d(2, track_running_stats=True), nn.Linear(INPUTS, CLASSES)

    def forward(self, x):
        return self.head(self.norm(x.view(-1, 2, 3)).flatten(1))


class Centred(nn.Module):
    """Subtracts the mean of the batch."""

    def __init__(self):
        super().__init__()
        self.first, self.head = nn.Linear(INPUTS, 5), nn.Linear(5, CLASSES)

    def forward(self, x):
        h = self.first(x)
        return self.head((h - h.mean(0)).tanh())


class CentredBackward(Centred):
    """Each gradient depends on the other samples of the batch, and no output does."""

    def forward(self, x):
        h = self.first(x)
        return self.head((h + h.mean(0) - h.mean(0).detach()).tanh())


class ByNumber(Centred):
    """Divides by the number of samples."""

    def forward(self, x):
        return self.head(self.first(x).tanh()) / len(x)


class ByFrequency(Centred):
    """Divides the gradients of functional embeddings by how often a token is in the batch."""

    def forward(self, x):
        tokens = (x > 0.5).long()
        return self.head(F.embedding(tokens, self.first.weight.T, scale_grad_by_freq=True).mean(1))


class Scaled(nn.Module):
    """A trained number, without axes."""

    def __init__(self):
        super().__init__()
        self.head, self.scale = nn.Linear(INPUTS, CLASSES), nn.Parameter(torch.tensor(2.0))

    def forward(self, x):
        return self.head(x) * self.scale


# the reason why only the sequential engine trains it; None: others train it too
NETWORKS = {
    Constrained: "its forward pass changes the parameter head.weight",
    ConstrainedInPlace: "its forward pass changes the parameter head.weight",
    Clamped: "its forward pass changes the parameter head.weight",
    Average: None,
    AverageReplaced: "its forward pass replaces the buffer average",
    AverageOutsideTheRow: "its forward pass changes the buffer average",
    AverageReplacedOutsideTheRow: "its forward pass replaces the buffer average",
    Steps: "its forward pass changes the buffer step",
    Standardised: None,
    FunctionalBatchNorm: None,
    InstanceNorm: None,
    Centred: None,
    CentredBackward: None,
    ByNumber: None,
    ByFrequency: None,
    Scaled: None,
}
SIZES = {"equal batches": [8, 8, 8], "unequal batches": [11, 7, 3], "full batches": [3, 3]}


def plain_row(factory, network, task):
    """The row of a plain PyTorch loop."""
    module = copy.deepcopy(factory()).train()
    for name, tensor in network.spec.tensors(task.start_P.clone()).items():
        if name in dict(module.named_parameters()):
            module.get_parameter(name).data = tensor
        else:
            module.get_buffer(name).copy_(tensor)
    optimizer = torch.optim.SGD(module.parameters(), task.local.lr)
    for _, batch in zip(range(task.steps), task.batches(), strict=False):
        index = np.arange(len(task.y)) if batch is None else batch
        optimizer.zero_grad()
        F.cross_entropy(module(task.x[index].clone()), task.y[index]).backward()
        optimizer.step()
    tensors = dict(module.named_parameters()) | dict(module.named_buffers())
    return torch.cat([tensors[name].detach().reshape(-1) for name in network.spec.names])


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
@pytest.mark.parametrize("factory", NETWORKS)
def test_all_engines_train_as_a_plain_loop(factory, sizes):
    network = Network(factory, (INPUTS,))
    local = replace(LOCAL, batch_size=None) if sizes == SIZES["full batches"] else LOCAL
    tasks = tasks_of(network, sizes, local, start_P=network.new_model(0, 0))
    samples = [task.x.clone() for task in tasks]
    expected = torch.stack([plain_row(factory, network, task) for task in tasks])
    assert close(rows(sequential, network, tasks), expected, 1e-5)
    for engine in OTHERS:
        reason = ENGINES[engine].why_not(network, tasks)
        if NETWORKS[factory] and engine != "span":
            assert reason == NETWORKS[factory]
        if not reason:
            assert close(rows(OTHERS[engine], network, tasks), expected, 1e-5), engine
    assert all(torch.equal(task.x, x) for task, x in zip(tasks, samples, strict=True)), "samples are not changed"


@pytest.mark.parametrize("factory", NETWORKS)
def test_a_model_answers_the_same_whatever_was_trained_before(factory):
    network, other = Network(factory, (INPUTS,)), Network(factory, (INPUTS,))
    tasks = tasks_of(network, [8, 8], LOCAL, start_P=network.new_model(0, 0))
    rows(sequential, network, tasks)
    x, row_P = torch.rand(5, INPUTS), network.new_model(3, 0)
    before = x.clone()
    assert torch.equal(logits_of(network, row_P, x), logits_of(other, row_P, x))
    assert torch.equal(x, before)


def test_statistics_of_a_batch_are_seen():
    mixing = {Average, AverageReplaced, FunctionalBatchNorm, InstanceNorm}
    mixing |= {Centred, CentredBackward, ByNumber, ByFrequency}
    for factory in NETWORKS:
        assert Network(factory, (INPUTS,)).batch_statistics == (factory in mixing), factory
    reason = "batch statistics need batches of one size and equal steps"
    for factory in mixing - {AverageReplaced}:
        network = Network(factory, (INPUTS,))
        assert vectorised.why_not(network, tasks_of(network, SIZES["unequal batches"], LOCAL)) == reason


def test_frozen_parameters_are_not_written_to():
    class Decayed(nn.Module):
        def __init__(self):
            super().__init__()
            self.base, self.head = nn.Linear(INPUTS, 5).requires_grad_(False), nn.Linear(5, CLASSES)

        def forward(self, x):
            self.base.weight.data.mul_(0.99)
            return self.head(self.base(x))

    with pytest.raises(ConfigError, match=r"writes to its frozen parameter base\.weight"):
        Network(Decayed, (INPUTS,))


def test_looking_at_a_pass_does_not_import_the_compiler_of_pytorch():
    """It would take each process of a run longer to start than PyTorch itself."""
    program = (
        "import sys\n"
        "from torch import nn\n"
        "from cfl_ray.nn.functional_dropout import repeated_backwards\n"
        "from cfl_ray.nn.network import Network\n"
        "network = Network(lambda: nn.Linear(2, 2), (2,))\n"
        "assert not repeated_backwards(network.module, network.flat.new_ones(1, 2))\n"
        "print('torch._dynamo' in sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


@pytest.mark.filterwarnings("error:Dynamo does not know:UserWarning")
def test_a_compiled_model_has_the_same_effects():
    class Compiled(nn.Module):
        def __init__(self):
            super().__init__()
            self.head = nn.Linear(INPUTS, CLASSES)
            self.register_buffer("passes", torch.zeros(1))
            self.drop = torch.compile(lambda x: F.dropout(x, 0.5, self.training), backend="eager")

        def forward(self, x):
            self.passes += 1
            return self.head(self.drop(x))

    network = Network(Compiled, (INPUTS,))
    assert network._trial.effects.changed == {"passes"} and list(network.dropouts) == ["call 0"]
