"""Rows and samples of several clients in a tensor on the device; a row that several clients use is copied once."""

from collections.abc import Callable, Sequence
from weakref import WeakValueDictionary

import torch
from torch import Tensor

RowLookup = Callable[[int, int], Tensor]  # (table, row) -> the model (P,)


def rows_on(device: torch.device, rows: Sequence[Tensor], copies: bool = True) -> Tensor:
    """These rows (m, P) on the device. Rows with the same address in memory are the same.

    copies: each row is a separate copy, which may be changed; False: rows may share memory.
    """
    number_of: dict[int, int] = {}
    which_m = [number_of.setdefault(row_P.data_ptr(), len(number_of)) for row_P in rows]
    firsts = [which_m.index(number) for number in range(len(number_of))]
    if len(firsts) == 1:
        one_P = rows[0].to(device).expand(len(rows), -1)
        return one_P.clone(memory_format=torch.contiguous_format) if copies else one_P
    if len(firsts) == len(rows):
        return torch.stack([row_P.to(device) for row_P in rows])
    distinct_KP = torch.stack([rows[first].to(device) for first in firsts])
    return distinct_KP[torch.tensor(which_m, device=device)]


def padded(parts: Sequence[Tensor], device: torch.device) -> Tensor:
    """The parts (n_i, ...), padded with zeros, as a tensor (m, n, ...) on the device.

    If no part is on the device, they are copied to it in one transfer.
    """
    most, first = max(map(len, parts)), parts[0]
    target = next((part.device for part in parts if part.device == device), first.device)
    whole = first.new_zeros(len(parts), most, *first.shape[1:], device=target)
    for index, part in enumerate(parts):
        whole[index, : len(part)] = part
    return whole.to(device)


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
