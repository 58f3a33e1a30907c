"""Secure aggregation: the server receives masked uploads, of which it can only read the sum.

With R output rows, L = levels / 2, b bits, weights w_ir >= 0 of client i in row r (0: it is not in the row), and U
uniform in [0, 1):

    u_ir = round(L w_ir / max w),    q_ir = floor(u_ir clamp(W_i - w_i, -c, c) / c + U)
    y_i  = (q_i1, u_i1, .., q_iR, u_iR) + p_i + sum_{j > i} p_ij - sum_{j < i} p_ij    mod 2^b
    mean change of row r = c sum_i q_ir / sum_i u_ir

p_i is the client's own mask, p_ij the mask that it shares with its neighbour j. The pair masks of clients that report
cancel. The server removes p_i of these, and p_ij if i reports and j does not, with shares of the keys that the
neighbours of i, or of j, hold. If less than a given share of them report, the sum cannot be read. Every client uploads
all rows, so the server does not see in which row a client is.

K. Bonawitz et al., Practical Secure Aggregation for Privacy-Preserving Machine Learning, CCS 2017,
doi:10.1145/3133956.3133982. Neighbours: J. H. Bell et al., Secure Single-Server Aggregation with (Poly)Logarithmic
Overhead, CCS 2020, doi:10.1145/3372297.3417885 (SecAgg+).

Simulated are quantisation, masks, dropout, and the traffic of keys and shares. There is no key agreement and no secret
sharing: masks are drawn from the seed. The server follows the protocol (honest but curious).
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from cfl_ray.core.params import Columns
from cfl_ray.core.rng import stream
from cfl_ray.core.work import Address, Averaging, SecureSum
from cfl_ray.errors import ConfigError

KEY_BITS = 256  # of a public key, and of a share of a key


@dataclass(frozen=True)
class SecureAggregation:
    """The settings of secure sums; constant."""

    clip: float = 8.0  # c, of each number of a change W - w
    levels: int = 2**22  # in -c .. c
    bits: int = 32  # b: the ring has 2^b elements
    neighbours: int = 8  # k, even; in a smaller cohort, all others
    threshold: float = 0.5  # share of its neighbours that has to report

    def check(self, num_clients: int) -> None:
        """Raises ConfigError if a sum over so many clients can exceed the ring."""
        unit, limit = self.levels // 2, 2 ** (self.bits - 1)
        if num_clients * unit >= limit:
            raise ConfigError(
                f"secure_aggregation: a sum of {num_clients} clients goes up to {num_clients} x levels / 2 = "
                f"{num_clients * unit}, a ring of {self.bits} bits holds less than {limit}, {(limit - 1) // unit} "
                "clients; set more bits, or fewer levels"
            )

    def of(
        self,
        averaging: Averaging,
        address: Address,
        ids_M: np.ndarray,
        private: Columns | None = None,
        absent: np.ndarray | None = None,
    ) -> tuple[Averaging, SecureSum]:
        """The averages with weights u / L, of changes, and the masks of their sums.

        private: columns that are not uploaded. absent: clients that agreed on masks and do not report.
        """
        ids_N = np.unique(ids_M) if absent is None else np.union1d(ids_M, absent)
        self.check(len(ids_N))
        unit, weight_E = self.levels // 2, averaging.weight_E * averaging.total_R[averaging.out_E]
        most = weight_E.max(initial=0.0) or 1.0
        scaled = replace(
            averaging,
            weight_E=np.rint(weight_E / most * unit) / unit,
            total_R=np.full(averaging.num_rows, most),
            of_changes=True,
        )
        neighbour_NX = self.graph(ids_N, address)
        needed = max(1, math.ceil(self.threshold * neighbour_NX.shape[1]))
        neighbour_MX = neighbour_NX[np.searchsorted(ids_N, ids_M)]
        return scaled, SecureSum(self.clip, unit, self.bits, needed, neighbour_MX, private)

    def graph(self, ids_N: np.ndarray, address: Address) -> np.ndarray:
        """The neighbours of each client, int64 ids (N, X): those next to it on a random circle."""
        count, half = len(ids_N), self.neighbours // 2
        near = np.arange(1, count)
        if self.neighbours < count - 1:
            near = np.concatenate([near[:half], near[-half:]])
        order_N = stream(address.seed, address.round, address.exchange, -1, "secure/graph").permutation(count)
        neighbour_NX = np.empty((count, len(near)), np.int64)
        neighbour_NX[order_N] = ids_N[order_N[(np.arange(count)[:, None] + near) % max(count, 1)]]
        return neighbour_NX


def traffic(secure: SecureSum, rows: int, columns: int) -> tuple[int, int]:
    """Bits that a client of a secure sum receives and uploads beside models (Bonawitz et al., Section 7.1.1).

    Two public keys and two encrypted shares for each neighbour; the masked vector; a share for each neighbour.
    columns: of a row that are uploaded.
    """
    count = secure.neighbour_MX.shape[1]
    return KEY_BITS * 4 * count, rows * (columns + 1) * secure.bits + KEY_BITS * (2 + 3 * count)


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


def missing(secure: SecureSum, ids_M: np.ndarray, arrived_M: np.ndarray) -> str:
    """Why the sum of the clients that arrived cannot be read; empty: it can."""
    reported, dead = _reports(secure, ids_M, arrived_M)
    alive_n = secure.neighbour_MX.shape[1] - dead.sum(1)
    gone, holders = np.unique(secure.neighbour_MX[reported][dead], return_counts=True)
    clients, counts = np.concatenate([ids_M[reported], gone]), np.concatenate([alive_n, holders])
    for client, count in zip(clients.tolist(), counts.tolist(), strict=True):
        if count < secure.needed:
            return (
                f"{count} neighbours of client {client} report, its masks need {secure.needed}; the sum is lost, and "
                "models stay as they were"
            )
    return ""


def unmasked(
    secure: SecureSum, address: Address, ids_M: np.ndarray, arrived_M: np.ndarray, totals: Mapping[int, Tensor]
) -> dict[int, Tensor]:
    """The sums (P + 1,), int64 with sign, by output row, of those clients that arrived; empty if they cannot be read.

    totals: sums of their uploads, of all rows.
    """
    if not totals or missing(secure, ids_M, arrived_M):
        return {}
    rows = sorted(totals)
    total_RF = torch.stack([totals[row] for row in rows])
    shape = (len(rows), total_RF.shape[1])
    for at, dead_X in zip(*_reports(secure, ids_M, arrived_M), strict=True):
        client = int(ids_M[at])
        total_RF -= _words(secure, address, client, client, shape)
        for other in secure.neighbour_MX[at][dead_X].tolist():
            total_RF -= _pair_mask(secure, address, client, other, shape)
    half = 2 ** (secure.bits - 1)
    total_RF = ((total_RF + half) & (2 * half - 1)) - half
    return dict(zip(rows, total_RF, strict=True))


def _reports(secure: SecureSum, ids_M: np.ndarray, arrived_M: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The first position of each client that arrived, and which of its neighbours did not, bool (n, X)."""
    arrived = np.flatnonzero(arrived_M)
    ids, first = np.unique(ids_M[arrived], return_index=True)
    return arrived[first], ~np.isin(secure.neighbour_MX[arrived[first]], ids)


def _pair_mask(secure: SecureSum, address: Address, client: int, other: int, shape: tuple[int, int]) -> Tensor:
    """The mask that a client adds for a neighbour: that of the pair, negative for the higher id."""
    words = _words(secure, address, min(client, other), max(client, other), shape)
    return words if client < other else words.neg_()


def _words(secure: SecureSum, address: Address, low: int, high: int, shape: tuple[int, int]) -> Tensor:
    """Uniform elements of the ring, int64, for a pair of clients, or one client as both."""
    draw = stream(address.seed, address.round, address.exchange, low, f"secure/mask/{high}").bit_generator
    count = math.prod(shape)
    if secure.bits > 32:
        words = draw.random_raw(count) >> np.uint64(64 - secure.bits)
    else:
        words = draw.random_raw(-(-count // 2)).view("<u4")[:count] >> np.uint32(32 - secure.bits)
    return torch.from_numpy(words.astype(np.int64).reshape(shape))
