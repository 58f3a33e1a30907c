"""What becomes of many rows where they were trained: weighted sums, and functions of all rows by ranges of columns."""

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from cfl_ray.core import exact
from cfl_ray.core.work import Combine, Mix, Train

_BLOCK = 1 << 22  # values of pending results that are in memory at a time


class PieceSums:
    """Sums of one piece in float32: a piece is always done whole and in order, so its rounding is always the same."""

    def __init__(self, mix: Mix):
        self.by_client: dict[int, list[tuple[int, float]]] = {}
        for out, client, weight in zip(mix.out_E.tolist(), mix.client_E.tolist(), mix.weight_E.tolist()):
            self.by_client.setdefault(client, []).append((out, weight))
        self.rows: dict[int, Tensor] = {}
        self.mass: dict[int, float] = {}

    def add(self, client: int, row_P: Tensor) -> None:
        for out, weight in self.by_client.get(client, ()):
            if out in self.rows:
                self.rows[out].add_(row_P, alpha=weight)
            else:
                self.rows[out] = row_P * weight
            self.mass[out] = self.mass.get(out, 0.0) + weight


class HostSums:
    """Exact sums of all pieces that one host has done of one exchange: float64 (P,) and a mass by output row."""

    def __init__(self):
        self.rows: dict[int, Tensor] = {}
        self.mass: dict[int, Tensor] = {}

    def add(self, rows: dict[int, Tensor], mass: dict[int, float | Tensor]) -> None:
        """Adds the sums of a piece, or of another host."""
        for out, row in rows.items():
            row = row.cpu()
            if out not in self.rows:
                self.rows[out] = torch.zeros(len(row), dtype=torch.float64)
                self.mass[out] = torch.zeros((), dtype=torch.float64)
            exact.add_(self.rows[out], row)
            exact.add_(self.mass[out], torch.as_tensor(mass[out], dtype=torch.float64))

    @property
    def bytes(self) -> int:
        return sum(row.nbytes for row in self.rows.values())


def combined(work: Combine, memory: Mapping[int, Tensor] | Sequence[Tensor]) -> np.ndarray:
    """What the function makes of one range of columns, (1, ...)."""
    (start,), (stop,), count = work.ids_M.tolist(), work.stop_M.tolist(), len(work.members)
    wide = max(_BLOCK // count, 1)
    blocks = (np.stack([memory[i][at : min(at + wide, stop)].numpy() for i in range(count)]) for at in range(start, stop, wide))
    return work.function(blocks)[None]


def length(work: Train, upload_P: Tensor, sent_P: Tensor) -> float:
    """How far an upload is from the model that was sent, without private columns."""
    change_P = upload_P.cpu() - sent_P
    if work.own is not None and work.own.private:
        columns = work.own.columns
        change_P = change_P[:0] if columns is None else change_P
        if columns is not None:
            columns.put(change_P, torch.zeros(columns.count))
    return change_P.double().norm().item()
