"""FedEM beside the code of its authors, omarfoq/FedEM."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from jobs.official import runs
from jobs.official.page import table
from jobs.official.runs import Course, Data, distance, modules, rotated_mnist, stand_in

K, CLIENTS, NEW, TRAIN, TEST = 3, 12, 4, 200, 50
EPOCHS, LR, DECAY = 5, 0.1, 5e-4  # DECAY: weight decay, which their optimisers have
MODEL: dict[str, Any] = {"name": "mlp", "options": {"hidden": 0}}  # their LinearLayer
KEPT = (1, 5, 20)
SEEDS = range(2)
COLUMNS = ["run", "seed", "round", "distance", "pi", "accuracy, theirs", "accuracy, ours"]


@dataclass(frozen=True)
class How:
    """A comparison."""

    fraction: float = 1.0  # of the clients, in a round
    damped: bool = False  # of ours
    momentum: float = 0.0  # theirs has 0 in one of its optimisers and 0.9 in another
    persist: bool = False  # of ours: each client keeps the momentum buffers of its models


RUNS = {
    "all clients": How(),
    "half, `damped: true`": How(fraction=0.5, damped=True),
    "half": How(fraction=0.5),
    "all clients, momentum 0.9, `persist: true`": How(momentum=0.9, persist=True),
    "half, momentum 0.9, `persist: true`, `damped: true`": How(0.5, damped=True, momentum=0.9, persist=True),
    "all clients, momentum 0.9": How(momentum=0.9),
}


@dataclass
class Mixtures:
    """The mixture weights in the rounds of a run; NaN: a client without weights yet."""

    course: Course = field(default_factory=Course)  # its weights are those of the K models, (K, P)
    pi: dict[int, np.ndarray] = field(default_factory=dict)  # (N, K) after these rounds
    new_pi: np.ndarray = field(default_factory=lambda: np.zeros((0, K)))  # (NEW, K) of newcomers in the end


def mixed(seed: int) -> tuple[Data, Data]:
    """Clients and newcomers; a share of the images of each, between none and all, is rotated by a quarter turn."""
    number = CLIENTS + NEW
    data, turned = (rotated_mnist(seed, [turns] * number, TRAIN, TEST) for turns in (0, 1))
    for i in range(number):
        share = 5 * i % number / (number - 1)
        for x, x_turned in ((data.x[i], turned.x[i]), (data.x_test[i], turned.x_test[i])):
            x[: round(share * len(x))] = x_turned[: round(share * len(x))]
    parts = (slice(CLIENTS), slice(CLIENTS, number))
    clients, new = (Data(data.x[i], data.y[i], data.x_test[i], data.y_test[i]) for i in parts)
    return clients, new


class Log:
    """Their logger; keeps the accuracy of the clients by round."""

    def __init__(self) -> None:
        self.accuracy: list[float] = []

    def add_scalar(self, name: str, value: float, step: int) -> None:
        if name == "Test/Metric":
            self.accuracy.append(value)


class Labels(list[int]):
    """The labels of a client; stands in for its data set."""

    @property
    def targets(self) -> list[int]:
        return self


class Loader:
    """All samples of a client as a batch (x, y, indices)."""

    def __init__(self, x: Tensor, y: Tensor):
        self.dataset, self.batch = Labels(y.tolist()), (x.flatten(1), y, torch.arange(len(y)))

    def __iter__(self) -> Iterator[tuple[Tensor, ...]]:
        return iter([self.batch])


def weights_of(clients: Iterable[Any]) -> np.ndarray:
    """Mixture weights (N, K) of their clients."""
    return np.stack([client.learners_ensemble.learners_weights.numpy() for client in clients])


def ensemble_of(code: Any, first_KP: Tensor, how: How, **more: Any) -> Any:
    """K models with these weights as their `LearnersEnsemble`. more: arguments of a fork."""
    options = {"device": "cpu", "scheduler_name": "constant", "initial_lr": LR, "mu": 0.0, "n_rounds": 1, "seed": 0}
    options |= {"input_dim": 784, "output_dim": 10, "n_learners": K, **more}
    optimizer = "sgd" if how.momentum else "prox_sgd"
    made = code.get_learners_ensemble(name="synthetic", optimizer_name=optimizer, **options)
    for learner, row_P in zip(made, first_KP, strict=True):
        vector_to_parameters(row_P.clone(), learner.model.parameters())
    return made


def clients_of(kind: Any, data: Data, ensemble: Callable[[], Any], **more: Any) -> list[Any]:
    """Their clients of this class. more: arguments of a fork."""
    train = [Loader(x, y) for x, y in zip(data.x, data.y, strict=True)]
    test = [Loader(x, y) for x, y in zip(data.x_test, data.y_test, strict=True)]
    return [kind(ensemble(), a, a, b, Log(), EPOCHS, **more) for a, b in zip(train, test, strict=True)]


def keep(run: Mixtures, server: Any, t: int) -> None:
    """Keeps the state of their server after round t, if it is one of KEPT."""
    if t in KEPT:
        models = [learner.model for learner in server.global_learners_ensemble]
        run.course.weights[t] = torch.stack([parameters_to_vector(m.parameters()).detach() for m in models])
        run.pi[t] = weights_of(server.clients)


def theirs(
    checkout: Path, data: Data, new: Data, first_KP: Tensor, how: How, cohorts: Sequence[np.ndarray]
) -> Mixtures:
    """FedEM by the authors' `CentralizedAggregator`, `MixtureClient` and `Learner`, with these cohorts."""
    for name in ("cvxpy", "networkx"):
        stand_in(name)
    (code,) = modules(checkout, "utils.utils")

    def ensemble() -> Any:
        return ensemble_of(code, first_KP, how)

    log, run = Log(), Mixtures()
    server = code.CentralizedAggregator(
        clients_of(code.MixtureClient, data, ensemble), ensemble(), 1, log, Log(), seed=0
    )
    server.sample_clients = lambda: None
    for t, cohort in enumerate(cohorts, 1):
        server.sampled_clients = [server.clients[i] for i in cohort]
        server.mix()
        keep(run, server, t)
    run.course.accuracy = log.accuracy[1:]  # the first is before any round
    server.test_clients = clients_of(code.MixtureClient, new, ensemble)
    server.update_test_clients()
    run.new_pi = weights_of(server.test_clients)
    return run


def global_models(result: Any) -> Tensor:
    return result.trained.state.models_KP.clone()  # type: ignore[no-any-return]


def mixtures(data: Data, new: Data, seed: int, how: How, method: dict[str, Any]) -> Mixtures:
    """A method of this project whose clients mix its models."""
    local: dict[str, Any] = {"epochs": EPOCHS, "batch_size": None, "lr": LR}
    local |= {"weight_decay": DECAY, "momentum": how.momentum, "persist": how.persist}
    run = Mixtures()

    def look(result: Any, rounds: int) -> None:
        state = result.trained.state
        run.pi[rounds] = np.where(state.weight_NK.sum(1, keepdims=True) > 0, state.weight_NK, np.nan)
        newcomers = [result.place(x, y) for x, y in zip(new.x, new.y, strict=True)]
        run.new_pi = np.stack([newcomer.model.weight_K for newcomer in newcomers])

    run.course = runs.ours(data, seed, KEPT, method, MODEL, local, look=look, fraction=how.fraction, rows=global_models)
    return run


def ours(data: Data, new: Data, seed: int, how: How) -> Mixtures:
    return mixtures(data, new, seed, how, {"fedem": {"num_models": K, "damped": how.damped, "fit_steps": 1}})


def cells(a: Mixtures, b: Mixtures, first_KP: Tensor, round: int) -> list[str]:
    """Cells of a table: the round, the distances of models and mixture weights, and the accuracy in the two codes."""
    apart = [f"{distance(a.course, b.course, first_KP, round):.1e}"]
    apart.append(f"{np.nanmax(abs(a.pi[round] - b.pi[round])):.1e}")
    return [str(round), *apart, *(f"{x.course.accuracy[round - 1]:.4f}" for x in (a, b))]


HEAD = f"""## FedEM

[omarfoq/FedEM](https://github.com/omarfoq/FedEM), commit COMMIT, by the authors of FedEM: `CentralizedAggregator`,
`MixtureClient` and `Learner`. {CLIENTS} clients of {TRAIN} training and {TEST} test images of MNIST; a share of the
images of each, between none and all, is rotated by a quarter turn. Multinomial logistic regression, K = {K}, {EPOCHS}
epochs of full batches at eta {LR}, weight decay {DECAY}. Both start from the same K models; the cohorts are ours.

Replaced in memory: the loaders, `sample_clients`, so that both have the same cohorts, and `cvxpy` and `networkx`, which
are for its decentralised variant. Without momentum its optimiser is `prox_sgd` with mu 0, else `sgd`.

Deviations of their code from the paper, in the list of our method: the average is over all clients, those outside the
cohort with the last global model (ours with `damped: true`), and the momentum lives over rounds (ours with
`local.persist: true`; otherwise it begins at zero in each round). A newcomer of theirs takes one E and one M step
whenever a round is logged, ours takes `fit_steps`, 10 by default and 1 here.

Distance: between the weights of a global model in the two codes, relative to their distance from the initial models;
the largest of the {K}. *pi*: the largest difference of a client's weight of a model, of the clients that have trained.
Before its first training a client of theirs mixes the models in equal parts, ours takes E and M steps for its test.
"""


def section(checkout: Path, commit: str) -> str:
    rows = [COLUMNS]
    newcomers = []
    for name, how in RUNS.items():
        for seed in SEEDS:
            data, new = mixed(seed)
            first_KP = torch.stack([runs.first_weights(MODEL, 10, seed, k) for k in range(K)])
            cohorts = runs.cohorts(CLIENTS, seed, how.fraction, KEPT[-1])
            a, b = theirs(checkout, data, new, first_KP, how, cohorts), ours(data, new, seed, how)
            rows += [[name, str(seed), *cells(a, b, first_KP, t)] for t in KEPT]
            if how in (RUNS["all clients"], RUNS["half, `damped: true`"]):
                newcomers.append(abs(a.new_pi - b.new_pi).max())
    lines = [
        f"In the first two runs, the weights of {NEW} newcomers after the last round differ by at most "
        f"{max(newcomers):.1e}.",
        "",
    ]
    return "\n".join([HEAD.replace("COMMIT", commit), *table(*rows), *lines])
