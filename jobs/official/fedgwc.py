"""FedGWC beside the code of its authors, davedleo/FedGWC."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils import parameters_to_vector, vector_to_parameters
from torch.utils.data import TensorDataset

from jobs.official import runs
from jobs.official.page import table
from jobs.official.runs import Course, Data, compared, groups_of, modules, quiet, rotated_mnist, same_groups

CLIENTS, COHORT, TRAIN, TEST = 24, 6, 100, 50
TURNS = [2 * (client % 3 == 0) for client in range(CLIENTS)]  # quarter turns of a client's images
STEPS, LR, DECAY = 7, 0.1, 4e-4
GAMMA, EPSILON = 10.0, 2e-3
MODEL: dict[str, Any] = {"name": "mlp", "options": {"hidden": 0}}
KEPT = (1, 20, 40, 60)
SEEDS = range(3)


@dataclass
class Interactions:
    """A run, and the interactions of the clients."""

    course: Course = field(default_factory=Course)
    a: dict[int, np.ndarray] = field(default_factory=dict)  # (N, N) after these rounds; NaN: of two clusters
    v: dict[int, np.ndarray] = field(default_factory=dict)  # (N,) after these rounds: v of each client's cluster


class Samples(TensorDataset):
    """A client's data as their data sets have them."""

    def __init__(self, x: Tensor, y: Tensor):
        super().__init__(x, y)
        self._labels = y.numpy()

    def load_data(self) -> None:
        pass

    clear = load_data


def theirs(checkout: Path, data: Data, start_P: Tensor, cohorts: Sequence[np.ndarray]) -> Interactions:
    """FedGWC by the authors' `ServerFedGWC` and `Client`, whose participants are those of these cohorts."""
    servers, agents = modules(checkout, "agents.servers", "agents.clients")
    run, model = Interactions(), torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(784, 10))
    vector_to_parameters(start_P.clone(), model.parameters())
    round = 0

    class Clusters(list[str]):
        def copy(self) -> list[str]:
            """The clusters of the next round: those with participants."""
            nonlocal round
            round += 1
            return [k for k in self if len(server._select_clients(k))]

    class Server(servers.ServerFedGWC):  # type: ignore[name-defined, misc]
        def _select_clients(self, cluster_id: str) -> np.ndarray:
            ids = np.intersect1d(self._clusters_clients_ids[cluster_id], cohorts[round - 1])
            self._num_clients_per_round, patience = len(ids), self._patience[cluster_id]
            if len(ids):  # theirs is equal to the target, or ours, which may change, not below it
                target = np.round(self._clusters_num_clients[cluster_id] / len(ids))
                patience["target"] = max(target, 1, patience["current"] + 1)
            return ids

        def _split_cluster(self, *args: Any) -> None:
            self._num_clients_per_round = COHORT  # a cluster with more clients splits again
            super()._split_cluster(*args)

        def test(self) -> Any:
            members = [(k, self._clusters_clients_ids[k]) for k in self._clusters]
            run.course.clusters.append(len(members))
            if round in KEPT:
                cluster_N = np.empty(CLIENTS, int)
                weights = torch.empty(CLIENTS, len(start_P))
                run.a[round], run.v[round] = np.full((CLIENTS, CLIENTS), np.nan), np.empty(CLIENTS)
                for number, (k, ids) in enumerate(members):
                    cluster_N[ids], run.v[round][ids] = number, self._mse[k]
                    weights[ids] = parameters_to_vector(self._clusters_models[k].parameters()).detach()
                    run.a[round][np.ix_(ids, ids)] = self._clusters_W[k]
                run.course.weights[round], run.course.groups[round] = weights, groups_of(cluster_N)
            return super().test()

    clients = {}
    for client in range(CLIENTS):
        train, test = Samples(data.x[client], data.y[client]), Samples(data.x_test[client], data.y_test[client])
        options = {"batch_size": TRAIN, "lr": LR, "weight_decay": DECAY, "device": "cpu"}
        clients[client] = agents.Client(client, model, train, test, **options)
    server = Server(model, clients, COHORT, STEPS, gamma=GAMMA, eps=EPSILON, loss_sampling_size=0, device="cpu")
    server._clusters = Clusters(server._clusters)
    with quiet():
        run.course.accuracy = server.train(len(cohorts), 1)["test_track"]["accuracy"]
    return run


def ours(data: Data, seed: int) -> Interactions:
    method = {"fedgwc": {"steps_sent": STEPS, "gamma": GAMMA, "epsilon": EPSILON}}
    local: dict[str, Any] = {"steps": STEPS, "batch_size": None, "lr": LR, "weight_decay": DECAY}
    run = Interactions()

    def look(result: Any, rounds: int) -> None:
        state = result.trained.state
        run.v[rounds] = np.where(state.assign_N < 0, np.nan, state.change_K[state.assign_N])
        run.a[rounds] = np.full((CLIENTS, CLIENTS), 1 / CLIENTS**2)
        run.a[rounds][np.ix_(state.seen_S, state.seen_S)] = state.interaction_SS

    run.course = runs.ours(data, seed, KEPT, method, MODEL, local, look=look, fraction=COHORT / CLIENTS)
    return run


HEAD = f"""## FedGWC

[davedleo/FedGWC](https://github.com/davedleo/FedGWC), commit COMMIT, by the authors of FedGWC: `ServerFedGWC` and
`Client`. {CLIENTS} clients of {TRAIN} training and {TEST} test images of MNIST, those of every third rotated by 180
degrees; {COHORT} take part in a round. Multinomial logistic regression, {STEPS} steps of full batches at eta {LR} with
weight decay {DECAY}, whose losses are sent, gamma {GAMMA:g}, epsilon {EPSILON:g}. Both start from the same model.

Replaced in memory: the data and the choice of participants. Theirs draws m clients of every cluster. Here they are the
clients of the cluster in our cohort, which is drawn from all clients: their number is m of the cluster in this round,
for its share m / size, its patience of size / m rounds and its largest number of parts; a cluster without any is
skipped. A part splits again if it has more than {COHORT} clients. Before the first split nothing of this has an effect.
Theirs may add losses drawn from a normal distribution, by default up to as many as take part of their 100 clients: not
here.

*A*: the largest difference of two clients' interaction, of clients of a cluster. *v*: the largest relative difference
of a cluster's v. Distance: between the weights of a client's cluster model in the two codes, relative to their distance
from the initial model; the largest of the clients.
"""


def section(checkout: Path, commit: str) -> str:
    rows = [["seed", "A", "v", "clusters, theirs", "clusters, ours", "same", *runs.HEAD]]
    splits = [["seed", "splits after round, theirs", "ours"]]
    for seed in SEEDS:
        data, start_P = rotated_mnist(seed, TURNS, TRAIN, TEST), runs.first_weights(MODEL, 10, seed)
        cohorts = runs.cohorts(CLIENTS, seed, COHORT / CLIENTS, KEPT[-1])
        a, b = theirs(checkout, data, start_P, cohorts), ours(data, seed)
        for t in KEPT:
            apart = [np.nanmax(abs(a.a[t] - b.a[t])), np.nanmax(abs(a.v[t] / b.v[t] - 1))]
            clusters = [str(len(x.course.groups[t])) for x in (a, b)]
            cells = [*(f"{value:.1e}" for value in apart), *clusters, same_groups(a.course, b.course, t)]
            rows.append([str(seed), *cells, *compared(a.course, b.course, start_P, t)])
        found = [np.flatnonzero(np.diff(x.course.clusters, prepend=1)) + 1 for x in (a, b)]
        splits.append([str(seed), *(", ".join(map(str, rounds)) or "-" for rounds in found)])
    return "\n".join([HEAD.replace("COMMIT", commit), *table(*rows), *table(*splits)])
