"""Rounds, placement, serving and diagnostics shared by several methods."""

from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from cfl_ray.core.clients import Clients, LocalTraining, Proximal
from cfl_ray.core.serving import Serving
from cfl_ray.core.state import UNASSIGNED, State
from cfl_ray.core.weights import cluster_weights

S = TypeVar("S", bound=State)


def fedavg_per_cluster(state: S, clients: Clients, weights: str, steps_M: np.ndarray | None = None) -> S:
    """One round of FedAvg within every cluster.

    Clients without a cluster do not take part, and a cluster without participants keeps its model.

    weights: "samples" or "uniform", as `Clients.weights`. steps_M: local steps of each client; None: as `local` says.
    """
    known_M = state.assign_N[clients.ids_M] != UNASSIGNED
    clients, steps_M = clients.select(known_M), None if steps_M is None else steps_M[known_M]
    assign_M = state.assign_N[clients.ids_M]
    weight_KM = cluster_weights(assign_M, clients.weights(weights), state.num_clusters)
    start = clients.send(state.models_KP, assign_M)
    updates = clients.train(start, how=LocalTraining(steps_M=steps_M), average=weight_KM)
    return state.advance(models_KP=updates.averaged(default=state.models_KP))


def fedavg_each(state: S, clients: Clients, weights: str, mu: float = 0.0) -> S:
    """One round of FedAvg (FedProx with `mu`) of each model separately; every client trains all models.

    P-local measures the first model.
    """
    sent, weight_M = clients.broadcast(state.models_KP), clients.weights(weights)
    rows = []
    for k in range(state.num_clusters):
        start = sent.choose(np.full(len(clients), k))
        how = LocalTraining(proximal=[Proximal(mu, start)])
        updates = clients.train(start, how=how, average=weight_M, keep_as_local_model=k == 0)
        rows.append(updates.averaged(default=state.models_KP[k : k + 1]))
    return state.advance(models_KP=torch.cat(rows))


def place_by_loss(state: S, clients: Clients) -> S:
    """Assigns the clients without a cluster to the cluster whose model has the least loss on their training samples.

    Each of them receives all models and uploads its choice. A client with invalid data stays without a cluster. With a
    single model there is no choice, and all stay without a cluster.
    """
    clients = clients.select(state.assign_N[clients.ids_M] == UNASSIGNED)
    if state.num_clusters < 2 or not len(clients):
        return state
    chosen_M = clients.choose(clients.broadcast(state.models_KP), upload=True)
    return placed(state, clients, clients.ids_M, chosen_M, clients=len(clients))


def placed(state: S, clients: Clients, ids_M: np.ndarray, assign_M: np.ndarray, /, **because: Any) -> S:
    """The state with these clients in these clusters. Reports births and deaths as `Clients.member_events`."""
    after = state.advance(assign_N=state.place(ids_M, assign_M))
    clients.member_events(state.members_K, after.members_K, **because)
    return after


def place_in_any(state: S, clients: Clients) -> S:
    """As `place_by_loss`, except that all join the cluster of a single model."""
    if state.num_clusters > 1:
        return place_by_loss(state, clients)
    return state.advance(assign_N=state.place(clients.ids_M, 0))


def with_mean(models_KP: Tensor) -> Tensor:
    """The models and their unweighted mean as a last row, (K + 1, P); the mean is for clients without a cluster."""
    return torch.cat([models_KP, models_KP.mean(0, keepdim=True)])


def row_or_last(state: State, clients: Clients) -> np.ndarray:
    """Cluster of each client, int64 (M,); K for a client without a cluster."""
    row_M = state.assign_N[clients.ids_M].astype(np.int64)
    return np.where(row_M == UNASSIGNED, state.num_clusters, row_M)


def serve_per_cluster(state: State, clients: Clients, other_KP: Tensor | None = None) -> Serving:
    """Each client predicts with the model of its cluster.

    other_KP: model (1, P) of clients without a cluster; None: the mean of all cluster models, or the only one.
    """
    if other_KP is None and state.num_clusters == 1:
        return Serving(state.models_KP, clients.first_row())
    models_KP = with_mean(state.models_KP) if other_KP is None else torch.cat([state.models_KP, other_KP])
    return Serving(models_KP, row_or_last(state, clients))


def record_global_score(clients: Clients, model_KP: Tensor) -> None:
    """Records the diagnostic `global_score`: the mean test score of one model, (1, P), over the clients."""
    score_M = clients.test(Serving(model_KP, clients.first_row()))[:, 0]
    if not np.isnan(score_M).all():
        clients.record("global_score", np.nanmean(score_M))
