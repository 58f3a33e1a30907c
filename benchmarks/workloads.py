"""The workloads of the benchmarks: clients of one round, their data, and the first model. Needs NumPy alone."""

from dataclasses import dataclass, replace

import numpy as np

INPUT = (1, 28, 28)


@dataclass(frozen=True)
class Workload:
    """Clients of one round and their local training."""

    description: str
    model: str
    options: dict
    classes: int
    clients: int
    samples: int
    batch: int | None
    epochs: int
    lr: float = 0.05
    # False: batches follow the order of the samples, so that systems can be compared number by number
    shuffle: bool = True
    input: tuple[int, int, int] = INPUT  # (C, H, W)
    tokens: int = 0  # samples are so many tokens of `classes` instead, whose targets are the next tokens; 0: images

    @property
    def steps(self) -> int:
        """Local steps of one client in one round."""
        return self.epochs * -(-self.samples // (self.batch or self.samples))

    def with_clients(self, clients: int | None) -> "Workload":
        """The workload with at most this number of clients; None: unchanged."""
        return self if clients is None else replace(self, clients=min(clients, self.clients))

    def for_check(self) -> "Workload":
        """Four clients of few steps in a fixed order, for comparison with the plain loop."""
        batches = 1 if self.batch is None else 5
        samples = self.samples if self.batch is None else batches * self.batch
        return replace(self, clients=4, samples=samples, epochs=min(self.epochs, 2), shuffle=False)


WORKLOADS = {
    "W1": Workload(
        "MLP 784-2048-10, 480 clients of 50, full batch, 5 epochs", "mlp", {"hidden": 2048}, 10, 480, 50, None, 5
    ),
    "W2": Workload("LeNet-5, 10 clients of 500, batch 10, 10 epochs", "lenet5", {}, 10, 10, 500, 10, 10),
    "W3": Workload(
        "CNN 32-64-512, 62 classes, 180 clients of 200, batch 20, 1 epoch", "leaf_cnn", {}, 62, 180, 200, 20, 1
    ),
}


# the networks of `python -m jobs.benchmarks modules`, by description
OWN_MODULES = {
    work.description: work
    for work in (
        Workload("MLP 784-200-10", "mlp", {"hidden": 200}, 10, 10, 600, 10, 1),
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
    )
}


def samples_of(work: Workload) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Random inputs (uint8; tokens int64), labels and client ids of all samples."""
    draw = np.random.default_rng(0)
    total = work.clients * work.samples
    if work.tokens:
        drawn = draw.integers(0, work.classes, (total, work.tokens + 1))
        return drawn[:, :-1], drawn[:, 1:], np.repeat(np.arange(work.clients), work.samples)
    return (
        draw.integers(0, 256, (total, *work.input), dtype=np.uint8),
        draw.integers(0, work.classes, total),
        np.repeat(np.arange(work.clients), work.samples),
    )


def samples_by_client(work: Workload) -> tuple[np.ndarray, np.ndarray]:
    """Inputs float32 (clients, samples, C, H, W) in [0, 1], and labels int64 (clients, samples).

    Of tokens, both are int64 (clients, samples, tokens).
    """
    x, y, _ = samples_of(work)
    x = x if work.tokens else x / np.float32(255)
    return x.reshape(work.clients, work.samples, *x.shape[1:]), y.reshape(work.clients, work.samples, *y.shape[1:])


def shapes_of(work: Workload) -> list[tuple[int, ...]]:
    """Shapes of the model's tensors, weights and biases in the order and layout of PyTorch."""
    conv = {"lenet5": (6, 16), "leaf_cnn": (32, 64), "mlp": ()}[work.model]
    dense = {"lenet5": (120, 84), "leaf_cnn": (512,), "mlp": (work.options.get("hidden", 200),)}[work.model]
    shapes: list[tuple[int, ...]] = []
    channels, side = INPUT[0], INPUT[1]
    for out in conv:
        shapes += [(out, channels, 5, 5), (out,)]
        channels, side = out, (side - 4) // 2
    width = channels * side**2
    for out in (*dense, work.classes):
        shapes += [(out, width), (out,)]
        width = out
    return shapes


def first_model(work: Workload) -> list[np.ndarray]:
    """The model from which all systems start, uniform in +- 1 / sqrt(inputs of the unit)."""
    draw, shapes, arrays = np.random.default_rng(1), shapes_of(work), []
    for weight, bias in zip(shapes[::2], shapes[1::2]):
        bound = np.prod(weight[1:]) ** -0.5
        arrays += [draw.uniform(-bound, bound, shape).astype(np.float32) for shape in (weight, bias)]
    return arrays
