"""FedSoft beside the code of its authors, ycruan/FedSoft."""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils import parameters_to_vector
from torch.optim import SGD, Adam

from cfl_ray.core.rng import Draws
from jobs.official import runs
from jobs.official.fedccfa import HIDDEN, MODEL, Model
from jobs.official.fedem import CLIENTS, TEST, TRAIN, mixed
from jobs.official.page import table
from jobs.official.runs import Course, Data, accuracy_of, distance, modules, quiet, replaced, rounded

SIZES = tuple(TRAIN - 10 * client for client in range(CLIENTS))
K, TAU, DRAWN, LAM, EPOCHS, LR, ADAM_LR = 2, 2, 4, 0.1, 5, 0.1, 1e-3
KEPT = (1, 5, 10)
SEEDS = range(2)


@dataclass(frozen=True)
class How:
    """A comparison."""

    drawn: int | None = DRAWN  # m; None: no selection
    momentum: float = 0.0
    adam: bool = False
    kept: bool = False  # theirs: the moments of Adam live over rounds
    common: bool = False  # theirs: clients start from one more model, and not from a centre


RUNS = {
    "no selection": How(None),
    f"m = {DRAWN}": How(),
    f"m = {DRAWN}, momentum 0.9, `persist: true`": How(momentum=0.9),
    f"m = {DRAWN}, Adam": How(adam=True),
    f"m = {DRAWN}, Adam, moments kept": How(adam=True, kept=True),
    f"m = {DRAWN}, from a common model": How(common=True),
}


@dataclass
class Soft:
    """A run: the models (N, P) with which the clients predict, the centres (K, P), and u, by round."""

    own: Course = field(default_factory=Course)
    centres: Course = field(default_factory=Course)
    u: dict[int, np.ndarray] = field(default_factory=dict)  # (N, K)


def theirs(checkout: Path, data: Data, first_KP: Tensor, seed: int, how: How) -> Soft:
    """The method by the authors' `Server`, `Client` and `MnistClientSolver`, with the draws of our method.

    first_KP: the centres and one more model, (K + 1, P).
    """
    with quiet():
        flags, servers, clients, solvers = modules(checkout, "FLAG", "servers", "clients", "solvers")
    run, average = Soft(), Model(first_KP[0])

    class Solver(solvers.MnistClientSolver):  # type: ignore[name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.batch_size, self.local_epoch, self.reg_weight = TRAIN, EPOCHS, LAM
            self.optimizer_type = Adam if how.adam else partial(SGD, momentum=how.momentum)
            self.lr = ADAM_LR if how.adam else LR
            self.estimate_criterion = torch.nn.CrossEntropyLoss(reduction="none")

    class Client(clients.Client):  # type: ignore[name-defined]
        trained = False

        def estimate_importance_weights(self, *_: Any) -> None:
            super().estimate_importance_weights()

        def predicts_with(self) -> Model:
            centre: Model = self.server.cluster_vec[self.importance_estimated.argmax()]
            return self.model if self.trained or how.common else centre

        def run(self) -> None:
            if not how.common:
                self.model.load_state_dict(self.predicts_with().state_dict())
            if how.adam and not how.kept:
                self.optimizer = Adam(self.model.parameters(), self.solver.lr)
            self.trained = True
            super().run()

    def vectors(models: list[Model]) -> Tensor:
        return torch.stack([parameters_to_vector(model.parameters()).detach() for model in models])

    def validate(client_vec: list[Client], cluster_vec: list[Model], t: int) -> None:
        run.own.weights[t + 1] = vectors([client.predicts_with() for client in client_vec])
        run.own.accuracy.append(accuracy_of(average, run.own.weights[t + 1], data))
        run.centres.weights[t + 1] = vectors(cluster_vec)
        run.u[t + 1] = np.stack([client.importance_estimated for client in client_vec])

    def generators() -> Iterator[np.random.Generator]:
        """That of our method in this round, for each centre."""
        for t in itertools.count(1):
            yield from [Draws(seed, t).stream("selection")] * K

    def choice(a: range, size: int, p: np.ndarray, replace: bool) -> np.ndarray:
        return next(draws).choice(len(a), size, p=p, replace=replace)

    draws, models = generators(), iter([first_KP[K], *first_KP[:K]])  # theirs makes the common model first
    log = dict.fromkeys(["log_client_selection", "log_validation_data"], lambda *_: None)
    members = [Client(i, part, Solver()) for i, part in enumerate(data.training)]
    for client in members:
        client.loader = [client.ds.tensors]  # one batch
    with (
        replaced(servers, logger=SimpleNamespace(**log), device="cpu"),
        replaced(flags, device="cpu"),
        replaced(np.random, choice=choice),
    ):
        solver = solvers.ServerSolver(how.drawn is not None, TAU, how.drawn)
        validator = SimpleNamespace(validate=validate)
        server = servers.Server(lambda: Model(next(models)), members, K, validator, solver)
        server.run(KEPT[-1])
    return run


def own_models(result: Any) -> Tensor:
    """The models (N, P) with which the clients predict."""
    state, rows = result.trained.state, []
    for client, k in enumerate(state.weight_NK.argmax(1)):
        kept = result.trained.backend.client_state("personal", client)
        rows.append(state.models_KP[k] if kept is None else kept[: state.models_KP.shape[1]])  # without its momentum
    return torch.stack(rows)


def ours(data: Data, seed: int, how: How) -> Soft:
    method = {"fedsoft": {"num_clusters": K, "lam": LAM, "tau": TAU, "clients_per_cluster": how.drawn}}
    local: dict[str, Any] = {"epochs": EPOCHS, "batch_size": None}
    local |= {"lr": LR, "momentum": how.momentum, "persist": how.momentum > 0}
    if how.adam:
        local = {"epochs": EPOCHS, "batch_size": None, "lr": ADAM_LR, "optimizer": "adam"}
    run = Soft()

    def look(result: Any, rounds: int) -> None:
        state = result.trained.state
        run.centres.weights[rounds], run.u[rounds] = state.models_KP.clone(), np.maximum(state.weight_NK, 1e-4)

    run.own = runs.ours(data, seed, KEPT, method, MODEL, local, look=look, rows=own_models)
    return run


HEAD = f"""## FedSoft

[ycruan/FedSoft](https://github.com/ycruan/FedSoft), commit COMMIT, by the authors of FedSoft: its `Server`, `Client`
and `MnistClientSolver`. {CLIENTS} clients of {SIZES[0]} to {SIZES[-1]} training and {TEST} test images of MNIST; a
share of the images of each, between none and all, is rotated by a quarter turn. An MLP with {HIDDEN} hidden units,
K = {K}, tau = {TAU}, lambda {LAM}, {EPOCHS} epochs of full batches at eta {LR} (with Adam {ADAM_LR}). Both start from
the same centres, and S_k is drawn with the same random numbers, so that equal probabilities give equal S_k.

Errors of theirs, mended in memory: `estimate_importance_weights` is called with an argument that it does not take, and
`MnistClientSolver` has no criterion for the estimate, so that the code stops as published. Also replaced: the model
(theirs for MNIST has a softmax before the loss, which has its own), the files that it logs, the loaders.

Deviations of their code, in the list of our method: clients start from one more model, common to all (*from a common
model*), here else from the centre of their largest importance as in ours; Adam keeps its moments over rounds (*moments
kept*), here else it begins anew in each round as in ours.

*Centres*: distance between the weights of a centre in the two codes, relative to its distance from the first one; the
larger of the {K}. *Rounding*: the larger one of theirs from itself, in two runs whose first weights differ by 1e-7 of
their size, at random: a hidden unit that is on in one run and off in the other can be seen, and Adam divides by
gradients near 0. *Own*: the distance of the model with which a client predicts, relative to its distance from the mean
of the first centres; the largest of the clients. *u*: the largest difference of an importance. Accuracy is on test
images; theirs prints that on the images that a client trains on.
"""


def section(checkout: Path, commit: str) -> str:
    rows = [["run", "seed", "round", "centres", "rounding", "own", "u", *runs.HEAD[2:]]]
    for name, how in RUNS.items():
        for seed in SEEDS:
            data = replace(mixed(seed)[0], sizes=SIZES)
            first_KP = torch.stack([runs.first_weights(MODEL, 10, seed, k) for k in range(K + 1)])
            a, b = theirs(checkout, data, first_KP, seed, how), ours(data, seed, how)
            others = [theirs(checkout, data, rows_KP, seed, how).centres for rows_KP in rounded(first_KP)]
            for t in KEPT:
                apart = [distance(a.centres, b.centres, first_KP[:K], t)]
                apart += [max(distance(a.centres, other, first_KP[:K], t) for other in others)]
                apart += [distance(a.own, b.own, first_KP[:K].mean(0), t), abs(a.u[t] - b.u[t]).max()]
                accuracy = [f"{x.own.accuracy[t - 1]:.4f}" for x in (a, b)]
                rows.append([name, str(seed), str(t), *(f"{value:.1e}" for value in apart), *accuracy])
    return "\n".join([HEAD.replace("COMMIT", commit), *table(*rows)])
