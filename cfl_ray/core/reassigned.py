"""Client ids as small arrays, and the clients whose cluster changed in a round, in eight bytes per client."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np

_BLOCK = 1 << 16


def ids_where(is_chosen_N: np.ndarray) -> np.ndarray:
    """Indices of the true entries of a mask (N,), int32, ascending; half the memory of `np.flatnonzero`."""
    blocks = [np.zeros(0, np.int32)]
    for at in range(0, len(is_chosen_N), _BLOCK):
        blocks.append((np.flatnonzero(is_chosen_N[at : at + _BLOCK]) + at).astype(np.int32))
    return np.concatenate(blocks)


@dataclass(frozen=True, eq=False)
class Reassigned:
    """The clients whose cluster changed in a round, and their clusters after it."""

    client_R: np.ndarray  # int32, ascending: ids
    cluster_R: np.ndarray  # int32; -1: the client is in no cluster any more

    @classmethod
    def of(cls, pairs: Sequence[Sequence[int]] = ()) -> Self:
        """From (client, cluster) pairs; the last pair of a client counts. Raises OverflowError beyond int32."""
        cluster_of = {client: cluster for client, cluster in pairs}  # noqa: C416 (pairs may be lists)
        pair_R2 = np.array(sorted(cluster_of.items()), np.int32).reshape(-1, 2)
        return cls(pair_R2[:, 0].copy(), pair_R2[:, 1].copy())

    @classmethod
    def between(cls, before_N: np.ndarray, after_N: np.ndarray) -> Self:
        """From the clusters of all clients before and after the round, int32 (N,)."""
        client_R = ids_where(before_N != after_N)
        return cls(client_R, after_N[client_R].astype(np.int32, copy=False))

    def __len__(self) -> int:
        return len(self.client_R)

    def __iter__(self) -> Iterator[tuple[int, int]]:
        """Yields (client, cluster)."""
        return zip(self.client_R.tolist(), self.cluster_R.tolist(), strict=True)

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, Reassigned)
            and np.array_equal(self.client_R, other.client_R)
            and np.array_equal(self.cluster_R, other.cluster_R)
        )

    def __hash__(self) -> int:
        return hash((self.client_R.tobytes(), self.cluster_R.tobytes()))

    def check(self) -> None:
        """Raises ValueError for invalid values; for arrays read from a file."""
        for array_R in (self.client_R, self.cluster_R):
            if array_R.dtype != np.int32 or array_R.ndim != 1 or len(array_R) != len(self.client_R):
                raise ValueError(
                    f"clients and clusters of {array_R.dtype} {array_R.shape}, expected int32 (R,) of both"
                )
        if len(self) and (self.client_R[0] < 0 or (self.client_R[1:] <= self.client_R[:-1]).any()):
            raise ValueError("clients are not ascending ids")
        if len(self) and self.cluster_R.min() < -1:
            raise ValueError(f"cluster {self.cluster_R.min()}, expected -1 or more")


NONE_REASSIGNED = Reassigned.of()
