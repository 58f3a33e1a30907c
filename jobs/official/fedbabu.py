"""FedBABU beside the code of its authors, jhoon-oh/FedBABU."""

import copy
from collections.abc import Sequence
from contextlib import chdir
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters
from torch.utils.data import TensorDataset

from jobs.official import runs
from jobs.official.pacfl import CLIENTS, TEST, TRAIN, two_labels
from jobs.official.page import table
from jobs.official.pfllib import EPOCHS, HIDDEN, MODEL, network, personal_rows
from jobs.official.runs import Course, Data, accuracy_of, cluster_rows, distance, modules, quiet, replaced, script

LR, MOMENTUM, DECAY, TUNE_EPOCHS, TUNE_LR = 0.03, 0.9, 5e-3, 5, 0.01
ROUNDS = 8
KEPT = (1, 5, 8)
SEEDS = range(2)
RUNS = {"all clients": 1.0, "half": 0.5}  # fraction of the clients, in a round


@dataclass
class Models:
    """A run."""

    w: Course = field(default_factory=Course)  # phi with h^0
    tuned: Course = field(default_factory=Course)


class Net(nn.Module):
    """The model, with the name of the head that theirs looks for."""

    def __init__(self, row_P: Tensor) -> None:
        super().__init__()
        self.body, self.linear = network()
        vector_to_parameters(row_P.clone(), self.parameters())

    def forward(self, x: Tensor) -> Any:
        return self.linear(self.body(x))


def samples(x: Tensor, y: Tensor) -> tuple[TensorDataset, dict[int, np.ndarray]]:
    """The samples of all clients in one data set, and the places of those of each client."""
    return TensorDataset(x.flatten(0, 1), y.flatten()), dict(enumerate(np.arange(y.numel()).reshape(y.shape)))


def theirs(checkout: Path, data: Data, start_P: Tensor, cohorts: Sequence[np.ndarray]) -> Models:
    """The run of their main_fed.py, with these cohorts; every client's model is tuned after the rounds KEPT."""
    run, turn = Models(), iter(cohorts)
    trains, updates, tests = modules(checkout, "utils.train_utils", "models.Update", "models.test")
    (train, own), (tested, own_test) = samples(data.x, data.y), samples(data.x_test, data.y_test)

    def test(nets: list[Any], args: Any, *_: Any, **__: Any) -> tuple[float, float]:
        run.w.accuracy.append(0.0)
        rounds = len(run.w.accuracy)
        if rounds in KEPT:
            run.w.weights[rounds] = torch.stack([parameters_to_vector(net.parameters()).detach() for net in nets])
            tuned = [copy.deepcopy(net) for net in nets]
            for client, net in enumerate(tuned):
                local = updates.LocalUpdate(args, train, own[client])
                local.train(net, body_lr=TUNE_LR, head_lr=TUNE_LR, local_eps=TUNE_EPOCHS)
            rows = [parameters_to_vector(net.parameters()).detach() for net in tuned]
            run.tuned.weights[rounds] = torch.stack(rows)
        return 0.0, 0.0

    options = {
        "epochs": ROUNDS, "num_users": CLIENTS, "frac": len(cohorts[0]) / CLIENTS, "local_ep": EPOCHS,
        "local_bs": TRAIN, "lr": LR, "momentum": MOMENTUM, "wd": DECAY, "gpu": -1, "local_upt_part": "body",
        "aggr_part": "body",
    }  # fmt: skip
    with (
        TemporaryDirectory() as folder,
        chdir(folder),
        replaced(trains, get_data=lambda _: (train, tested, own, own_test), get_model=lambda _: Net(start_P)),
        replaced(tests, test_img_local_all=test),
        replaced(np.random, choice=lambda *_, **__: next(turn)),
        quiet(),
    ):
        script(checkout / "main_fed.py", *(f"--{name}={value}" for name, value in options.items()))
    return run


def decayed(t: int, total: int) -> float:
    """The factor of their learning rate in round t."""
    return float(0.1 ** ((t > ROUNDS // 2) + (t > ROUNDS * 3 // 4)))


def ours(data: Data, seed: int, fraction: float) -> Models:
    run = Models()

    def look(result: Any, rounds: int) -> None:
        run.w.weights[rounds] = cluster_rows(result)

    method = {"fedbabu": {"tune_epochs": TUNE_EPOCHS, "tune_lr": TUNE_LR}}
    local = {
        "epochs": EPOCHS, "batch_size": None, "lr": LR, "momentum": MOMENTUM, "weight_decay": DECAY,
        "schedule": decayed,
    }  # fmt: skip
    run.tuned = runs.ours(data, seed, KEPT, method, MODEL, local, look=look, fraction=fraction, rows=personal_rows)
    return run


HEAD = f"""## FedBABU

[jhoon-oh/FedBABU](https://github.com/jhoon-oh/FedBABU), commit COMMIT, by the authors of FedBABU: its `main_fed.py` as
a whole. {CLIENTS} clients of {TRAIN} training and {TEST} test images of Fashion-MNIST of two labels each; an MLP with
{HIDDEN} hidden units, {EPOCHS} epochs of full batches at eta {LR}, which is divided by 10 after a half and after three
quarters of {ROUNDS} rounds, momentum {MOMENTUM}, weight decay {DECAY}. Both start from the same model.

Replaced in memory: the data, the model, the choice of clients, so that both have the same cohorts, and the test.
Clients are tuned for {TUNE_EPOCHS} epochs at {TUNE_LR} with its `LocalUpdate`, as in its `analysis.ipynb`. Deviations:
none; the mean is uniform in both.

Distance: *phi*, of the global model, and *tuned*, of the models with which the clients predict: between the weights in
the two codes, relative to their distance from the initial models; the largest of the clients. Accuracy: tuned.
"""


def section(checkout: Path, commit: str) -> str:
    rows, model = [["run", "seed", "round", "phi", "tuned", "accuracy, theirs", "accuracy, ours"]], network()
    for seed in SEEDS:
        data, start_P = two_labels(seed), runs.first_weights(MODEL, 10, seed)
        for name, fraction in RUNS.items():
            a = theirs(checkout, data, start_P, runs.cohorts(CLIENTS, seed, fraction, ROUNDS))
            b = ours(data, seed, fraction)
            for t in KEPT:
                apart = [f"{distance(*pair, start_P, t):.1e}" for pair in ((a.w, b.w), (a.tuned, b.tuned))]
                accuracy = [f"{accuracy_of(model, run.tuned.weights[t], data):.4f}" for run in (a, b)]
                rows.append([name, str(seed), str(t), *apart, *accuracy])
    return "\n".join([HEAD.replace("COMMIT", commit), *table(*rows)])
