"""IFCA beside the code of its authors, jichan3751/ifca (its part for MNIST)."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from jobs.official import runs
from jobs.official.page import table
from jobs.official.runs import Course, Data, compared, groups_of, modules, rotated_mnist, same_groups

K, CLIENTS, TRAIN, TEST, STEPS, LR = 4, 40, 250, 50, 10, 0.1
MODEL = {"name": "mlp", "options": {"hidden": 200}}
KEPT = (1, 5, 20)
SEEDS = range(4)


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


def ours(data: Data, seed: int) -> Course:
    method = {"ifca": {"num_clusters": K, "weights": "uniform"}}
    local: dict[str, Any] = {"steps": STEPS, "batch_size": None, "lr": LR}
    return runs.ours(data, seed, KEPT, method, MODEL, local)


HEAD = """## IFCA

[jichan3751/ifca](https://github.com/jichan3751/ifca), commit {commit}, by the authors of IFCA: `TrainMNISTCluster` of
its part for MNIST. {clients} clients of {train} training and {test} test images, ten for each of four rotations; K = 4,
{steps} steps of full batches at eta {lr}, all clients in every round: nothing is random but the first models, which
both have in common.

Replaced in memory: the images of a client, so that clients have test images of their own. Deviation of ours that is
switched off here: weights by samples (`weights: uniform`). For its test a client of theirs chooses the model with the
least loss on the *test* images, ours on its training images.

Distance: between the weights of the model that a client has trained in the two codes, after averaging, relative to
their distance from the mean of the first models; the largest of the clients. *Clients*: those of each model that was
chosen in the round.
"""


def section(checkout: Path, commit: str) -> str:
    values = {"clients": CLIENTS, "train": TRAIN, "test": TEST, "steps": STEPS, "lr": LR}
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
    return "\n".join([HEAD.format(commit=commit, **values), *table(*rows), *lines, ""])
