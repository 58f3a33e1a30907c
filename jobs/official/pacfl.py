"""PACFL beside the code of its authors, MMorafah/PACFL."""

import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from cfl_ray.clustering.agreement import agreement
from jobs.official import runs
from jobs.official.page import table
from jobs.official.runs import Course, Data, compared, groups_of, images, modules, quiet, replaced, same_groups, script

CLIENTS, TRAIN, TEST, BASIS, ALPHA = 20, 200, 100, 3, 4.9
EPOCHS, LR, MOMENTUM = 10, 0.01, 0.5
MODEL: dict[str, Any] = {"name": "lenet5"}
KEPT = (1, 5)
SEEDS = range(3)


def two_labels(seed: int) -> Data:
    """Random images of Fashion-MNIST for each client: half of label i mod 10 of client i, half of another."""
    x, y = images("fashion_mnist", seed)
    rng, unused = np.random.default_rng(seed), {label: torch.nonzero(y == label).flatten() for label in range(10)}
    rows = []
    for client in range(CLIENTS):
        first = client % 10
        parts = []
        for label in (first, rng.choice(np.delete(np.arange(10), first))):
            size = (TRAIN + TEST) // 2
            parts.append(unused[label][:size])
            unused[label] = unused[label][size:]
        rows.append(torch.stack(parts, 1).flatten())  # the labels take turns, so that both are in training and test
    row = torch.stack(rows)
    return Data(x[row][:, :TRAIN], y[row][:, :TRAIN], x[row][:, TRAIN:], y[row][:, TRAIN:])


@dataclass(frozen=True)
class Pixels:
    """Stored pixels of a client, 0 to 255, as the authors' data sets have them."""

    data: np.ndarray
    target: np.ndarray

    def __len__(self) -> int:
        return len(self.target)


def main_pacfl(
    checkout: Path, data: Data, start_P: Tensor, rounds: int, partition: str = "noniid-#label2"
) -> dict[str, Any]:
    """The variables of the authors' main_pacfl.py after so many rounds with full batches, of all clients."""
    (utils, models) = modules(checkout, "src.utils", "src.models")
    model = models.SimpleCNNMNIST(input_dim=256, hidden_dims=[120, 84], output_dim=10)
    torch.nn.utils.vector_to_parameters(start_P, model.parameters())
    counts = [dict(zip(*(v.tolist() for v in y.unique(return_counts=True)), strict=True)) for y in data.y]
    own = dict(enumerate(np.split(np.arange(CLIENTS * TRAIN), CLIENTS)))

    def partition_data(*_: Any, **__: Any) -> tuple[Any, ...]:
        return None, None, None, None, own, dict(own), dict(enumerate(counts)), None

    def get_dataloader(*args: Any, **_: Any) -> tuple[Any, ...]:
        # without positions: the whole data, which we do not test
        client = 0 if len(args) < 5 else int(args[4][0]) // TRAIN
        train = DataLoader(TensorDataset(data.x[client], data.y[client]), batch_size=TRAIN)
        test = DataLoader(TensorDataset(data.x_test[client], data.y_test[client]), batch_size=TEST)
        pixels = Pixels((data.x[client, :, 0] * 255).round().numpy(), data.y[client].numpy())
        return train, test, pixels, pixels

    options = {
        "rounds": rounds, "num_users": CLIENTS, "frac": 1.0, "local_ep": EPOCHS, "local_bs": TRAIN, "lr": LR,
        "momentum": MOMENTUM, "model": "simple-cnn", "dataset": "fmnist", "partition": partition, "alg": "pacfl",
        "cluster_alpha": ALPHA, "n_basis": BASIS, "linkage": "average",
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        torch.save(model.state_dict(), Path(folder) / "start.pt")
        words = [f"--{name}={value}" for name, value in options.items()]
        words += [f"--savedir={folder}/", f"--logdir={folder}/", f"--load_initial={folder}/start.pt"]
        with (
            replaced(utils, partition_data=partition_data, get_dataloader=get_dataloader),
            replaced(np, NINF=-np.inf),
            replaced(torch.Tensor, cuda=lambda self: self),
            replaced(torch.cuda, set_device=lambda _: None),
            quiet(),
        ):
            return script(checkout / "main_pacfl.py", *words)


def theirs(checkout: Path, data: Data, start_P: Tensor) -> tuple[Course, dict[str, Any]]:
    """The course of main_pacfl.py, and its variables in the end."""
    course: Course = Course()
    for rounds in KEPT:
        found = main_pacfl(checkout, data, start_P, rounds)
        cluster = [found["clients_clust_id"][client] for client in range(CLIENTS)]
        models = [torch.cat([v.flatten() for v in state.values()]) for state in found["w_glob_per_cluster"]]
        course.weights[rounds], course.groups[rounds] = torch.stack([models[k] for k in cluster]), groups_of(cluster)
    course.accuracy = [float(value) / 100 for value in found["ckp_avg_tacc"]]
    course.clusters = [len(models)] * KEPT[-1]
    return course, found


def ours(data: Data, seed: int) -> tuple[Course, np.ndarray]:
    """The course of PACFL of this project, and its matrix of angles."""
    method = {"pacfl": {"vectors": BASIS, "angle": "code", "linkage": "weighted", "threshold": ALPHA}}
    local = {"epochs": EPOCHS, "batch_size": None, "lr": LR, "momentum": MOMENTUM}
    angles = []

    def look(result: Any, rounds: int) -> None:
        angles.append(result.diagnostics["distance"][1].value)

    return runs.ours(data, seed, KEPT, method, MODEL, local, metric="accuracy_local", look=look), angles[0]


HEAD = f"""## PACFL

[MMorafah/PACFL](https://github.com/MMorafah/PACFL), commit COMMIT, by the authors of PACFL: its `main_pacfl.py` as a
whole. {CLIENTS} clients of {TRAIN} training and {TEST} test images of Fashion-MNIST of two labels each, all of them in
every round; full batches, {EPOCHS} epochs at eta {LR} with momentum {MOMENTUM}, {BASIS} vectors per label, threshold
{ALPHA} degrees. Both start from the same model.

Replaced in memory: the partition and the loaders, so that both have the same images; `numpy.NINF`; calls of CUDA. Ours
is its variant: `angle: code`, `linkage: weighted`, pixels that are not normalised. The signs of singular vectors are
arbitrary and differ in the two codes. Accuracy is P-local, that of the models that clients hold after training. In
their code and not in the paper: the smallest angle between two single vectors in the place of the principal angle, and
a linkage that it names `average`, which gives two merged clusters the same weight whatever their sizes (WPGMA).

Angle: the largest difference between the two matrices of angles, in degrees. Distance: between the weights of a
client's cluster model in the two codes, relative to their distance from the initial models; the largest of the clients.
*ARI*: of the clusters with the label sets of the clients.
"""


def section(checkout: Path, commit: str) -> str:
    head = HEAD.replace("COMMIT", commit)
    rows = [["seed", "angle", "clusters, theirs", "clusters, ours", "same", "ARI", *runs.HEAD]]
    for seed in SEEDS:
        data, start_P = two_labels(seed), runs.first_weights(MODEL, 10, seed)
        (a, found), (b, angle_SS) = theirs(checkout, data, start_P), ours(data, seed)
        apart = np.abs(found["adj_mat"] - angle_SS)[~np.eye(CLIENTS, dtype=bool)].max()
        _, labels_N = np.unique([np.sort(y.unique().numpy()) for y in data.y], axis=0, return_inverse=True)
        cluster_N = np.array([found["clients_clust_id"][client] for client in range(CLIENTS)])
        ari = agreement(labels_N.ravel(), cluster_N)["ari"]
        for t in KEPT:
            clusters = [str(len(a.groups[t])), str(len(b.groups[t])), same_groups(a, b, t)]
            rows.append([str(seed), f"{apart:.4f}", *clusters, f"{ari:.2f}", *compared(a, b, start_P, t)])
    found = main_pacfl(checkout, data, start_P, 0, partition="noniid-labeldir")
    per_label = {u.shape[1] // len(y.unique()) for u, y in zip(found["U_clients"], data.y, strict=True)}
    of_theirs = [
        "An error of theirs: for Dirichlet skew the script divides a budget of 20 vectors among a client's labels, but",
        "then looks for a list among the labels, which is never there. With that partition each client has",
        f"{' or '.join(map(str, sorted(per_label)))} vectors per label, as without.",
        "",
    ]
    return "\n".join([head, *table(*rows), *of_theirs])
