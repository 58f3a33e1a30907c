"""FedAC: Y. Zhang, H. Chen, Z. Lin, Z. Chen, J. Zhao. FedAC: An Adaptive Clustered Federated Learning Framework for Heterogeneous Data.
arXiv:2403.16460. The equations are reconstructed; the authors' LCFed (ICASSP 2025) confirms their form.

    min sum_i f_i(omega_i) + (mu / 2) ||omega_i - Omega_{r(i)}||^2 + (lambda / 2) ||phi_i - Phi||^2        phi: all but the last layer
    omega_i <- SGD of that from the client's own omega_i (`start: global`: from Phi and its own last layer)     it stays with the client
    Phi <- mean of phi_i;   Omega_k <- mean of omega_i over r(i) = k;   r(i) <- argmax_k cos(z_i, z_k)        z = M^T (omega - mean)
    M <- q leading principal components of up to 100 uploads                    in the first round, then every 100 rounds
    CNT: rho_k = mean cosine distance of members to z_k / distance of z_k to the nearest other centre; split if > rho_hi, merge if < rho_lo

In the first round clients train from one w_0 and k-means of z gives the centres.

Departures: all numeric settings are lost; the defaults are ours. PCA is done by the server on centred uploads, so that M is never sent.
CNT takes one step in 10 rounds, after round 20. It splits no cluster with fewer than 4 remembered members, nor one of whose halves has no
participant, and merges none with 4 members: the further clusters are apart, the lower is rho. The E-step after a split is the next
round's. A client never seen trains from Phi and the mean head; `start: global` suits few rounds. Longer uploads are projected (`sketch`).
"""

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from cfl_ray.core.clients import Keep, Own, Pull
from cfl_ray.core.grouping import by_cluster, everyone
from cfl_ray.core.hierarchy import nearest
from cfl_ray.core.kmeans import kmeans
from cfl_ray.core.method import Method, option, weighting
from cfl_ray.core.rounds import row_or_last, with_mean
from cfl_ray.core.serving import Serving
from cfl_ray.core.signatures import SignatureState, sketching
from cfl_ray.core.tuning import ClusterTuning, compactness, merged_into, split_in_two


@dataclass(frozen=True)
class FedACState(SignatureState):
    """`signature_SF` holds the latest uploads of the clients heard last."""

    global_KP: Tensor = None  # Phi in a whole row (1, P)
    mean_F: Tensor = None  # of the uploads that M was made of
    basis_FQ: Tensor = None  # M

    def z(self, feature_MF: Tensor) -> Tensor:
        """Low-rank representation (M, q)."""
        return (feature_MF - self.mean_F) @ self.basis_FQ


@dataclass(frozen=True)
class FedAC(ClusterTuning, Method, name="fedac"):
    """Personal models between their cluster's model and a global embedding; clusters found in a low-rank space, their number adapted."""

    num_clusters: int = option(5, "K_0, clusters at first", source="ours: lost", low=1)
    mu: float = option(0.1, "mu: pull to the cluster model (grid 0.01, 0.1, 1)", source="ours: lost", low=0)
    lam: float = option(0.1, "lambda: pull of the embedding to the global one (grid 0.01, 0.1, 1)", source="ours: lost", low=0)
    start: str = option("own", "where the embedding starts: at the client's own, or at the global one Phi", source="paper", choices=("own", "global"))
    rank: int = option(20, "q: principal components", source="ours: lost", low=1)
    pca_every: int = option(100, "rounds between two PCAs", source="paper", low=1)
    memory: int = option(100, "latest uploads that PCA and CNT see", source="paper: 50 to 100", low=4)
    sketch: int = sketching()
    weights: str = weighting("uniform")

    State = FedACState

    def init(self, start):
        first_KP, size = start.new_model(0)[None], self.keep(start.spec).count
        return FedACState(
            models_KP=first_KP, assign_N=start.unassigned(), phase="cluster", global_KP=first_KP, **FedACState.nobody(size),
            mean_F=torch.zeros(size), basis_FQ=torch.zeros(size, 0),
        )  # fmt: skip

    def round(self, state, clients, rng):
        weight_M, base, own = clients.weights(self.weights), clients.spec.base, self.personal(clients.spec)
        sent = clients.send(self.contexts(state, clients.spec), row_or_last(state, clients))
        pulls = [Pull(self.mu, sent), Pull(self.lam, clients.send(state.global_KP, columns=base), base)]
        start = replace(sent, models_KP=self.starts(state, clients.spec))
        updates = clients.train(start, own=own, pulls=pulls, keep=self.keep(clients.spec), mix=everyone(weight_M), mix_later=True)
        if not updates.ok_M.any():
            return state
        ids_M, upload_MF = clients.ids_M[updates.ok_M], updates.sound_MF
        state = self.heard(state, ids_M, upload_MF, rng).advance(global_KP=updates.mixed(empty=state.global_KP))
        if state.phase == "cluster" or clients.number % self.pca_every == 0:
            state = self.components(state)
        if state.phase == "cluster":
            found, centres = kmeans(state.z(upload_MF), self.num_clusters, rng.seed, cosine=True)
            state = state.advance(models_KP=state.models_KP.repeat(len(centres), 1), assign_N=state.place(ids_M, found), phase="federate")
        mix = by_cluster(state.assign_N[clients.ids_M], weight_M, state.num_clusters)
        state = state.advance(models_KP=clients.mix(updates, mix).mixed(empty=state.models_KP))
        state = self.expect(state, clients, ids_M, upload_MF)
        return self.tuned(state, clients, updates) if self.due(clients.number) else state

    def keep(self, spec):
        return Keep(spec.trainable, sketch=self.sketch)

    def heard(self, state, ids_M, upload_MF, rng):
        """With these uploads as the latest, in drawn order: where there is no room for all of one round, chance decides."""
        order_M = rng.stream("memory").permutation(len(ids_M))
        state = state.only(~np.isin(state.seen_S, ids_M)).remember(ids_M[order_M], upload_MF[torch.from_numpy(order_M)])
        return state.only(np.arange(len(state.seen_S)) >= len(state.seen_S) - self.memory)

    def components(self, state):
        """M from the latest uploads."""
        from sklearn.decomposition import PCA

        pca = PCA(max(min(self.rank, len(state.seen_S) - 1, len(state.mean_F)), 1), svd_solver="full").fit(state.signature_SF.numpy())
        return state.advance(mean_F=state.signature_SF.mean(0), basis_FQ=torch.from_numpy(pca.components_.T.copy()).float())

    def centres(self, state, clients):
        return state.z(self.keep(clients.spec).features(state.models_KP, clients.seed))

    def expect(self, state, clients, ids_M, upload_MF):
        """E-step: the cluster with the highest cosine in the low-rank space."""
        return state.advance(assign_N=state.place(ids_M, nearest(state.z(upload_MF), self.centres(state, clients), "cosine")[0]))

    def tuned(self, state, clients, updates):
        """CNT: one split or one merge at most."""
        z_SQ = state.z(state.signature_SF)
        rho_K, nearest_K, known_K = compactness(z_SQ, state.cluster_S, self.centres(state, clients))
        split, merge = self.step(rho_K, known_K, state.members_K)
        if split is not None:
            return split_in_two(state, split, z_SQ, state.z(updates.sound_MF), clients, updates, clients.weights(self.weights))
        return state if merge is None else merged_into(state, merge, nearest_K[merge])

    def contexts(self, state, spec):
        """Omega_1 .. Omega_K and, last, Phi with the mean head, for clients that were never seen."""
        models_KP = with_mean(state.models_KP)
        spec.base.put(models_KP[-1:], spec.base.of(state.global_KP))
        return models_KP

    def starts(self, state, spec):
        """The contexts, with the embedding that a client starts from."""
        models_KP = self.contexts(state, spec)
        if self.start == "global":
            spec.base.put(models_KP, spec.base.of(state.global_KP))
        return models_KP

    def personal(self, spec):
        """What of omega_i a client goes on from."""
        return Own("personal", None if self.start == "own" else spec.head, private=False)

    def join(self, state, clients):
        """Newcomers train once as a client that was never seen, and join the cluster with the highest cosine."""
        if state.phase == "cluster":
            return state
        sent = clients.send(self.contexts(state, clients.spec)[-1:])
        updates = clients.train(sent, pulls=[Pull(self.mu, sent), Pull(self.lam, sent, clients.spec.base)], keep=self.keep(clients.spec), held=False)
        return self.expect(state, clients, clients.ids_M[updates.ok_M], updates.sound_MF)

    def serve(self, state, clients):
        return Serving(self.starts(state, clients.spec), row_or_last(state, clients), own=self.personal(clients.spec))

