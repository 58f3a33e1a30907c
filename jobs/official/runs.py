"""Data, first weights and runs of this project that are compared with the code of a method's authors."""

import importlib
import os
import runpy
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from types import ModuleType
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn.utils import vector_to_parameters
from torch.utils.data import TensorDataset

from cfl_ray import Experiment, federation_from_arrays, simulate
from cfl_ray.data.sources import locate
from cfl_ray.models import recipe
from cfl_ray.nn.network import Network
from cfl_ray.population.population import Population

SHAPE = (1, 28, 28)
HEAD = ("round", "distance", "accuracy, theirs", "accuracy, ours")  # of the cells of `compared`


@dataclass(frozen=True)
class Data:
    """Samples (clients, samples, ...) that each client trains on and is tested with; pixels of 0 to 1."""

    x: Tensor
    y: Tensor
    x_test: Tensor
    y_test: Tensor
    sizes: tuple[int, ...] = ()  # number of samples of each client for training, the first of its row; (): all

    @property
    def clients(self) -> int:
        return len(self.x)

    @property
    def used(self) -> Tensor:
        """Whether a client trains on a sample, bool (clients, samples)."""
        sizes = torch.tensor(self.sizes or [self.y.shape[1]] * self.clients)
        return torch.arange(self.y.shape[1]) < sizes[:, None]

    @property
    def training(self) -> list[TensorDataset]:
        """The samples that each client trains on."""
        return [TensorDataset(x[used], y[used]) for x, y, used in zip(self.x, self.y, self.used, strict=True)]


@dataclass
class Course:
    """Accuracy and clusters of a run by round, from 1."""

    accuracy: list[float] = field(default_factory=list)  # mean over the clients, by round
    clusters: list[int] = field(default_factory=list)  # their number, by round
    groups: dict[int, set[frozenset[int]]] = field(default_factory=dict)  # the clusters after some rounds
    weights: dict[int, Tensor] = field(default_factory=dict)  # of each client's model after these rounds, (clients, P)

    @property
    def split(self) -> int | None:
        """The first round with more than one cluster."""
        return next((t for t, found in enumerate(self.clusters, 1) if found > 1), None)

    def sizes(self, round: int) -> list[int]:
        """Clients of each cluster after this round, the largest first."""
        return sorted(map(len, self.groups[round]), reverse=True)


def images(source: str, seed: int) -> tuple[Tensor, Tensor]:
    """All training images of a built-in source and their labels in random order."""
    read = locate(source, Experiment(data={"source": source}).data).read(True, None)
    order = np.random.default_rng(seed).permutation(len(read.train_y))
    x = torch.from_numpy(read.train_x[order] / np.float32(255)).reshape(-1, *SHAPE)
    return x, torch.from_numpy(read.train_y[order]).long()


def rotated_mnist(seed: int, turns: Sequence[int], train: int, test: int) -> Data:
    """Random images of MNIST for each client, rotated by its number of quarter turns."""
    x, y = images("mnist", seed)
    used = len(turns) * (train + test)
    x, y = x[:used].reshape(len(turns), -1, *SHAPE), y[:used].reshape(len(turns), -1)
    x = torch.stack([part.rot90(k, (-2, -1)) for part, k in zip(x, turns, strict=True)])
    return Data(x[:, :train], y[:, :train], x[:, train:], y[:, train:])


def network_of(model: dict[str, Any], classes: int) -> Network:
    """The network of a section `model`."""
    return Network(recipe(model["name"], model.get("options", {}), SHAPE, classes), SHAPE)


def first_weights(model: dict[str, Any], classes: int, seed: int, number: int = 0) -> Tensor:
    """The weights (P,) of the first model of this number that our runs start from."""
    return network_of(model, classes).new_model(seed, number)


@contextmanager
def weights_file(model: dict[str, Any], classes: int, seed: int) -> Iterator[Path]:
    """A file with the weights of `first_weights`, for `model.weights` of runs with another seed."""
    tensors = network_of(model, classes).spec.tensors(first_weights(model, classes, seed))
    with TemporaryDirectory() as folder:
        file = Path(folder) / "first.safetensors"
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, file)
        yield file


def groups_of(assign: Iterable[int]) -> set[frozenset[int]]:
    """The clusters as sets of clients."""
    numbers = np.asarray(list(assign))
    return {frozenset(np.flatnonzero(numbers == k).tolist()) for k in np.unique(numbers)}


def cohorts(clients: int, seed: int, fraction: float, rounds: int) -> list[np.ndarray]:
    """The ids of the clients in each round of our runs."""
    return [Population(clients, [], seed).draw(t, fraction, None).ids_M for t in range(1, rounds + 1)]


def cluster_rows(result: Any) -> Tensor:
    """The weights (clients, P) of the model of each client's cluster."""
    assign = result.assignments()["cluster"].tolist()
    rows = {k: torch.cat([v.flatten() for v in result.trained.state_dict(k).values()]) for k in {*assign}}
    return torch.stack([rows[k] for k in assign])


def ours(
    data: Data,
    seed: int,
    kept: Sequence[int],
    method: dict[str, Any],
    model: dict[str, Any],
    local: dict[str, Any],
    classes: int = 10,
    metric: str = "accuracy",
    look: Callable[[Any, int], None] | None = None,
    fraction: float = 1.0,
    rows: Callable[[Any], Tensor] = cluster_rows,
    schedule: Sequence[dict[str, Any]] = (),
) -> Course:
    """A method of this project, in runs that end after each of the rounds `kept`: one is the beginning of the next.

    fraction: of the clients, which take part in a round. look: called with the result and the rounds of each of these
    runs. rows: the weights that are compared, from the result. schedule: of the experiment, as far as a run goes.
    """
    federation = federation_from_arrays(
        data.x[data.used].numpy(),
        data.y[data.used].numpy(),
        np.repeat(np.arange(data.clients), data.used.sum(1)),
        x_test=data.x_test.flatten(0, 1).numpy(),
        y_test=data.y_test.flatten().numpy(),
        test_clients=np.repeat(np.arange(data.clients), data.y_test.shape[1]),
        num_classes=classes,
    )
    course, (name,) = Course(), method
    for rounds in sorted(kept):
        experiment = Experiment(
            data=federation,
            seed=seed,
            rounds=rounds,
            methods=[method],
            model=model,
            local=local,
            cohort={"fraction": fraction},
            schedule=[event for event in schedule if event["round"] <= rounds],
            evaluation={"every": 1, "local": metric != "accuracy", "choice_samples": None},
            tracking={"enabled": False},
        )
        result = simulate(experiment)[name]
        course.weights[rounds] = rows(result)
        course.groups[rounds] = groups_of(result.assignments()["cluster"])
        if look:
            look(result, rounds)
    by_round = [record.metrics for record in result.records]
    course.accuracy = [metrics[metric] for metrics in by_round]
    course.clusters = [int(metrics.get("num_clusters", 1)) for metrics in by_round]
    return course


def accuracy_of(model: torch.nn.Module, row_NP: Tensor, data: Data) -> float:
    """The mean accuracy of the clients' models on their own test images."""
    hits = []
    for row_P, x, y in zip(row_NP, data.x_test, data.y_test, strict=True):
        vector_to_parameters(row_P.clone(), model.parameters())
        hits.append((model(x).argmax(1) == y).float().mean())
    return float(torch.stack(hits).mean())


def distance(theirs: Course, ours: Course, start_P: Tensor, round: int) -> float:
    """The largest distance between a client's weights in the two codes, relative to that from the initial models."""
    apart = (theirs.weights[round] - ours.weights[round]).norm(dim=1)
    return float((apart / (theirs.weights[round] - start_P).norm(dim=1)).max())


def rounded(first: Tensor) -> list[Tensor]:
    """These weights twice, each changed at random by as much as rounding does."""
    generator = torch.Generator().manual_seed(0)
    return [first * (1 + 1e-7 * torch.randn(first.shape, generator=generator)) for _ in range(2)]


def compared(theirs: Course, ours: Course, start_P: Tensor, round: int) -> list[str]:
    """Cells of a table: the round, the distance, and the accuracy in the two codes."""
    accuracy = [f"{course.accuracy[round - 1]:.4f}" for course in (theirs, ours)]
    return [str(round), f"{distance(theirs, ours, start_P, round):.1e}", *accuracy]


def same_groups(theirs: Course, ours: Course, round: int) -> str:
    """Whether the clusters after a round are the same, as a cell of a table."""
    return "yes" if theirs.groups[round] == ours.groups[round] else "no"


# Context in which attributes of a module or class have other values.
replaced = partial(patch.multiple, create=True)


@contextmanager
def quiet() -> Iterator[None]:
    """Context in which nothing is printed."""
    with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere):
        yield


def modules(folder: Path, *names: str) -> list[Any]:
    """Modules of a checkout."""
    with replaced(sys, path=[str(folder), *sys.path]):
        return [importlib.import_module(name) for name in names]


def script(file: Path, *words: str, run: bool = True) -> dict[str, Any]:
    """The variables of a script of a checkout after it was run with these arguments, or only imported."""
    with replaced(sys, path=[str(file.parent), *sys.path], argv=[file.name, *words]):
        return runpy.run_path(str(file), run_name="__main__" if run else "imported")


def stand_in(name: str, **values: Any) -> None:
    """A module that a checkout imports and the comparison does not need."""
    sys.modules[name] = module = ModuleType(name)
    vars(module).update(values)
