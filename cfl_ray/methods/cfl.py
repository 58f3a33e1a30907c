"""CFL: F. Sattler, K.-R. Müller, W. Samek. Clustered Federated Learning: Model-Agnostic Distributed Multitask
Optimization Under Privacy Constraints. IEEE TNNLS 2021, arXiv:1910.01991, Algorithms 1 and 2.

    Delta_i <- SGD_i(W_c) - W_c                                                 every client of leaf c
    split c iff  ||sum_i p_i Delta_i|| < eps_1  and  max_i ||Delta_i|| > eps_2  and  |c| > 2  and  t > t_min
        [and gamma_max < sqrt((1 - alpha_cross) / 2)]
    bipartition by alpha_ij = cos(Delta_i, Delta_j);   W_c <- W_c + sum_i p_i Delta_i   in every (new) leaf
    join: descend the tree; at each split train from its stored model and follow the side with the higher max cosine

In the paper all clients take part in every round. With a sampled cohort, averages are over this round's participants,
and a leaf splits only if max(4, half) of its members have an update from the last 1/R rounds that is also newer than
the leaf's last split. The leaf's other members go to the side with the higher mean cosine: at once by their old update,
and again by a new update when they next take part. If the new update moves the client to the other side, the update is
excluded from averages and splits, since it was trained from the wrong model. Members without any update, and clients
that never took part, join as newcomers.

The paper also requires gamma_max < sqrt((1 - alpha_cross) / 2). alpha_cross is the largest cosine across the two sides;
gamma_i is the distance of client i's update to the update of its true distribution, divided by the length of the
latter. Then the cosines within groups, at least 1 - 2 gamma_max^2, exceed the cosines across groups. `gamma_max` sets
the value; `estimate_gamma` takes gamma_i = ||Delta_i - mean|| / ||mean|| with the unweighted mean of the client's side.
The table has the estimated gamma_max and the bound, after 0 and after 40 rounds of FedAvg (MLP with 32 hidden units,
one epoch of batch 20, eta 0.1; 16 clients of the digits, 12 clients of 600 images of MNIST). The bipartition has the
true groups (ARI 1) except on IID data:

                                  digits                      MNIST
    IID                           0.97, 0.47;  1.87, 0.49     0.54, 0.33;  3.04, 0.70
    rotated by 0, 180             0.67, 0.54;  0.95, 0.75     0.52, 0.63;  1.79, 0.76
    labels shifted by 0, 5        0.72, 0.66;  0.67, 0.88     0.48, 0.65;  1.11, 0.84
    labels 0 to 4, 5 to 9         0.47, 0.88;  0.55, 0.92     0.55, 0.72;  1.22, 0.81

The condition never splits IID clients, but also prevents correct splits, since the mean of a side shrinks with training
while the noise does not. So it is off by default, as in the official code.

Deviations: complete linkage as in the official code (paper: single). Momentum starts from zero in every round (official
code: it is kept, as with `local.persist`). Updates longer than `sketch` are projected; norms are exact. A client
without a leaf predicts with the mean of the leaves. `stale_updates: reapply` is CFL in PACFL's code: every member's
last update is added again in every round with equal weights, zeros for clients that never took part or have not joined
yet.
"""

from dataclasses import dataclass, field
from typing import Self

import numpy as np
import scipy
import torch
from torch import Tensor
from torch.nn.functional import normalize

from cfl_ray.clustering import agglomerative
from cfl_ray.clustering.merging import cluster_means, means_of_emptied
from cfl_ray.clustering.signature_diagnostics import record_signatures, record_similarity
from cfl_ray.clustering.signatures import SignatureState, sketch_option, unplaced, whole_update
from cfl_ray.core.aggregation.rules import Mean
from cfl_ray.core.clients import Clients, UpdateFeatures, Updates
from cfl_ray.core.method import Method, Start, option, weights_option
from cfl_ray.core.params import ParamSpec
from cfl_ray.core.rng import Draws
from cfl_ray.core.state import UNASSIGNED, no_numbers
from cfl_ray.core.weights import cluster_weights

NO_SPLIT = -1


@dataclass(frozen=True, kw_only=True)
class SplitState(SignatureState):
    """A state whose clusters are the leaves of a tree. Signatures are the clients' last updates.

    Splits are numbered in the order in which they happened; a client descends the tree by passing them in this order.
    Axes: K2 are the splits with their two leaves; E are the updates of all splits, which are the updates that the
    members of a leaf had when it was split.
    """

    split_KP: Tensor  # model of the leaf before each split
    # int64: the leaf that was split, which stays as side 0, and the new leaf, side 1
    leaves_K2: np.ndarray = field(default_factory=lambda: np.zeros((0, 2), np.int64))
    update_EF: Tensor
    # int64: client of the update; UNASSIGNED: the mean of a side without remaining clients
    client_E: np.ndarray = field(default_factory=no_numbers)
    split_E: np.ndarray = field(default_factory=no_numbers)  # int64: split of the update
    side_E: np.ndarray = field(default_factory=no_numbers)  # int64: side of the update, 0 or 1

    def with_split(self, leaf: int, ids_E: np.ndarray, update_EF: Tensor, side_E: np.ndarray) -> Self:
        """This state with a leaf split: members `ids_E` of side 1 go to a new leaf, which starts from its model."""
        split, new, model_1P = len(self.split_KP), self.num_clusters, self.models_KP[leaf][None]
        return self.advance(
            models_KP=torch.cat([self.models_KP, model_1P]),
            split_KP=torch.cat([self.split_KP, model_1P]),
            leaves_K2=np.concatenate([self.leaves_K2, [[leaf, new]]]),
            update_EF=torch.cat([self.update_EF, update_EF]),
            client_E=np.concatenate([self.client_E, ids_E]),
            split_E=np.concatenate([self.split_E, np.full(len(ids_E), split)]),
            side_E=np.concatenate([self.side_E, side_E]),
            assign_N=self.place(ids_E, np.where(side_E, new, leaf)),
        )

    def leaf_at(self, split: int, update_MF: Tensor, reduce: str) -> np.ndarray:
        """int64 (M,): for each update, the leaf of this split whose updates have the higher cosine with it.

        reduce: "mean" or "max" over the updates of a leaf. Ties go to the leaf that was split.
        """
        at_split_E = self.split_E == split
        side_E = self.side_E[at_split_E]
        cos_ME = normalize(update_MF, dim=1) @ normalize(self.update_EF[torch.from_numpy(at_split_E)], dim=1).T
        cos_by_side = [cos_ME[:, torch.from_numpy(side_E == side)] for side in (0, 1)]
        old_M, new_M = (cos.mean(1) if reduce == "mean" else cos.amax(1) for cos in cos_by_side)
        return np.where((new_M > old_M).numpy(), self.leaves_K2[split, 1], self.leaves_K2[split, 0])

    def leaf_below(self, split: int, update_MF: Tensor) -> np.ndarray:
        """int64 (M,): the leaf that each update reaches from this split through all later splits, by mean cosines."""
        leaf_M = np.full(len(update_MF), self.leaves_K2[split, 0])
        for later in range(split, len(self.leaves_K2)):
            here = np.flatnonzero(leaf_M == self.leaves_K2[later, 0])
            leaf_M[here] = self.leaf_at(later, update_MF[torch.from_numpy(here)], "mean")
        return leaf_M

    def forget(self, ids: np.ndarray) -> Self:
        """This state without the assignments, signatures and split updates of clients that left.

        A side of a split that loses its last updates keeps their mean.
        """
        stay_E = ~np.isin(self.client_E, ids)
        key_E = 2 * self.split_E + self.side_E  # a number for each side of each split
        emptied, mean_EF = means_of_emptied(self.update_EF, key_E, stay_E)
        return (
            super()
            .forget(ids)
            .advance(
                update_EF=torch.cat([self.update_EF[torch.from_numpy(stay_E)], mean_EF]),
                client_E=np.concatenate([self.client_E[stay_E], np.full(len(emptied), UNASSIGNED)]),
                split_E=np.concatenate([self.split_E[stay_E], emptied // 2]),
                side_E=np.concatenate([self.side_E[stay_E], emptied % 2]),
            )
        )


@dataclass(frozen=True, kw_only=True)
class CFLState(SplitState):
    """The tree, and the values by which the next split is decided."""

    norm_S: np.ndarray  # float64: length of each client's last update
    # int64: round of that update; 0 after its leaf was split, or if the update moved its client
    round_S: np.ndarray = field(default_factory=no_numbers)
    # int64: the first split at which the client's next update decides its side; -1: none
    open_S: np.ndarray = field(default_factory=no_numbers)
    early: np.ndarray  # float64 (2,): sum of the lengths of all updates in rounds 1 to 5, and their number


@dataclass(frozen=True)
class CFL(Method[CFLState], name="cfl"):
    """Recursive bipartition of clusters whose members disagree after their common model has stalled."""

    compares = "participants"
    placement = "the leaf of the tree of splits, by a local training at each split that it meets"

    eps1: float | None = option(
        None,
        "eps_1: a leaf may split when its mean update is shorter than this; null: 0.4, relative 0.1",
        source="official code; relative: ours",
        low=0,
    )
    eps2: float | None = option(
        None,
        "eps_2: a leaf may split when its longest update is longer than this; null: 1.6 (FedClust prints 0.6), "
        "relative 0.6",
        source="official code; relative: ours",
        low=0,
    )
    relative: bool = option(
        False, "eps_1 and eps_2 are multiples of the mean update length in rounds 1 to 5", source="ours"
    )
    min_rounds: int = option(20, "t_min: rounds before the first split", source="official code", low=0)
    linkage: str = option(
        "complete",
        "linkage of the bipartition: complete or single (paper)",
        source="official code",
        choices=("complete", "single"),
    )
    gamma_max: float | None = option(
        None,
        "gamma_max: a leaf splits only if this is below sqrt((1 - alpha_cross) / 2); null: not checked",
        source="paper: estimated; official code: not checked",
        low=0,
        high=1,
    )
    estimate_gamma: bool = option(
        False, "take gamma_max from the updates of the two sides of each split", source="ours; official code: no"
    )
    stale_updates: str = option(
        "drop",
        "updates of earlier rounds: drop, or reapply (PACFL's code)",
        source="paper: all clients take part",
        choices=("drop", "reapply"),
    )
    sketch: int = sketch_option()
    weights: str = weights_option()

    def __post_init__(self) -> None:
        super().__post_init__()
        defaults = {"eps1": 0.1, "eps2": 0.6} if self.relative else {"eps1": 0.4, "eps2": 1.6}
        vars(self).update({name: value for name, value in defaults.items() if getattr(self, name) is None})
        if self.estimate_gamma and self.gamma_max is not None:
            raise ValueError(f"give cfl.gamma_max or estimate_gamma, not both; got {self.gamma_max:g} and true")
        if self.stale_updates == "reapply" and not isinstance(self.aggregation_rule, Mean):
            raise ValueError(
                "cfl.aggregation must be mean with stale_updates reapply, whose sums the server makes itself, "
                f"got {self.aggregation!r}; use drop"
            )

    @property
    def needs_mean(self) -> str:
        return "stale_updates: reapply adds the last updates of all members" if self.stale_updates == "reapply" else ""

    def init(self, start: Start) -> CFLState:
        first_KP = start.new_model(0)[None]
        no_updates_EF = torch.zeros(0, self.update_features(start.spec).count)
        return CFLState(
            models_KP=first_KP,
            assign_N=start.one_cluster() if self.stale_updates == "reapply" else start.unassigned(),
            split_KP=first_KP[:0],
            update_EF=no_updates_EF,
            signature_SF=no_updates_EF,
            norm_S=np.zeros(0),
            early=np.zeros(2),
        )

    def round(self, state: CFLState, clients: Clients, rng: Draws) -> CFLState:
        state = self.join(state, unplaced(state, clients))
        clients = clients.select(state.assign_N[clients.ids_M] >= 0)
        before, leaf_M = state, state.assign_N[clients.ids_M]
        # Delta_i <- SGD_i(W_c) - W_c
        updates = clients.train(
            clients.send(state.models_KP, leaf_M), features=self.update_features(clients.spec), defer_aggregation=True
        )
        state = self.remember_updates(state, clients, updates)
        stays_M = state.assign_N[clients.ids_M] == leaf_M  # a client that moved is excluded from averages and splits
        # W_c <- W_c + sum_i p_i Delta_i
        models_KP, mean_KP = self.averaged_models(state, clients, updates, stays_M)
        if clients.round > self.min_rounds:  # t > t_min
            # split c iff ||sum_i p_i Delta_i|| < eps_1 and ..
            mean_norm_K = (mean_KP - before.models_KP)[:, : clients.spec.trained].norm(dim=1)
            updated_S = state.cluster_S if self.stale_updates == "reapply" else leaf_M[stays_M & updates.valid_M]
            window = -(-int((state.assign_N >= 0).sum()) // max(len(clients), 1))  # 1 / R, the same for all leaves
            for leaf in np.unique(updated_S).tolist():
                state = self.split(state, clients, leaf, mean_norm_K[leaf].item(), window)
            # W_c <- W_c + sum_i p_i Delta_i in every new leaf
            if state.num_clusters > before.num_clusters:
                record_similarity(clients, state.seen_S, state.signature_SF)
                record_signatures(clients, state.seen_S, state.signature_SF)
                models_KP, _ = self.averaged_models(state, clients, updates, stays_M)
        return state.advance(models_KP=models_KP)

    def update_features(self, spec: ParamSpec) -> UpdateFeatures:
        """Delta_i, without projection if it is added to a model again."""
        return whole_update(spec, self.sketch if self.stale_updates == "drop" else None)

    def remember_updates(self, state: CFLState, clients: Clients, updates: Updates) -> CFLState:
        """The state with the cohort's updates, after clients with an open split moved to the side of their update."""
        valid_M, update_MF = updates.valid_M, updates.valid_features_MF
        ids_M, norm_M = clients.ids_M[valid_M], updates.norm_M[valid_M]
        leaf_M = state.assign_N[ids_M]
        open_splits = dict(zip(state.seen_S.tolist(), state.open_S.tolist(), strict=True))
        for position, client in enumerate(ids_M.tolist()):
            split = open_splits.get(client, NO_SPLIT)
            if split != NO_SPLIT:
                leaf = state.leaf_below(split, update_MF[position : position + 1])
                state = state.advance(assign_N=state.place(np.array([client]), leaf))
        round_M = np.where(state.assign_N[ids_M] == leaf_M, clients.round, 0)
        open_M = np.full(len(ids_M), NO_SPLIT)
        state = state.remember(ids_M, update_MF, norm_S=norm_M, round_S=round_M, open_S=open_M)
        if self.stale_updates == "reapply":
            state = self.remember_zeros(state, clients.spec)
        if clients.round > 5:
            return state
        return state.advance(early=state.early + np.array([norm_M.sum(), len(norm_M)]))

    def remember_zeros(self, state: CFLState, spec: ParamSpec) -> CFLState:
        """The state with zeros as the updates of members that never took part."""
        ids = np.setdiff1d(np.flatnonzero(state.assign_N >= 0), state.seen_S)
        count = len(ids)
        return state.remember(
            ids,
            torch.zeros(count, spec.trained),
            norm_S=np.zeros(count),
            round_S=np.zeros(count, np.int64),
            open_S=np.full(count, NO_SPLIT),
        )

    def averaged_models(
        self, state: CFLState, clients: Clients, updates: Updates, stays_M: np.ndarray
    ) -> tuple[Tensor, Tensor]:
        """The model of every leaf after this round's updates, (K, P), and the same without a server optimiser, (K, P).

        With `reapply`, the last updates of all members take the place of this round's updates.
        """
        weight_KM = cluster_weights(
            state.assign_N[clients.ids_M], clients.weights(self.weights) * stays_M, state.num_clusters
        )
        averages = clients.average(updates, weight_KM, average_number=0)  # called twice in a round with a split
        models_KP, mean_KP = averages.averaged(default=state.models_KP), averages.means(default=state.models_KP)
        if self.stale_updates == "reapply":
            member_KS = cluster_weights(state.cluster_S, np.ones(len(state.seen_S)), state.num_clusters)
            count_K1 = np.maximum(member_KS.sum(1, keepdims=True), 1)
            step_KF = torch.from_numpy(member_KS).float() @ state.signature_SF / torch.from_numpy(count_K1).float()
            trained = clients.spec.trained
            mean_KP[:, :trained] = state.models_KP[:, :trained] + step_KF
            models_KP = mean_KP
        return models_KP, mean_KP

    def split(self, state: CFLState, clients: Clients, leaf: int, mean_norm: float, window: int) -> CFLState:
        """The state with leaf c split in two if it stalls and its members disagree; else the state unchanged.

        mean_norm: ||sum_i p_i Delta_i|| of this round. window: number of rounds whose updates are recent; with
            `reapply` all are.
        """
        recent_S = (state.round_S > max(clients.round - window, 0)) | (self.stale_updates == "reapply")
        member_S = state.cluster_S == leaf
        recent, stale = np.flatnonzero(member_S & recent_S), np.flatnonzero(member_S & ~recent_S)
        because = self.norms(state, mean_norm, recent)
        if not self.splits(state, leaf, recent, because):
            return state
        # bipartition by alpha_ij = cos(Delta_i, Delta_j)
        update_EF = state.signature_SF[torch.from_numpy(recent)]
        distance = agglomerative.distances(update_EF, "cosine")
        side_E = agglomerative.cut_tree(agglomerative.linkage_tree(distance, self.linkage), num_clusters=2)
        because |= self.separation(update_EF, distance, side_E)
        if "gamma_max" in because and not because["gamma_max"] < because["gamma_bound"]:
            return state
        if 2 * side_E.sum() > len(side_E):
            side_E = 1 - side_E  # the larger side stays in the leaf
        unseen = np.setdiff1d(np.flatnonzero(state.assign_N == leaf), state.seen_S)
        state = state.with_split(leaf, state.seen_S[recent], update_EF, side_E)
        # Members without a recent update are placed by their old update until they have a new update. Members without
        # any update join as newcomers.
        split, open_S = len(state.split_KP) - 1, state.open_S.copy()
        clients.event("split", cluster=leaf, into=[leaf, state.num_clusters - 1], because=because)
        open_S[stale] = np.where(open_S[stale] == NO_SPLIT, split, open_S[stale])
        leaf_M = state.leaf_at(split, state.signature_SF[torch.from_numpy(stale)], "mean")
        state = state.advance(assign_N=state.place(state.seen_S[stale], leaf_M))
        return state.advance(
            open_S=open_S,
            round_S=np.where(member_S, 0, state.round_S),  # the members' updates are not used for another split
            assign_N=state.place(unseen, UNASSIGNED),
        )

    def norms(self, state: CFLState, mean_norm: float, recent: np.ndarray) -> dict[str, float]:
        """The norms ||sum_i p_i Delta_i|| and max_i ||Delta_i|| of the recent updates, with their thresholds."""
        assert self.eps1 is not None and self.eps2 is not None
        scale = state.early[0] / max(state.early[1], 1) if self.relative else 1.0
        longest = float(state.norm_S[recent].max(initial=0))
        return {"mean": mean_norm, "eps1": self.eps1 * scale, "max": longest, "eps2": self.eps2 * scale}

    def splits(self, state: CFLState, leaf: int, recent: np.ndarray, norms: dict[str, float]) -> bool:
        """Whether ||sum_i p_i Delta_i|| < eps_1, max_i ||Delta_i|| > eps_2, |c| > 2, and recent updates suffice."""
        size = int(state.members_K[leaf])
        if len(recent) <= 2 or len(recent) < min(size, max(4, -(-size // 2))):
            return False
        return norms["mean"] < norms["eps1"] and norms["max"] > norms["eps2"]

    def separation(self, update_EF: Tensor, distance: np.ndarray, side_E: np.ndarray) -> dict[str, float]:
        """alpha_cross, the largest cosine across the two sides, as "cosine_across". If gamma_max is checked, also
        "gamma_max" and its bound sqrt((1 - alpha_cross) / 2), "gamma_bound".

        distance: condensed, 1 - cos.
        """
        nearest = scipy.spatial.distance.squareform(distance)[side_E == 0][:, side_E == 1].min(initial=2)
        if self.gamma_max is None and not self.estimate_gamma:
            return {"cosine_across": 1 - nearest}
        gamma = noise(update_EF, side_E) if self.gamma_max is None else self.gamma_max
        return {"cosine_across": 1 - nearest, "gamma_max": gamma, "gamma_bound": np.sqrt(nearest / 2)}

    def join(self, state: CFLState, clients: Clients) -> CFLState:
        """Newcomers descend the tree; they train once at each split that they reach."""
        leaf_M, valid_M = np.zeros(len(clients), np.int64), np.ones(len(clients), bool)
        for split, old in enumerate(state.leaves_K2[:, 0].tolist()):
            here = np.flatnonzero((leaf_M == old) & valid_M)
            if not len(here):
                continue
            descending = clients.select(here)
            updates = descending.train(
                descending.send(state.split_KP[split][None]),
                features=self.update_features(clients.spec),
                keep_as_local_model=False,
            )
            valid_M[here] = updates.valid_M
            leaf_M[here[updates.valid_M]] = state.leaf_at(split, updates.valid_features_MF, "max")
        return state.advance(assign_N=state.place(clients.ids_M[valid_M], leaf_M[valid_M]))


def noise(update_EF: Tensor, side_E: np.ndarray) -> float:
    """max_i ||Delta_i - mean Delta|| / ||mean Delta||, with the mean over the updates on the same side as i."""
    mean_2F, _ = cluster_means(update_EF, side_E, 2)
    mean_EF = mean_2F[torch.from_numpy(side_E)]
    gamma_E = (update_EF - mean_EF).norm(dim=1) / mean_EF.norm(dim=1).clamp(min=1e-30)
    return float(gamma_E.max())
