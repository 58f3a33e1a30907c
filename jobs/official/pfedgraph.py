"""pFedGraph beside the code of its authors, MediaBrain-SJTU/pFedGraph."""

import os
import random
import sys
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import normalize
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from cfl_ray.core.state import OwnModelsState
from jobs.official import runs
from jobs.official.fedccfa import HIDDEN, MODEL, Model
from jobs.official.pacfl import TEST, TRAIN, two_labels
from jobs.official.page import table
from jobs.official.runs import (
    Course,
    Data,
    accuracy_of,
    compared,
    distance,
    modules,
    quiet,
    replaced,
    rounded,
    script,
    stand_in,
)

CLIENTS = 10
SIZES = tuple(TRAIN - 10 * client for client in range(CLIENTS))
ALPHA, LAM, STEPS, LR, MOMENTUM, DECAY = 0.8, 0.01, 20, 0.01, 0.9, 1e-5
KEPT = (1, 5, 20)
SEEDS = range(2)


@dataclass(frozen=True)
class How:
    """A comparison."""

    regulariser: str = "away"
    difference: str = "all"
    fraction: float = 1.0  # of the clients, in a round
    sums: bool = False  # theirs: the regulariser has the sum of W_ij theta_j / ||theta_j||
    sketch: int = 100_000  # of ours: more than the models have parameters


RUNS = {
    "near": How("near"),
    "away": How(),
    "away, half of the clients": How(fraction=0.5),
    "away, last layer": How(difference="head"),
    "away, sums of unit models": How(sums=True),
    "away, `sketch: 8192`": How(sketch=8192),
}


@dataclass
class Graphs:
    """The weights W of the cohort, (M, M), after these rounds of a run, whose models are the aggregates."""

    course: Course = field(default_factory=Course)
    graph: dict[int, np.ndarray] = field(default_factory=dict)


def clients(seed: int) -> Data:
    """Clients with images of two labels each, and with different numbers of them."""
    data = two_labels(seed)
    x, y, x_test, y_test = (part[:CLIENTS] for part in (data.x, data.y, data.x_test, data.y_test))
    return Data(x, y, x_test, y_test, SIZES)


def theirs(checkout: Path, data: Data, start_P: Tensor, how: How, cohorts: Sequence[np.ndarray]) -> Graphs:
    """The method by the authors' script `pfedgraph_cosine.py`, with these cohorts."""
    train = {i: [part.tensors] for i, part in enumerate(data.training)}  # one batch
    image = [(data.x_test[0, :1], data.y_test[0, :1])]  # of their own tests, whose results are not compared
    samples = {i: range(int(size)) for i, size in enumerate(data.used.sum(1))}
    loaders: tuple[Any, ...] = (train, [image] * data.clients, image, samples, {}, np.ones((data.clients, 10)))
    stand_in("prepare_data", get_dataloader=lambda _: loaders)
    folder, run, models = checkout / "pytorch", Graphs(), list[Model]()  # the global model and those of the clients
    with replaced(sys, path=[*sys.path, str(checkout / "deps")]):
        utils, networks = modules(folder, "pfedgraph_cosine.utils", "model")
    aggregate, average = utils.aggregation_by_graph, Model(start_P)
    anchors: dict[int, Tensor] = defaultdict(lambda: torch.zeros_like(start_P))

    def rows(nets: Sequence[Model]) -> Tensor:
        return torch.stack([parameters_to_vector(net.parameters()).detach() for net in nets])

    def new_model(_: int) -> Model:
        models.append(Model(start_P))
        return models[-1]

    def aggregation_by_graph(cfg: Any, graph: Tensor, nets: dict[int, Model], first: Any) -> dict[int, Tensor]:
        ids = sorted(nets)
        size_M = data.used.sum(1)[ids]
        mean_P = size_M / size_M.sum() @ rows([nets[i] for i in ids])
        anchors.update(aggregate(cfg, graph, nets, first))
        if not how.sums:
            anchors.update({i: normalize(parameters_to_vector(nets[i].parameters()).detach(), dim=0) for i in ids})
        for i in {*range(data.clients)} - {*anchors}:
            vector_to_parameters(mean_P.clone(), models[1 + i].parameters())
        rounds = len(run.course.accuracy) + 1
        run.course.weights[rounds], run.graph[rounds] = rows(models[1:]), graph[ids][:, ids].numpy().copy()
        run.course.accuracy.append(accuracy_of(average, run.course.weights[rounds], data))
        return anchors

    sampled = iter([*(ids.tolist() for ids in cohorts), range(data.clients)])
    if how.fraction == 1:
        sampled = iter([list(range(data.clients))])  # their benign clients; the cohorts are not drawn
    options = {
        "n_parties": data.clients, "sample_fraction": how.fraction, "comm_round": len(cohorts), "alpha": ALPHA,
        "lam": LAM if how.regulariser == "away" else -LAM, "num_local_iterations": STEPS, "lr": LR, "reg": DECAY,
        "difference_measure": "all" if how.difference == "all" else "fc",
    }  # fmt: skip
    with (
        replaced(utils, aggregation_by_graph=aggregation_by_graph),
        replaced(networks, simplecnn=new_model),
        replaced(random, sample=lambda *_: list(next(sampled))),
        replaced(torch.Tensor, cuda=lambda self: self),
        replaced(torch.nn.Module, cuda=lambda self: self),
        patch.dict(os.environ),
        quiet(),
    ):
        script(folder / "pfedgraph_cosine.py", *(f"--{name}={value}" for name, value in options.items()))
    return run


def own_models(result: Any) -> Tensor:
    """The models (clients, P) with which the clients predict."""
    state: OwnModelsState = result.trained.state
    return state.all_models[state.rows_of(np.arange(CLIENTS))]


def ours(data: Data, seed: int, how: How) -> Graphs:
    options = {"alpha": ALPHA, "lam": LAM, "regulariser": how.regulariser}
    options |= {"difference": how.difference, "sketch": how.sketch}
    local = {"steps": STEPS, "batch_size": None, "lr": LR, "momentum": MOMENTUM, "weight_decay": DECAY}
    run = Graphs()

    def look(result: Any, rounds: int) -> None:
        run.graph[rounds] = result.diagnostics["graph"][rounds].value

    method = {"pfedgraph": options}
    run.course = runs.ours(data, seed, KEPT, method, MODEL, local, look=look, fraction=how.fraction, rows=own_models)
    return run


HEAD = f"""## pFedGraph

[MediaBrain-SJTU/pFedGraph](https://github.com/MediaBrain-SJTU/pFedGraph), commit COMMIT, by the authors of pFedGraph:
its script `pytorch/pfedgraph_cosine.py` with the solver cvxpy. {CLIENTS} clients of {SIZES[0]} to {SIZES[-1]} training
and {TEST} test images of Fashion-MNIST of two labels each; an MLP with {HIDDEN} hidden units, {STEPS} steps of full
batches at eta {LR} with momentum {MOMENTUM} and weight decay {DECAY:g}, alpha {ALPHA}, lambda {LAM}. Both start from
the same model.

Replaced in memory: the data and the model; calls of CUDA; the choice of clients, so that both have the same cohorts.
Deviations of their code, in the list of our method: it adds the cosine (ours with `regulariser: away`; *near* is theirs
with a negative lambda), and a client's term has the sum of W_ij theta_j / ||theta_j|| (*sums of unit models*), here
else the direction of the aggregate as ours. Ours has `sketch` above the size of the model here, so that it compares
whole models, except in the last run. *Last layer*: `difference: head`; theirs, `fc`, compares all layers with `fc` in
their name, which is the last one alone in this model.

An error of theirs: with a sampled cohort it stops with a KeyError in the second round, at a client that was not in the
first. Here such a client has no term, and starts as in ours from the mean of the last round's models; one that has
taken part keeps its last aggregate, in both.

Distance: between the weights of a client's aggregate in the two codes (of the mean, before a client's first round),
relative to their distance from the initial models; the largest of the clients. *Rounding*: the larger distance of
theirs from itself, in two runs whose first weights differ by 1e-7 of their size, at random. *Graph*: the largest
difference of a weight W_ij of the round.
"""


def section(checkout: Path, commit: str) -> str:
    rows = [["run", "seed", "round", "distance", "rounding", "graph", *runs.HEAD[2:]]]
    for name, how in RUNS.items():
        for seed in SEEDS:
            data, start_P = clients(seed), runs.first_weights(MODEL, 10, seed)
            cohorts = runs.cohorts(CLIENTS, seed, how.fraction, KEPT[-1])
            a, b = theirs(checkout, data, start_P, how, cohorts), ours(data, seed, how)
            others = [theirs(checkout, data, row_P, how, cohorts).course for row_P in rounded(start_P)]
            for t in KEPT:
                rounding = f"{max(distance(a.course, other, start_P, t) for other in others):.1e}"
                round, apart, *accuracy = compared(a.course, b.course, start_P, t)
                graph = f"{abs(a.graph[t] - b.graph[t]).max():.1e}"
                rows.append([name, str(seed), round, apart, rounding, graph, *accuracy])
    return "\n".join([HEAD.replace("COMMIT", commit), *table(*rows)])
