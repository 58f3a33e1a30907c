"""Reductions of training results on their hosts: weighted sums, and functions of all rows by ranges of columns."""

import math
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from cfl_ray.core.work import AverageDeferred, Averaging, ClientState, Clip, CombineColumns, Train
from cfl_ray.engine import exact

_BLOCK = 1 << 22  # values of deferred results that are stacked at a time
_COLUMNS = 1 << 16  # of a mean at a time, so that the temporaries stay in cache
_GPU_BYTES = 1 << 29  # of totals on a GPU; further totals are added on the CPU


class ChunkSums:
    """Weighted sums of the changes W - w of one chunk, float32, with w the model that was sent to the client.

    The clients of a chunk are added in a fixed order, so the rounding is always the same.
    models: entries of a client, which are clipped together.
    """

    def __init__(self, averaging: Averaging, clip: Clip | None = None, models: int = 1):
        self.clip, self.models = clip, 1 if clip is None else models
        self.unclipped: dict[int, bool] = {}  # whether an upload was within the norm, by entry
        self._current: dict[int, Tensor] = {}  # changes of the current client, by entry
        self._uploads: list[Tensor] = []  # its further uploads (P,)
        self.num_models = averaging.num_models
        self.terms_of: dict[int, list[tuple[int, float]]] = {}  # by client: (output row, weight)
        entries = zip(averaging.out_E.tolist(), averaging.client_E.tolist(), averaging.weight_E.tolist(), strict=True)
        for out, client, weight in entries:
            self.terms_of.setdefault(client, []).append((out, weight))
        self.changes: dict[int, Tensor] = {}  # (P,) by output row

    def add(self, client: int, upload_P: Tensor, sent_P: Tensor, uploads: Iterable[Tensor] = ()) -> None:
        """Adds the change of the client at this position in the chunk, and its further uploads of at most P numbers."""
        if client not in self.terms_of:
            return
        if self._current and next(iter(self._current)) // self.models != client // self.models:
            self._end_client()
        self._current[client] = change_P = upload_P - sent_P.to(upload_P.device)
        self._uploads = [pad(values.to(change_P), (0, len(change_P) - len(values))) for values in uploads]
        if len(self._current) == self.models:
            self._end_client()

    def close(self) -> None:
        """Adds the last client, after the last call of `add`."""
        self._end_client()

    def _end_client(self) -> None:
        """Clips and adds the changes of the current client, if there is one."""
        if not self._current:
            return
        if self.clip is not None:
            within = clip_together(self.clip, list(self._current.values()))
            self.unclipped |= dict.fromkeys(self._current, within)
        self._add_current()
        self._current = {}

    def _add_current(self) -> None:
        for client, change_P in self._current.items():
            for out, weight in self.terms_of[client]:
                upload = out // self.num_models
                values_P = self._uploads[upload - 1] if upload else change_P
                if out in self.changes:
                    self.changes[out].add_(values_P.to(self.changes[out].device), alpha=weight)
                else:
                    self.changes[out] = values_P * weight

    def add_change(self, out: int, change_P: Tensor) -> None:
        """Adds the weighted sum of the changes of several clients to an output row."""
        self.changes[out] = self.changes[out].add_(change_P) if out in self.changes else change_P


def clip_together(clip: Clip, changes: Sequence[Tensor]) -> bool:
    """Clips the changes (P,) of all models of a client in place. Returns whether all parts were within their norm."""
    if clip.private is not None:
        for change_P in changes:
            clip.private.put(change_P, torch.zeros(clip.private.count, device=change_P.device))
    within, begin, part_norm = True, 0, clip.norm / len(clip.ends) ** 0.5
    for end in clip.ends:
        square = sum(float(change_P[begin:end].double().square().sum()) for change_P in changes)
        factor = part_norm / max(math.sqrt(square), 1e-300)
        if factor < 1:
            within = False
            for change_P in changes:
                change_P[begin:end].mul_(factor * (1 - 1e-6))  # 1e-6: so that rounding cannot exceed the norm
        begin = end
    return within


class HostSums:
    """Exact sums of the chunks of an exchange, on one host or all hosts: `exact` totals by output row.

    Sums of chunks that are on a GPU are added on the GPU, with the same bits.
    Totals of masked uploads are int64 (P + 1,). They are added modulo 2^64, so they are correct modulo 2^b.
    """

    def __init__(self) -> None:
        self._on_cpu: dict[int, Tensor] = {}  # float64 (2, P), or int64, on the CPU
        self._on_gpu: dict[int, Tensor] = {}  # float64 (2, P) on a GPU, not yet in the totals on the CPU

    @property
    def totals(self) -> dict[int, Tensor]:
        """The totals by output row, on the CPU: float64 (2, P), or int64."""
        on_gpu, self._on_gpu = self._on_gpu, {}
        self.merge({out: total_2P.cpu() for out, total_2P in on_gpu.items()})
        return self._on_cpu

    def add(self, chunk: ChunkSums) -> None:
        """Adds the sums of a chunk."""
        for out, change_P in chunk.changes.items():
            if not change_P.is_floating_point():
                self.merge({out: change_P.cpu()})
                continue
            total_2P = self._total(out, change_P)
            exact.add_(total_2P, change_P.to(total_2P.device))

    def _total(self, out: int, change_P: Tensor) -> Tensor:
        """The total to which a change is added: on its device if there is room."""
        if change_P.device.type != "cpu":
            if out in self._on_gpu:
                return self._on_gpu[out]
            size = (1 + len(self._on_gpu)) * 16 * len(change_P)
            with suppress(torch.OutOfMemoryError):
                if size <= _GPU_BYTES:
                    return self._on_gpu.setdefault(out, exact.zeros(len(change_P), change_P.device))
        if out not in self._on_cpu:
            self._on_cpu[out] = exact.zeros(len(change_P))
        return self._on_cpu[out]

    def values(self) -> dict[int, Tensor]:
        """The sums, float32 (P,) by output row; totals of masked uploads are unchanged."""
        only_on_gpu = {out: self._on_gpu.pop(out) for out in list(self._on_gpu) if out not in self._on_cpu}
        sums = {out: exact.value(total_2P).cpu() for out, total_2P in only_on_gpu.items()}
        for out, total in self.totals.items():
            sums[out] = exact.value(total) if total.is_floating_point() else total
        self._on_gpu |= only_on_gpu
        return sums

    def merge(self, totals: Mapping[int, Tensor]) -> None:
        """Adds the totals of another host."""
        for out, total_2P in totals.items():
            self._on_cpu[out] = self._on_cpu[out] + total_2P if out in self._on_cpu else total_2P


def weighted_means(
    work: Train | AverageDeferred, changes: Mapping[int, Tensor], valid_M: np.ndarray
) -> tuple[dict[int, Tensor], np.ndarray]:
    """Weighted means of the valid clients' models, float32 (P,) by output row, and the arrived weight of each row.

    For the clients i of a row, with weights p_i and the models w_i that were sent to them:

        mean = w + sum_i (p_i / p) (w_i - w) + sum_i p_i (W_i - w_i) / p        p = sum_i p_i, the weight that arrived

    with w the first of the models w_i. `changes` are the sums of the last term before the division, float32 (P,) by
    output row. The weights are summed here, in the order of the clients, and never rounded.

    For averages of changes, and for further uploads of client programs, the mean is the last term alone. With fixed
    totals, by which the weights are already divided, p = 1.
    """
    assert work.averaging is not None
    averaging = work.averaging.subset(valid_M[work.averaging.client_E])
    arrived_R = np.bincount(averaging.out_E, averaging.weight_E, averaging.num_rows)
    if averaging.of_changes:
        share_R = np.ones_like(arrived_R) if averaging.fixed else arrived_R
        changes = {out: change_P for out, change_P in changes.items() if arrived_R[out] > 0}
        return {out: (change_P.double() / share_R[out]).float() for out, change_P in changes.items()}, arrived_R
    further = {
        out: (change_P.double() / arrived_R[out]).float()
        for out, change_P in changes.items()
        if out >= averaging.num_models and arrived_R[out] > 0
    }
    averaging = averaging.subset(averaging.out_E < averaging.num_models)
    table_KP, row_E = work.tables[work.start.table], work.start.row_M[averaging.client_E]
    pairs, which_E = np.unique(averaging.out_E * len(table_KP) + row_E, return_inverse=True)
    weights = np.bincount(which_E, averaging.weight_E, len(pairs))
    shares: dict[int, list[tuple[int, float]]] = {}  # by output row: (row of the table, its share of the weight)
    for pair, weight in zip(pairs.tolist(), weights.tolist(), strict=True):
        out, row = divmod(pair, len(table_KP))
        if arrived_R[out] > 0:
            shares.setdefault(out, []).append((row, weight / arrived_R[out]))
    means_RP = torch.empty(len(shares), table_KP.shape[1])  # a single table, so that `Updates` need not copy
    means = dict(zip(sorted(shares), means_RP, strict=True))
    for start in range(0, table_KP.shape[1], _COLUMNS):
        part = slice(start, start + _COLUMNS)
        for out, ((first, _), *others) in shares.items():
            first_p = table_KP[first, part].double()
            mean_p = first_p.clone()
            for row, share in others:
                mean_p.add_(table_KP[row, part] - first_p, alpha=share)
            means[out][part] = mean_p.add_(changes[out][part], alpha=1 / arrived_R[out])
    return means | further, arrived_R


def combine_columns(work: CombineColumns, deferred: Mapping[int, Tensor] | Sequence[Tensor]) -> np.ndarray:
    """The value (1, ...) of the work's function for one range of columns. deferred: these columns of all members."""
    (start,), (stop,), count = work.ids_M.tolist(), work.stop_M.tolist(), len(work.members)
    width = max(_BLOCK // count, 1)
    blocks = (
        np.stack([deferred[i][at : at + width].numpy() for i in range(count)]) for at in range(0, stop - start, width)
    )
    return work.function(blocks)[None]


def upload_distance(client_state: ClientState | None, upload_P: Tensor, sent_P: Tensor) -> float:
    """Euclidean distance of an upload to the model that the client received, without private columns."""
    change_P = upload_P.cpu() - sent_P
    if client_state is not None and client_state.private:
        columns = client_state.private_columns
        if columns is None:
            return 0.0
        columns.put(change_P, torch.zeros(columns.count))
    return change_P.double().norm().item()
