"""FedClust: M. S. Islam, S. Javaherian, F. Xu, X. Yuan, L. Chen, N.-F. Tzeng. FedClust: Tackling Data Heterogeneity in
Federated Learning through Weight-Driven Client Clustering. ICPP 2024, arXiv:2407.07124, Algorithm 1.

    s_i <- final layer of SGD_i(w_0)                        first round: every client online, once
    M_pq = ||s_p - s_q||_2;   agglomerate until the next merge is higher than lambda
    W_i <- SGD_i(theta_{c(i)});   theta_k <- Avg of W_i over the cluster's participants
                                                            later rounds, from theta_k = w_0

A newcomer trains from w_0 and joins the cluster with the nearest mean signature of the first round. With
`newcomers: found` it becomes a new cluster if that distance is above lambda. The first round needs every client; a
client that cannot be reached in it is later treated as a newcomer.

Deviations: the paper leaves linkage and lambda open. Linkage is average, and lambda the highest merge of the cut with
the largest mean silhouette; if no silhouette is above 0.25, all clients form a single cluster. The first round counts
as a round, with its traffic. A newcomer is compared with first-round signatures ("stored partial weights"), not with
trained heads. `layer` selects another layer than the last as s_i, to show the effect of this choice (Fig. 1).

Clusters and adjusted Rand index by the default cut (with its mean silhouette), and by half the median distance (`cut:
median`), with LeNet-5 on Fashion-MNIST, 1 to 3 local epochs of batch 10 (3,000 images: 50), eta 0.01, momentum 0.5:

    clients, images each                         distance within, between groups    silhouette        median
    100 of two labels, 38 label sets             0.11, 1.00                         39, 0.99 (0.79)   39, 0.99
    40, 600, four label groups                   0.10, 1.04                         4, 1.00 (0.90)    4, 1.00
    40, 600, labels shifted by 0, 3, 6, 9                                           4, 1.00 (0.58)    5, 0.97
    60, 3,000, rotated by 0, 180, 270            0.03, 0.10                         3, 1.00 (0.63)    4, 0.98
    60, 600, rotated by 0, 180, 270, seed 0      0.07, 0.12                         3, 1.00 (0.33)    38, 0.07
        seeds 1, 2                                                                  2, 0.56; 2, 0.00  41, 0.06; 49, 0.03
    40, 600, rotated by 0, 180                   0.16, 0.34                         2, 1.00 (0.54)    13, 0.26
    40, 600, rotated by 0, 90, 180, 270          0.15, 0.36                         3, 0.70 (0.50)    7, 0.90
    60, 600, IID, seeds 0, 1, 2                                                     1, 1, 2 (<= 0.26) 60, 59, 52
    100, Dirichlet 0.1                                                              2 (0.27)          58
    40, IID, six each with 10, 30, 60 % of 1,000                                    2 (0.63)          21

In these cases the heads do not separate the groups. After one epoch on 600 images, with two of three seeds, no cut of
the tree has the three rotations (the best ARI are 0.90 and 0.55). Two of the four rotations are 0.25 apart, and the cut
into 3 is as good as the cut into 4 (ARI 0.70 with three seeds). Dirichlet skew has no groups. Clients with a tenth of
the others' samples train fewer steps, so that on IID data their heads form a separate cluster. In such cases set
`threshold` or `num_clusters`.
"""

import math
from dataclasses import dataclass

from cfl_ray.clustering.agglomerative import distances
from cfl_ray.clustering.merging import cluster_means
from cfl_ray.clustering.signature_diagnostics import record_signatures
from cfl_ray.clustering.signatures import CentreState, place_by_training, unplaced
from cfl_ray.clustering.tree_cut import TreeCut
from cfl_ray.core.clients import Clients
from cfl_ray.core.method import Method, Start, option, weights_option
from cfl_ray.core.params import Columns, ParamSpec
from cfl_ray.core.rng import Draws
from cfl_ray.core.rounds import fedavg_per_cluster, serve_per_cluster
from cfl_ray.core.serving import Serving
from cfl_ray.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class FedClustState(CentreState):
    """The mean s_i of every cluster as its centre, and the lambda at which the tree was cut."""

    height: float | None = None  # lambda of the first round; None: the cut was by another rule


@dataclass(frozen=True)
class FedClust(TreeCut, Method[FedClustState], name="fedclust"):
    """One-shot hierarchical clustering of the clients' classifier weights, then FedAvg per cluster."""

    compares = "reachable"
    placement = "the cluster with the nearest final layer, by a local training from the first model"
    without_cluster = "the first model"
    phases = {"cluster": ("federate",), "federate": ()}

    newcomers: str = option(
        "join",
        "join: a newcomer always joins the nearest cluster; found: it becomes a new cluster if the nearest is further "
        "than lambda (of the first round, if its cut has a lambda)",
        source="paper",
        choices=("join", "found"),
    )
    layer: int | None = option(
        None,
        "layer by whose weights and biases clients are compared: 1 is the model's first layer with trained "
        "parameters (a normalisation counts); null: the last layer",
        source="paper; others: Fig. 1",
        low=1,
    )
    weights: str = weights_option()

    def check_model(self, spec: ParamSpec) -> None:
        if self.layer is not None and self.layer > len(spec.layers):
            raise ConfigError(
                f"{self.name}.layer must be in 1 .. {len(spec.layers)}, the layers of this model with trained "
                f"parameters, got {self.layer}"
            )

    def compared(self, spec: ParamSpec) -> Columns:
        """The columns of s_i."""
        layer = spec.head if self.layer is None else spec.layer(self.layer)
        return layer.within(0, spec.trained)  # without the statistics of a normalisation

    def init(self, start: Start) -> FedClustState:
        return FedClustState.first(start, "cluster", models=0)

    def round(self, state: FedClustState, clients: Clients, rng: Draws) -> FedClustState:
        if state.phase == "cluster":
            return self.cluster(state, clients.all_reachable())
        state = self.join(state, unplaced(state, clients))
        return fedavg_per_cluster(state, clients, self.weights)

    def cluster(self, state: FedClustState, clients: Clients) -> FedClustState:
        """The state with clusters by the clients' final layers, or `layer`, all with the model w_0."""
        # s_i <- final layer of SGD_i(w_0)
        updates = clients.train(clients.send(state.start_KP), features=self.compared(clients.spec))
        ids_M, layer_MF = clients.ids_M[updates.valid_M], updates.valid_features_MF
        if not len(ids_M):
            return state
        # agglomerate until the next merge is higher than lambda
        distance = distances(layer_MF, "l2")
        clients.record("distance", distance, ("clients", "clients"), ids=ids_M)
        record_signatures(clients, ids_M, layer_MF)
        cut = self.cut_tree(distance, len(ids_M))
        cluster_M = cut.cluster_S
        centre_KF, _ = cluster_means(layer_MF, cluster_M, cluster_M.max() + 1)
        models_KP, assign_N = state.start_KP.repeat(len(centre_KF), 1), state.place(ids_M, cluster_M)
        clients.event("birth", into=range(len(centre_KF)), because=cut.because)
        state = state.clustered(clients, state.start_KP, models_KP, assign_N, centre_KF)
        return state.advance(height=cut.height)

    def join(self, state: FedClustState, clients: Clients) -> FedClustState:
        within = math.inf if self.newcomers == "join" or state.height is None else state.height
        return place_by_training(state, clients, self.compared(clients.spec), "l2", within=within)

    def serve(self, state: FedClustState, clients: Clients) -> Serving:
        return serve_per_cluster(state, clients, state.start_KP)
