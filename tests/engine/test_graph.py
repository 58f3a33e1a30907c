"""The manual engine equals the sequential one on networks as people write them, or says which part it lacks."""

from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import prune
from training_tasks import ADDRESS, FLAT, assert_same

from cfl_ray.core.local_sgd import LocalSGD
from cfl_ray.core.optimizers import resolve_optimizer
from cfl_ray.core.tasks import Task, mse, token_cross_entropy
from cfl_ray.engine import manual
from cfl_ray.engine.task import HeldByClient, TrainingTask
from cfl_ray.nn.network import Network

pytestmark = pytest.mark.cpu

SGD = LocalSGD(epochs=2, batch_size=4, lr=0.05, momentum=0.9, weight_decay=0.01)
GREY, SMALL, COLOUR, TOKENS = (1, 28, 28), (1, 16, 16), (3, 16, 16), (7,)
CLASSES, WORDS = 3, 11
ATOL = 2e-5


class LeNetBase(nn.Module):
    """The layers of LeNet-5; spellings differ in `forward`."""

    def __init__(self):
        super().__init__()
        self.conv1, self.conv2, self.pool = nn.Conv2d(1, 6, 5), nn.Conv2d(6, 16, 5), nn.MaxPool2d(2)
        self.fc1, self.fc2, self.fc3 = nn.Linear(256, 120), nn.Linear(120, 84), nn.Linear(84, CLASSES)
        self.drop = nn.Dropout(0.3)


class LeNetFunctional(LeNetBase):
    def forward(self, x):
        x = F.max_pool2d(F.relu(self.conv1(x)), 2)
        x = F.max_pool2d(F.relu(self.conv2(x)), (2, 2))
        x = x.view(-1, 16 * 4 * 4)
        return self.fc3(F.relu(self.fc2(F.relu(self.fc1(x)))))


class LeNetTutorial(LeNetBase):
    """As in PyTorch's first tutorial: a loop over the sizes."""

    def forward(self, x):
        x = self.pool(torch.relu(self.conv1(x)))
        x = self.pool(torch.relu(self.conv2(x)))
        x = x.view(-1, self.num_flat_features(x))
        return self.fc3(self.fc2(self.fc1(x).relu()).relu())

    def num_flat_features(self, x):
        count = 1
        for size in x.size()[1:]:
            count *= size
        return count


class LeNetMethods(LeNetBase):
    def forward(self, x):
        assert x.dim() == 4, f"images, got {x.shape}"
        x = self.pool(self.conv1(x).relu_())
        x = self.pool(self.conv2(x).tanh())
        x = x.reshape(len(x), -1)
        return self.fc3(self.fc2(self.fc1(x).sigmoid()).sigmoid())


class LeNetBlocks(nn.Module):
    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 6, 5),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(2),
            nn.Conv2d(6, 16, 5),
            nn.ReLU(True),
            nn.MaxPool2d(2),
        )
        self.classifier = nn.Sequential(nn.Linear(256, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, 3))

    def forward(self, x):
        return self.classifier(torch.flatten(self.features(x), 1))


class LeNetDropout(LeNetBase):
    """One dropout layer, used twice, and functional dropout."""

    def forward(self, x):
        x = F.max_pool2d(F.relu(self.conv1(x)), 2)
        x = F.dropout2d(F.max_pool2d(F.relu(self.conv2(x)), 2), 0.2, self.training)
        x = x.flatten(start_dim=1)
        x = F.dropout(F.relu(self.fc1(x)), p=0.5, training=self.training)
        return F.log_softmax(self.fc3(self.drop(F.relu(self.fc2(x)))), dim=1)


class LeNetList(LeNetBase):
    """Layers in a list, average pooling, an image without a channel axis."""

    def __init__(self):
        super().__init__()
        self.convs = nn.ModuleList([self.conv1, self.conv2])

    def forward(self, x):
        x = x.squeeze(1).unsqueeze(1)
        for conv in self.convs:
            x = F.avg_pool2d(F.gelu(conv(x)), 2)
        x = x.view(x.size(0), -1)
        for layer in (self.fc1, self.fc2):
            x = F.silu(layer(x))
        return self.fc3(x)


class BasicBlock(nn.Module):
    def __init__(self, inputs, outputs, stride=1, norm=lambda channels: nn.GroupNorm(4, channels)):
        super().__init__()
        self.conv1, self.n1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False), norm(outputs)
        self.conv2, self.n2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False), norm(outputs)
        self.shortcut = nn.Sequential()
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), norm(outputs))

    def forward(self, x):
        out = F.relu(self.n1(self.conv1(x)))
        out = self.n2(self.conv2(out))
        out += self.shortcut(x)
        return F.relu(out)


class ResNet(nn.Module):
    def __init__(self, widths=(4, 8), blocks=1, **norm):
        super().__init__()
        self.stem, inputs, stages = nn.Conv2d(3, widths[0], 3, padding=1, bias=False), widths[0], []
        for number, width in enumerate(widths):
            for block in range(blocks):
                stages.append(BasicBlock(inputs, width, 2 if number and not block else 1, **norm))
                inputs = width
        self.stages, self.head = nn.Sequential(*stages), nn.Linear(inputs, CLASSES)

    def forward(self, x):
        x = self.stages(F.relu(self.stem(x)))
        return self.head(F.adaptive_avg_pool2d(x, 1).flatten(1))


class OptionA(nn.Module):
    """The residual block of He et al. on CIFAR-10, whose shortcut pads channels with zeros; pre-activation."""

    def __init__(self):
        super().__init__()
        self.stem, self.conv, self.head = nn.Conv2d(3, 4, 3), nn.Conv2d(4, 8, 3, 2, 1), nn.Linear(8, CLASSES)
        self.norm = nn.GroupNorm(2, 4)

    def forward(self, x):
        x = self.stem(x)
        shortcut = F.pad(x[:, :, ::2, ::2], (0, 0, 0, 0, 2, 2), "constant", 0)
        x = self.conv(F.relu(self.norm(x), inplace=True)) + shortcut
        x = F.avg_pool2d(x, x.size()[3])
        return self.head(x.view(x.size(0), -1))


class DenseBlock(nn.Module):
    def __init__(self, width=4):
        super().__init__()
        self.layers = nn.ModuleList(nn.Conv2d(3 + number * width, width, 3, padding=1) for number in range(3))
        self.head = nn.Linear((3 + 3 * width) * 16, CLASSES)

    def forward(self, x):
        found = [x]
        for layer in self.layers:
            found.append(F.relu(layer(torch.cat(found, 1))))
        x = F.max_pool2d(torch.cat(found, dim=1), 4)
        return self.head(torch.flatten(x, 1))


class Inception(nn.Module):
    def __init__(self, width=4):
        super().__init__()
        self.a, self.b = nn.Conv2d(3, width, 1), nn.Conv2d(3, width, 3, padding=1)
        self.pool, self.c = nn.MaxPool2d(3, stride=1, padding=1), nn.Conv2d(3, width, 1)
        self.head = nn.Linear(3 * width, CLASSES)

    def forward(self, x):
        x = torch.cat((self.a(x), self.b(x), self.c(self.pool(x))), dim=1)
        return self.head(x.relu().mean(dim=(2, 3)))


class SqueezeExcitation(nn.Module):
    """Depthwise convolutions, and a gate by channel."""

    def __init__(self):
        super().__init__()
        self.stem, self.depthwise = nn.Conv2d(3, 8, 3, 2, 1), nn.Conv2d(8, 8, 3, padding=1, groups=8)
        self.fc1, self.fc2, self.head = nn.Linear(8, 4), nn.Linear(4, 8), nn.Linear(8, CLASSES)

    def forward(self, x):
        x = F.hardswish(self.depthwise(F.relu6(self.stem(x))))
        gate = torch.sigmoid(self.fc2(F.relu(self.fc1(x.mean((2, 3))))))
        x = x * gate[:, :, None, None]
        return self.head(x.mean([2, 3]))


class ResidualMLP(nn.Module):
    def __init__(self, norm=True):
        super().__init__()
        self.inputs, self.a, self.b, self.head = (
            nn.Linear(6, 8),
            nn.Linear(8, 8),
            nn.Linear(8, 8),
            nn.Linear(8, CLASSES),
        )
        self.norm = nn.LayerNorm(8) if norm else nn.Identity()

    def forward(self, x):
        x = self.inputs(x)
        x = x + self.b(F.gelu(self.a(self.norm(x))))
        x = 0.5 * x + x.tanh() - 1
        return self.head(self.norm(x))


class SharedInputs(nn.Module):
    """Activations with several users of every kind, and an output that is not only returned."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c, self.head = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, CLASSES)

    def forward(self, x):
        x = self.a(x)
        h = torch.relu(x)
        z = self.b(x)
        y = z + x
        u = torch.tanh(y)
        w = y + torch.sigmoid(z) + u + h
        return self.head(w + w) + self.head(self.c(w)).sigmoid()


class BagOfWords(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.fc, self.head = (
            nn.Embedding(WORDS, 5, padding_idx=0),
            nn.Linear(5, 6),
            nn.Linear(6, CLASSES),
        )

    def forward(self, ids):
        return self.head(F.relu(self.fc(self.embedding(ids).mean(dim=1))))


class EmbeddingBag(nn.Module):
    def __init__(self):
        super().__init__()
        self.bag, self.head = nn.EmbeddingBag(WORDS, 5), nn.Linear(5, CLASSES)

    def forward(self, ids):
        return self.head(self.bag(ids))


class TextCNN(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(WORDS, 5)
        self.convs = nn.ModuleList(nn.Conv1d(5, 4, size) for size in (2, 3))
        self.head = nn.Linear(8, CLASSES)

    def forward(self, ids):
        x = self.embedding(ids).transpose(1, 2)
        return self.head(torch.cat([F.adaptive_max_pool1d(F.relu(conv(x)), 1).squeeze(2) for conv in self.convs], 1))


class VGG(nn.Module):
    def __init__(self, width=32):
        super().__init__()
        layers, inputs = [], 3
        for outputs in (width, "M", width, width, "M"):
            layers += (
                [nn.MaxPool2d(2, 2)] if outputs == "M" else [nn.Conv2d(inputs, outputs, 3, padding=1), nn.ReLU(True)]
            )
            inputs = inputs if outputs == "M" else outputs
        self.features, self.avgpool = nn.Sequential(*layers), nn.AdaptiveAvgPool2d((2, 2))
        self.classifier = nn.Sequential(nn.Linear(4 * width, 16), nn.ReLU(True), nn.Dropout(), nn.Linear(16, CLASSES))

    def forward(self, x):
        return self.classifier(torch.flatten(self.avgpool(self.features(x)), 1))


class Normalised(nn.Module):
    """A buffer that the forward pass reads, a sample of two axes, and a layer that the output does not use."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.full((6,), 0.3))
        self.fc, self.unused, self.head = nn.Linear(6, 5), nn.Linear(6, 5), nn.Linear(5, CLASSES)

    def forward(self, x):
        x = (x - self.mean) / 2
        self.unused(x)
        return self.head(F.leaky_relu(self.fc(x), 0.1))


class WeightNorm(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.utils.parametrizations.weight_norm(nn.Linear(6, CLASSES))

    def forward(self, x):
        return self.fc(x)


def pruned():
    network = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, CLASSES))
    prune.l1_unstructured(network[0], "weight", amount=0.5)
    return network


class WeightStandardised(nn.Module):
    def __init__(self, width=8):
        super().__init__()
        self.conv, self.head = nn.Conv2d(3, width, 3), nn.Linear(width, CLASSES)

    def forward(self, x):
        w = self.conv.weight
        w = (w - w.mean((1, 2, 3), keepdim=True)) / (w.std((1, 2, 3), keepdim=True) + 1e-5)
        return self.head(F.conv2d(x, w, self.conv.bias).relu().mean((2, 3)))


class Cosine(nn.Module):
    """A head of normalised weights, and one matrix in two uses."""

    def __init__(self):
        super().__init__()
        self.fc, self.head = nn.Linear(6, 6), nn.Linear(6, CLASSES, bias=False)

    def forward(self, x):
        symmetric = self.fc.weight + self.fc.weight.T
        x = F.linear(x, symmetric, self.fc.bias).tanh() + x @ symmetric
        return F.linear(F.normalize(x), F.normalize(self.head.weight))


class Positions(nn.Module):
    """Attention with encodings of positions in a buffer, of which the first are used."""

    def __init__(self, persistent=True):
        super().__init__()
        self.words, self.qk, self.v = nn.Embedding(WORDS, 6), nn.Linear(6, 6), nn.Linear(6, 6)
        self.head = nn.Linear(6, CLASSES)
        self.register_buffer("positions", torch.randn(1, 20, 6), persistent=persistent)

    def forward(self, tokens):
        x = self.words(tokens) + self.positions[:, : tokens.size(1)]
        q = self.qk(x).view(len(x), -1, 2, 3).transpose(1, 2)
        weights = (q @ q.transpose(-2, -1)).softmax(-1)
        v = self.v(x).view(len(x), -1, 2, 3).transpose(1, 2)
        return self.head((x + (weights @ v).transpose(1, 2).reshape(x.shape)).mean(1))


def tied():
    """Two layers with one weight."""
    network = nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 6), nn.Linear(6, CLASSES))
    network[2].weight = network[0].weight
    return network


def mlp(*between):
    return lambda: nn.Sequential(nn.Linear(6, 8), *(layer() for layer in between), nn.Linear(8, CLASSES))


def torchvision_resnet18():
    from torchvision.models import resnet18

    return resnet18(num_classes=CLASSES, norm_layer=lambda channels: nn.GroupNorm(8, channels))


def batch_norm(channels):
    return nn.BatchNorm2d(channels)


NETWORKS = {
    "LeNet, functional": (LeNetFunctional, GREY),
    "LeNet, as in the tutorial": (LeNetTutorial, GREY),
    "LeNet, methods": (LeNetMethods, GREY),
    "LeNet, features and classifier": (LeNetBlocks, GREY),
    "LeNet, functional dropout": (LeNetDropout, GREY),
    "LeNet, lists": (LeNetList, GREY),
    "ResNet-8 GroupNorm": (lambda: ResNet((8, 16, 32)), COLOUR),
    "ResNet-20 GroupNorm, narrow": (lambda: ResNet((4, 4, 8), 3), COLOUR),
    "ResNet BatchNorm": (lambda: ResNet((4, 8), norm=batch_norm), COLOUR),
    "ResNet BatchNorm, wide": (lambda: ResNet((16, 32), norm=batch_norm), COLOUR),
    "ResNet, option A": (OptionA, COLOUR),
    "torchvision resnet18 GroupNorm": (torchvision_resnet18, COLOUR),
    "DenseNet": (DenseBlock, COLOUR),
    "DenseNet, wide": (lambda: DenseBlock(32), COLOUR),
    "Inception": (Inception, COLOUR),
    "Inception, wide": (lambda: Inception(32), COLOUR),
    "squeeze and excitation": (SqueezeExcitation, COLOUR),
    "VGG": (VGG, COLOUR),
    "VGG, narrow": (lambda: VGG(8), COLOUR),
    "MLP LayerNorm": (mlp(lambda: nn.LayerNorm(8), nn.ReLU), FLAT),
    "MLP BatchNorm, dropout": (mlp(lambda: nn.BatchNorm1d(8), nn.ReLU, lambda: nn.Dropout(0.3)), FLAT),
    "MLP GELU": (mlp(nn.GELU), FLAT),
    "MLP SiLU": (mlp(nn.SiLU), FLAT),
    "MLP ELU, softmax": (mlp(nn.ELU, lambda: nn.Softmax(1)), FLAT),
    "residual MLP LayerNorm": (ResidualMLP, FLAT),
    "residual MLP": (lambda: ResidualMLP(norm=False), FLAT),
    "shared activations and layers": (SharedInputs, FLAT),
    "a buffer and an unused layer": (Normalised, FLAT),
    "tied weights": (tied, FLAT),
    "bag of words": (BagOfWords, TOKENS),
    "EmbeddingBag": (EmbeddingBag, TOKENS),
    "text CNN": (TextCNN, TOKENS),
    "weight normalisation": (WeightNorm, FLAT),
    "pruned": (pruned, FLAT),
    "weight standardisation": (WeightStandardised, COLOUR),
    "weight standardisation, wide": (lambda: WeightStandardised(32), COLOUR),
    "functions of weights": (Cosine, FLAT),
    "positions": (Positions, TOKENS),
    "positions outside the row": (lambda: Positions(persistent=False), TOKENS),
    "an output after an activation": (lambda: nn.Sequential(nn.Linear(6, CLASSES), nn.Sigmoid()), FLAT),
}


def network_of(factory, shape, **options) -> Network:
    return Network(factory, shape, dtype=torch.int64 if shape == TOKENS else torch.float32, **options)


def task_of(network: Network, local: LocalSGD = SGD, size: int = 10, y=None, **fields) -> TrainingTask:
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(size, *network.input_shape, generator=draw)
    if network.dtype == torch.int64:
        x = torch.randint(0, WORDS, (size, *network.input_shape), generator=draw)
    y = torch.randint(0, CLASSES, (size,), generator=draw) if y is None else y
    steps = int(local.steps_of(np.array([size]))[0])
    return TrainingTask(0, network.new_model(1, 0), x, y, steps, local, ADDRESS, **fields)


@pytest.mark.parametrize("factory, shape", NETWORKS.values(), ids=NETWORKS)
def test_is_sequential_for(factory, shape):
    network = network_of(factory, shape)
    amplifies_rounding = network.spec.size > 1e6 or network.batch_statistics or len(network.spec.ends) > 50
    steps = 1 if amplifies_rounding else None
    assert_same(network, [task_of(network, replace(SGD, steps=steps))], manual, ATOL)


class TestWithOther:
    @pytest.mark.parametrize("name", ["adam", "adamw", "rmsprop"])
    def test_optimisers(self, name):
        local = replace(SGD, momentum=0.0, weight_decay=0.0, lr=0.01, optimizer=resolve_optimizer(name, {"eps": 1e-2}))
        network = network_of(LeNetFunctional, GREY)
        assert_same(network, [task_of(network, replace(local, clip_norm=0.5))], manual, 1e-4)

    def test_an_optimiser_that_treats_tensors_by_themselves(self):
        class Normalised(torch.optim.SGD):
            def step(self):
                for p in self.param_groups[0]["params"]:
                    p.grad = p.grad / p.grad.norm()
                super().step()

        network = network_of(LeNetFunctional, GREY)
        local = LocalSGD(epochs=2, batch_size=4, lr=0.05, optimizer=resolve_optimizer(Normalised, {}))
        assert not local.optimizer.elementwise
        assert_same(network, [task_of(network, local)], manual, ATOL)

    def test_losses(self):
        network = network_of(ResidualMLP, FLAT, task=Task(mse, "real"))
        task = task_of(network, y=torch.randn(10, CLASSES), held=HeldByClient(frozen_P=network.new_model(5, 0)))
        assert_same(network, [task], manual, ATOL)

    def test_outputs_of_several_axes(self):
        def factory():
            return nn.Sequential(nn.Embedding(WORDS, 5), nn.ReLU(), nn.Linear(5, WORDS))

        network = network_of(factory, TOKENS, task=Task(token_cross_entropy, "tokens"))
        assert_same(network, [task_of(network, y=torch.randint(0, WORDS, (10, 7)))], manual, ATOL)

    def test_outputs_that_are_images(self):
        def loss(outputs, targets):
            return (outputs - targets).square().mean((1, 2, 3))

        for width in (4, 32):
            network = network_of(
                lambda: nn.Sequential(nn.Conv2d(3, width, 3), nn.ReLU(), nn.Conv2d(width, 2, 3)), COLOUR
            )
            network.task = Task(loss, "real")
            assert_same(network, [task_of(network, y=torch.randn(10, 2, 12, 12))], manual, ATOL)


def test_recording_leaves_the_network_as_it_was():
    network = network_of(lambda: ResNet((4, 8), norm=batch_norm), COLOUR)
    network.load(network.new_model(3, 0))
    row_P, counters = network.row().clone(), {name: b.clone() for name, b in network.module.named_buffers()}
    state = torch.get_rng_state()
    assert manual.why_not(network, []) is None
    assert torch.equal(network.row(), row_P) and torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(b, counters[name]) for name, b in network.module.named_buffers())


# ---- networks without a graph


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.rnn, self.head = nn.Embedding(WORDS, 5), nn.LSTM(5, 6, batch_first=True), nn.Linear(6, 3)

    def forward(self, ids):
        return self.head(self.rnn(self.embedding(ids))[0][:, -1])


class Transformer(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(WORDS, 8), nn.Linear(8, CLASSES)
        self.encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 1)

    def forward(self, ids):
        return self.head(self.encoder(self.embedding(ids)).mean(1))


class Branches(ResidualMLP):
    def forward(self, x):
        return super().forward(x) if x.sum() > 0 else super().forward(-x)


class Noisy(ResidualMLP):
    def forward(self, x):
        return super().forward(x + 0.1 * torch.randn_like(x))


class OfTheBatch(ResidualMLP):
    def forward(self, x):
        return super().forward(x / x.shape[0])


class Constant(ResidualMLP):
    def forward(self, x):
        return super().forward(x + torch.ones(6))


class Detached(ResidualMLP):
    def forward(self, x):
        return super().forward(x) + super().forward(x).detach()


class BatchLast(ResidualMLP):
    def forward(self, x):
        return super().forward(x.T.T)


class Overwritten(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.head = nn.Conv2d(1, 2, 3), nn.Linear(2 * 14 * 14, CLASSES)

    def forward(self, x):
        x = self.conv(x)
        flat = x.flatten(1)
        x.mul_(2)
        return self.head(flat)


class WithoutGradient(ResidualMLP):
    """Its weights are normalised without a gradient."""

    def forward(self, x):
        with torch.no_grad():
            scale = self.head.weight.norm()
        return super().forward(x) / scale


class ChangedInPlace(WeightStandardised):
    def forward(self, x):
        w = self.conv.weight * 2
        w[0].mul_(0.5)
        return self.head(F.conv2d(x, w).mean((2, 3)))


class Broadcast(ResidualMLP):
    """A parameter for each sample of the batch."""

    def forward(self, x):
        start = self.head.bias[:1].expand(len(x), 6).clone()
        start += x
        return super().forward(start)


def frozen_layer():
    network = mlp(nn.ReLU)()
    network[0].weight.requires_grad_(False)
    return network


OTHERS = {
    "LSTM": (Recurrent, TOKENS, "module rnn: lstm returns several values"),
    "Transformer": (Transformer, TOKENS, "the first axis has to be the batch"),
    "a branch": (Branches, FLAT, "its forward pass: sum gives shape () for a batch of 2"),
    "noise": (Noisy, FLAT, "its forward pass: randn_like draws random numbers"),
    "the size of the batch": (OfTheBatch, FLAT, "div has other arguments for batches of 2 and 3"),
    "a constant": (Constant, FLAT, "add uses a tensor that is neither"),
    "detach": (Detached, FLAT, "detach passes no gradient on"),
    "transposition": (BatchLast, FLAT, "T gives shape (6, 2) for a batch of 2"),
    "a view of what is overwritten": (
        Overwritten,
        SMALL,
        "an activation whose memory another operation has overwritten",
    ),
    "a function of weights without a gradient": (WithoutGradient, FLAT, "div uses a tensor that is neither"),
    "weights changed in place": (ChangedInPlace, COLOUR, "conv2d uses a tensor that is neither"),
    "a tensor of the batch changed in place": (Broadcast, FLAT, "changes a tensor in place that is no activation"),
    "a frozen layer": (frozen_layer, FLAT, "module 0: linear uses the frozen parameter 0.weight"),
}


@pytest.mark.parametrize("factory, shape, reason", OTHERS.values(), ids=OTHERS)
def test_says_why_it_does_not_train(factory, shape, reason):
    network = network_of(factory, shape)
    assert reason in manual.why_not(network, [])
