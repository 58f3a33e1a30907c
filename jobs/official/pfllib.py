"""Personalised methods beside PFLlib, TsingZ0/PFLlib, whose servers and clients FedCAC and FedAS are compared with."""

import copy
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from math import inf
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters
from torch.utils.data import TensorDataset

from cfl_ray.core.local_sgd import LocalSGD
from cfl_ray.methods import fedala
from jobs.official import runs
from jobs.official.pacfl import CLIENTS, TRAIN, two_labels
from jobs.official.page import table
from jobs.official.runs import Course, Data, accuracy_of, cluster_rows, distance, modules, quiet, replaced, stand_in

EPOCHS, LR, HIDDEN = 5, 0.03, 8
MODEL: dict[str, Any] = {"name": "mlp", "options": {"hidden": HIDDEN}}
LOCAL: dict[str, Any] = {"epochs": EPOCHS, "batch_size": None, "lr": LR}
KEPT = (1, 5)
SEEDS = range(1)


def network() -> nn.Sequential:
    """Body and head of the model."""
    body = nn.Sequential(nn.Flatten(), nn.Linear(784, HIDDEN), nn.ReLU())
    return nn.Sequential(body, nn.Linear(HIDDEN, 10))


def theirs(
    checkout: Path,
    name: str,
    data: Data,
    start_P: Tensor,
    cohorts: Sequence[np.ndarray],
    settings: dict[str, Any] | None = None,
    attribute: str = "model",
    mended: Callable[[type[Any]], type[Any]] = lambda server: server,
    look: Callable[[Any, int], None] | None = None,
    whole: bool = True,
) -> Course:
    """The course of their server `name`, with these cohorts, one more than rounds, and whole batches.

    attribute: of a client, the model that it predicts with. mended: the class of the server to use, from theirs. look:
    called with the server and the number of rounds. whole: False: loaders with a batch size that is not of the
    experiment, as FedAS has for its alignment, stay theirs.
    """
    stand_in("h5py")
    file = name.lower().removeprefix("fed").removesuffix("_fedavg")
    base, clients, servers, server, models = modules(
        checkout / "system",
        "flcore.clients.clientbase",
        f"flcore.clients.client{file}",
        "flcore.servers.serverbase",
        f"flcore.servers.server{file}",
        "flcore.trainmodel.models",
    )
    model, course, loader = models.BaseHeadSplit(*network()), Course(), base.Client.load_train_data
    vector_to_parameters(start_P.clone(), model.parameters())

    class Server(getattr(server, name)):  # type: ignore[misc]
        def select_clients(self) -> list[Any]:
            cohort = cohorts[len(self.rs_test_acc)]
            self.current_num_join_clients = len(cohort)
            return [self.clients[i] for i in cohort]

        def evaluate(self) -> None:
            rounds, found = len(self.rs_test_acc), [getattr(client, attribute) for client in self.clients]
            course.weights[rounds] = torch.stack([parameters_to_vector(each.parameters()).detach() for each in found])
            self.rs_test_acc.append(accuracy_of(model, course.weights[rounds], data))
            if look:
                look(self, rounds)

        evaluate_one_step = evaluate

        def nothing(self) -> None:
            pass

        evaluate_personalized = save_results = save_global_model = avg_generalization_metrics = nothing

    def load(client: Any, batch_size: int | None = None) -> Any:
        kept = whole or batch_size is None
        return [(data.x[client.id], data.y[client.id])] if kept else loader(client, batch_size)

    def read(_: str, i: int, **how: Any) -> list[tuple[Tensor, ...]]:
        x, y = (data.x, data.y) if how["is_train"] else (data.x_test, data.y_test)
        return list(TensorDataset(x[i], y[i]))

    args: dict[str, Any] = {
        "device": "cpu", "dataset": "", "num_classes": 10, "global_rounds": len(cohorts) - 1, "local_epochs": EPOCHS,
        "batch_size": data.y.shape[1], "local_learning_rate": LR, "model": model, "num_clients": data.clients,
        "join_ratio": 1.0, "random_join_ratio": False, "few_shot": 0, "algorithm": name, "time_select": False,
        "goal": "", "time_threthold": inf, "save_folder_name": "", "top_cnt": 0, "auto_break": False, "eval_gap": 1,
        "client_drop_rate": 0.0, "train_slow_rate": 0.0, "send_slow_rate": 0.0, "dlg_eval": False, "dlg_gap": 1,
        "batch_num_per_client": 0, "num_new_clients": 0, "fine_tuning_epoch_new": 0, "learning_rate_decay": False,
        "learning_rate_decay_gamma": 1.0, "plocal_epochs": EPOCHS,
    }  # fmt: skip
    with (
        replaced(base, read_client_data=read),
        replaced(clients, read_client_data=read),
        replaced(servers, read_client_data=read),
        replaced(random, sample=lambda clients, count: clients[:count], randint=lambda first, _: first),
        replaced(base.Client, load_train_data=load),
        quiet(),
    ):
        made = mended(Server)(SimpleNamespace(**args | (settings or {})), times=0)
        made.train()
    course.accuracy = made.rs_test_acc[1:]  # the first is before any round
    return course


def personal_rows(result: Any) -> Tensor:
    """The weights (clients, P) of the models that the clients predict with."""
    models = [result.trained.personal_model(client) for client in range(result.trained.federation.num_clients)]
    return torch.stack([result.trained.spec.row_of(model) for model in models])


@dataclass(frozen=True)
class Pair:
    """A method in the two codes."""

    theirs: str  # their server
    ours: dict[str, Any]
    settings: dict[str, Any] = field(default_factory=dict)  # of theirs
    attribute: str = "model"
    rows: Callable[[Any], Tensor] = personal_rows
    epochs: int = EPOCHS  # of ours
    mended: Callable[[type[Any]], type[Any]] = lambda server: server  # the class of the server, from theirs


MU, ALPHA = 0.1, 0.5
AMP = {"alphaK": 0.02, "sigma": 1.0, "lamda": MU}


def clients_with(**members: Any) -> Callable[[type[Any]], type[Any]]:
    """Returns a function: a server whose clients have these members, from theirs."""

    def mended(server: type[Any]) -> type[Any]:
        class Server(server):  # type: ignore[misc, valid-type]
            def set_clients(self, kind: type[Any]) -> None:
                super().set_clients(type("Client", (kind,), members))

        return Server

    return mended


def train_with_term(client: Any) -> None:
    """Training of FedAMP on loss + lambda / (2 alpha) ||w - u_i||^2."""
    for _ in range(client.local_epochs):
        for x, y in client.load_train_data():
            pairs = zip(client.model.parameters(), client.client_u.parameters(), strict=True)
            square = sum(((w - u.detach()) ** 2).sum() for w, u in pairs)
            client.optimizer.zero_grad()
            (client.loss(client.model(x), y) + client.lamda / (2 * client.alphaK) * square).backward()
            client.optimizer.step()


def with_both_heads(client: Any) -> nn.Module:
    """The model of a client of FedRoD whose head is the sum of its two heads."""
    model = copy.deepcopy(client.model)
    for generic, personal in zip(model.head.parameters(), client.head.parameters(), strict=True):
        generic.data += personal.data
    return model


def tuned(client: Any, body: nn.Module) -> nn.Module:
    """The model of a client of FedBABU after its fine-tuning, from this body."""
    twin = copy.copy(client)
    twin.model = copy.deepcopy(client.model)
    for new, old in zip(body.parameters(), twin.model.base.parameters(), strict=True):
        old.data = new.data.clone()
    twin.optimizer = torch.optim.SGD(twin.model.parameters(), lr=client.learning_rate)
    twin.train_time_cost = dict(client.train_time_cost)
    twin.fine_tune()
    return twin.model


def keep_last_body(client: Any, base: nn.Module) -> None:
    """Sets the received body of a client of FedBABU, and keeps its last local one as `last`."""
    client.last = copy.deepcopy(client.model.base)
    for new, old in zip(
        base.parameters(), client.model.base.parameters(), strict=False
    ):  # at first it is the whole model
        old.data = new.data.clone()


BABU = {
    "set_parameters": keep_last_body,
    "tuned": property(lambda client: tuned(client, client.model.base)),
    "tuned_last": property(lambda client: tuned(client, client.last)),
}
TUNING, TUNED = {"fine_tuning_epochs": EPOCHS}, {"fedbabu": {"tune_epochs": EPOCHS, "tune_lr": None}}
RUNS = {
    "FedProx, w": Pair("FedProx", {"fedprox": {"mu": MU}}, {"mu": MU}, rows=cluster_rows),
    "Ditto, w": Pair("Ditto", {"ditto": {"lam": MU}}, {"mu": MU}, rows=cluster_rows),
    "Ditto, v_i": Pair("Ditto", {"ditto": {"lam": MU}}, {"mu": MU}, "model_per"),
    "Per-FedAvg, w": Pair(
        "PerAvg",
        {"per_fedavg": {"alpha": LR}},
        {"batch_size": TRAIN // 2},
        rows=cluster_rows,
        epochs=2 * EPOCHS,
    ),
    "LG-FedAvg": Pair("LG_FedAvg", {"lg_fedavg": {"private_layers": 1}}),
    "FedPer": Pair("FedPer", {"fedper": {}}),
    "FedRep": Pair("FedRep", {"fedrep": {"head_epochs": EPOCHS}}),
    "APFL, w": Pair("APFL", {"apfl": {"alpha": ALPHA}}, {"alpha": ALPHA}, rows=cluster_rows),
    "FedAMP as it is, beside ours with lambda 0": Pair("FedAMP", {"fedamp": {"lam": 0.0}}, AMP),
    "FedAMP with a term that has a gradient": Pair(
        "FedAMP",
        {"fedamp": {"lam": MU, "alpha": AMP["alphaK"], "sigma": 1.0}},
        AMP,
        mended=clients_with(train=train_with_term),
    ),
    "APFL, mixture": Pair("APFL", {"apfl": {"alpha": ALPHA, "adaptive": True}}, {"alpha": ALPHA}, "model_per"),
    "SCAFFOLD, x": Pair("SCAFFOLD", {"scaffold": {}}, {"server_learning_rate": 1.0}, rows=cluster_rows),
    "MOON, w": Pair("MOON", {"moon": {"mu": 1.0, "first": "initial"}}, {"mu": 1.0, "tau": 0.5}, rows=cluster_rows),
    "FedALA": Pair("FedALA", {"fedala": {}}, {"eta": 1.0, "rand_percent": 80, "layer_idx": 2}),
    "FedRoD": Pair(
        "FedROD", {"fedrod": {"start": "copy"}}, {}, "summed", mended=clients_with(summed=property(with_both_heads))
    ),
    "FedProto, one epoch": Pair(
        "FedProto",
        {"fedproto": {"prototypes": "running", "weights": "uniform", "predict": "classifier"}},
        {"lamda": 1.0, "local_epochs": 1},
        epochs=1,
    ),
    "FedBABU, w": Pair("FedBABU", {"fedbabu": {"tune_epochs": 0}}, TUNING, rows=cluster_rows),
    "FedBABU, tuned": Pair("FedBABU", TUNED, TUNING, "tuned", mended=clients_with(**BABU)),
    "FedBABU as it is, tuned": Pair("FedBABU", TUNED, TUNING, "tuned_last", mended=clients_with(**BABU)),
}


def in_order(_: LocalSGD, size: int, count: int, draw: Any, parts: int = 1) -> Iterator[np.ndarray | None]:
    """Batches of our runs: all samples, or for steps of two batches the two halves, in the order of the samples."""
    halves = np.array_split(np.arange(size), parts)
    yield from (None if parts == 1 else halves[number % parts] for number in range(count))


def ours(data: Data, seed: int, pair: Pair) -> Course:
    local = LOCAL | {"epochs": pair.epochs}
    first_part = SimpleNamespace(random=lambda: 0.0)  # of the samples, in FedALA
    with replaced(LocalSGD, batches=in_order), replaced(fedala, stream=lambda *_: first_part):
        return runs.ours(data, seed, KEPT, pair.ours, MODEL, local, rows=pair.rows)


HEAD = f"""## PFLlib

Other methods of [TsingZ0/PFLlib](https://github.com/TsingZ0/PFLlib), commit COMMIT, which is second-hand for all of
them, with the data and the model of FedCAC and FedAS: {CLIENTS} clients, {EPOCHS} epochs of full batches at eta {LR}.
mu of FedProx and lambda of Ditto are {MU} (theirs: 0 by default, which is FedAvg and local training). The head is the
last layer, which FedRep trains for {EPOCHS} epochs.

Deviations of theirs from the papers. Per-FedAvg: a client trains twice in a round, so ours takes 2 x {EPOCHS} steps; a
batch is two halves, in the order of the samples in both codes. APFL: v_i takes steps on its own loss, not on that of
the mixture, and becomes the mixture with w_i at the end of a round; alpha_i, from {ALPHA}, is adapted in every step;
ours is `adaptive: true`. FedAMP: the term of the clients is computed from detached values, so
that it has no gradient; their FedAMP is local training, and ours with lambda 0. With the squared distance in its place,
of which the gradient is taken, theirs is ours (alpha 0.02, sigma 1, lambda {MU}). FedBABU: after the last round clients
tune the bodies that they trained last, since the average is not sent (*as it is*); else the average, as ours do for
{EPOCHS} epochs. MOON: the previous model is w_0 at first (ours: `first: initial`), mu is 1. FedRoD: p_i is a copy of g
at first (`start: copy`). FedProto: features are collected in all epochs, which is ours with `prototypes: running` in a
round of one epoch, and prototypes are averaged with `weights: uniform`. FedALA: of the last layer, on the first 80 % of
the samples. SCAFFOLD: none. FedRoD and SCAFFOLD have no code by their authors. Replaced in memory: as for FedCAC.

Distance: of the global model w or of the models with which the clients predict, as for FedCAC; of FedProto with their
own last layer. Accuracy: of these models, after round {KEPT[-1]}.
"""


def section(checkout: Path, commit: str) -> str:
    accuracy = [f"accuracy, {code}" for code in ("theirs", "ours")]
    rows, model = [["method", "seed", *[f"distance, round {t}" for t in KEPT], *accuracy]], network()
    for seed in SEEDS:
        data, start_P = two_labels(seed), runs.first_weights(MODEL, 10, seed)
        cohorts = runs.cohorts(CLIENTS, seed, 1.0, KEPT[-1] + 1)
        for name, pair in RUNS.items():
            a = theirs(checkout, pair.theirs, data, start_P, cohorts, pair.settings, pair.attribute, pair.mended)
            b = ours(data, seed, pair)
            apart = [f"{distance(a, b, start_P, t):.1e}" for t in KEPT]
            rows.append(
                [name, str(seed), *apart, *[f"{accuracy_of(model, run.weights[KEPT[-1]], data):.4f}" for run in (a, b)]]
            )
    return "\n".join([HEAD.replace("COMMIT", commit), *table(*rows)])
