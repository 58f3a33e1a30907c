"""FL+HC: C. Briggs, Z. Fan, P. Andras. Federated Learning with Hierarchical Clustering of Local Updates to Improve
Training on Non-IID Data. IJCNN 2020, arXiv:2004.11791, Algorithm 1.

    w_{t+1} <- Avg(SGD_i(w_t))                               rounds before `cluster_round`: FedAvg
    Delta_i <- SGD_i(w) - w                                  in that round: every client online
    agglomerate the Delta_i until the next merge is higher than the threshold;   theta_k <- Avg of W_i over the cluster
    theta_k <- Avg of SGD_i(theta_k) over the cluster's participants                            later rounds

The clustering round needs every client. A client that cannot be reached in it is placed as a newcomer when it first
takes part, and predicts with that round's w until then.

Deviations: the threshold is not published. By default the tree is cut into the clusters with the largest mean
silhouette, as for FedClust; the groups are the same with updates as with heads. `cut: gap` splits IID data into two
clusters. Updates longer than `sketch` are projected (not for L1). Newcomers (none in the paper) train from the w of the
clustering round and join the cluster with the nearest mean update.
"""

from dataclasses import dataclass

from cfl_ray.clustering.agglomerative import distances
from cfl_ray.clustering.merging import cluster_means
from cfl_ray.clustering.signature_diagnostics import record_signatures
from cfl_ray.clustering.signatures import CentreState, place_by_training, sketch_option, unplaced, whole_update
from cfl_ray.clustering.tree_cut import TreeCut
from cfl_ray.core.clients import Clients, UpdateFeatures
from cfl_ray.core.method import Method, Start, option, weights_option
from cfl_ray.core.rng import Draws
from cfl_ray.core.rounds import fedavg_per_cluster, serve_per_cluster
from cfl_ray.core.serving import Serving
from cfl_ray.core.weights import cluster_weights


@dataclass(frozen=True)
class FLHC(TreeCut, Method[CentreState], name="fl_hc"):
    """Some rounds of FedAvg, a single hierarchical clustering of all clients' updates, then FedAvg per cluster."""

    compares = "reachable"
    placement = "the cluster with the nearest update, by a local training from the model before clustering"
    without_cluster = "the model before clustering"
    phases = {"warmup": ("federate",), "federate": ()}

    cluster_round: int = option(
        5, "the round in which all clients are clustered (n + 1)", source="AutoCFL's comparison", low=1
    )
    metric: str = option(
        "l2", "distance between updates: L1, L2 or cosine", source="paper", choices=("l1", "l2", "cosine")
    )
    model: str = option(
        "mean",
        "model from which a cluster starts: the mean of its members' models, or the common w",
        source="paper",
        choices=("mean", "common"),
    )
    sketch: int = sketch_option()
    weights: str = weights_option()

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.linkage == "ward" and self.metric != "l2":
            raise ValueError(
                f"fl_hc.linkage ward is defined for metric l2 only, got {self.metric!r}; choose another of the two"
            )

    def init(self, start: Start) -> CentreState:
        return CentreState.first(start, "warmup", models=1)

    def round(self, state: CentreState, clients: Clients, rng: Draws) -> CentreState:
        # later rounds: FedAvg within every cluster
        if state.phase == "federate":
            return fedavg_per_cluster(self.join(state, unplaced(state, clients)), clients, self.weights)
        # the clustering round
        if clients.round >= self.cluster_round:
            return self.cluster(state, clients.all_reachable())
        # earlier rounds: FedAvg
        updates = clients.train(clients.send(state.models_KP), average=clients.weights(self.weights))
        return state.advance(models_KP=updates.averaged(default=state.models_KP))

    def cluster(self, state: CentreState, clients: Clients) -> CentreState:
        """The state after the clustering round with these clients; unchanged if no update is valid."""
        # Delta_i <- SGD_i(w) - w
        updates = clients.train(
            clients.send(state.models_KP), features=self.update_features(clients), defer_aggregation=True
        )
        valid_M = updates.valid_M
        if not valid_M.any():
            return state

        # agglomerate the Delta_i
        feature_MF = updates.valid_features_MF
        distance = distances(feature_MF, self.metric)
        clients.record("distance", distance, ("clients", "clients"), ids=clients.ids_M[valid_M])
        record_signatures(clients, clients.ids_M[valid_M], feature_MF)
        cut = self.cut_tree(distance, len(feature_MF))
        cluster_M = cut.cluster_S
        centre_KF, _ = cluster_means(feature_MF, cluster_M, cluster_M.max() + 1)
        assign_N = state.place(clients.ids_M[valid_M], cluster_M)

        # theta_k <- Avg of W_i over the cluster
        models_KP = state.models_KP.repeat(len(centre_KF), 1)
        if self.model == "mean":
            weight_KM = cluster_weights(assign_N[clients.ids_M], clients.weights(self.weights), len(centre_KF))
            models_KP = clients.average(updates, weight_KM).averaged(default=models_KP)
        clients.event("birth", into=range(len(centre_KF)), because=cut.because)
        return state.clustered(clients, state.models_KP, models_KP, assign_N, centre_KF)

    def update_features(self, clients: Clients) -> UpdateFeatures:
        """Delta_i, not projected for L1: a projection does not keep L1 distances."""
        return whole_update(clients.spec, None if self.metric == "l1" else self.sketch)

    def join(self, state: CentreState, clients: Clients) -> CentreState:
        return place_by_training(state, clients, self.update_features(clients), self.metric)

    def serve(self, state: CentreState, clients: Clients) -> Serving:
        return serve_per_cluster(state, clients, state.models_KP if state.phase == "warmup" else state.start_KP)
