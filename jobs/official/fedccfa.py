"""FedCCFA, and the FedDrift of its repository, beside the code of the authors of FedCCFA."""

import itertools
from contextlib import chdir
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from jobs.official import runs
from jobs.official.page import table
from jobs.official.runs import Course, Data, compared, modules, quiet, replaced, script, stand_in

CLIENTS, TRAIN, TEST, HIDDEN = 10, 200, 50, 32
MOMENTUM, DECAY = 0.9, 1e-5
MODEL: dict[str, Any] = {"name": "mlp", "options": {"hidden": HIDDEN}}
LOCAL: dict[str, Any] = {"epochs": 5, "batch_size": None, "lr": 0.01, "momentum": MOMENTUM, "weight_decay": DECAY}
DRIFT = 100  # rounds before the drift of their script
KEPT = (20, 104)
SEEDS = range(1)
# their `sudden_drift`: clients by id modulo 10, and the labels that they swap
SWAPS = {(1, 2): range(3), (3, 4): range(3, 6), (5, 6): range(6, 10)}
SCHEDULE = [
    {
        "round": DRIFT + 1,
        "change": [
            {"clients": [i for i in range(CLIENTS) if i % 10 in ids], "swap": list(labels)}
            for labels, ids in SWAPS.items()
        ],
    }
]


@dataclass(frozen=True)
class How:
    """A comparison."""

    eps: float = 0.1
    own_start: bool = True  # theirs: in the first round h_i starts from h^0, as ours does, and not from v_i
    sums: bool = False  # theirs: the first client's prototypes become the sum of all


RUNS = {
    "eps 0.4": How(0.4),
    "eps 0.4, h_i from v_i": How(0.4, own_start=False),
    "eps 0.4, h_i from v_i, prototypes as they are": How(0.4, own_start=False, sums=True),
}


def images(seed: int) -> Data:
    """Random images of Fashion-MNIST for each client, of all labels."""
    x, y = runs.images("fashion_mnist", seed)
    size = TRAIN + TEST
    x, y = x[: CLIENTS * size].reshape(CLIENTS, size, *runs.SHAPE), y[: CLIENTS * size].reshape(CLIENTS, size)
    return Data(x[:, :TRAIN], y[:, :TRAIN], x[:, TRAIN:], y[:, TRAIN:])


class Samples:
    """A client's data as their `ClientDataset` has them, whose labels their drift changes in place."""

    transform = None

    def __init__(self, x: Tensor, y: Tensor):
        self.data, self.targets = x, y.numpy().copy()

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.data[index], self.targets[index]


class Model(torch.nn.Module):
    """Our MLP in the form of their models."""

    def __init__(self, start_P: Tensor):
        super().__init__()
        self.hidden_layers = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(784, HIDDEN), torch.nn.ReLU())
        self.fc = torch.nn.Linear(HIDDEN, 10)
        vector_to_parameters(start_P.clone(), self.parameters())

    def forward(self, x: Tensor, return_features: bool = False) -> Any:
        feature = self.hidden_layers(x)
        return (self.fc(feature), feature) if return_features else self.fc(feature)


def their_script(
    checkout: Path,
    name: str,
    data: Data,
    start_P: Tensor,
    seed: int,
    args: dict[str, Any],
    client: type[Any] | None = None,
) -> Course:
    """The course of their `methods/NAME.py` with these settings, from models with these weights.

    client: in the place of their client. The models that their script adds during the run are models 1, 2 .. of ours.
    """
    stand_in("torch.utils.tensorboard", SummaryWriter=lambda *_: SimpleNamespace(add_scalars=lambda *_: None))
    names = ("yaml", "entities.base", "utils.gen_dataset", "utils.models", "utils.drift", f"entities.{name}")
    yaml, base, generator, models, drifts, entities = modules(checkout, *names)
    course, added, sudden_drift = Course(), itertools.count(1), drifts.sudden_drift
    args = args | {
        "algorithm": name, "client_num": CLIENTS, "sample_ratio": 1.0, "seed": seed, "device": "cpu", "dataset": "",
        "partition": "", "alpha": 0.0, "drift_pattern": "sudden", "model": "", "rounds": KEPT[-1],
        "momentum": MOMENTUM, "weight_decay": DECAY, "batch_size": TRAIN, "num_classes": 10,
    }  # fmt: skip

    class Server(getattr(entities, f"{name}Server")):  # type: ignore[misc]
        clients: ClassVar[list[Any]] = []  # of a round that has not been evaluated

        def select_clients(self, clients: list[Any]) -> list[Any]:
            evaluate()
            Server.clients, Server.models = clients, getattr(self, "global_models", [0])
            return clients

        def last_round_evaluate(self, *_: Any) -> None:
            evaluate()

    def evaluate() -> None:
        if Server.clients:
            course.accuracy.append(float(np.mean([client.local_test() for client in Server.clients])))
            rows = [parameters_to_vector(client.model.parameters()).detach() for client in Server.clients]
            course.weights[len(course.accuracy)] = torch.stack(rows)
            course.clusters.append(len(Server.models))
        Server.clients = []

    def drift(*given: Any) -> None:
        evaluate()
        sudden_drift(*given)

    def first(*_: Any) -> Model:
        return Model(start_P)

    def new(*_: Any) -> Model:
        return Model(runs.first_weights(MODEL, 10, seed, next(added)))

    train = [Samples(x, y) for x, y in zip(data.x, data.y, strict=True)]
    test = [Samples(x, y) for x, y in zip(data.x_test, data.y_test, strict=True)]
    of_all = {i: Samples(data.x_test[0], data.y_test[0]) for i in range(4)}  # their test of all concepts, not used here
    own = {f"{name}Server": Server, "get_model": first} | ({f"{name}Client": client} if client else {})
    with (
        replaced(generator, distribute_dataset=lambda *_: (train, test, of_all)),
        replaced(base, get_model=first),
        replaced(models, get_model=new),
        replaced(drifts, sudden_drift=drift),
        replaced(entities, **own),
        replaced(yaml, load=lambda *_, **__: args),
        chdir(checkout / "methods"),
        quiet(),
    ):
        script(checkout / "methods" / f"{name}.py")
    return course


def theirs(checkout: Path, data: Data, start_P: Tensor, seed: int, how: How) -> Course:
    """FedCCFA by the authors' script, `FedCCFAClient` and `FedCCFAServer`."""
    (entities,) = modules(checkout, "entities.FedCCFA")

    class Client(entities.FedCCFAClient):  # type: ignore[name-defined, misc]
        def class_balance_sample(self) -> Any:
            labels = np.asarray(self.train_set.targets)
            each = min(np.bincount(labels).min(), 5)
            indices = np.concatenate([np.flatnonzero(labels == label)[:each] for label in range(10)])
            return entities.ClientDataset(self.train_set, indices, None)

        def train_with_protos(self, round: int) -> None:
            if how.own_start and not self.p_clf_params:
                self.p_clf_params = list(Model(start_P).fc.parameters())
            super().train_with_protos(round)
            if not how.sums:  # what the server adds up in place is a copy
                self.global_protos = list(self.global_protos)
                self.kept = {label: value.clone() for label, value in self.local_protos.items()}

        def set_rep_params(self, new_params: Any) -> None:
            super().set_rep_params(new_params)
            if not how.sums:
                self.local_protos = self.kept

    args = {
        "rep_epochs": 5, "clf_epochs": 1, "balanced_epochs": 5, "rep_lr": 0.01, "clf_lr": 0.1, "p_lr": 0.01,
        "balanced_clf_lr": 0.1, "lambda": 0.0, "gamma": 20.0, "penalize": "CL", "temperature": 0.1, "eps": how.eps,
        "oracle": False, "weights": "uniform", "clustered_protos": True,
    }  # fmt: skip
    return their_script(checkout, "FedCCFA", data, start_P, seed, args, Client)


def personal_models(result: Any) -> Tensor:
    """The models (clients, P) with which the clients predict."""
    models_KP, row_M = result.trained.state.models_of(np.arange(CLIENTS), runs.network_of(MODEL, 10).spec)
    return models_KP[row_M]


def ours(data: Data, seed: int, how: How) -> Course:
    method = {"fedccfa": {"eps": how.eps}}
    return runs.ours(data, seed, KEPT, method, MODEL, LOCAL, rows=personal_models, schedule=SCHEDULE)


HEAD = f"""## FedCCFA

[Chen-Junbao/FedCCFA](https://github.com/Chen-Junbao/FedCCFA), commit COMMIT, by the authors of FedCCFA: its script
`methods/FedCCFA.py` with `FedCCFAClient` and `FedCCFAServer`. {CLIENTS} clients of {TRAIN} training and {TEST} test
images of Fashion-MNIST, an MLP with {HIDDEN} hidden units, full batches, all clients; else their settings. Before round
{DRIFT + 1} all clients swap two labels, in three groups, as their `sudden_drift` does.

Replaced in memory: the data, the model, TensorBoard, and the balanced samples, which are the first of each label here
and random ones there. Their deviations, in the list of our method: in a client's first round h_i starts from v_i
(*h_i from v_i*), here else from the first classifier as ours; and the prototypes of the first client become the sum of
all (*prototypes as they are*), here else they stay.

Distance: between the weights of the model with which a client predicts in the two codes, relative to their distance
from the initial models; the largest of the clients.
"""

DRIFT_HEAD = """### FedDrift in FedCCFA's repository

Its script `methods/FedDrift.py`, with the same data and drift, 5 epochs of full batches at eta 0.01, threshold 0.5 of
the loss. It differs from FedDrift's paper: a client compares the present round with the one before, with the best model
for each; a new model is random; nothing is replayed. Ours is `criterion: loss`, `delta: 0.5`, with a time step of ten
rounds or when data change. Until the drift both are FedAvg. *Models*: their number.
"""


def section(checkout: Path, commit: str) -> str:
    head = ["run", "seed", *runs.HEAD]
    rows, drift_rows = [head], [[*head[1:], "models, theirs", "models, ours"]]
    for seed in SEEDS:
        data, start_P = images(seed), runs.first_weights(MODEL, 10, seed)
        found = {eps: ours(data, seed, How(eps)) for eps in {how.eps for how in RUNS.values()}}
        for name, how in RUNS.items():
            a, b = theirs(checkout, data, start_P, seed, how), found[how.eps]
            rows += [[name, str(seed), *compared(a, b, start_P, t)] for t in KEPT]
        args = {"epochs": 5, "lr": 0.01, "detection_threshold": 0.5}
        a = their_script(checkout, "FedDrift", data, start_P, seed, args)
        method = {"feddrift": {"criterion": "loss", "delta": 0.5, "step_rounds": 10}}
        b = runs.ours(data, seed, KEPT, method, MODEL, LOCAL, schedule=SCHEDULE)
        for t in KEPT:
            line = compared(a, b, start_P, t)
            if t > DRIFT:
                line[1] = "-"
            drift_rows.append([str(seed), *line, str(a.clusters[t - 1]), str(b.clusters[t - 1])])
    return "\n".join([HEAD.replace("COMMIT", commit), *table(*rows), DRIFT_HEAD, *table(*drift_rows)])
