"""The port's backend in this process: one worker does every piece."""

from collections.abc import Iterable, Iterator

import numpy as np
from torch import Tensor

from cfl_ray.core.work import Combine, LeftOut, Mix, Outcome, OwnedKey, PieceResult, Work
from cfl_ray.data.federation import Federation
from cfl_ray.engine.owned import Owned
from cfl_ray.engine.reduce import HostSums
from cfl_ray.engine.worker import Worker


def pieces_of(work: Work, size: int) -> list[np.ndarray]:
    """Indices of the clients of each piece: clients that share a model side by side, `size` at a time.

    Depends on the work alone, never on hosts: a piece is the unit whose rounding is fixed.
    """
    if work.in_order or not len(work.ids_M):
        return [np.arange(len(work.ids_M))]
    size = 1 if isinstance(work, Combine) else size
    order = np.arange(len(work.ids_M))
    mix = getattr(work, "mix", None)
    if mix is not None and len(mix.out_E):
        out_M = np.zeros(len(work.ids_M), np.int64)
        out_M[mix.client_E] = mix.out_E
        order = np.argsort(out_M, kind="stable")
    return [order[at : at + size] for at in range(0, len(order), size)]


def piece_size(num_clients: int, engine: str, one_by_one: bool = False) -> int:
    """Clients of a piece: small enough that work can follow load, large enough that a call is cheap (and a stack is worth it).

    one_by_one: every client has a host of its own, or nearly (`runtime.clients_per_host`).
    """
    if one_by_one:
        return 1
    return min(-(-num_clients // 4), 64) if engine == "vectorised" else min(max(1, num_clients // 32), 8)


def gather(pieces: list[PieceResult], size: int) -> dict[str, np.ndarray]:
    """Per-client arrays (M, ...) from those of the pieces, whatever the order they came in."""
    if not pieces:
        return {}
    arrays = {}
    for name, first in pieces[0].arrays.items():
        shape = np.max([piece.arrays[name].shape[1:] for piece in pieces], axis=0).astype(int)  # features may have different lengths
        whole = np.zeros((size, *shape), first.dtype)
        for piece in pieces:
            array = piece.arrays[name]
            whole[(piece.index_m, *map(slice, array.shape[1:]))] = array
        arrays[name] = whole
    return arrays


def left_out_of(pieces: list[PieceResult]) -> dict[int, LeftOut]:
    """Clients that were left out, by position among the M clients."""
    return {int(piece.index_m[i]): left for piece in pieces for i, left in piece.left_out.items()}


def mass_of(mix: Mix | None, sums: HostSums) -> np.ndarray | None:
    """float64 (R,): the weight that arrived for every output row."""
    if mix is None:
        return None
    mass_R = np.zeros(mix.num_rows)
    for out, mass in sums.mass.items():
        mass_R[out] = float(mass)
    return mass_R


class InProcess:
    """Backend of `simulate`: the same pieces, the same worker, no cluster."""

    def __init__(self, worker: Worker, one_by_one: bool = False):
        self.worker, self.one_by_one = worker, one_by_one
        self.memory = Owned()

    def run(self, work: Work) -> Outcome:
        self.memory.begin(work)
        sums, results = HostSums(), []
        for index_m in pieces_of(work, piece_size(len(work.ids_M), self.worker.engine, self.one_by_one)):
            piece = work.take(index_m)
            ids = piece.ids_M.tolist()
            result, left = self.worker.run(piece, index_m, lambda table, row: work.tables[table][row], self.memory.of(piece), sums)
            self.memory.keep(work, *({ids[i]: value for i, value in values.items()} for values in (left.owned, left.pending)))
            results.append(result)
        return Outcome(gather(results, len(work.ids_M)), sums.rows, mass_of(getattr(work, "mix", None), sums), left_out_of(results))

    def use(self, federation: Federation) -> None:
        self.worker.federation = federation

    def forget(self, ids: np.ndarray) -> None:
        self.memory.forget(ids)

    def changed(self, everything: bool = False) -> Iterator[tuple[OwnedKey, Tensor]]:
        return self.memory.changed(everything)

    def forgotten(self) -> set[OwnedKey]:
        return self.memory.forgotten()

    def restore(self, entries: Iterable[tuple[OwnedKey, Tensor]]) -> None:
        self.memory.restore(entries)
