"""Rounds that several methods have in common."""

import numpy as np
import torch
from torch import Tensor

from cfl_ray.core.clients import Clients, Pull
from cfl_ray.core.grouping import by_cluster, everyone
from cfl_ray.core.serving import Serving
from cfl_ray.core.state import UNKNOWN, State


def fedavg_per_cluster(state: State, clients: Clients, weights: str, steps_M: np.ndarray | None = None) -> State:
    """FedAvg within every cluster. Clients without a cluster sit the round out, and a cluster without participants keeps its model."""
    known_M = state.assign_N[clients.ids_M] != UNKNOWN
    clients, steps_M = clients.select(known_M), None if steps_M is None else steps_M[known_M]
    assign_M = state.assign_N[clients.ids_M]
    mix = by_cluster(assign_M, clients.weights(weights), state.num_clusters)
    updates = clients.train(clients.send(state.models_KP, assign_M), mix=mix, steps_M=steps_M)
    return state.advance(models_KP=updates.mixed(empty=state.models_KP))


def with_mean(models_KP: Tensor) -> Tensor:
    """The models and, as the last of (K + 1, P) rows, their mean, members or not: for clients of which nothing is known."""
    return torch.cat([models_KP, models_KP.mean(0, keepdim=True)])


def row_or_last(state: State, clients: Clients) -> np.ndarray:
    """Cluster (M,) of each client; K for a client without one."""
    row_M = state.assign_N[clients.ids_M].astype(np.int64)
    return np.where(row_M == UNKNOWN, state.num_clusters, row_M)


def serve_per_cluster(state: State, clients: Clients, other_KP: Tensor | None = None) -> Serving:
    """The model of the client's cluster; for a client without one the row of `other_KP`, or the mean of all cluster models."""
    models_KP = with_mean(state.models_KP) if other_KP is None else torch.cat([state.models_KP, other_KP])
    return Serving(models_KP, row_or_last(state, clients))


def fedavg_each(state: State, clients: Clients, weights: str, mu: float = 0.0) -> State:
    """FedAvg (FedProx with `mu`) of every model on its own, all by the same clients; the first is what a client holds afterwards."""
    sent, mix = clients.broadcast(state.models_KP), everyone(clients.weights(weights))
    rows = []
    for k in range(state.num_clusters):
        mine = sent.choose(np.full(len(clients), k))
        updates = clients.train(mine, pulls=[Pull(mu, mine)], mix=mix, held=k == 0)
        rows.append(updates.mixed(empty=state.models_KP[k : k + 1]))
    return state.advance(models_KP=torch.cat(rows))
