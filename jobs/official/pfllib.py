"""Personalised methods beside PFLlib, TsingZ0/PFLlib, whose servers and clients FedCAC and FedAS are compared with."""

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
from jobs.official import runs
from jobs.official.pacfl import CLIENTS, TRAIN, two_labels
from jobs.official.page import table
from jobs.official.runs import Course, Data, accuracy_of, cluster_rows, distance, modules, quiet, replaced, stand_in

EPOCHS, LR, HIDDEN = 5, 0.03, 8
MODEL: dict[str, Any] = {"name": "mlp", "options": {"hidden": HIDDEN}}
LOCAL: dict[str, Any] = {"epochs": EPOCHS, "batch_size": None, "lr": LR}
KEPT = (1, 5)
SEEDS = range(1)


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
    base, servers, server, models = modules(
        checkout / "system",
        "flcore.clients.clientbase",
        "flcore.servers.serverbase",
        f"flcore.servers.server{file}",
        "flcore.trainmodel.models",
    )
    body = nn.Sequential(nn.Flatten(), nn.Linear(784, HIDDEN), nn.ReLU())
    model, course, loader = models.BaseHeadSplit(body, nn.Linear(HIDDEN, 10)), Course(), base.Client.load_train_data
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

    def read(_: str, i: int, **how: Any) -> TensorDataset:
        x, y = (data.x, data.y) if how["is_train"] else (data.x_test, data.y_test)
        return TensorDataset(x[i], y[i])

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
        replaced(servers, read_client_data=read),
        replaced(random, sample=lambda clients, count: clients[:count]),
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


def with_gradient(server: type[Any]) -> type[Any]:
    """The server of FedAMP whose clients train on loss + lambda / (2 alpha) ||w - u_i||^2."""

    def train(client: Any) -> None:
        for _ in range(client.local_epochs):
            for x, y in client.load_train_data():
                pairs = zip(client.model.parameters(), client.client_u.parameters(), strict=True)
                square = sum(((w - u.detach()) ** 2).sum() for w, u in pairs)
                client.optimizer.zero_grad()
                (client.loss(client.model(x), y) + client.lamda / (2 * client.alphaK) * square).backward()
                client.optimizer.step()

    class Server(server):  # type: ignore[misc, valid-type]
        def set_clients(self, kind: type[Any]) -> None:
            super().set_clients(type("Client", (kind,), {"train": train}))

    return Server


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
        "FedAMP", {"fedamp": {"lam": MU, "alpha": AMP["alphaK"], "sigma": 1.0}}, AMP, mended=with_gradient
    ),
    "APFL, mixture": Pair("APFL", {"apfl": {"alpha": ALPHA, "adaptive": True}}, {"alpha": ALPHA}, "model_per"),
}


def in_order(_: LocalSGD, size: int, count: int, draw: Any, parts: int = 1) -> Iterator[np.ndarray | None]:
    """Batches of our runs: all samples, or for steps of two batches the two halves, in the order of the samples."""
    halves = np.array_split(np.arange(size), parts)
    yield from (None if parts == 1 else halves[number % parts] for number in range(count))


def ours(data: Data, seed: int, pair: Pair) -> Course:
    local = LOCAL | {"epochs": pair.epochs}
    with replaced(LocalSGD, batches=in_order):
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
of which the gradient is taken, theirs is ours (alpha 0.02, sigma 1, lambda {MU}). Replaced in memory:
as for FedCAC.

Distance: of the global model w or of the models with which the clients predict, as for FedCAC.
"""


def section(checkout: Path, commit: str) -> str:
    rows = [["method", "seed", *[f"distance, round {t}" for t in KEPT]]]
    for seed in SEEDS:
        data, start_P = two_labels(seed), runs.first_weights(MODEL, 10, seed)
        cohorts = runs.cohorts(CLIENTS, seed, 1.0, KEPT[-1] + 1)
        for name, pair in RUNS.items():
            a = theirs(checkout, pair.theirs, data, start_P, cohorts, pair.settings, pair.attribute, pair.mended)
            b = ours(data, seed, pair)
            rows.append([name, str(seed), *[f"{distance(a, b, start_P, t):.1e}" for t in KEPT]])
    return "\n".join([HEAD.replace("COMMIT", commit), *table(*rows)])
