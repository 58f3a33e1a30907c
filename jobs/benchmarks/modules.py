"""CPU seconds of FedAvg rounds with own modules, beside a plain loop: `python -m jobs.benchmarks modules`.

Both have one thread and take turns, each in a process of its own: cfl_ray's keeps freed memory, as hosts do, the plain
loop's has PyTorch's and the C library's settings. The plain loop has no server, no validation and no records.
"""

import multiprocessing
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from multiprocessing.connection import Connection

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.models import MODELS
from benchmarks.workloads import Workload
from cfl_ray.errors import ConfigError
from cfl_ray.system.allocator import keep_freed_memory
from cfl_ray.system.threads import one_thread
from jobs.benchmarks.in_process import PlainLoop, compare, cpu_seconds, our_round

ENGINES = ("manual", "sequential", "compiled")


class DropoutMLP(nn.Module):
    """784-400-200 with two dropouts, as layers or as functions."""

    def __init__(self, classes: int, functional: bool = False) -> None:
        super().__init__()
        self.fc1, self.fc2, self.fc3 = nn.Linear(784, 400), nn.Linear(400, 200), nn.Linear(200, classes)
        self.drop1, self.drop2 = nn.Dropout(0.5), nn.Dropout(0.5)
        self.functional = functional

    def forward(self, x_B: Tensor) -> Tensor:
        """Logits (B, classes) of images (B, 1, 28, 28)."""
        x_B = F.relu(self.fc1(x_B.flatten(1)))
        x_B = F.dropout(x_B, training=self.training) if self.functional else self.drop1(x_B)
        x_B = F.relu(self.fc2(x_B))
        x_B = F.dropout(x_B, training=self.training) if self.functional else self.drop2(x_B)
        return self.fc3(x_B)


class ResNet8(nn.Module):
    """Three residual blocks of 16, 32 and 64 channels, with GroupNorm."""

    def __init__(self, classes: int, channels: int = 1) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(channels, 16, 3, padding=1, bias=False), nn.GroupNorm(8, 16), nn.ReLU())
        self.blocks = nn.Sequential(_Block(16, 16, 1), _Block(16, 32, 2), _Block(32, 64, 2))
        self.fc = nn.Linear(64, classes)

    def forward(self, x_B: Tensor) -> Tensor:
        """Logits (B, classes) of images (B, channels, H, W)."""
        return self.fc(self.blocks(self.first(x_B)).mean((2, 3)))


class _Block(nn.Module):
    def __init__(self, channels: int, out: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, out, 3, stride, 1, bias=False)
        self.conv2 = nn.Conv2d(out, out, 3, 1, 1, bias=False)
        self.norm1, self.norm2 = nn.GroupNorm(8, out), nn.GroupNorm(8, out)
        self.shortcut: nn.Module = nn.Identity()
        if channels != out:
            self.shortcut = nn.Sequential(nn.Conv2d(channels, out, 1, stride, bias=False), nn.GroupNorm(8, out))

    def forward(self, x_B: Tensor) -> Tensor:
        inner_B = self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x_B)))))
        return F.relu(inner_B + self.shortcut(x_B))


class LSTM(nn.Module):
    """An LSTM of 64 units that reads the rows of an image."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.lstm, self.fc = nn.LSTM(28, 64, batch_first=True), nn.Linear(64, classes)

    def forward(self, x_B: Tensor) -> Tensor:
        """Logits (B, classes) of images (B, 1, 28, 28)."""
        return self.fc(self.lstm(x_B.squeeze(1))[0][:, -1])


class Transformer(nn.Module):
    """Two encoder layers of 64 features on the rows of an image."""

    def __init__(self, classes: int, dropout: float) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(64, 4, 128, dropout=dropout, batch_first=True)
        self.embed, self.encoder = nn.Linear(28, 64), nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.fc = nn.Linear(64, classes)

    def forward(self, x_B: Tensor) -> Tensor:
        """Logits (B, classes) of images (B, 1, 28, 28)."""
        return self.fc(self.encoder(self.embed(x_B.squeeze(1))).mean(1))


class ViT(nn.Module):
    """Three encoder layers of 64 features on patches of 4 x 4."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(64, 4, 128, dropout=0.0, activation="gelu", batch_first=True)
        self.patches = nn.Conv2d(3, 64, 4, 4)
        self.positions = nn.Parameter(torch.zeros(64, 64))
        self.encoder = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
        self.fc = nn.Linear(64, classes)

    def forward(self, x_B: Tensor) -> Tensor:
        """Logits (B, classes) of images (B, 3, 32, 32)."""
        patches_BTF = self.patches(x_B).flatten(2).mT + self.positions
        return self.fc(self.encoder(patches_BTF).mean(1))


class GPT(nn.Module):
    """Two causal encoder layers of 64 features on tokens, which predict the next token."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(
            64, 4, 256, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
        )
        self.embed, self.positions = nn.Embedding(classes, 64), nn.Parameter(torch.zeros(64, 64))
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.norm, self.fc = nn.LayerNorm(64), nn.Linear(64, classes, bias=False)
        self.causal = nn.Transformer.generate_square_subsequent_mask(64)

    def forward(self, x_BT: Tensor) -> Tensor:
        """Logits (B, T, classes) of the tokens after tokens (B, T), T at most 64."""
        length = x_BT.shape[1]
        inner_BTF = self.embed(x_BT) + self.positions[:length]
        return self.fc(self.norm(self.encoder(inner_BTF, mask=self.causal[:length, :length])))


class Mixer(nn.Module):
    """Three mixer blocks of 64 features on patches of 4 x 4."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 64, 4, 4)
        self.tokens = nn.ModuleList(nn.Sequential(nn.Linear(64, 32), nn.GELU(), nn.Linear(32, 64)) for _ in range(3))
        self.features = nn.ModuleList(
            nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64)) for _ in range(3)
        )
        self.norms = nn.ModuleList(nn.LayerNorm(64) for _ in range(6))
        self.fc = nn.Linear(64, classes)

    def forward(self, x_B: Tensor) -> Tensor:
        """Logits (B, classes) of images (B, 3, 32, 32)."""
        inner_BTF = self.patches(x_B).flatten(2).mT
        for block in range(3):
            inner_BTF = inner_BTF + self.tokens[block](self.norms[2 * block](inner_BTF).mT).mT
            inner_BTF = inner_BTF + self.features[block](self.norms[2 * block + 1](inner_BTF))
        return self.fc(inner_BTF.mean(1))


class LowRank(nn.Module):
    """A frozen layer with a trained change of rank 8."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.body = nn.Linear(inputs, outputs).requires_grad_(False)
        self.down, self.up = nn.Linear(inputs, 8, bias=False), nn.Linear(8, outputs, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x) + self.up(self.down(x))


class LoRAEncoder(nn.Module):
    """Encoder layers of 768 features on tokens, as those of DistilBERT: frozen, with changes of rank 8."""

    def __init__(self, classes: int, layers: int = 6, features: int = 768) -> None:
        super().__init__()
        self.heads = features // 64
        self.embed = nn.Embedding(1000, features).requires_grad_(False)
        self.attention = nn.ModuleList(LowRank(features, 3 * features) for _ in range(layers))
        self.out = nn.ModuleList(nn.Linear(features, features).requires_grad_(False) for _ in range(layers))
        self.wide = nn.ModuleList(LowRank(features, 4 * features) for _ in range(layers))
        self.narrow = nn.ModuleList(nn.Linear(4 * features, features).requires_grad_(False) for _ in range(layers))
        self.norms = nn.ModuleList(nn.LayerNorm(features).requires_grad_(False) for _ in range(2 * layers))
        self.fc = nn.Linear(features, classes)

    def forward(self, x_BT: Tensor) -> Tensor:
        """Logits (B, classes) of tokens (B, T)."""
        inner_BTF = self.embed(x_BT)
        for layer, (attention, out, wide, narrow) in enumerate(
            zip(self.attention, self.out, self.wide, self.narrow, strict=True)
        ):
            parts = (part.unflatten(-1, (self.heads, 64)).transpose(1, 2) for part in attention(inner_BTF).chunk(3, -1))
            mixed_BTF = F.scaled_dot_product_attention(*parts).transpose(1, 2).flatten(2)
            inner_BTF = self.norms[2 * layer](inner_BTF + out(mixed_BTF))
            inner_BTF = self.norms[2 * layer + 1](inner_BTF + narrow(F.gelu(wide(inner_BTF))))
        return self.fc(inner_BTF[:, 0])


class MLP(nn.Module):
    """784-200-10, as a module of one's own."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(784, 200), nn.Linear(200, classes)

    def forward(self, x_B: Tensor) -> Tensor:
        """Logits (B, classes) of images (B, 1, 28, 28)."""
        return self.fc2(F.relu(self.fc1(x_B.flatten(1))))


OWN: dict[str, Callable[..., nn.Module]] = {
    "own_mlp": MLP,
    "dropout_mlp": DropoutMLP,
    "resnet8": ResNet8,
    "lstm": LSTM,
    "transformer": Transformer,
    "vit": ViT,
    "gpt": GPT,
    "mixer": Mixer,
}
CASES = [
    Workload("MLP 784-200-10", "own_mlp", {}, 10, 10, 600, 10, 1),
    Workload("MLP with dropout", "dropout_mlp", {}, 10, 10, 600, 32, 1),
    Workload("MLP with F.dropout", "dropout_mlp", {"functional": True}, 10, 10, 600, 32, 1),
    Workload("CNN with dropout", "small_cnn", {"channels": 1, "side": 28, "dropout": True}, 62, 5, 100, 20, 1),
    Workload("ResNet-8 with GroupNorm", "resnet8", {}, 10, 5, 200, 32, 1),
    Workload("ResNet-8, 3x32x32", "resnet8", {"channels": 3}, 10, 5, 200, 32, 1, input=(3, 32, 32)),
    Workload("LSTM", "lstm", {}, 10, 10, 300, 32, 1),
    Workload("Transformer", "transformer", {"dropout": 0.0}, 10, 5, 200, 32, 1),
    Workload("Transformer with dropout", "transformer", {"dropout": 0.1}, 10, 5, 200, 32, 1),
    Workload("ViT, 3x32x32", "vit", {}, 10, 5, 200, 32, 1, input=(3, 32, 32)),
    Workload("GPT-like, 64 tokens of 80", "gpt", {}, 80, 5, 100, 10, 1, tokens=64),
    Workload("Mixer, 3x32x32", "mixer", {}, 10, 5, 200, 32, 1, input=(3, 32, 32)),
]


def modules(rounds: int) -> None:
    """Prints CPU seconds per round of the plain loop and of each engine that trains the module, and their ratio."""
    print(f"CPU seconds of one thread per round of FedAvg, least and median of {rounds}, in turn")
    MODELS.update(OWN)
    keep_freed_memory()
    for work in CASES:
        with _plain_loop(work) as loop:
            for engine in ENGINES:
                try:
                    with our_round(work, "fedavg", engine) as ours:
                        steps = loop, partial(cpu_seconds, ours)
                        compare(f"{work.description}, {engine}", steps, ("loop", "cfl_ray"), rounds)
                except ConfigError as error:
                    print(f"{work.description}: {error}", flush=True)


@contextmanager
def _plain_loop(work: Workload) -> Iterator[Callable[[], float]]:
    """A function that runs a round of the plain loop in another process and returns its CPU seconds."""
    context = multiprocessing.get_context("spawn")
    pipe, end = context.Pipe()
    process = context.Process(target=_rounds_of_loop, args=(end, work), daemon=True)
    process.start()

    def round_of_loop() -> float:
        pipe.send(True)
        seconds: float = pipe.recv()
        return seconds

    try:
        yield round_of_loop
    finally:
        pipe.send(False)
        process.join()


def _rounds_of_loop(pipe: Connection, work: Workload) -> None:
    """Runs a round of the plain loop for each True that arrives, and sends its CPU seconds."""
    MODELS.update(OWN)
    with one_thread():
        loop = PlainLoop(work, 1)
        while pipe.recv():
            pipe.send(cpu_seconds(loop.round))
