"""FedClust: M. S. Islam, S. Javaherian, F. Xu, X. Yuan, L. Chen, N.-F. Tzeng. FedClust: Tackling Data Heterogeneity in Federated
Learning through Weight-Driven Client Clustering. ICPP 2024, arXiv:2407.07124, Algorithm 1.

    s_i <- final layer of SGD_i(w_0)                          first round: every client online, once
    M_pq = ||s_p - s_q||_2;   agglomerate until the next merge is higher than lambda
    W_i <- SGD_i(theta_{c(i)});   theta_k <- Avg of W_i over the cluster's participants         later rounds, from theta_k = w_0

A newcomer trains from w_0 and joins the cluster whose mean signature of the first round is nearest, or with `newcomers: found` founds
one where that is further than lambda. The first round needs every client: who cannot be reached in it is a newcomer later.

Departures: average linkage and lambda of half the median distance where the paper leaves both open. The first round counts as a
round and its traffic is booked. A newcomer is compared with first-round signatures ("stored partial weights"), not with trained heads.
"""

import math
from dataclasses import dataclass

from cfl_ray.core.clients import Keep
from cfl_ray.core.hierarchy import distances
from cfl_ray.core.merging import cluster_means
from cfl_ray.core.method import Method, option, weighting
from cfl_ray.core.rounds import fedavg_per_cluster, serve_per_cluster
from cfl_ray.core.signatures import CentreState, placed_by_training, unplaced
from cfl_ray.core.treecut import TreeCut


@dataclass(frozen=True)
class FedClustState(CentreState):
    height: float | None = None  # lambda of the first round; None: the number of clusters decided


@dataclass(frozen=True)
class FedClust(TreeCut, Method, name="fedclust"):
    """One-shot hierarchical clustering of the clients' classifier weights, then FedAvg per cluster."""

    newcomers: str = option("join", "a newcomer always joins the nearest cluster, or founds one if that is further than lambda (of the first round, if its cut has one)", source="paper", choices=("join", "found"))
    weights: str = weighting()

    State = FedClustState

    def init(self, start):
        first_KP = start.new_model(0)[None]
        return FedClustState(models_KP=first_KP[:0], assign_N=start.unassigned(), phase="cluster", start_KP=first_KP, centre_KF=first_KP[:0])

    def round(self, state, clients, rng):
        if state.phase == "cluster":
            return self.cluster(state, clients.all())
        state = self.join(state, unplaced(state, clients))
        return fedavg_per_cluster(state, clients, self.weights)

    def cluster(self, state, clients):
        updates = clients.train(clients.send(state.start_KP), keep=clients.spec.head)
        ids_M, head_MF = clients.ids_M[updates.ok_M], updates.sound_MF
        if not len(ids_M):
            return state
        distance = distances(head_MF, "l2")
        assign_M = self.clusters(distance, len(ids_M))
        centre_KF, _ = cluster_means(head_MF, assign_M, assign_M.max() + 1)
        models_KP = state.start_KP.repeat(len(centre_KF), 1)
        assign_N, height = state.place(ids_M, assign_M), self.height(distance)
        return state.advance(models_KP=models_KP, assign_N=assign_N, centre_KF=centre_KF, height=height, phase="federate")

    def join(self, state, clients):
        if state.phase == "cluster":
            return state
        within = math.inf if self.newcomers == "join" or state.height is None else state.height
        return placed_by_training(state, clients, Keep(clients.spec.head), "l2", within=within)

    def serve(self, state, clients):
        return serve_per_cluster(state, clients, state.start_KP)
