"""IFCA: A. Ghosh, J. Chung, D. Yin, K. Ramchandran. An Efficient Framework for Clustered Federated Learning. NeurIPS 2020,
arXiv:2006.04088, Algorithm 1, model averaging.

    j_i <- argmin_j f_i(theta_j)                   each client, on its training data, among the K models it received
    W_i <- SGD_i(theta_{j_i})
    theta_j <- mean of W_i over the clients that chose j; a model that nobody chose stays

The K models start from independent initialisations: equal ones could never separate.

Departures: none. Ties go to the lowest j.
"""

from dataclasses import dataclass

import torch

from cfl_ray.core.grouping import by_cluster
from cfl_ray.core.method import Method, option
from cfl_ray.core.serving import Serving
from cfl_ray.core.state import State


@dataclass(frozen=True)
class IFCA(Method, name="ifca"):
    """K models; in every round each client trains the one that fits its data best."""

    num_clusters: int = option(4, "K, number of cluster models", low=1)
    weights: str = option("samples", "weight of a client in its cluster's average: its samples n_i, or the same for all", choices=("samples", "uniform"))
    select_samples: int | None = option(None, "training samples on which a client compares the models; null: all of them", low=1)

    def init(self, start):
        models_KP = torch.stack([start.new_model(k) for k in range(self.num_clusters)])
        return State(models_KP=models_KP, assign_N=start.unassigned())

    def round(self, state, clients, rng):
        sent = clients.broadcast(state.models_KP)
        assign_M = self.choose(clients, sent)
        clients.upload(1)  # j_i
        mix = by_cluster(assign_M, clients.weights(self.weights), self.num_clusters)
        updates = clients.train(sent.choose(assign_M), mix=mix)
        return state.advance(models_KP=updates.mixed(empty=state.models_KP), assign_N=state.place(clients.ids_M, assign_M))

    def choose(self, clients, sent):
        return clients.losses(sent, max_samples=self.select_samples).argmin(1)

    def serve(self, state, clients):
        return Serving(state.models_KP, self.choose(clients, clients.known(state.models_KP)))
