"""Secure sums on hosts and server: quantisation, noise, masks. The protocol is that of `core.secure_aggregation`."""

import math
from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from cfl_ray.core.rng import secret_stream, stream
from cfl_ray.core.secure_aggregation import missing, reports
from cfl_ray.core.work import Address, AverageDeferred, SecureSum, Train
from cfl_ray.engine.discrete_gaussian import discrete_gaussian
from cfl_ray.engine.reduce import ChunkSums


def chunk_sums(work: Train | AverageDeferred, columns: int) -> ChunkSums:
    """The empty sums of a chunk of this work. columns: P."""
    if work.secure is not None:
        return SecureChunkSums(work, columns)
    assert work.averaging is not None
    return ChunkSums(work.averaging, work.clip, work.models_per_client)


class SecureChunkSums(ChunkSums):
    """Sums of the masked uploads of one chunk, int64 (P + 1,) modulo 2^b: changes, then the weight, of every row."""

    def __init__(self, work: Train | AverageDeferred, columns: int):
        assert work.averaging is not None and work.secure is not None
        super().__init__(work.averaging, work.clip, work.models_per_client)
        self.secure, self.address, self.ids_M = work.secure, work.address, work.ids_M
        self.models, self.shape = work.models_per_client, (work.averaging.num_rows, columns + 1)
        self.terms_of = {entry: self.terms_of.get(entry, []) for entry in range(len(self.ids_M))}  # all upload
        self._missing = dict.fromkeys(range(0, len(self.ids_M), self.models))  # clients that did not upload

    def _add_current(self) -> None:
        self._upload(next(iter(self._current)) // self.models * self.models)

    def close(self) -> None:
        """Adds the last upload, and zeros for the clients without a valid upload."""
        self._end_client()
        for first in list(self._missing):
            self._upload(first)

    def _upload(self, first: int) -> None:
        """Quantises, masks and adds the upload of the current client, whose first entry is `first`."""
        client, neighbour_X = int(self.ids_M[first]), self.secure.neighbour_MX[first]
        upload_RF = self._numbers(client)
        upload_RF += mask(self.secure, self.address, client, neighbour_X, self.shape)
        for out, upload_F in enumerate(upload_RF):
            self.changes[out] = (self.changes.get(out, 0) + upload_F) & (2**self.secure.bits - 1)
        del self._missing[first]

    def _numbers(self, client: int) -> Tensor:
        """The quantised upload (R, P + 1) of the current client, with its noise."""
        at, noise = self.address, self.secure.noise
        draws = {}
        for out in {out for entry in self._current for out, _ in self.terms_of[entry]}:
            draws[out] = stream(at.seed, at.round, at.exchange, client, f"secure/rounding/{out}")
        while True:
            upload_RF = torch.zeros(self.shape, dtype=torch.int64)
            for entry, change_P in self._current.items():
                for out, weight in self.terms_of[entry]:
                    upload_RF[out] += quantised(self.secure, change_P, weight, draws[out])
            if noise is None:
                return upload_RF
            upload_RF[:, -1] = 0  # sums of a private run are divided by constants
            if upload_RF.double().norm() <= noise.norm:
                break
        if noise.scale:
            draw = secret_stream(noise.secret, at.round, at.exchange, client, "sum")
            upload_RF += torch.from_numpy(discrete_gaussian(draw, noise.scale, upload_RF.numel()).reshape(self.shape))
        return upload_RF


def secure_means(work: Train | AverageDeferred, sums: Mapping[int, Tensor]) -> tuple[dict[int, Tensor], np.ndarray]:
    """`reduce.weighted_means` from unmasked sums (P + 1,): c sum_i q_i / sum_i u_i, and sum_i u_i / L.

    In a private run: c sum_i q_i / (L D_r), with the constant D_r of the row.
    """
    assert work.averaging is not None and work.secure is not None
    secure, means, arrived_R = work.secure, dict[int, Tensor](), np.zeros(work.averaging.num_rows)
    for out, sum_F in sums.items():
        weight = int(sum_F[-1]) if secure.noise is None else secure.unit * float(work.averaging.total_R[out])
        if weight:
            means[out] = (sum_F[:-1].double() * (secure.clip / weight)).float()
            arrived_R[out] = weight / secure.unit if secure.noise is None else 1.0
    return means, arrived_R


def quantised(secure: SecureSum, change_P: Tensor, weight: float, draw: np.random.Generator) -> Tensor:
    """(q, u), int64 (P + 1,), of a client with this weight, u / L, in a row."""
    u = round(weight * secure.unit)
    value_P = change_P.cpu().double().clamp_(-secure.clip, secure.clip).mul_(u / secure.clip)
    value_P.add_(torch.from_numpy(draw.random(len(value_P)))).floor_().clamp_(-u, u)
    if secure.private is not None:
        secure.private.put(value_P, torch.zeros(secure.private.count, dtype=torch.float64))
    return torch.cat([value_P, torch.tensor([u], dtype=torch.float64)]).long()


def mask(secure: SecureSum, address: Address, client: int, neighbour_X: np.ndarray, shape: tuple[int, int]) -> Tensor:
    """Sum of a client's own mask and its pair masks, int64 in 0 .. 2^b - 1 of this shape."""
    total = _words(secure, address, client, client, shape)
    for other in neighbour_X.tolist():
        total += _pair_mask(secure, address, client, other, shape)
    return total & (2**secure.bits - 1)


def unmasked(
    secure: SecureSum, address: Address, ids_M: np.ndarray, arrived_M: np.ndarray, totals: Mapping[int, Tensor]
) -> dict[int, Tensor]:
    """The sums (P + 1,), signed int64, by output row, of the arrived clients; empty if they cannot be unmasked.

    totals: sums of their uploads, of all rows.
    """
    if not totals or missing(secure, ids_M, arrived_M):
        return {}
    rows = sorted(totals)
    total_RF = torch.stack([totals[row] for row in rows])
    shape = (len(rows), total_RF.shape[1])
    for at, dead_X in zip(*reports(secure, ids_M, arrived_M), strict=True):
        client = int(ids_M[at])
        total_RF -= _words(secure, address, client, client, shape)
        for other in secure.neighbour_MX[at][dead_X].tolist():
            total_RF -= _pair_mask(secure, address, client, other, shape)
    half = 2 ** (secure.bits - 1)
    total_RF = ((total_RF + half) & (2 * half - 1)) - half
    return dict(zip(rows, total_RF, strict=True))


def _pair_mask(secure: SecureSum, address: Address, client: int, other: int, shape: tuple[int, int]) -> Tensor:
    """The mask that a client adds for a neighbour: the pair's mask, negated for the higher id."""
    words = _words(secure, address, min(client, other), max(client, other), shape)
    return words if client < other else words.neg_()


def _words(secure: SecureSum, address: Address, low: int, high: int, shape: tuple[int, int]) -> Tensor:
    """Uniform elements of the ring, int64, for a pair of clients; low = high for a client's own mask."""
    draw = stream(address.seed, address.round, address.exchange, low, f"secure/mask/{high}").bit_generator
    count = math.prod(shape)
    if secure.bits > 32:
        words = draw.random_raw(count) >> np.uint64(64 - secure.bits)
    else:
        words = draw.random_raw(-(-count // 2)).view("<u4")[:count] >> np.uint32(32 - secure.bits)
    return torch.from_numpy(words.astype(np.int64).reshape(shape))
