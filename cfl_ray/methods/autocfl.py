"""AutoCFL: B. Gong, T. Xing, Z. Liu, W. Xi, X. Chen. Adaptive Client Clustering for Efficient Federated Learning over Non-IID and Imbalanced
Data. IEEE Transactions on Big Data 2022, doi:10.1109/TBDATA.2022.3167994, Equations 1 to 7 and Algorithm 1.

    first phase, all clients:  W_m <- E_m epochs of SGD_m(w);  L_m its last loss, C_m <- C_m + L_m;  w <- Avg(W_m)
    E_m <- E_m + (alpha |D_s| / |D_m|)^min(1, L_m / L_s)  if C_m > C_s                        s: the client with most samples
    until Var_m(C_m) rises;  then dist(m, n) = ||h_m - h_n||_2 / |h|                           h: last layer
    P_m = m and all whose distance to m is below the largest gap of row m;  rep(m) = the largest client of P_m
    every m votes that the members of P_m follow rep(m);  n follows the representative with most votes, then its representative's
    theta_k <- Avg of W_m over the cluster;  later  theta_k <- Avg of SGD_i(theta_k) over its participants

The first phase needs every client online in each round: who cannot be reached in the clustering round is placed as newcomers are, and a
round that a client misses counts in its C_m with the mean loss of the others. With E_0 (`local.epochs`) = 1 rounding doubles the steps of some
clients and makes clusters of its own: use 2 or more.

Departures: Equation 3 has the sign that makes it FedAvg. A row's distance to itself takes no part in its gap. Votes of row m weigh |D_m|
(`vote: literal` for |D_n| / sum over P_m, which splits IID data). The variance is looked at from round 3 on. Fractional epochs become
floor(E_m ceil(n / B) + 1/2) steps. Newcomers (none in the paper) train from the stored w and follow the nearest representative.
"""

from dataclasses import dataclass

import numpy as np
import scipy
import torch

from cfl_ray.core.clients import Keep
from cfl_ray.core.grouping import by_cluster, everyone
from cfl_ray.core.hierarchy import by_lowest_member, distances
from cfl_ray.core.method import Method, option, weighting
from cfl_ray.core.rounds import fedavg_per_cluster, serve_per_cluster
from cfl_ray.core.signatures import CentreState, placed_by_training, unplaced


@dataclass(frozen=True)
class AutoCFLState(CentreState):
    more_N: np.ndarray = None  # E_m - E_0
    loss_N: np.ndarray = None  # C_m, with everybody's mean for what was not heard
    variance: float = float("nan")  # of C_m after the last round

    def forget(self, ids):
        """Without the assignment and the progress of clients that left."""
        gone_N = np.isin(np.arange(len(self.loss_N)), ids)
        mean = self.loss_N[~gone_N].mean() if not gone_N.all() else 0.0
        return super().forget(ids).advance(more_N=np.where(gone_N, 0.0, self.more_N), loss_N=np.where(gone_N, mean, self.loss_N))

    def grown(self, num_clients):
        """With newcomers of mean progress."""
        state, more = super().grown(num_clients), num_clients - len(self.loss_N)
        return state.advance(loss_N=np.append(self.loss_N, np.full(more, self.loss_N.mean())))


def representatives(distance_MM: np.ndarray, size_M: np.ndarray, vote: str, min_gap: float = 0.0) -> np.ndarray:
    """The client (M,) that each client follows in the end, by the votes of all rows. Ties go to the lowest number."""
    count = len(size_M)
    score_MM, gap_M = np.zeros((count, count)), np.zeros(count)  # score of client n for representative r
    for m in range(count):
        order = np.argsort(distance_MM[m] + np.where(np.arange(count) == m, np.inf, 0), kind="stable")[: count - 1]
        steps = np.diff(distance_MM[m, order])
        near = order[: steps.argmax() + 1] if steps.any() else order  # no gap: nobody is cut off
        gap_M[m] = steps.max(initial=0) / max(np.median(distance_MM[m, order]), 1e-300) if len(steps) else 0
        party = np.sort(np.append(near, m))
        weight = {"row": size_M[m], "literal": size_M[party] / size_M[party].sum(), "unweighted": 1}[vote]
        score_MM[party, party[size_M[party].argmax()]] += weight
    if count and np.median(gap_M) < min_gap:
        return np.zeros(count, np.int64)
    follows = score_MM.argmax(1) if count else np.zeros(0, np.int64)
    for _ in range(count.bit_length()):
        follows = follows[follows]  # ends at one that follows itself: a representative is larger than who follows it, or lower on ties
    return follows


@dataclass(frozen=True)
class AutoCFL(Method, name="autocfl"):
    """Training progress is evened out by epochs per client; then one clustering by votes on last-layer distances."""

    alpha: float = option(0.5, "alpha: how fast clients with few samples get more epochs", source="paper", low=0)
    vote: str = option("row", "weight of a vote: samples of the voting row, the printed formula, or 1", source="ours: the printed formula splits IID data", choices=("row", "literal", "unweighted"))
    max_rounds: int = option(6, "rounds of the first phase at most", source="paper: clustering happened in rounds 3 to 6", low=1)
    min_rounds: int = option(3, "rounds of the first phase at least", source="as max_rounds: earlier, every variance rises", low=1)
    min_gap: float = option(0.0, "one cluster if the median over rows of largest gap / median distance is less (0.15 is safe with equal sizes); 0: off", source="ours", low=0)
    keep_epochs: bool = option(False, "clients keep their epochs E_m after clustering; false: E_0", source="ours: the paper is silent")
    weights: str = weighting()

    State = AutoCFLState

    def init(self, start):
        first_KP, zero_N = start.new_model(0)[None], np.zeros(start.num_clients)
        return AutoCFLState(
            models_KP=first_KP, assign_N=start.unassigned(), phase="adjust", start_KP=first_KP, centre_KF=first_KP[:0],
            more_N=zero_N, loss_N=zero_N,
        )  # fmt: skip

    def round(self, state, clients, rng):
        if state.phase == "adjust":
            return self.adjust(state, clients.all())
        state = self.join(state, unplaced(state, clients))
        return fedavg_per_cluster(state, clients, self.weights, self.steps(state, clients) if self.keep_epochs else None)

    def steps(self, state, clients):
        local, size_M = clients.local, clients.size_M
        epochs = local.epochs if local.steps is None else local.steps / -(-size_M // local.batch_of(size_M))  # E_0, also where steps are given
        return local.steps_of(size_M, epochs + state.more_N[clients.ids_M])

    def adjust(self, state, clients):
        """A round of FedAvg with all clients, each with its own epochs; the last one ends in clusters."""
        mix = everyone(clients.weights(self.weights))
        keep = Keep(clients.spec.head)
        updates = clients.train(clients.send(state.models_KP), keep=keep, mix=mix, mix_later=True, steps_M=self.steps(state, clients))
        clients.upload(2)  # |D_m|, L_m
        ok_M = updates.ok_M
        ids_M, size_M, loss_M = clients.ids_M[ok_M], clients.size_M[ok_M], updates.train_loss_M[ok_M]
        if not len(ids_M):
            return state
        loss_N, more_N, s = state.loss_N + loss_M.mean(), state.more_N.astype(np.float64), size_M.argmax()
        loss_N[ids_M] = total_M = state.loss_N[ids_M] + loss_M
        more_N[ids_M] += np.where(total_M > total_M[s], (self.alpha * size_M[s] / size_M) ** np.minimum(1, loss_M / max(loss_M[s], 1e-12)), 0)
        before, variance = state.variance, float(total_M.var())
        state = state.advance(loss_N=loss_N, more_N=more_N, variance=variance)
        if clients.number >= self.max_rounds or (clients.number >= self.min_rounds and variance > before):
            return self.cluster(state, clients, updates)
        return state.advance(models_KP=updates.mixed(empty=state.models_KP))

    def cluster(self, state, clients, updates):
        ok_M = updates.ok_M
        head_MF = updates.sound_MF
        follows = representatives(scipy.spatial.distance.squareform(distances(head_MF, "l2") / head_MF.shape[1]), clients.size_M[ok_M], self.vote, self.min_gap)
        found = by_lowest_member(follows)
        centre_KF = torch.stack([head_MF[follows[found == k][0]] for k in range(found.max() + 1)])
        assign_N = state.place(clients.ids_M[ok_M], found)
        mix = by_cluster(assign_N[clients.ids_M], clients.weights(self.weights), len(centre_KF))
        models_KP = clients.mix(updates, mix).mixed(empty=state.models_KP.repeat(len(centre_KF), 1))
        return state.advance(models_KP=models_KP, assign_N=assign_N, start_KP=state.models_KP, centre_KF=centre_KF, phase="federate")

    def join(self, state, clients):
        return state if state.phase == "adjust" else placed_by_training(state, clients, Keep(clients.spec.head), "l2")

    def serve(self, state, clients):
        return serve_per_cluster(state, clients, state.models_KP if state.phase == "adjust" else state.start_KP)
