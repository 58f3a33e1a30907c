"""The page docs/official.md: methods beside the code of their authors, on the same data and from the same weights.

    git clone https://github.com/felisat/clustered-federated-learning CHECKOUT
    python -m jobs.official CHECKOUT

The checkout is no part of this project and stays as it is; what its age needs is replaced in memory. MNIST stands in
for its EMNIST: ten clients, half of them with images rotated by 180 degrees.
"""

import argparse
import importlib
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sklearn.cluster import AgglomerativeClustering
from torch import Tensor
from torch.nn.utils import parameters_to_vector, vector_to_parameters
from torch.utils.data import DataLoader, TensorDataset

from cfl_ray import Experiment, federation_from_arrays, simulate
from cfl_ray.data.sources import locate
from cfl_ray.models import recipe
from cfl_ray.nn.network import Network

PAGE = Path(__file__).parents[1] / "docs" / "official.md"
CLIENTS, TRAIN, TEST, CLASSES = 10, 800, 200, 62  # samples of a client; its ConvNet has an output per EMNIST class
LR, MOMENTUM, DECAY = 0.1, 0.9, 0.99
MODEL, OPTIONS, SHAPE = "autocfl_cnn", {"channels": [6, 16]}, (1, 28, 28)  # its ConvNet


@dataclass(frozen=True)
class Data:
    """Samples (clients, samples, ...) that each client trains on and is tested with."""

    x: Tensor
    y: Tensor
    x_test: Tensor
    y_test: Tensor


@dataclass(frozen=True)
class Course:
    """What a run did; a round is counted from 1."""

    accuracy: list[float]  # mean over the clients, by round
    clusters: list[int]  # their number, by round
    groups: set[frozenset[int]]  # the clusters in the end
    weights: dict[int, Tensor]  # after some rounds, (clients, P)

    @property
    def split(self) -> int | None:
        """The first round with more than one cluster."""
        return next((t for t, found in enumerate(self.clusters, 1) if found > 1), None)


@dataclass(frozen=True)
class Settings:
    """Of one comparison."""

    batch: int
    rounds: int
    eps1: float
    eps2: float
    kept: tuple[int, ...]  # rounds after which weights are compared


def mnist(seed: int) -> Data:
    """Random images of MNIST; those of the first half of the clients are rotated by 180 degrees."""
    images = locate("mnist", Experiment(data={"source": "mnist"}).data).read(True, None)
    chosen = np.random.default_rng(seed).permutation(len(images.train_y))[: CLIENTS * (TRAIN + TEST)]
    x = torch.from_numpy(images.train_x[chosen] / np.float32(255)).reshape(CLIENTS, TRAIN + TEST, *SHAPE)
    y = torch.from_numpy(images.train_y[chosen]).long().reshape(CLIENTS, TRAIN + TEST)
    x[: CLIENTS // 2] = x[: CLIENTS // 2].flip(-1, -2)
    return Data(x[:, :TRAIN], y[:, :TRAIN], x[:, TRAIN:], y[:, TRAIN:])


def first_weights(seed: int) -> Tensor:
    """The weights (P,) that our runs start from."""
    return Network(recipe(MODEL, OPTIONS, SHAPE, CLASSES), SHAPE).new_model(seed, 0)


# ---- the two codes


def theirs(checkout: Path, data: Data, seed: int, how: Settings) -> Course:
    """CFL by the authors' `Server` and `Client`, with the loop of their notebook."""
    sys.path.insert(0, str(checkout))
    devices: Any = importlib.import_module("fl_devices")
    convnet = importlib.import_module("models").ConvNet
    sys.path.remove(str(checkout))
    devices.device = "cpu"
    devices.AgglomerativeClustering = lambda affinity, linkage: AgglomerativeClustering(
        metric=affinity, linkage=linkage
    )
    torch.manual_seed(seed)
    clients = []
    for i in range(CLIENTS):
        own = TensorDataset(data.x[i], data.y[i])
        client = devices.Client(convnet, lambda values: torch.optim.SGD(values, lr=LR, momentum=MOMENTUM), own, idnum=i)
        client.train_loader = DataLoader(own, batch_size=how.batch, shuffle=how.batch < TRAIN)
        client.eval_loader = DataLoader(TensorDataset(data.x_test[i], data.y_test[i]), batch_size=TEST)
        clients.append(client)
    server = devices.Server(convnet, TensorDataset(data.x_test[0], data.y_test[0]))
    vector_to_parameters(first_weights(seed), server.model.parameters())
    for client in clients:
        client.synchronize_with_server(server)

    leaves, accuracy, clusters, weights = [np.arange(CLIENTS)], [], [], {}
    for t in range(1, how.rounds + 1):
        for client in clients:
            client.compute_weight_update(epochs=1)
            client.reset()
        similarity = server.compute_pairwise_similarities(clients)
        after = []
        for leaf in leaves:
            members = [clients[i] for i in leaf]
            short = server.compute_mean_update_norm(members) < how.eps1
            if short and server.compute_max_update_norm(members) > how.eps2 and len(leaf) > 2 and t > 20:
                after += [leaf[side] for side in server.cluster_clients(similarity[leaf][:, leaf])]
            else:
                after.append(leaf)
        leaves = after
        server.aggregate_clusterwise([[clients[i] for i in leaf] for leaf in leaves])
        accuracy.append(float(np.mean([client.evaluate() for client in clients])))
        clusters.append(len(leaves))
        if t in how.kept:
            rows = [parameters_to_vector(client.model.parameters()).detach().clone() for client in clients]
            weights[t] = torch.stack(rows)
    return Course(accuracy, clusters, {frozenset(leaf.tolist()) for leaf in leaves}, weights)


def ours(data: Data, seed: int, how: Settings) -> Course:
    """CFL of this project."""
    federation = federation_from_arrays(
        data.x.flatten(0, 1).numpy(),
        data.y.flatten().numpy(),
        np.repeat(np.arange(CLIENTS), TRAIN),
        x_test=data.x_test.flatten(0, 1).numpy(),
        y_test=data.y_test.flatten().numpy(),
        test_clients=np.repeat(np.arange(CLIENTS), TEST),
        num_classes=CLASSES,
    )
    weights = {}
    for rounds in sorted({*how.kept, how.rounds}):  # a run of fewer rounds is the beginning of the longer one
        experiment = Experiment(
            data=federation,
            seed=seed,
            rounds=rounds,
            methods=[{"cfl": {"eps1": how.eps1, "eps2": how.eps2, "weights": "uniform"}}],
            model={"name": MODEL, "options": OPTIONS},
            local={
                "epochs": 1,
                "batch_size": how.batch if how.batch < TRAIN else None,
                "lr": LR * DECAY,  # theirs decays before the first round
                "schedule": {"exponential": {"gamma": DECAY}},
                "momentum": MOMENTUM,
                "persist": True,
            },
            cohort={"fraction": 1.0},
            evaluation={"every": 1, "local": False},
            tracking={"enabled": False},
        )
        result = simulate(experiment)["cfl"]
        assign = result.assignments()["cluster"].to_numpy()
        rows = {k: torch.cat([v.flatten() for v in result.trained.state_dict(k).values()]) for k in {*assign.tolist()}}
        weights[rounds] = torch.stack([rows[k] for k in assign.tolist()])
    groups = {frozenset(np.flatnonzero(assign == k).tolist()) for k in rows}
    by_round = [record.metrics for record in result.records]
    return Course(
        [one["accuracy"] for one in by_round], [int(one["num_clusters"]) for one in by_round], groups, weights
    )


# ---- the page

FULL = Settings(batch=TRAIN, rounds=22, eps1=10.0, eps2=0.0, kept=(1, 20, 22))
THEIRS = Settings(batch=128, rounds=30, eps1=0.4, eps2=1.6, kept=())
HEAD = """# Beside the authors' code

`python -m jobs.official CHECKOUT` writes this page; the head of [jobs/official.py](../jobs/official.py) says how to get
the checkout. No number in a table is typed by hand.

## CFL

[felisat/clustered-federated-learning](https://github.com/felisat/clustered-federated-learning), commit {commit}, by the
authors of CFL: its `Server`, `Client` and `ConvNet` with the loop of its notebook. MNIST stands in for EMNIST: ten
clients of {train} training and {test} test images, those of the first five rotated by 180 degrees. The learning rate is
{lr}, times {decay} in each round; the momentum of {momentum} is kept from round to round; weights are uniform; both
start from the same model.

Replaced in memory: scikit-learn's argument `affinity`, which is called `metric` today, and the loaders, so that both
have the same images. Deviations of ours that are switched off here: momentum from zero in every round
(`local.persist: true`) and weights by samples (`weights: uniform`). Theirs tests in training mode, which has no effect
on this network.
"""


def page(checkout: Path, commit: str) -> str:
    values = {"train": TRAIN, "test": TEST, "lr": LR, "decay": DECAY, "momentum": MOMENTUM}
    lines = [HEAD.format(commit=commit, **values)]
    data = mnist(0)
    a, b = theirs(checkout, data, 0, FULL), ours(data, 0, FULL)
    lines += [
        "### The same batches",
        "",
        f"With full batches there is no order of batches to differ. With eps1 {FULL.eps1:g} and eps2 {FULL.eps2:g},",
        "every leaf of three or more clients splits from round 21 on. Distance: between the weights of a client in the",
        "two codes, relative to their distance from the first ones; the largest of the ten clients.",
        "",
        "| round | distance | accuracy, theirs | accuracy, ours | clusters, theirs | clusters, ours |",
        "|---|---|---|---|---|---|",
    ]
    start_P = first_weights(0)
    for t in FULL.kept:
        distance = ((a.weights[t] - b.weights[t]).norm(dim=1) / (a.weights[t] - start_P).norm(dim=1)).max()
        lines.append(
            f"| {t} | {distance:.1e} | {a.accuracy[t - 1]:.4f} | {b.accuracy[t - 1]:.4f} | {a.clusters[t - 1]} "
            f"| {b.clusters[t - 1]} |"
        )
    lines += [
        "",
        f"The clusters after round {FULL.rounds} are {'the same' if a.groups == b.groups else 'not the same'}.",
        "",
        "### The authors' settings",
        "",
        f"Batches of {THEIRS.batch} in random order, which differs; eps1 {THEIRS.eps1:g}, eps2 {THEIRS.eps2:g}.",
        f"*Groups*: whether the clusters after round {THEIRS.rounds} are the two rotations.",
        "",
        "| seed | code | first split | clusters | groups | accuracy, round 20 | round 21 | round 25 | round 30 |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    true = {frozenset(range(CLIENTS // 2)), frozenset(range(CLIENTS // 2, CLIENTS))}
    for seed in range(3):
        data = mnist(seed)
        for code, run in (("theirs", theirs(checkout, data, seed, THEIRS)), ("ours", ours(data, seed, THEIRS))):
            at = " | ".join(f"{run.accuracy[t - 1]:.3f}" for t in (20, 21, 25, 30))
            right = "yes" if run.groups == true else "no"
            lines.append(f"| {seed} | {code} | {run.split or '-'} | {run.clusters[-1]} | {right} | {at} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout", type=Path, help="folder of felisat/clustered-federated-learning")
    checkout = parser.parse_args().checkout
    commit = subprocess.check_output(["git", "-C", checkout, "rev-parse", "--short=7", "HEAD"], text=True).strip()
    PAGE.write_text(page(checkout, commit))
    print(f"wrote {PAGE}")


if __name__ == "__main__":
    main()
