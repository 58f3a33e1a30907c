"""PFLlib's servers and clients beside our runs with `protocol: pfllib`: their division, their scores."""

import copy
import random
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from math import inf
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from jobs.coming_from.measured import HIDDEN, MODEL, Client, ours, side_by_side
from jobs.official.page import table
from jobs.official.runs import first_weights, modules, quiet, replaced, stand_in

CLIENTS, SHARE, ROUNDS, SEEDS = 20, 0.04, 10, range(3)
LR = 0.005
Server = Any  # of theirs


def shipped(checkout: Path) -> list[Client]:
    """The clients of the division of MNIST that the repository has, each with `SHARE` of its samples."""
    parts = []
    for client in range(CLIENTS):
        files = (checkout / f"dataset/MNIST/{part}/{client}.npz" for part in ("train", "test"))
        train, test = (np.load(file, allow_pickle=True)["data"].item() for file in files)
        parts.append(Client(train["x"], train["y"], test["x"], test["y"]).part(SHARE))
    return parts


def theirs(
    checkout: Path,
    name: str,
    clients: Sequence[Client],
    first_P: Tensor,
    seed: int,
    settings: dict[str, Any],
    mended: Callable[[type[Server]], type[Server]] = lambda server: server,
) -> Server:
    """Their server `name` after all rounds; settings: arguments of main.py that are not the defaults."""
    stand_in("h5py")
    sys.path.append(str(checkout / "deps"))
    file = name.removeprefix("Fed").lower() if name.startswith("Fed") else name.lower()
    file = {"pfedme": "pFedMe"}.get(file, file)
    base, servers, server, models, ala = modules(
        checkout / "system",
        "flcore.clients.clientbase",
        "flcore.servers.serverbase",
        f"flcore.servers.server{file}",
        "flcore.trainmodel.models",
        "flcore.clients.clientala",
    )
    body = nn.Sequential(nn.Flatten(), nn.Linear(784, HIDDEN), nn.ReLU())
    model = models.BaseHeadSplit(body, nn.Linear(HIDDEN, 10))
    vector_to_parameters(first_P.clone(), model.parameters())

    @cache
    def read(_: str, i: int, is_train: bool = True, few_shot: int = 0) -> list[tuple[Tensor, Tensor]]:
        of = clients[i]
        x, y = (of.x, of.y) if is_train else (of.x_test, of.y_test)
        return list(zip(torch.tensor(x, dtype=torch.float32), torch.tensor(y), strict=True))

    def nothing(*_: Any) -> tuple[list[int], list[int], list[float]]:
        return [0], [1], [0.0]  # the losses of training samples, which are only printed

    args = {
        "device": "cpu", "dataset": "", "num_classes": 10, "global_rounds": ROUNDS, "local_epochs": 1, "batch_size": 10,
        "local_learning_rate": LR, "model": model, "num_clients": len(clients), "join_ratio": 1.0,
        "random_join_ratio": False, "few_shot": 0, "algorithm": name, "time_select": False, "goal": "",
        "time_threthold": inf, "save_folder_name": "", "top_cnt": 100, "auto_break": False, "eval_gap": 1,
        "client_drop_rate": 0.0, "train_slow_rate": 0.0, "send_slow_rate": 0.0, "dlg_eval": False, "dlg_gap": 100,
        "batch_num_per_client": 2, "num_new_clients": 0, "fine_tuning_epoch_new": 0, "learning_rate_decay": False,
        "learning_rate_decay_gamma": 0.99, "plocal_epochs": 1, "beta": 0.0, "lamda": 1.0, "mu": 0.0, "K": 5,
        "p_learning_rate": 0.01, "alphaK": 1.0, "sigma": 1.0, "alpha": 1.0, "tau": 1.0, "fine_tuning_epochs": 10,
        "server_learning_rate": 1.0, "eta": 1.0, "rand_percent": 80, "layer_idx": 2,
    }  # fmt: skip
    random.seed(seed)
    np.random.seed(seed)
    own = mended(getattr(server, name))
    kind = type(name, (own,), {"save_results": nothing, "save_global_model": nothing, "train_metrics": nothing,
                               "train_metrics_personalized": lambda _: ([0], [1], [0.0], [0.0])})  # fmt: skip
    if name == "Ditto":
        kind.train_metrics_personalized = nothing
    no_auc = SimpleNamespace(roc_auc_score=lambda *_, **__: 0.0)  # which is only printed
    with (
        replaced(base, read_client_data=read, metrics=no_auc, label_binarize=lambda y, **_: y),
        replaced(servers, read_client_data=read),
        replaced(ala, read_client_data=read),
        quiet(),
    ):
        made = kind(SimpleNamespace(**args | settings), times=0)
        torch.manual_seed(seed)  # after the clients, each of which sets it to 0
        made.train()
    return made


def scores_of(made: Server) -> np.ndarray:
    """The accuracies (rounds + 1,) of their list, from before round 1."""
    return np.array(getattr(made, "rs_test_acc_per", None) or made.rs_test_acc)


@dataclass(frozen=True)
class Row:
    """A method in both codes."""

    label: str
    theirs: str  # their server
    settings: dict[str, Any]
    ours: Any
    mended: Callable[[type[Server]], type[Server]] = lambda server: server
    scores: Callable[[Server], np.ndarray] = scores_of
    metric: str = "best"  # of ours
    rounds: int = ROUNDS  # of ours
    sections: dict[str, Any] = field(default_factory=dict)  # of ours


def with_gradient(server: type[Server]) -> type[Server]:
    """FedAMP's server whose clients are attracted by u_i, lambda / (2 alpha) ||w - u_i||^2."""

    def train(client: Any) -> None:
        client.model.train()
        pull = client.lamda / client.alphaK
        for _ in range(client.local_epochs):
            for x, y in client.load_train_data():
                client.optimizer.zero_grad()
                client.loss(client.model(x), y).backward()
                for w, u in zip(client.model.parameters(), client.client_u.parameters(), strict=True):
                    w.grad += pull * (w.detach() - u.detach())
                client.optimizer.step()

    return of_clients(server, train=train)


def at_most_one(server: type[Server]) -> type[Server]:
    """The same, and weights xi_ij that add up to more than 1 are divided by their sum."""

    class Scaled(with_gradient(server)):  # type: ignore[misc]
        def set_clients(self, kind: type[Any]) -> None:
            def set_parameters(client: Any, others: nn.Module, own: Tensor) -> None:
                with torch.no_grad():
                    for part in others.parameters():
                        part /= (1 - own).clamp(min=1)
                kind.set_parameters(client, others, own.clamp(min=0))

            super().set_clients(type("Client", (kind,), {"set_parameters": set_parameters}))

    return Scaled


def copied_heads(server: type[Server]) -> type[Server]:
    """FedPAC's server that mixes the heads that it received, and no mixed ones."""

    class Mended(server):  # type: ignore[misc, valid-type]
        def receive_models(self) -> None:
            super().receive_models()
            self.uploaded_heads = copy.deepcopy(self.uploaded_heads)

    return Mended


def in_order(server: type[Server]) -> type[Server]:
    """The same, and the heads are in the order of the statistics of which the weights are computed."""

    class InOrder(copied_heads(server)):  # type: ignore[misc]
        def receive_models(self) -> None:
            with replaced(random, sample=lambda clients, count: clients[:count]):
                super().receive_models()

    return InOrder


def theta_of_the_paper(server: type[Server]) -> type[Server]:
    """The server of pFedMe whose clients begin a batch with theta_i = w_i; as it is, theta_i goes on from the last."""

    def train(client: Any) -> None:
        client.model.train()
        for _ in range(client.local_epochs):
            for x, y in client.load_train_data():
                client.update_parameters(client.model, client.local_params)
                for _ in range(client.K):
                    client.optimizer.zero_grad()
                    client.loss(client.model(x), y).backward()
                    client.optimizer.step(client.local_params, "cpu")
                client.personalized_params = [theta.detach().clone() for theta in client.model.parameters()]
                for w, theta in zip(client.local_params, client.personalized_params, strict=True):
                    w.data -= client.lamda * client.learning_rate * (w.data - theta)
        client.update_parameters(client.model, client.local_params)

    return of_clients(server, train=train)


def of_clients(server: type[Server], **functions: Callable[..., None]) -> type[Server]:
    """The server whose clients have these functions in the place of theirs."""

    class Mended(server):  # type: ignore[misc, valid-type]
        def set_clients(self, kind: type[Any]) -> None:
            super().set_clients(type("Client", (kind,), functions))

    return Mended


def copied_theta(server: type[Server]) -> type[Server]:
    """The server of pFedMe whose clients keep theta_i; as it is, it is the tensors of the model, which then gets w."""

    class Mended(server):  # type: ignore[misc, valid-type]
        def set_clients(self, kind: type[Any]) -> None:
            super().set_clients(kind)
            for client in self.clients:
                client.optimizer.step = partial(copied, client.optimizer.step)

    def copied(step: Callable[..., list[Tensor]], *arguments: Any) -> list[Tensor]:
        return [theta.detach().clone() for theta in step(*arguments)]

    return Mended


def sent_before_tuning(server: type[Server]) -> type[Server]:
    """FedBABU's server whose clients fine-tune the last average."""

    class Mended(server):  # type: ignore[misc, valid-type]
        def set_clients(self, kind: type[Any]) -> None:
            outer = self

            def fine_tune(client: Any) -> None:
                client.set_parameters(outer.global_model)
                kind.fine_tune(client)

            super().set_clients(type("Client", (kind,), {"fine_tune": fine_tune}))

    return Mended


def personal(made: Server) -> np.ndarray:
    """Ditto's list has the score of the global and of the personal model in turn."""
    return np.array(made.rs_test_acc[1::2])


def both(made: Server) -> np.ndarray:
    """The better of Ditto's two scores, of whose list the maximum is printed."""
    return np.array(made.rs_test_acc).reshape(-1, 2).max(1)


def tuned(made: Server) -> np.ndarray:
    """The score after fine-tuning, the last of the list."""
    return np.array(made.rs_test_acc[-1:])


PAC = {"lam": 1.0, "head_lr": LR}
PFEDME = {"lam": 1.0, "inner_steps": 5, "personal_lr": 0.01, "eta": LR, "mu": 0.0, "weights": "samples"}
BABU = {"fedbabu": {"weights": "samples"}}
TUNED = {"evaluation": {"tuned_epochs": 10, "reported": {"fedbabu": "tuned"}}}
ROWS = (
    Row("FedAvg", "FedAvg", {}, "fedavg"),
    Row("Local", "Local", {}, "local"),
    Row("FedPer", "FedPer", {}, "fedper"),
    Row("FedRep", "FedRep", {}, {"fedrep": {"head_epochs": 1}}),
    Row("Ditto, `-mu 0.1`, personal model", "Ditto", {"mu": 0.1}, {"ditto": {"lam": 0.1}}, scores=personal),
    Row("Ditto, `-mu 0.1`, as printed", "Ditto", {"mu": 0.1}, {"ditto": {"lam": 0.1}}, scores=both),
    Row("APFL, `-al 0.5`", "APFL", {"alpha": 0.5}, {"apfl": {"alpha": 0.5, "adaptive": True}}),
    Row("pFedMe, `-bt 1`", "pFedMe", {"beta": 1.0}, {"pfedme": PFEDME}),
    Row("pFedMe, theta kept in theirs", "pFedMe", {"beta": 1.0}, {"pfedme": PFEDME}, copied_theta),
    Row("pFedMe, and from w at each batch", "pFedMe", {"beta": 1.0}, {"pfedme": PFEDME}, theta_of_the_paper),
    Row("FedProto", "FedProto", {}, {"fedproto": {"weights": "uniform", "prototypes": "running"}}),
    Row("FedALA", "FedALA", {}, "fedala"),
    Row("SCAFFOLD", "SCAFFOLD", {}, "scaffold"),
    Row("MOON, `-mu 1`", "MOON", {"mu": 1.0}, {"moon": {"mu": 1.0, "tau": 1.0, "first": "initial"}}),
    Row("FedAMP beside our Local", "FedAMP", {}, "local"),
    Row("FedAMP beside ours", "FedAMP", {}, "fedamp"),
    Row("FedAMP, a term with a gradient in theirs", "FedAMP", {}, "fedamp", with_gradient),
    Row("FedAMP, and weights of at most 1", "FedAMP", {}, "fedamp", at_most_one),
    Row("FedBABU, fine-tuned", "FedBABU", {}, BABU, scores=tuned, metric="reported", rounds=ROUNDS + 1, sections=TUNED),
    Row("FedBABU, average sent before", "FedBABU", {}, BABU, sent_before_tuning, tuned, "reported", ROUNDS + 1, TUNED),
    Row("FedPAC", "FedPAC", {}, {"fedpac": PAC}),
    Row("FedPAC, heads copied in theirs", "FedPAC", {}, {"fedpac": PAC}, copied_heads),
    Row("FedPAC, and in the order of their weights", "FedPAC", {}, {"fedpac": PAC}, in_order),
)  # fmt: skip

HEAD = f"""## Measured beside PFLlib

[TsingZ0/PFLlib](https://github.com/TsingZ0/PFLlib), commit d832e76: its servers, clients and lists of scores as they
are, by the division of MNIST that its repository has, of which each client keeps {SHARE:.0%}, for training and test
alike: 20 clients with SIZES training samples. Multilayer perceptron with {HIDDEN} hidden neurons, {ROUNDS} rounds,
otherwise its defaults: E = 1, B = 10, lr {LR}. Three seeds, in both codes from the same first weights; the order of
samples differs. Ours: `protocol: pfllib`, with the same samples. A number is the best over the rounds, mean and
standard deviation over the seeds; noise: the half-width of the 95 % interval of the difference.
"""


def section(checkout: Path) -> str:
    clients = shipped(checkout)
    runs: dict[str, Any] = {}  # which several rows may share

    def scores(row: Row, seed: int) -> tuple[float, float]:
        key, own = f"{row.theirs} {row.settings} {row.mended.__qualname__} {seed}", f"{row.ours} {seed}"
        if key not in runs:
            first_P = first_weights(MODEL, 10, seed)
            runs[key] = theirs(checkout, row.theirs, clients, first_P, seed, row.settings, row.mended)
        if own not in runs:
            runs[own] = ours("pfllib", clients, seed, row.rounds, row.ours, MODEL, **row.sections)
        return row.scores(runs[key])[-ROUNDS:].max(), runs[own][row.metric][-1]

    rows = side_by_side("PFLlib", ROWS, SEEDS, scores)
    sizes = [len(client.y) for client in clients]
    head = HEAD.replace("SIZES", f"{min(sizes)} to {max(sizes)}")
    return "\n".join([head, *table(*rows), *facts(checkout, clients)])


def facts(checkout: Path, clients: Sequence[Client]) -> list[str]:
    """Lines on two runs of two rounds."""
    first_P = first_weights(MODEL, 10, 0)

    def made(name: str, **settings: float) -> Server:
        return theirs(checkout, name, clients, first_P, 0, {"global_rounds": 2, **settings})

    rows = [
        torch.stack([parameters_to_vector(client.model.parameters()) for client in made("FedAMP", lamda=lam).clients])
        for lam in (0.0, 1e6)
    ]
    same = "to the last bit" if torch.equal(*rows) else f"up to {float((rows[0] - rows[1]).norm()):.1g}"
    moved = float((parameters_to_vector(made("pFedMe").global_model.parameters()) - first_P).norm())
    return [
        f"- FedAMP: the models of all clients with `-lam 0` and with `-lam 1000000` are equal {same}.",
        f"- pFedMe with the default `-bt 0`: the global model is {moved:g} from the first one.",
        "",
    ]
