"""Rows and samples of several clients in a tensor on the device; a row that several clients use is copied once."""

from collections.abc import Callable, Sequence
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from cfl_ray.core.work import Proximal
from cfl_ray.nn.network import Network

RowLookup = Callable[[int, int], Tensor]  # (table, row) -> the model (P,)


def distinct(rows: Sequence[Tensor]) -> list[tuple[Tensor, list[int]]]:
    """The distinct rows, each with its positions in `rows`. Rows with the same address in memory are the same."""
    groups: dict[int, tuple[Tensor, list[int]]] = {}
    for position, row_P in enumerate(rows):
        groups.setdefault(row_P.data_ptr(), (row_P, []))[1].append(position)
    return list(groups.values())


def rows_on(device: torch.device, rows: Sequence[Tensor], copies: bool = True) -> Tensor:
    """These rows (m, P) on the device; rows that are the same are copied once.

    copies: each row is a separate copy, which may be changed; False: rows may share memory.
    """
    groups = distinct(rows)
    if len(groups) == 1:
        one_P = rows[0].to(device).expand(len(rows), -1)
        return one_P.clone(memory_format=torch.contiguous_format) if copies else one_P
    distinct_KP = torch.stack([row_P.to(device) for row_P, _ in groups])
    if len(groups) == len(rows):
        return distinct_KP
    number_of = {position: number for number, (_, positions) in enumerate(groups) for position in positions}
    return distinct_KP[torch.tensor([number_of[position] for position in range(len(rows))], device=device)]


def stacked_on(device: torch.device, values: Sequence[Tensor]) -> Tensor:
    """A value (...) of each of m clients as a tensor (m, ...) on the device, which may be changed."""
    return torch.stack([value.to(device) for value in values]) if values[0].ndim != 1 else rows_on(device, values)


def padded(parts: Sequence[Tensor], device: torch.device) -> Tensor:
    """The parts (n_i, ...), padded with zeros, as a tensor (m, n, ...) on the device.

    If no part is on the device, they are copied to it in one transfer.
    """
    target = device if any(part.device == device for part in parts) else parts[0].device
    return pad_sequence([part.to(target) for part in parts], batch_first=True).to(device)


class DeviceRows:
    """Rows of a work's tables on the device. A row is copied once and kept while it is in use."""

    def __init__(self, device: torch.device, lookup: RowLookup):
        self.device, self.lookup = device, lookup
        self._present: WeakValueDictionary[tuple[int, int], Tensor] = WeakValueDictionary()

    def __call__(self, table: int, row: int) -> Tensor:
        if self.device.type == "cpu":
            return self.lookup(table, row)
        row_P = self._present.get((table, row))
        if row_P is None:
            self._present[table, row] = row_P = self.lookup(table, row).to(self.device)
        return row_P


class ProximalRows:
    """Gradients of one proximal term of every client, at their rows (m, P).

    first: number of the first column of the rows and steps, of which earlier columns are left out.
    """

    def __init__(self, network: Network, terms: Sequence[Proximal[Tensor]], first: int = 0):
        self.term, self.first, self.trained = terms[0], first, network.spec.trained
        self.weight: float | Tensor = terms[0].weight
        if any(term.weight != self.weight for term in terms):
            self.weight = torch.tensor([[term.weight] for term in terms], device=network.device)
        self.anchor_mP = rows_on(network.device, [term.anchor for term in terms], copies=terms[0].follow > 0)
        self.ranges = (terms[0].columns or network.spec.trainable).within(first, self.trained).ranges

    def add_to(self, step: Tensor, rows_mP: Tensor) -> None:
        """Adds the gradient to `step` (m, trained columns), in place."""
        for start, stop in self.ranges:
            here = slice(start - self.first, stop - self.first)
            step[:, here] += self.weight * (rows_mP[:, here] - self.anchor_mP[:, start:stop])

    def move(self, rows_mP: Tensor, number: int, steps_m: Sequence[int]) -> None:
        """Moves the anchors of the clients whose anchor moves after step `number`. `first` is 0."""
        moves = [number < steps and self.term.moves_after(number, steps) for steps in steps_m]
        if not any(moves):
            return
        now = torch.tensor(moves, device=rows_mP.device)
        for start, stop in self.ranges:
            moved = self.anchor_mP[:, start:stop].lerp(rows_mP[:, start:stop], self.term.follow * self.weight)
            self.anchor_mP[:, start:stop] = torch.where(now[:, None], moved, self.anchor_mP[:, start:stop])

    def moved(self, rows_mP: Tensor) -> Tensor | None:
        """The moved anchors (m, P), with the buffers of `rows_mP`; None if they do not move."""
        if not self.term.follow:
            return None
        return torch.cat([self.anchor_mP[:, : self.trained], rows_mP[:, self.trained :]], 1)
