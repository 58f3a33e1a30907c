"""FedRC beside the code of its authors, LINs-lab/FedRC, a fork of FedEM's."""

from argparse import Namespace
from collections.abc import Sequence
from contextlib import chdir
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cfl_ray.clustering.agreement import agreement
from jobs.official import fedem, runs
from jobs.official.fedem import CLIENTS, COLUMNS, DECAY, EPOCHS, KEPT, LR, MODEL, NEW, K, Log, Mixtures, cells
from jobs.official.page import table
from jobs.official.runs import Data, modules, quiet, replaced, stand_in

TRAIN, TEST = 100, 50
SEEDS = range(2)


@dataclass(frozen=True)
class How(fedem.How):
    """A comparison."""

    of_cohort: bool = False  # theirs: C(y, k) of the cohort, as ours


RUNS = {
    "all clients": How(),
    "half, C of the cohort": How(fraction=0.5, of_cohort=True),
    "half": How(fraction=0.5),
    "all clients, momentum 0.9, `persist: true`": How(momentum=0.9, persist=True),
    "all clients, momentum 0.9": How(momentum=0.9),
}


def swapped(seed: int) -> tuple[Data, Data]:
    """Clients and newcomers with Dirichlet(1) shares of Fashion-MNIST's labels; every second has label 9 - y for y."""
    x, y = runs.images("fashion_mnist", seed)
    rng = np.random.default_rng(seed)
    unused = [iter(torch.nonzero(y == label).flatten().tolist()) for label in range(10)]
    number, size = CLIENTS + NEW, TRAIN + TEST
    label_NS = np.stack([rng.choice(10, size, p=rng.dirichlet(np.ones(10))) for _ in range(number)])
    row_NS = torch.tensor([[next(unused[label]) for label in label_S] for label_S in label_NS])
    x, y = x[row_NS], y[row_NS]
    y[1::2] = 9 - y[1::2]
    parts = (slice(CLIENTS), slice(CLIENTS, number))
    clients, new = (Data(x[i, :TRAIN], y[i, :TRAIN], x[i, TRAIN:], y[i, TRAIN:]) for i in parts)
    return clients, new


def theirs(
    checkout: Path, data: Data, new: Data, first_KP: Tensor, how: How, cohorts: Sequence[np.ndarray]
) -> tuple[Mixtures, np.ndarray]:
    """FedRC by the authors' `run_experiment`, with these cohorts; and pi (NEW, K) of newcomers without C(y, k)."""
    for name in ("cvxpy", "networkx", "learners.autoencoder"):
        stand_in(name)
    stand_in("torch.utils.tensorboard", SummaryWriter=lambda _: Log())
    code, script = modules(checkout, "utils.utils", "run_experiment")
    run, servers = Mixtures(), []

    def ensemble(**_: Any) -> Any:
        return fedem.ensemble_of(code, first_KP, how, client_type="fedrc", hard_cluster=False, n_gmm=0)

    def clients(data: Data) -> list[Any]:
        return fedem.clients_of(code.FedRC, data, ensemble, feature_types=[0] * TRAIN)

    class Server(code.CentralizedAggregator):  # type: ignore[name-defined, misc]
        def sample_clients(self) -> None:
            self.sampled_clients = [self.clients[i] for i in cohorts[self.c_round]]

        def mix(self, **options: Any) -> None:
            super().mix(**options)
            fedem.keep(run, self, self.c_round)
            servers.append(self)
            for client in self.clients:
                if how.of_cohort and client not in self.sampled_clients:
                    client.labels_learner_weights.zero_()

    def init_clients(_: Any, root_path: str, logs_dir: str) -> list[Any]:
        return clients(data if root_path.endswith("train") else new)

    names = (
        "decentralized split domain_disc input_dimension output_dimension embedding_dimension lr_lambda lr q mu "
        "communication_probability suffix em_step gamma n_gmm binary phi_model optimizer lr_scheduler hard_cluster"
    )
    args = Namespace(
        **dict.fromkeys(names.split()), experiment="fmnist-c", method="fedrc", seed=0, device="cpu", n_learners=K,
        n_rounds=len(cohorts) - 1, sampling_rate=1.0, log_freq=1, verbose=0, logs_dir="logs",
    )  # fmt: skip
    with (
        TemporaryDirectory() as folder,
        chdir(folder),
        replaced(code, CentralizedAggregator=Server),
        replaced(script, init_clients=init_clients, get_learners_ensemble=ensemble, args=args),
        replaced(torch.Tensor, __format__=lambda *_: ""),  # in files of single weights, which take most of its time
        quiet(),
    ):
        Path("logs/fmnist-c").mkdir(parents=True)
        script.run_experiment(args)
    server = servers[-1]
    run.course.accuracy = server.global_train_logger.accuracy[1:]  # the first is before any round
    found = []
    for given in (False, True):
        server.test_clients = clients(new)
        for client in server.test_clients if given else ():
            client.update_labels_weights([model.labels_weights for model in server.clients[0].learners_ensemble])
        server.update_test_clients()
        found.append(fedem.weights_of(server.test_clients))
    run.new_pi = found[1]
    return run, found[0]


def ours(data: Data, new: Data, seed: int, how: How) -> Mixtures:
    return fedem.mixtures(data, new, seed, how, {"fedrc": {"num_models": K, "fit_steps": 1}})


HEAD = f"""## FedRC

[LINs-lab/FedRC](https://github.com/LINs-lab/FedRC), commit COMMIT, by the authors of FedRC: `run_experiment`,
`CentralizedAggregator`, `FedRC` and `Learner`, a fork of FedEM's code. {CLIENTS} clients of {TRAIN} training and {TEST}
test images of Fashion-MNIST, whose labels have shares from a Dirichlet(1) distribution; every second client has label
9 - y in the place of y. Multinomial logistic regression, K = {K}, {EPOCHS} epochs of full batches at eta {LR}, weight
decay {DECAY}. Both start from the same K models; the cohorts are ours.

Replaced in memory: the clients, `sample_clients`, so that both have the same cohorts, TensorBoard, the text of weights
in its files, and `cvxpy`, `networkx` and `learners.autoencoder`, which this method does not need; the last is missing
in the repository, so that the code as published does not start. Without momentum its optimiser is `prox_sgd` with mu 0,
else `sgd`.

Deviations of their code, in the list of our method: C(y, k) is of all clients, with the last sums of those outside the
cohort and equal ones before their first round (*C of the cohort* leaves these out, as ours does); momentum
lives over rounds (ours with `local.persist: true`); newcomers do not get C(y, k), and take one E and one M step
whenever a round is logged (`fit_steps`, 1 here). Sums below 1e-8 are raised to it, in ours shares below 1e-8.

Distance, *pi* and clients before their first training: as for FedEM. *Concepts*: ARI of the models with the largest pi
of a client with the two labellings, theirs / ours.
"""


def section(checkout: Path, commit: str) -> str:
    rows, newcomers = [[*COLUMNS, "concepts"]], []
    for name, how in RUNS.items():
        for seed in SEEDS:
            data, new = swapped(seed)
            first_KP = torch.stack([runs.first_weights(MODEL, 10, seed, k) for k in range(K)])
            cohorts = runs.cohorts(CLIENTS, seed, how.fraction, KEPT[-1])
            a, without = theirs(checkout, data, new, first_KP, how, cohorts)
            b = ours(data, new, seed, how)
            for t in KEPT:
                found = [agreement(np.arange(CLIENTS) % 2, x.pi[t].argmax(1))["ari"] for x in (a, b)]
                rows.append([name, str(seed), *cells(a, b, first_KP, t), " / ".join(f"{ari:.2f}" for ari in found)])
            if how == How():
                newcomers.append([abs(pi - b.new_pi).max() for pi in (a.new_pi, without)])
    given, missing = np.max(newcomers, 0)
    lines = [
        f"In the first run, the weights of {NEW} newcomers after the last round differ by at most {given:.1e} if they",
        f"have C(y, k) in both codes, and by at most {missing:.1e} with theirs as it is.",
        "",
    ]
    return "\n".join([HEAD.replace("COMMIT", commit), *table(*rows), *lines])
