"""A tree of clusters that were split in two, and which side of a split a client belongs to."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import normalize

from cfl_ray.core.merging import cluster_means
from cfl_ray.core.signatures import SignatureState
from cfl_ray.core.state import UNKNOWN


@dataclass(frozen=True)
class SplitState(SignatureState):
    """A state whose clusters are the leaves of a tree. Splits are numbered in their order: a client descends by going through them."""

    split_KP: Tensor = None  # model before each split
    leaves_K2: np.ndarray = None  # the leaf that was split, and the new one
    update_EF: Tensor = None  # updates of the members at the splits
    client_E: np.ndarray = None  # int64: whose update; UNKNOWN for the mean of a side that everybody has left
    split_E: np.ndarray = None  # of which split
    side_E: np.ndarray = None  # 0: stayed in the leaf, 1: went to the new one

    @classmethod
    def unsplit(cls, first_KP: Tensor, features: int) -> dict[str, object]:
        """The fields above, and those of signatures, before the first split."""
        none = np.zeros(0, np.int64)
        tree = {"split_KP": first_KP[:0], "leaves_K2": np.zeros((0, 2), np.int64), "update_EF": torch.zeros(0, features)}
        tree |= {"client_E": none, "split_E": none, "side_E": none}
        return cls.nobody(features) | tree

    def with_split(self, leaf: int, ids_E: np.ndarray, update_EF: Tensor, side_E: np.ndarray) -> "SplitState":
        """With a leaf split: its members `ids_E` of side 1 go to a new leaf, which starts from the same model."""
        number, new, model_KP = len(self.split_KP), self.num_clusters, self.models_KP[leaf][None]
        return self.advance(
            models_KP=torch.cat([self.models_KP, model_KP]),
            split_KP=torch.cat([self.split_KP, model_KP]),
            leaves_K2=np.concatenate([self.leaves_K2, [[leaf, new]]]),
            update_EF=torch.cat([self.update_EF, update_EF]),
            client_E=np.concatenate([self.client_E, ids_E]),
            split_E=np.concatenate([self.split_E, np.full(len(ids_E), number)]),
            side_E=np.concatenate([self.side_E, side_E]),
            assign_N=self.place(ids_E, np.where(side_E, new, leaf)),
        )

    def forget(self, ids: np.ndarray) -> "SplitState":
        """Without the assignment, signature and updates at splits of clients that left. A side that loses its last update keeps their mean."""
        state, stay_E, side_E = super().forget(ids), ~np.isin(self.client_E, ids), 2 * self.split_E + self.side_E
        lost = np.setdiff1d(side_E, side_E[stay_E])
        last_E = np.isin(side_E, lost)
        mean_EF, _ = cluster_means(self.update_EF[torch.from_numpy(last_E)], np.searchsorted(lost, side_E[last_E]), len(lost))
        return state.advance(
            update_EF=torch.cat([self.update_EF[torch.from_numpy(stay_E)], mean_EF]),
            client_E=np.concatenate([self.client_E[stay_E], np.full(len(lost), UNKNOWN)]),
            split_E=np.concatenate([self.split_E[stay_E], lost // 2]),
            side_E=np.concatenate([self.side_E[stay_E], lost % 2]),
        )

    def leaf_at(self, split: int, update_MF: Tensor, reduce: str) -> np.ndarray:
        """The leaf (M,) of a split whose members' updates have the higher `mean` or `max` cosine with each of these; the old one on ties."""
        mine_E = self.split_E == split
        cos_ME = normalize(update_MF, dim=1) @ normalize(self.update_EF[torch.from_numpy(mine_E)], dim=1).T
        by_side = [cos_ME[:, torch.from_numpy(self.side_E[mine_E] == side)] for side in (0, 1)]
        old_M, new_M = (cos_Me.mean(1) if reduce == "mean" else cos_Me.amax(1) for cos_Me in by_side)
        return np.where((new_M > old_M).numpy(), self.leaves_K2[split, 1], self.leaves_K2[split, 0])

    def leaf_below(self, split: int, update_MF: Tensor, reduce: str) -> np.ndarray:
        """The leaf (M,) to which each of these updates descends from a split, through those that followed."""
        leaf_M = np.full(len(update_MF), self.leaves_K2[split, 0])
        for later in range(split, len(self.leaves_K2)):
            here = np.flatnonzero(leaf_M == self.leaves_K2[later, 0])
            leaf_M[here] = self.leaf_at(later, update_MF[torch.from_numpy(here)], reduce)
        return leaf_M
