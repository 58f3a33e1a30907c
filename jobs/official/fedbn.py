"""FedBN beside the code of its authors, med-air/FedBN."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from jobs.official import runs
from jobs.official.page import table
from jobs.official.pfllib import personal_rows
from jobs.official.runs import Course, Data, compared, modules, quiet, rotated_mnist

CLIENTS, TRAIN, TEST, EPOCHS, LR, HIDDEN = 8, 200, 100, 5, 0.1, 16
KEPT = (1, 5, 10)
SEEDS = range(2)


class Named(nn.Module):
    """An MLP with a normalised hidden layer, by the name of that layer."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.fc1, self.fc2, self.norm = nn.Linear(784, HIDDEN), nn.Linear(HIDDEN, 10), name
        self.add_module(name, nn.BatchNorm1d(HIDDEN))

    def forward(self, x: Tensor) -> Any:
        return self.fc2(self.get_submodule(self.norm)(self.fc1(x.flatten(1))).relu())


def with_bn1(input_shape: tuple[int, ...], num_classes: int) -> nn.Module:
    """The model with the name that theirs looks for."""
    return Named("bn1")


def with_downsample(input_shape: tuple[int, ...], num_classes: int) -> nn.Module:
    """The model with a name of torchvision's ResNets."""
    return Named("downsample")


RUNS: dict[str, Callable[..., nn.Module]] = {"bn1": with_bn1, "downsample": with_downsample}


def theirs(checkout: Path, data: Data, make: Callable[..., nn.Module], seed: int) -> Course:
    """The course of their `train` and `communication`."""
    course, network = Course(), runs.network_of({"name": make}, 10)
    (fed,) = modules(checkout / "federated", "fed_digits")
    fed.client_num = data.clients
    first = network.spec.tensors(runs.first_weights({"name": make}, 10, seed))
    server, *models = (make(runs.SHAPE, 10) for _ in range(data.clients + 1))
    for model in (server, *models):
        model.load_state_dict(first, strict=False)  # without the number of batches
    loaders = [DataLoader(TensorDataset(x, y), batch_size=len(y)) for x, y in zip(data.x, data.y, strict=True)]
    for rounds in range(1, KEPT[-1] + 1):
        optimizers = [torch.optim.SGD(model.parameters(), lr=LR) for model in models]
        with quiet():
            for _ in range(EPOCHS):
                for client, model in enumerate(models):
                    fed.train(model, loaders[client], optimizers[client], nn.CrossEntropyLoss(), client, "cpu")
            fed.communication(SimpleNamespace(mode="fedbn"), server, models, [1 / data.clients] * data.clients)
        course.weights[rounds] = torch.stack([network.spec.row_of(model) for model in models])
        hits = []
        for model, x, y in zip(models, data.x_test, data.y_test, strict=True):
            with torch.no_grad():
                hits.append((model.eval()(x).argmax(1) == y).float().mean())
        course.accuracy.append(float(torch.stack(hits).mean()))
    return course


def ours(data: Data, make: Callable[..., nn.Module], seed: int) -> Course:
    local = {"epochs": EPOCHS, "batch_size": None, "lr": LR}
    return runs.ours(data, seed, KEPT, {"fedbn": {}}, {"name": make}, local, rows=personal_rows)


HEAD = f"""## FedBN

[med-air/FedBN](https://github.com/med-air/FedBN), commit COMMIT, by the authors of FedBN: `train` and `communication`
of `fed_digits.py`. {CLIENTS} clients of {TRAIN} training and {TEST} test images of MNIST, two for each of four
rotations; an MLP with {HIDDEN} hidden units, which are normalised, {EPOCHS} epochs of full batches at eta {LR}. Both
start from the same model; weights are uniform in both. Replaced: the data and the model.

An error of theirs, and of the filters of PFLlib and FL-bench: norm layers are known by names with "bn". The same layer
under the name of one in torchvision's ResNets, *downsample*, is averaged. Ours goes by the type of the module.

Distance: between the models of a client in the two codes, with the statistics of their norm layers, relative to their
distance from the initial model; the largest of the clients.
"""


def section(checkout: Path, commit: str) -> str:
    rows = [["name of the norm layer", "seed", *runs.HEAD]]
    for seed in SEEDS:
        data = rotated_mnist(seed, [i % 4 for i in range(CLIENTS)], TRAIN, TEST)
        for name, make in RUNS.items():
            start_P = runs.first_weights({"name": make}, 10, seed)
            a, b = theirs(checkout, data, make, seed), ours(data, make, seed)
            rows += [[name, str(seed), *compared(a, b, start_P, t)] for t in KEPT]
    return "\n".join([HEAD.replace("COMMIT", commit), *table(*rows)])
