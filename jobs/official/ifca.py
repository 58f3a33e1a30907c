"""IFCA beside the code of its authors, jichan3751/ifca (its part for MNIST)."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from cfl_ray import Experiment
from cfl_ray.data.sources import locate
from jobs.official import runs
from jobs.official.page import table
from jobs.official.runs import Course, Data, compared, groups_of, modules, rotated_mnist, same_groups

K, CLIENTS, TRAIN, TEST, STEPS, LR = 4, 40, 250, 50, 10, 0.1
MODEL = {"name": "mlp", "options": {"hidden": 200}}
KEPT = (1, 5, 20)
SEEDS = range(4)
EPOCHS = 4  # of their settings


def theirs(checkout: Path, data: Data, first_KP: Tensor) -> Course:
    """IFCA by the authors' `TrainMNISTCluster`, with our images and first models."""
    (code,) = modules(checkout / "mnist", "train_cluster_mnist")

    class Trainer(code.TrainMNISTCluster):  # type: ignore[name-defined, misc]
        def load_data(self, m_i: int, train: bool = True) -> tuple[Tensor, Tensor]:
            x, y = (data.x, data.y) if train else (data.x_test, data.y_test)
            return x[m_i].flatten(1), y[m_i]

    config = {"m": CLIENTS, "m_test": CLIENTS, "p": K, "n": TRAIN, "h1": 200, "tau": STEPS, "lr": LR, "train_seed": 0}
    trainer = Trainer(config)
    trainer.setup_models()
    for model, row_P in zip(trainer.models, first_KP, strict=True):
        vector_to_parameters(row_P, model.parameters())
    true = [i * K // CLIENTS for i in range(CLIENTS)]
    trainer.dataset = {"train": {"cluster_assign": true}, "test": {"cluster_assign": true}}
    chosen, course = trainer.test(train=True)["cluster_assign"], Course()
    for t in range(1, KEPT[-1] + 1):
        trainer.train(chosen, lr=LR)
        course.accuracy.append(trainer.test(train=False)["acc"])
        course.clusters.append(len(set(chosen)))
        if t in KEPT:
            row_KP = torch.stack([parameters_to_vector(m.parameters()).detach() for m in trainer.models])
            course.weights[t] = row_KP[torch.from_numpy(np.array(chosen))]
            course.groups[t] = groups_of(chosen)
        chosen = trainer.test(train=True)["cluster_assign"]
    return course


def of_their_settings(checkout: Path) -> list[list[str]]:
    """Rows of the first epochs of the authors' script with its default seed: accuracy, test clients of each model."""
    (code,) = modules(checkout / "mnist", "train_cluster_mnist")
    read = locate("mnist", Experiment(data={"source": "mnist"}).data).read(True, None)

    class Trainer(code.TrainMNISTCluster):  # type: ignore[name-defined, misc]
        def _load_MNIST(self, train: bool = True) -> tuple[Tensor, Tensor]:
            x, y = (read.train_x, read.train_y) if train else (read.test_x, read.test_y)
            return torch.from_numpy(x).reshape(-1, 28, 28) / 255.0, torch.from_numpy(y).long()

    config = {"m": 240, "m_test": 40, "p": K, "n": 1000, "h1": 200, "tau": STEPS, "lr": LR}
    trainer = Trainer(config | {"data_seed": 0, "train_seed": 0})
    trainer.setup_datasets()
    trainer.setup_models()
    rows = [["epoch", "accuracy", "test clients of each model"]]
    for epoch in range(1, EPOCHS + 1):
        trainer.train(trainer.test(train=True)["cluster_assign"], lr=LR)
        tested = trainer.test(train=False)
        rows.append([str(epoch), f"{tested['acc']:.3f}", ", ".join(map(str, tested["cl_ct"]))])
    return rows


def ours(data: Data, seed: int) -> Course:
    method = {"ifca": {"num_clusters": K, "weights": "uniform"}}
    local: dict[str, Any] = {"steps": STEPS, "batch_size": None, "lr": LR}
    return runs.ours(data, seed, KEPT, method, MODEL, local)


HEAD = f"""## IFCA

[jichan3751/ifca](https://github.com/jichan3751/ifca), commit COMMIT, by the authors of IFCA: `TrainMNISTCluster` of
its part for MNIST. {CLIENTS} clients of {TRAIN} training and {TEST} test images, ten for each of four rotations; K = 4,
{STEPS} steps of full batches at eta {LR}, all clients in every round: nothing is random but the first models, which
both have in common.

Replaced in memory: the images of a client, so that clients have test images of their own. Deviation of ours that is
switched off here: weights by samples (`weights: uniform`). An error of theirs: for its test a client chooses the model
with the least loss on the *test* images and their labels; ours chooses by its training images.

Distance: between the weights of the model that a client has trained in the two codes, after averaging, relative to
their distance from the mean of the first models; the largest of the clients. *Clients*: those of each model that was
chosen in the round.
"""

SETTINGS = """`train_cluster_mnist.py` with its default seed and its own first models: K = 4 for four rotations, 240
clients for training and 40 for tests, of 1,000 images each. A model that no client chooses stays as it is, and two
rotations share one: the first run of their code shows the collapse."""


def section(checkout: Path, commit: str) -> str:
    rows = [["seed", *runs.HEAD, "clients, theirs", "clients, ours", "same"]]
    shared = [0, 0]  # runs of theirs and of ours in the end of which two rotations share a model
    for seed in SEEDS:
        data = rotated_mnist(seed, [i * K // CLIENTS for i in range(CLIENTS)], TRAIN, TEST)
        first_KP = torch.stack([runs.first_weights(MODEL, 10, seed, k) for k in range(K)])
        a, b = theirs(checkout, data, first_KP), ours(data, seed)
        for t in KEPT:
            sizes = [", ".join(map(str, x.sizes(t))) for x in (a, b)]
            rows.append([str(seed), *compared(a, b, first_KP.mean(0), t), *sizes, same_groups(a, b, t)])
        shared = [n + (len(x.groups[KEPT[-1]]) < K) for n, x in zip(shared, (a, b), strict=True)]
    lines = [
        f"In the end two rotations share a model in {shared[0]} of the {len(SEEDS)} runs of theirs and in {shared[1]}",
        "of ours: the collapse is a property of the method and of its first models.",
    ]
    own = ["", "### IFCA, the authors' settings", "", *SETTINGS.splitlines(), "", *table(*of_their_settings(checkout))]
    return "\n".join([HEAD.replace("COMMIT", commit), *table(*rows), *lines, *own, ""])
