"""FedPAC beside the code of its authors, JianXu95/FedPAC."""

import sys
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters
from torch.utils.data import DataLoader, TensorDataset

from jobs.official import runs
from jobs.official.fedrep import CLIENTS, images
from jobs.official.pacfl import TEST, TRAIN
from jobs.official.page import table
from jobs.official.pfllib import HIDDEN, MODEL, network, personal_rows
from jobs.official.runs import Course, Data, accuracy_of, distance, modules, quiet, replaced

EPOCHS, LR, HEAD_LR, MOMENTUM, DECAY, LAM = 5, 0.03, 0.1, 0.5, 5e-4, 1.0  # HEAD_LR, MOMENTUM, DECAY: text of theirs
LOCAL: dict[str, Any] = {
    "epochs": EPOCHS, "batch_size": None, "lr": LR, "momentum": MOMENTUM, "weight_decay": DECAY,
}  # fmt: skip
KEPT = (1, 2, 5)
SEEDS = range(2)


@dataclass
class Mixed:
    """A run, with the weights a_ij of the heads by round, (N, N)."""

    course: Course = field(default_factory=Course)
    graph: dict[int, np.ndarray] = field(default_factory=dict)


class Net(nn.Module):
    """The model, with the outputs and the names of the head that theirs looks for."""

    classifier_weight_keys = ("head.weight", "head.bias")

    def __init__(self, row_P: Tensor) -> None:
        super().__init__()
        self.body, self.head = network()
        vector_to_parameters(row_P.clone(), self.parameters())
        self.classifier_weight_keys = [*self.classifier_weight_keys]

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        features_BF = self.body(x)
        return features_BF, self.head(features_BF)


def eig(matrix_MM: Tensor, eigenvectors: bool) -> tuple[Tensor, Tensor]:
    """Eigenvalues, real and imaginary part (M, 2), and vectors of a symmetric matrix, as `torch.eig` had them."""
    value_M, vector_MM = torch.linalg.eigh(matrix_MM)
    return torch.stack([value_M, torch.zeros_like(value_M)], 1), vector_MM


def theirs(checkout: Path, data: Data, start_P: Tensor) -> Mixed:
    """The run of their `train_round_fedpac` with all clients."""
    run = Mixed()
    sys.path.append(str(checkout / "deps"))
    running, methods = modules(checkout, "running", "methods.fedpac")
    weigh = running.get_head_agg_weight

    def weights(*given: Any) -> Any:
        found = weigh(*given)
        graph_NN = np.array(found)
        run.graph[len(run.graph) + 1] = graph_NN / graph_NN.sum(1, keepdims=True)
        return found

    args = SimpleNamespace(
        num_users=data.clients, num_classes=10, device="cpu", frac=1.0, epochs=KEPT[-1] + 1, local_epoch=EPOCHS, lr=LR,
        lam=LAM, agg_g=1,
    )  # fmt: skip

    def loader(x: Tensor, y: Tensor) -> DataLoader[Any]:
        return DataLoader(TensorDataset(x, y), batch_size=len(y))

    clients = [
        methods.LocalUpdate_FedPAC(
            i, args, loader(data.x[i], data.y[i]), loader(data.x_test[i], data.y_test[i]), Net(start_P)
        )
        for i in range(data.clients)
    ]
    with replaced(running, get_head_agg_weight=weights), replaced(torch, eig=eig), quiet():
        for number in range(KEPT[-1]):
            running.train_round_fedpac(args, None, clients, number)
            rows = [parameters_to_vector(client.local_model.parameters()).detach() for client in clients]
            run.course.weights[number + 1] = torch.stack(rows)
    return run


def ours(data: Data, seed: int) -> Mixed:
    run = Mixed()

    def look(result: Any, rounds: int) -> None:
        run.graph[rounds] = result.diagnostics["graph"][rounds].value

    method = {"fedpac": {"lam": LAM, "head_lr": HEAD_LR}}
    run.course = runs.ours(data, seed, KEPT, method, MODEL, LOCAL, look=look, rows=personal_rows)
    return run


HEAD = f"""## FedPAC

[JianXu95/FedPAC](https://github.com/JianXu95/FedPAC), commit COMMIT, by the authors of FedPAC ("simplified"): its
`train_round_fedpac` and `LocalUpdate_FedPAC`. {CLIENTS} clients of {TRAIN} training and {TEST} test images of
Fashion-MNIST of two labels each; an MLP with {HIDDEN} hidden units, {EPOCHS} epochs of the body at eta {LR} and one of
the head at {HEAD_LR}, of full batches, with momentum {MOMENTUM} and weight decay {DECAY}, lambda {LAM:g}. Both start
from the same model.

Replaced in memory: `torch.eig`, which PyTorch no longer has, by `torch.linalg.eigh`; the data and the model.
Deviations: none. Theirs solves for the weights a_ij with `cvxpy`, to its tolerance, and ours exactly.

Distance: between the models with which a client predicts in the two codes, relative to their distance from the initial
ones; the largest of the clients. *Graph*: the largest difference of a weight a_ij of the round.
"""


def section(checkout: Path, commit: str) -> str:
    rows, model = [["seed", *runs.HEAD, "graph"]], network()
    for seed in SEEDS:
        data, start_P = images(seed), runs.first_weights(MODEL, 10, seed)
        a, b = theirs(checkout, data, start_P), ours(data, seed)
        for t in KEPT:
            accuracy = [f"{accuracy_of(model, run.course.weights[t], data):.4f}" for run in (a, b)]
            far, apart = distance(a.course, b.course, start_P, t), np.abs(a.graph[t] - b.graph[t]).max()
            rows.append([str(seed), str(t), f"{far:.1e}", *accuracy, f"{apart:.1e}"])
    return "\n".join([HEAD.replace("COMMIT", commit), *table(*rows)])
