"""CFL: F. Sattler, K.-R. Müller, W. Samek. Clustered Federated Learning: Model-Agnostic Distributed Multitask Optimization Under Privacy
Constraints. IEEE TNNLS 2021, arXiv:1910.01991, Algorithms 1 and 2.

    Delta_i <- SGD_i(W_c) - W_c                                                 every client of leaf c
    split c iff  ||sum_i p_i Delta_i|| < eps_1  and  max_i ||Delta_i|| > eps_2  and  |c| > 2  and  t > t_min
    bipartition by alpha_ij = cos(Delta_i, Delta_j);   W_c <- W_c + sum_i p_i Delta_i   in every (new) leaf
    join: descend the tree; at each split train from its stored model and follow the side with the higher max cosine

The paper has everybody take part. With a sampled cohort, averages are over this round's participants and a leaf splits only if max(4, half)
of it have an update from the last 1/R rounds, and after its own last split. Its other members go to the side with the higher mean cosine,
by their old update at once and by a new one when they next take part; if that moves them it counts in no average and for no split, for it
was trained from the other side's model. Members without any update, and clients that never took part, join as newcomers do.

Departures: complete linkage as in the official code (paper: single). Momentum starts afresh in every round (official code: kept; for that,
`local.persist`). Updates longer than `sketch` are projected; norms are exact. A client without a leaf predicts with the mean of the leaves.
`stale_updates: reapply` is PACFL's CFL: every member's last update again in every round, zeros for who never took part or is yet to come.
"""

from dataclasses import dataclass

import numpy as np
import torch

from cfl_ray.core import hierarchy
from cfl_ray.core.grouping import by_cluster
from cfl_ray.core.method import Method, option, weighting
from cfl_ray.core.rounds import serve_per_cluster
from cfl_ray.core.signatures import sketching, unplaced, update_of
from cfl_ray.core.splits import SplitState
from cfl_ray.core.state import UNKNOWN


@dataclass(frozen=True)
class CFLState(SplitState):
    norm_S: np.ndarray = None  # length of each client's last update
    round_S: np.ndarray = None  # the round it is from; 0 once its leaf was split
    open_S: np.ndarray = None  # the first split whose side a client's next update decides; -1: none
    early: np.ndarray = None  # sum and number of the lengths of rounds 1 to 5


@dataclass(frozen=True)
class CFL(Method, name="cfl"):
    """Recursive bipartition of clusters whose members disagree once their common model stalls."""

    eps1: float | None = option(None, "eps_1: a leaf may split when its mean update is shorter than this; null: 0.4, relative 0.1", source="official code; relative: ours", low=0)
    eps2: float | None = option(None, "eps_2: and its longest update is longer than this; null: 1.6 (FedClust prints 0.6), relative 0.6", source="official code; relative: ours", low=0)
    relative: bool = option(False, "eps_1 and eps_2 count in mean update lengths of rounds 1 to 5", source="ours")
    min_rounds: int = option(20, "t_min: rounds before the first split", source="official code", low=0)
    linkage: str = option("complete", "of the bipartition: complete or single (paper)", source="official code", choices=("complete", "single"))
    stale_updates: str = option("drop", "what becomes of updates of earlier rounds: drop, or reapply (PACFL's code)", source="paper: everybody takes part", choices=("drop", "reapply"))
    sketch: int = sketching()
    weights: str = weighting()

    State = CFLState

    def __post_init__(self):
        super().__post_init__()
        defaults = {"eps1": 0.1, "eps2": 0.6} if self.relative else {"eps1": 0.4, "eps2": 1.6}
        vars(self).update({name: value for name, value in defaults.items() if getattr(self, name) is None})
        if self.stale_updates == "reapply" and self.rule.name != "mean":
            raise ValueError(f"cfl.aggregation must be mean with stale_updates reapply, whose sums are the server's own, got {self.aggregation!r}; use drop")

    def init(self, start):
        first_KP, size = start.new_model(0)[None], self.keep(start.spec).count
        return CFLState(
            models_KP=first_KP, assign_N=start.one_cluster() if self.stale_updates == "reapply" else start.unassigned(), **CFLState.unsplit(first_KP, size),
            norm_S=np.zeros(0), round_S=np.zeros(0, np.int64), open_S=np.zeros(0, np.int64), early=np.zeros(2),
        )  # fmt: skip

    def round(self, state, clients, rng):
        state = self.join(state, unplaced(state, clients))
        clients = clients.select(state.assign_N[clients.ids_M] >= 0)
        before, assign_M = state, state.assign_N[clients.ids_M]
        updates = clients.train(clients.send(state.models_KP, assign_M), keep=self.keep(clients.spec), mix_later=True)
        state = self.noted(state, clients, updates)
        stays_M = state.assign_N[clients.ids_M] == assign_M
        models_KP = self.merged(state, clients, updates, stays_M)
        if clients.number > self.min_rounds:
            stall_K = (models_KP - before.models_KP)[:, : clients.spec.trained].norm(dim=1)
            for leaf in np.unique(assign_M[stays_M & updates.ok_M] if self.stale_updates == "drop" else state.cluster_S).tolist():
                state = self.split(state, leaf, stall_K[leaf].item(), self.fresh(state, clients))
            if state.num_clusters > before.num_clusters:
                models_KP = self.merged(state, clients, updates, stays_M)
        return state.advance(models_KP=models_KP)

    def keep(self, spec):
        return update_of(spec, self.sketch if self.stale_updates == "drop" else None)

    def noted(self, state, clients, updates):
        """With the cohort's updates remembered, and the sides of members that were waiting for one decided."""
        ids_M, feature_MF, norm_M = clients.ids_M[updates.ok_M], updates.sound_MF, updates.norm_M[updates.ok_M]
        before_M, waits_M = state.assign_N[ids_M], dict(zip(state.seen_S.tolist(), state.open_S.tolist()))
        for at, client in enumerate(ids_M.tolist()):
            if (split := waits_M.get(client, -1)) >= 0:
                state = state.advance(assign_N=state.place([client], state.leaf_below(split, feature_MF[at : at + 1], "mean")))
        round_M = np.where(state.assign_N[ids_M] == before_M, clients.number, 0)
        state = state.remember(ids_M, feature_MF, norm_S=norm_M, round_S=round_M, open_S=np.full(len(ids_M), -1))
        if self.stale_updates == "reapply":
            silent = np.setdiff1d(np.flatnonzero(state.assign_N >= 0), state.seen_S)
            state = state.remember(silent, torch.zeros(len(silent), clients.spec.trained), norm_S=0.0, round_S=0, open_S=-1)
        return state.advance(early=state.early + [norm_M.sum(), len(norm_M)]) if clients.number <= 5 else state

    def merged(self, state, clients, updates, stays_M):
        """Models after this round's updates (with `reapply`, after everybody's last ones)."""
        mix = by_cluster(state.assign_N[clients.ids_M], clients.weights(self.weights) * stays_M, state.num_clusters)
        models_KP = clients.mix(updates, mix).mixed(empty=state.models_KP)
        if self.stale_updates == "reapply":
            member_KS = by_cluster(state.cluster_S, np.ones(len(state.seen_S)), state.num_clusters).float()
            step_KF = member_KS @ state.signature_SF / member_KS.sum(1, keepdim=True).clamp(min=1)
            models_KP[:, : clients.spec.trained] = state.models_KP[:, : clients.spec.trained] + step_KF
        return models_KP

    def fresh(self, state, clients):
        """Of the clients seen, those whose update is from the last 1 / R rounds (with `reapply`, all)."""
        window = -(-int((state.assign_N >= 0).sum()) // max(len(clients), 1))
        return (state.round_S > max(clients.number - window, 0)) | (self.stale_updates == "reapply")

    def split(self, state, leaf, stall, fresh_S):
        """The state with this leaf split in two, if it stalls and its members disagree."""
        scale = state.early[0] / max(state.early[1], 1) if self.relative else 1.0
        size, fresh = int(state.members_K[leaf]), np.flatnonzero((state.cluster_S == leaf) & fresh_S)
        enough = len(fresh) > 2 and len(fresh) >= min(size, max(4, -(-size // 2)))
        if not enough or stall >= self.eps1 * scale or state.norm_S[fresh].max() <= self.eps2 * scale:
            return state
        update_EF = state.signature_SF[torch.from_numpy(fresh)]
        side_E = hierarchy.cut(hierarchy.tree(hierarchy.distances(update_EF, "cosine"), self.linkage), num_clusters=2)
        side_E = side_E if 2 * side_E.sum() <= len(side_E) else 1 - side_E  # the larger side stays in the leaf
        stale, round_S = np.flatnonzero((state.cluster_S == leaf) & ~fresh_S), np.where(state.cluster_S == leaf, 0, state.round_S)
        unseen = np.setdiff1d(np.flatnonzero(state.assign_N == leaf), state.seen_S)
        state = state.with_split(leaf, state.seen_S[fresh], update_EF, side_E)
        split, open_S = len(state.split_KP) - 1, state.open_S.copy()
        open_S[stale] = np.where(open_S[stale] < 0, split, open_S[stale])
        leaf_M = state.leaf_at(split, state.signature_SF[torch.from_numpy(stale)], "mean")
        state = state.advance(open_S=open_S, round_S=round_S, assign_N=state.place(state.seen_S[stale], leaf_M))
        return state.advance(assign_N=state.place(unseen, UNKNOWN))

    def join(self, state, clients):
        """Newcomers descend the tree: one training per split they meet."""
        leaf_M, sound_M = np.zeros(len(clients), np.int64), np.ones(len(clients), bool)
        for split, old in enumerate(state.leaves_K2[:, 0].tolist()):
            here = np.flatnonzero((leaf_M == old) & sound_M)
            if len(here):
                asked = clients.select(here)
                updates = asked.train(asked.send(state.split_KP[split][None]), keep=self.keep(clients.spec), held=False)
                sound_M[here] = updates.ok_M
                leaf_M[here[updates.ok_M]] = state.leaf_at(split, updates.sound_MF, "max")
        return state.advance(assign_N=state.place(clients.ids_M[sound_M], leaf_M[sound_M]))

    def serve(self, state, clients):
        return serve_per_cluster(state, clients)
