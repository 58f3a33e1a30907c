"""CFL beside the code of its authors, felisat/clustered-federated-learning.

MNIST stands in for its EMNIST: ten clients, half of them with images rotated by 180 degrees.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sklearn.cluster import AgglomerativeClustering
from torch.nn.utils import parameters_to_vector, vector_to_parameters
from torch.utils.data import DataLoader, TensorDataset

from jobs.official import runs
from jobs.official.page import table
from jobs.official.runs import Course, Data, compared, modules, rotated_mnist

CLIENTS, TRAIN, TEST, CLASSES = 10, 800, 200, 62  # samples of a client; its ConvNet has an output per EMNIST class
LR, MOMENTUM, DECAY = 0.1, 0.9, 0.99
MODEL: dict[str, Any] = {"name": "autocfl_cnn", "options": {"channels": [6, 16]}}  # its ConvNet


@dataclass(frozen=True)
class Settings:
    """Settings of a comparison."""

    batch: int
    eps1: float
    eps2: float
    kept: tuple[int, ...]  # rounds after which weights and clusters are compared; the last ends the run


def mnist(seed: int) -> Data:
    """Images of the clients; those of the first half are rotated by 180 degrees."""
    return rotated_mnist(seed, [2 * (i < CLIENTS // 2) for i in range(CLIENTS)], TRAIN, TEST)


def first_weights(seed: int) -> torch.Tensor:
    return runs.first_weights(MODEL, CLASSES, seed)


# ---- the two codes


def theirs(checkout: Path, data: Data, seed: int, how: Settings, order: int | None = None) -> Course:
    """CFL by the authors' `Server` and `Client`, with the loop of their notebook.

    seed: of the first model. order: seed of the order of batches; None: the same.
    """
    devices, models = modules(checkout, "fl_devices", "models")
    convnet, devices.device = models.ConvNet, "cpu"
    devices.AgglomerativeClustering = lambda affinity, linkage: AgglomerativeClustering(
        metric=affinity, linkage=linkage
    )
    torch.manual_seed(seed if order is None else order)
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

    leaves, course = [np.arange(CLIENTS)], Course()
    for t in range(1, how.kept[-1] + 1):
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
        course.accuracy.append(float(np.mean([client.evaluate() for client in clients])))
        course.clusters.append(len(leaves))
        if t in how.kept:
            rows = [parameters_to_vector(client.model.parameters()).detach().clone() for client in clients]
            course.weights[t] = torch.stack(rows)
            course.groups[t] = {frozenset(leaf.tolist()) for leaf in leaves}
    return course


def ours(data: Data, seed: int, how: Settings, order: int | None = None) -> Course:
    """CFL of this project; seed and order as in `theirs`."""
    local = {
        "epochs": 1,
        "batch_size": how.batch if how.batch < TRAIN else None,
        "lr": LR * DECAY,  # theirs decays before the first round
        "schedule": {"exponential": {"gamma": DECAY}},
        "momentum": MOMENTUM,
        "persist": True,
    }
    method = {"cfl": {"eps1": how.eps1, "eps2": how.eps2, "weights": "uniform"}}
    if order is None:
        return runs.ours(data, seed, how.kept, method, MODEL, local, CLASSES)
    with runs.weights_file(MODEL, CLASSES, seed) as file:
        return runs.ours(data, order, how.kept, method, MODEL | {"weights": str(file)}, local, CLASSES)


# ---- the page

FULL = Settings(batch=TRAIN, eps1=10.0, eps2=0.0, kept=(1, 20, 22))
THEIRS = Settings(batch=128, eps1=0.4, eps2=1.6, kept=(30,))
SLOW, ORDERS = 2, (2, *range(100, 111))  # the seed at which the codes differ most; seeds of orders of batches
LEARNT = 0.3  # accuracy; by chance it is 0.1
HEAD = f"""## CFL

[felisat/clustered-federated-learning](https://github.com/felisat/clustered-federated-learning), commit COMMIT, by the
authors of CFL: its `Server`, `Client` and `ConvNet` with the loop of its notebook. MNIST stands in for EMNIST: ten
clients of {TRAIN} training and {TEST} test images, those of the first five rotated by 180 degrees. The learning rate is
{LR}, times {DECAY} in each round; the momentum of {MOMENTUM} is kept from round to round; weights are uniform; both
start from the same model.

Replaced in memory: scikit-learn's argument `affinity`, which is called `metric` today, and the loaders, so that both
have the same images. Deviations of ours that are switched off here: momentum from zero in every round
(`local.persist: true`) and weights by samples (`weights: uniform`). Theirs tests in training mode, which has no effect
on this network.
"""


def section(checkout: Path, commit: str) -> str:
    lines = [HEAD.replace("COMMIT", commit)]
    data, start_P = mnist(0), first_weights(0)
    a, b = theirs(checkout, data, 0, FULL), ours(data, 0, FULL)
    rows = [[*runs.HEAD, "clusters, theirs", "clusters, ours"]]
    for t in FULL.kept:
        rows.append([*compared(a, b, start_P, t), str(a.clusters[t - 1]), str(b.clusters[t - 1])])
    last = FULL.kept[-1]
    lines += [
        "### CFL, the same batches",
        "",
        f"With full batches there is no order of batches to differ. With eps1 {FULL.eps1:g} and eps2 {FULL.eps2:g},",
        "every leaf of three or more clients splits from round 21 on. Distance: between the weights of a client in the",
        "two codes, relative to their distance from the initial models; the largest of the ten clients.",
        "",
        *table(*rows),
        f"The clusters after round {last} are {'the same' if a.groups[last] == b.groups[last] else 'not the same'}.",
        "",
        "### CFL, the authors' settings",
        "",
        f"Batches of {THEIRS.batch} in random order, which differs; eps1 {THEIRS.eps1:g}, eps2 {THEIRS.eps2:g}.",
        f"*Groups*: whether the clusters after round {THEIRS.kept[-1]} are the two rotations.",
        "",
    ]
    true = {frozenset(range(CLIENTS // 2)), frozenset(range(CLIENTS // 2, CLIENTS))}
    shown = (20, 21, 25, 30)
    rows = [["seed", "code", "first split", "clusters", "groups", f"accuracy, round {shown[0]}"]]
    rows[0] += [f"round {t}" for t in shown[1:]]
    for seed in range(3):
        data = mnist(seed)
        for code, run in (("theirs", theirs(checkout, data, seed, THEIRS)), ("ours", ours(data, seed, THEIRS))):
            at = [f"{run.accuracy[t - 1]:.3f}" for t in shown]
            right = "yes" if run.groups[THEIRS.kept[-1]] == true else "no"
            rows.append([str(seed), code, str(run.split or "-"), str(run.clusters[-1]), right, *at])
    return "\n".join([*lines, *table(*rows), *other_orders(checkout)])


def other_orders(checkout: Path) -> list[str]:
    """Both codes from the first model and data of the seed at which they differ, with other orders of batches."""
    data, last = mnist(SLOW), THEIRS.kept[-1]
    courses = [(theirs(checkout, data, SLOW, THEIRS, order), ours(data, SLOW, THEIRS, order)) for order in ORDERS]
    final = [[run.accuracy[last - 1] for run in pair] for pair in courses]
    learnt = [sum(accuracy > LEARNT for accuracy in code) for code in zip(*final, strict=True)]
    rows = [[str(order), *(f"{accuracy:.3f}" for accuracy in pair)] for order, pair in zip(ORDERS, final, strict=True)]
    return [
        f"### CFL, seed {SLOW} with other orders of batches",
        "",
        f"The first model and the images of seed {SLOW}, with batches in the orders of other seeds: accuracy after",
        f"round {last}. It is above {LEARNT} in {learnt[0]} of {len(ORDERS)} orders with theirs and in {learnt[1]}",
        f"with ours; in the others this model stays at chance (eta {LR}, momentum {MOMENTUM}). With the same batches",
        f"both codes agree (above), and whether seed {SLOW} learns depends on the order, which differs between them.",
        "",
        *table(["order", "theirs", "ours"], *rows),
    ]
