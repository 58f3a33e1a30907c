"""FL+HC: C. Briggs, Z. Fan, P. Andras. Federated Learning with Hierarchical Clustering of Local Updates to Improve Training on
Non-IID Data. IJCNN 2020, arXiv:2004.11791, Algorithm 1.

    w_{t+1} <- Avg(SGD_i(w_t))                               rounds before `cluster_round`: FedAvg
    Delta_i <- SGD_i(w) - w                                  in that round: every client online
    agglomerate the Delta_i until the next merge is higher than the threshold;   theta_k <- Avg of W_i over the cluster
    theta_k <- Avg of SGD_i(theta_k) over the cluster's participants                            later rounds

The clustering round needs every client: who cannot be reached in it is placed when it first takes part, as newcomers are, and predicts with
that round's w until then.

Departures: the threshold is not published; the default cuts in the largest gap of merge heights. Updates longer than `sketch` are
projected (not for L1). Newcomers (none in the paper) train from the w of the clustering round and join the nearest mean update.
"""

from dataclasses import dataclass

from cfl_ray.core.grouping import by_cluster, everyone
from cfl_ray.core.hierarchy import distances
from cfl_ray.core.merging import cluster_means
from cfl_ray.core.method import Method, option, weighting
from cfl_ray.core.rounds import fedavg_per_cluster, serve_per_cluster
from cfl_ray.core.signatures import CentreState, placed_by_training, sketching, unplaced, update_of
from cfl_ray.core.treecut import TreeCut


@dataclass(frozen=True)
class FLHC(TreeCut, Method, name="fl_hc"):
    """Some rounds of FedAvg, one hierarchical clustering of all clients' updates, then FedAvg per cluster."""

    cluster_round: int = option(5, "the round in which all clients are clustered (n + 1)", source="AutoCFL's comparison", low=1)
    metric: str = option("l2", "distance between updates: L1, L2 or cosine", source="paper", choices=("l1", "l2", "cosine"))
    cut: str = option("gap", "without threshold and num_clusters: in the largest gap of the last 20 merge heights, or at half the median distance", source="ours: the threshold is not published", choices=("median", "gap"))
    model: str = option("mean", "what a cluster starts from: the mean of its members' models, or the common w", source="paper", choices=("mean", "common"))
    sketch: int = sketching()
    weights: str = weighting()

    State = CentreState

    def __post_init__(self):
        super().__post_init__()
        if self.linkage == "ward" and self.metric != "l2":
            raise ValueError(f"fl_hc.linkage ward is defined for metric l2 only, got {self.metric!r}; choose another of the two")

    def init(self, start):
        first_KP = start.new_model(0)[None]
        return CentreState(models_KP=first_KP, assign_N=start.unassigned(), phase="warmup", start_KP=first_KP, centre_KF=first_KP[:0])

    def round(self, state, clients, rng):
        if state.phase == "federate":
            return fedavg_per_cluster(self.join(state, unplaced(state, clients)), clients, self.weights)
        if clients.number >= self.cluster_round:
            return self.cluster(state, clients.all())
        updates = clients.train(clients.send(state.models_KP), mix=everyone(clients.weights(self.weights)))
        return state.advance(models_KP=updates.mixed(empty=state.models_KP))

    def cluster(self, state, clients):
        updates = clients.train(clients.send(state.models_KP), keep=self.signature(clients), mix_later=True)
        ok_M = updates.ok_M
        if not ok_M.any():
            return state
        feature_MF = updates.sound_MF
        found = self.clusters(distances(feature_MF, self.metric), len(feature_MF))
        centre_KF, _ = cluster_means(feature_MF, found, found.max() + 1)
        assign_N = state.place(clients.ids_M[ok_M], found)
        models_KP = state.models_KP.repeat(len(centre_KF), 1)
        if self.model == "mean":
            mix = by_cluster(assign_N[clients.ids_M], clients.weights(self.weights), len(centre_KF))
            models_KP = clients.mix(updates, mix).mixed(empty=models_KP)
        return state.advance(models_KP=models_KP, assign_N=assign_N, start_KP=state.models_KP, centre_KF=centre_KF, phase="federate")

    def signature(self, clients):
        return update_of(clients.spec, None if self.metric == "l1" else self.sketch)

    def join(self, state, clients):
        if state.phase == "warmup":
            return state
        return placed_by_training(state, clients, self.signature(clients), self.metric)

    def serve(self, state, clients):
        return serve_per_cluster(state, clients, state.models_KP if state.phase == "warmup" else state.start_KP)
