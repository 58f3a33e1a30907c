"""The port's backend over Ray: pieces go to hosts as they become free, models cross once per host, sums come back once."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice

import numpy as np
import ray
from torch import Tensor

from cfl_ray.core.work import Address, Combine, LeftOut, Outcome, OwnedKey, PieceResult, Work
from cfl_ray.data.federation import Federation
from cfl_ray.engine.local import gather, left_out_of, mass_of, piece_size, pieces_of
from cfl_ray.engine.owned import Owned
from cfl_ray.engine.reduce import HostSums
from cfl_ray.engine.sound import blank
from cfl_ray.runtime.dispatch import Call, Dispatch
from cfl_ray.runtime.hosts import shared_tensor
from cfl_ray.runtime.pool import Pool


@dataclass
class OnRay:
    """Backend over a pool of hosts. What clients own stays in the object store; only references are held here."""

    pool: Pool
    memory: Owned = field(default_factory=Owned)
    _rows: dict[int, tuple[Tensor, dict[int, ray.ObjectRef]]] = field(default_factory=dict)  # by table: the rows put so far
    _late: dict[int, LeftOut] = field(default_factory=dict)  # clients that took too long in this round: nobody waits for them again
    _address: tuple | None = None

    def run(self, work: Work) -> Outcome:
        exchange = self.pool.next_exchange()
        self._forget_other_rounds(work.address)
        late = [] if not work.of_clients else [i for i, client in enumerate(work.ids_M.tolist()) if client in self._late]
        pieces = [index_m for piece in pieces_of(work, self.piece_size(len(work.ids_M))) if len(index_m := np.setdiff1d(piece, late, True)) or not late]
        self.memory.begin(work)
        left: tuple[dict[int, ray.ObjectRef], ...] = ({}, {})  # owned, pending
        results: dict[int, PieceResult] = {}
        skipped: list[PieceResult] = []
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

        def leave_out(index_m: np.ndarray, why: list[LeftOut]) -> None:
            skipped.append(PieceResult(index_m, blank(work.take(index_m), self.pool.setup.federation.shape.num_classes), dict(enumerate(why))))

        if late:
            leave_out(np.array(late), [self._late[client] for client in work.ids_M[late].tolist()])
        mixes = getattr(work, "mix", None) is not None
        calls = [self._call(work, index_m, exchange, leave_out) for index_m in pieces]
        Dispatch(self.pool, calls, take).run((lambda actor: actor.collect.remote(exchange)) if mixes else None, merge)
        self.memory.keep(work, *left)
        found = [*(results[position] for position in sorted(results)), *skipped]
        return Outcome(gather(found, len(work.ids_M)), sums.rows, mass_of(getattr(work, "mix", None), sums), left_out_of(found))

    def piece_size(self, clients: int) -> int:
        return piece_size(clients, self.pool.choice.engine, bool(self.pool.setup.experiment.runtime.clients_per_host))

    def _call(self, work: Work, index_m: np.ndarray, exchange: int, leave_out: Callable[[np.ndarray, list[LeftOut]], None], again: bool = False) -> Call:
        piece = work.take(index_m)
        ids = piece.ids_M.tolist()
        brought = self.memory.of(piece)
        values = [list(brought.values())] if isinstance(piece, Combine) else brought.values()  # within a list they stay references
        refs = {(rows.table, row): self._row(work.tables[rows.table], row) for rows in piece.rows() for row in np.unique(rows.row_M).tolist()}
        returns = 1 + sum(work.stays) * len(ids)
        per_host = None if not piece.of_clients else self.pool.setup.experiment.runtime.clients_per_host

        def start(actor) -> list[ray.ObjectRef]:
            made = actor.work.options(num_returns=returns).remote(exchange, piece, index_m, refs, list(brought), *values)
            return made if isinstance(made, list) else [made]

        def instead() -> list[Call]:
            if not again:  # alone, perhaps on another host: only who takes too long then is left out
                return [self._call(work, part, exchange, leave_out, again=True) for part in ([index_m] if work.in_order else index_m[:, None])]
            why = [LeftOut(_late(work, client, seconds), late=True) for client in ids]
            leave_out(index_m, why)
            if work.of_clients:
                self._late.update(zip(ids, why))
            return []

        deadline = None if isinstance(work, Combine) else self.pool.setup.experiment.runtime.round_deadline
        seconds = deadline and deadline * (len(ids) if work.in_order else 1)
        return Call(start, ids[0] // per_host if per_host else None, seconds, instead)

    # ---- models

    def _row(self, table: Tensor, row: int) -> ray.ObjectRef:
        """The row in the object store: put once per round, however many exchanges and hosts use it."""
        _, refs = self._rows.setdefault(id(table), (table, {}))
        if row not in refs:
            refs[row] = ray.put(table[row].numpy())
        return refs[row]

    def _forget_other_rounds(self, address: Address) -> None:
        if self._address != (address.round, address.exchange < 0):
            self._address, self._rows, self._late = (address.round, address.exchange < 0), {}, {}

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


def _late(work: Work, which: int, seconds: float) -> str:
    """Who is to blame for work that took too long; of a chain, nobody knows."""
    who = f"the test on its test set {which} " if not work.of_clients else f"its chain of {len(work.ids_M)} clients " if work.in_order else ""
    return f"{who}did not finish within {seconds:g} s"
