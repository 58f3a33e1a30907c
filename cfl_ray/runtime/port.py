"""The port's backend over Ray: pieces go to hosts as they become free, models cross once per host, sums come back once."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice

import numpy as np
import ray
from torch import Tensor

from cfl_ray.core.work import Address, Outcome, OwnedKey, PieceResult, Work
from cfl_ray.data.federation import Federation
from cfl_ray.engine.local import gather, mass_of, piece_size, pieces_of
from cfl_ray.engine.owned import Owned
from cfl_ray.engine.reduce import HostSums
from cfl_ray.runtime.hosts import shared_tensor
from cfl_ray.runtime.pool import Call, Pool


@dataclass
class OnRay:
    """Backend over a pool of hosts. What clients own stays in the object store; only references are held here."""

    pool: Pool
    memory: Owned = field(default_factory=Owned)
    _rows: dict[int, tuple[Tensor, dict[int, ray.ObjectRef]]] = field(default_factory=dict)  # by table: the rows put so far
    _address: tuple | None = None

    def run(self, work: Work) -> Outcome:
        pieces = pieces_of(work, self.piece_size(len(work.ids_M)))
        exchange = self.pool.next_exchange()
        self._forget_rows_of_other_rounds(work.address)
        self.memory.begin(work)
        left: tuple[dict[int, ray.ObjectRef], ...] = ({}, {})  # owned, pending
        results: dict[int, PieceResult] = {}
        sums = HostSums()

        def take(position: int, returns: list) -> None:
            results[position] = returns[0]
            ids = work.ids_M[returns[0].index_m].tolist()
            refs = iter(returns[1:])
            for kept, wanted in zip(left, work.stays):
                if wanted:
                    kept.update({client: ref for client, ref, ok in zip(ids, islice(refs, len(ids)), returns[0].arrays["ok"]) if ok})

        def merge(gathered: tuple[dict[int, np.ndarray], dict[int, float]]) -> None:
            rows, mass = gathered
            sums.add({out: shared_tensor(row) for out, row in rows.items()}, mass)

        mixes = getattr(work, "mix", None) is not None
        calls = [self._call(work, index_m, exchange) for index_m in pieces]
        self.pool.run(calls, take, (lambda actor: actor.collect.remote(exchange)) if mixes else None, merge)
        self.memory.keep(work, *left)
        return Outcome(gather([results[position] for position in sorted(results)], len(work.ids_M)), sums.rows, mass_of(getattr(work, "mix", None), sums))

    def piece_size(self, clients: int) -> int:
        return piece_size(clients, self.pool.choice.engine, bool(self.pool.setup.experiment.runtime.clients_per_host))

    def _call(self, work: Work, index_m: np.ndarray, exchange: int) -> Call:
        piece = work.take(index_m)
        ids = piece.ids_M.tolist()
        brought = self.memory.of(piece)
        refs = {(rows.table, row): self._row(work.tables[rows.table], row) for rows in piece.rows() for row in np.unique(rows.row_M).tolist()}
        returns = 1 + sum(work.stays) * len(ids)
        per_host = self.pool.setup.experiment.runtime.clients_per_host

        def start(actor) -> list[ray.ObjectRef]:
            made = actor.work.options(num_returns=returns).remote(exchange, piece, index_m, refs, list(brought), *brought.values())
            return made if isinstance(made, list) else [made]

        return Call(start, ids[0] // per_host if per_host else None)

    # ---- models

    def _row(self, table: Tensor, row: int) -> ray.ObjectRef:
        """The row in the object store: put once per round, however many exchanges and hosts use it."""
        _, refs = self._rows.setdefault(id(table), (table, {}))
        if row not in refs:
            refs[row] = ray.put(table[row].numpy())
        return refs[row]

    def _forget_rows_of_other_rounds(self, address: Address) -> None:
        if self._address != (address.round, address.exchange < 0):
            self._address, self._rows = (address.round, address.exchange < 0), {}

    # ---- what clients own

    def use(self, federation: Federation) -> None:
        self.pool.use(federation)

    def forget(self, ids: np.ndarray) -> None:
        self.memory.forget(ids)

    def changed(self, everything: bool = False) -> Iterator[tuple[OwnedKey, Tensor]]:
        return ((key, shared_tensor(ray.get(ref))) for key, ref in self.memory.changed(everything))

    def forgotten(self) -> set[OwnedKey]:
        return self.memory.forgotten()

    def restore(self, entries: Iterable[tuple[OwnedKey, Tensor]]) -> None:
        self.memory.restore((key, ray.put(value.numpy())) for key, value in entries)
