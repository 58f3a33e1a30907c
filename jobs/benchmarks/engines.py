"""The rule of `runtime.engine: auto` beside measured times: `python -m jobs.benchmarks engines`.

CPU milliseconds of a local step for one client, for networks, batch sizes and cohorts; the engine that the rule chooses
and its time as a multiple of the least. The constants of the rule (`cfl_ray/engine/rule.py`) come from such times.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from benchmarks.models import LSTM, MODELS, DropoutMLP, ResNet8, Transformer
from cfl_ray.core.local_sgd import LocalSGD
from cfl_ray.data.synthetic import SyntheticFederation
from cfl_ray.engine.choice import choice_of
from cfl_ray.engine.engines import Division
from cfl_ray.engine.timing import time_engines
from cfl_ray.nn.counts import counts_of
from cfl_ray.nn.network import Network
from cfl_ray.system.allocator import keep_freed_memory
from cfl_ray.system.threads import one_thread

COHORTS = (10, 300, 1000)  # 3, 18 and 62 clients of a chunk with vectorised
LARGE = 30_000  # numbers of a sample's forward pass from which only the smallest cohort is measured


def mlp(inputs: int, *hidden: int, act: type[nn.Module] = nn.ReLU) -> nn.Module:
    """A perceptron with ten outputs."""
    sizes, layers = (inputs, *hidden), list[nn.Module]()
    for size, following in zip(sizes, hidden, strict=False):
        layers += [nn.Linear(size, following), act()]
    return nn.Sequential(nn.Flatten(), *layers, nn.Linear(sizes[-1], 10))


class Depthwise(nn.Module):
    """Two depthwise separable convolutions with BatchNorm."""

    def __init__(self) -> None:
        super().__init__()
        blocks = list[nn.Module]()
        for channels, out in ((32, 32), (32, 64)):
            blocks += [nn.Conv2d(channels, channels, 3, padding=1, groups=channels), nn.BatchNorm2d(channels)]
            blocks += [nn.ReLU(), nn.Conv2d(channels, out, 1), nn.BatchNorm2d(out), nn.ReLU()]
        self.blocks, self.fc = nn.Sequential(nn.Conv2d(3, 32, 3, 2, 1), nn.ReLU(), *blocks), nn.Linear(64, 10)

    def forward(self, x_B: Tensor) -> Tensor:
        """Logits (B, 10) of images (B, 3, H, W)."""
        return self.fc(self.blocks(x_B).mean((2, 3)))


class Words(nn.Module):
    """The mean embedding of a text's tokens, and a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.fc = nn.Embedding(2000, 32), nn.Linear(32, 10)

    def forward(self, x_B: Tensor) -> Tensor:
        """Logits (B, 10) of token ids (B, T)."""
        return self.fc(self.embed(x_B).mean(1))


class Own(nn.Module):
    """Functions without written-out passes between two linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.scale, self.head = nn.Linear(64, 32), nn.Parameter(torch.ones(32)), nn.Linear(32, 10)

    def forward(self, x_B: Tensor) -> Tensor:
        """Logits (B, 10) of vectors (B, 64)."""
        h_B = torch.tanh(self.first(x_B)) * self.scale
        return self.head(h_B / (1 + h_B.norm(dim=1, keepdim=True)))


def convolutions_1d() -> nn.Module:
    """Two convolutions of a series."""
    layers = nn.Conv1d(6, 16, 5), nn.ReLU(), nn.MaxPool1d(2), nn.Conv1d(16, 32, 5), nn.ReLU()
    return nn.Sequential(*layers, nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.Linear(32, 10))


NETWORKS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "softmax 784-10": (partial(mlp, 784), (1, 28, 28)),
    "MLP 64-8-10": (partial(mlp, 64, 8), (64,)),
    "MLP 64-8-10, GELU": (partial(mlp, 64, 8, act=nn.GELU), (64,)),
    "MLP 64-64-10": (partial(mlp, 64, 64), (64,)),
    "MLP 64-64-10, BatchNorm": (lambda: nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), mlp(64)), (64,)),
    "MLP 784-200-10": (partial(mlp, 784, 200), (1, 28, 28)),
    "MLP 784-2048-10": (partial(mlp, 784, 2048), (1, 28, 28)),
    "MLP 784-400-200-10, dropout": (partial(DropoutMLP, 10), (1, 28, 28)),
    "own functions": (Own, (64,)),
    "mean embedding": (Words, (20,)),
    "CNN of series": (convolutions_1d, (6, 128)),
    "LeNet-5": (partial(MODELS["lenet5"], 10), (1, 28, 28)),
    "CNN 32-64-512": (partial(MODELS["leaf_cnn"], 62), (1, 28, 28)),
    "depthwise, BatchNorm": (Depthwise, (3, 32, 32)),
    "ResNet-8, GroupNorm": (partial(ResNet8, 10, 3), (3, 32, 32)),
    "LSTM": (partial(LSTM, 10), (1, 28, 28)),
    "Transformer": (partial(Transformer, 10, 0.0), (1, 28, 28)),
}
# (samples, batch size, epochs): small batches, and all samples at once
CLIENTS = ((20, 4, 1), (160, 32, 1), (50, None, 5))


def engines() -> None:
    """Prints a row of a table for each network, batch size and cohort."""
    keep_freed_memory()
    print("| network | batch | cohort | ms: measured, least first | rule | of the least |\n|---|---|---|---|---|---|")
    with one_thread():
        for name, (factory, shape) in NETWORKS.items():
            _rows(name, factory, shape)


def _rows(name: str, factory: Callable[[], nn.Module], shape: tuple[int, ...]) -> None:
    dtype = torch.int64 if factory is Words else torch.float32
    network = Network(factory, shape, dtype=dtype)
    for samples, batch, epochs in CLIENTS:
        for cohort in COHORTS[:1] if counts_of(network).activations >= LARGE else COHORTS:
            federation = SyntheticFederation(cohort, input=shape, classes=network.output_shape[0], samples=samples)
            local, division = LocalSGD(epochs=epochs, batch_size=batch), Division(cohort)
            chosen = choice_of(network, federation, local, division).engine
            found = time_engines(network, federation, local, division)
            times = {engine: time for engine, time in found.items() if not isinstance(time, str)}
            ranked = sorted(times, key=times.__getitem__)
            listed = ", ".join(f"{engine} {1e3 * times[engine]:.2f}" for engine in ranked)
            ratio, size = times[chosen] / times[ranked[0]], batch or f"all {samples}"
            print(f"| {name} | {size} | {cohort} | {listed} | {chosen} | {ratio:.2f} |", flush=True)
