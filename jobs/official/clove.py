"""CLoVE beside the code of its authors, Nokia-Bell-Labs/Loss-Vector-based-Clustered-Federated-Learning."""

import logging
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils import vector_to_parameters
from torch.utils.data import DataLoader, TensorDataset

from cfl_ray.clustering.agreement import agreement
from jobs.official import runs
from jobs.official.flux import labels_of
from jobs.official.page import table
from jobs.official.pfllib import personal_rows
from jobs.official.runs import Course, Data, accuracy_of, groups_of, modules, quiet, replaced, rotated_mnist, stand_in

TURNS, PER_TURN, TRAIN, TEST, EPOCHS, LR, HIDDEN = 4, 3, 100, 50, 10, 0.1, 32
CLIENTS = TURNS * PER_TURN
MODEL: dict[str, Any] = {"name": "mlp", "options": {"hidden": HIDDEN}}
LOCAL: dict[str, Any] = {"epochs": EPOCHS, "batch_size": None, "lr": LR}
KEPT = (1, 4, 8)
SEEDS = range(1)
TURN_N = np.arange(CLIENTS) % TURNS
LATE = CLIENTS - 1  # a client that comes late
LATE_ROUND = 8


@dataclass(frozen=True)
class How:
    """A comparison."""

    theirs: dict[str, Any] = field(default_factory=dict)
    ours: dict[str, Any] = field(default_factory=dict)
    models: int = TURNS


RUNS = {
    "K = 4": How(),
    "K = 4, stable clusters are fixed": How({"early_stopping_of_clustering": True}, {"stable_rounds": 3}),
    "K not known": How({"K_is_unknown": True}, {"num_clusters": None, "max_clusters": 6}, models=6),
}


def network() -> nn.Module:
    return runs.network_of(MODEL, 10).module


def theirs(
    checkout: Path, data: Data, first: Sequence[Tensor], seed: int, how: How, cohorts: Sequence[list[int]] = ()
) -> Course:
    """The course of their `clustered_federated_training_function`, with these cohorts; (): all clients."""
    course = Course()
    stand_in("finch", FINCH=None, finch_fit=None)
    stand_in("ml_collections", ConfigDict=dict)
    stand_in("model", get_model=lambda _: network())
    (algorithm,) = modules(checkout, "utils.algorithm_utils")
    kmeans = algorithm.KMeans
    nets = [network() for _ in first]
    for net, row_P in zip(nets, first, strict=True):
        vector_to_parameters(row_P.clone(), net.parameters())
    arrays = {k: [value.numpy().copy() for value in net.state_dict().values()] for k, net in enumerate(nets)}

    def metrics(_: Any, models: dict[int, Any], __: Any, assign: dict[int, int], *___: Any) -> dict[str, Any]:
        rounds = len(course.clusters) + 1
        course.clusters.append(len({*assign.values()}))
        rows = {k: torch.cat([torch.from_numpy(value).flatten() for value in models[k]]) for k in models}
        course.weights[rounds] = torch.stack([rows[int(assign.get(i, 0))] for i in range(data.clients)])
        course.groups[rounds] = groups_of(assign.get(client, -1) for client in range(data.clients))
        return {}

    turn = iter(cohorts)
    settings = {
        "number_of_clients": data.clients, "number_of_rounds": KEPT[-1], "fraction_fit": 1.0,
        "early_stopping_of_clustering": False, "number_of_rounds_for_clustering_stability": 3,
        "first_round_client_to_cluster_assignment": "evaluation_based", "algorithm": "CLoVE",
        "replicate_model_parameters_at_some_round": False, "loss_transform": None, "K_is_unknown": False,
        "clustering_alg": "KMEANS", "upper_bound_on_K": len(first), "seed": seed, "number_of_models": len(first),
        "total_number_of_models": len(first), "lr_schedule_enabled": False, "averaging_mode": "model_averaging",
        "cluster_to_model_matching_method": "min_cost_matching_wrt_total_cluster_loss", "local_epochs": EPOCHS,
        "dataset": "MNIST", "model_type": "CNN", "criterion": {"CNN": nn.CrossEntropyLoss()}, "device": "cpu",
        "optimizer_type": "SGD", "local_learning_rate": LR,
    }  # fmt: skip
    train, test = (
        [DataLoader(TensorDataset(x, y), batch_size=len(y)) for x, y in zip(xs, ys, strict=True)]
        for xs, ys in ((data.x, data.y), (data.x_test, data.y_test))
    )
    logging.disable()
    try:
        with (
            replaced(algorithm, calculate_metrics=metrics, KMeans=lambda **options: kmeans(**options | {"n_init": 10})),
            replaced(random, sample=lambda population, k: next(turn, [*population])),
            quiet(),
        ):
            algorithm.clustered_federated_training_function(
                settings | how.theirs, nets, train, test, arrays, TURN_N.tolist()
            )
    finally:
        logging.disable(logging.NOTSET)
    return course


def ours(data: Data, seed: int, how: How, schedule: Sequence[dict[str, Any]] = ()) -> Course:
    method = {"clove": {"num_clusters": TURNS, "first": "losses", "stable_rounds": None} | how.ours}
    return runs.ours(data, seed, KEPT, method, MODEL, LOCAL, rows=personal_rows, schedule=schedule)


def of_a_late_client(checkout: Path, data: Data, first: Sequence[Tensor], seed: int) -> str:
    """A sentence about both codes with a client that first takes part in round LATE_ROUND."""
    how = RUNS["K = 4, stable clusters are fixed"]
    cohorts = [list(range(CLIENTS - (t < LATE_ROUND))) for t in range(1, KEPT[-1] + 1)]
    try:
        theirs(checkout, data, first, seed, how, cohorts)
        end = "goes on"
    except KeyError as error:
        end = f"stops with KeyError: {error}"
    b = ours(data, seed, how, [{"round": LATE_ROUND, "join": [LATE]}])
    (group,) = (group for group in b.groups[KEPT[-1]] if LATE in group)
    others = sum(TURN_N[i] == TURN_N[LATE] for i in group - {LATE})
    return (
        f"An error of theirs: if client {LATE} first takes part in round {LATE_ROUND}, when clusters are fixed,\n"
        f"it {end}. Ours puts it by its loss vector in a cluster of {len(group) - 1} others,\n"
        f"{others} of them with its rotation.\n"
    )


HEAD = f"""## CLoVE

[Nokia-Bell-Labs/Loss-Vector-based-Clustered-Federated-Learning](https://github.com/Nokia-Bell-Labs/Loss-Vector-based-Clustered-Federated-Learning),
commit COMMIT, by the authors of CLoVE: its `clustered_federated_training_function`. {CLIENTS} clients of {TRAIN}
training and {TEST} test images of MNIST, {PER_TURN} for each of {TURNS} rotations; an MLP with {HIDDEN} hidden units,
{EPOCHS} epochs of full batches of SGD at eta {LR}; the first assignment is by losses. Both start from the same models.

Replaced in memory: the data, the model, FINCH, its metrics, and the one start of k-means by the best of ten, as ours.
The numbers are of a copy of its functions, without branches that these settings do not take: no checkout was at hand.
With K not known, it finds the number by Ward clustering and the clusters by k-means; with
`AgglomerativeClustering`, as in the paper and ours, it stops, since that has no `cluster_centers_`.

An error of theirs: of a client's last three assignments it compares the last and the third to last only.

Distance: between the weights of a client's cluster model in the two codes, relative to their distance from the mean of
the first models; the largest of the clients. *ARI*: of the clusters with the rotations.
"""


def section(checkout: Path, commit: str) -> str:
    rows = [["run", "seed", "round", "distance", "same clusters"]]
    rows[0] += [f"{name}, {code}" for name in ("ARI", "accuracy") for code in ("theirs", "ours")]
    model, late = network(), ""
    for seed in SEEDS:
        data = rotated_mnist(seed, TURN_N.tolist(), TRAIN, TEST)
        for name, how in RUNS.items():
            first = [runs.first_weights(MODEL, 10, seed, k) for k in range(how.models)]
            start_P = torch.stack(first).mean(0)
            a, b = theirs(checkout, data, first, seed, how), ours(data, seed, how)
            for t in KEPT:
                ari = [f"{agreement(TURN_N, labels_of(run.groups[t], CLIENTS))['ari']:.2f}" for run in (a, b)]
                accuracy = [f"{accuracy_of(model, run.weights[t], data):.4f}" for run in (a, b)]
                far = f"{runs.distance(a, b, start_P, t):.1e}"
                rows.append([name, str(seed), str(t), far, runs.same_groups(a, b, t), *ari, *accuracy])
            if seed == SEEDS[0] and name == "K = 4":
                late = of_a_late_client(checkout, data, first, seed)
    return "\n".join([HEAD.replace("COMMIT", commit), *table(*rows), late])
