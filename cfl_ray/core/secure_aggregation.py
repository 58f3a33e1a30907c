"""Secure aggregation: the server receives masked uploads, of which it can only read the sum.

With R output rows, L = levels / 2, b bits, weights w_ir >= 0 of client i in row r (0: it is not in the row), and U
uniform in [0, 1):

    u_ir = round(L w_ir / max w),    q_ir = floor(u_ir clamp(W_i - w_i, -c, c) / c + U)
    y_i  = (q_i1, u_i1, .., q_iR, u_iR) + p_i + sum_{j > i} p_ij - sum_{j < i} p_ij    mod 2^b
    mean change of row r = c sum_i q_ir / sum_i u_ir

p_i is the client's own mask, p_ij the mask that it shares with its neighbour j. The pair masks of clients that report
cancel. The server removes p_i of these, and p_ij if i reports and j does not, with shares of the keys that the
neighbours of i, or of j, hold. If less than a given share of them report, or of all clients, the sum cannot be read.
Every client uploads all rows, so the server does not see in which row a client is; a client whose data or update are
not valid uploads zeros.

In a private run, W_i - w_i is clipped to the norm C of the run, c = C, u_ir = 0, and every number has the client's
share of the noise (`cfl_ray.privacy.noisy_sums`).

K. Bonawitz et al., Practical Secure Aggregation for Privacy-Preserving Machine Learning, CCS 2017,
doi:10.1145/3133956.3133982. Neighbours: J. H. Bell et al., Secure Single-Server Aggregation with (Poly)Logarithmic
Overhead, CCS 2020, doi:10.1145/3372297.3417885 (SecAgg+).

Simulated are quantisation, masks, dropout, and the traffic of keys and shares (`engine.secure_sums`). There is no key
agreement and no secret sharing: masks are drawn from the seed. The server follows the protocol (honest but curious).
"""

import math
from dataclasses import dataclass, replace

import numpy as np

from cfl_ray.core.params import Columns
from cfl_ray.core.rng import stream
from cfl_ray.core.work import Address, Averaging, SecureSum
from cfl_ray.errors import ConfigError

KEY_BITS = 256  # of a public key, and of a share of a key
TAIL = 9  # standard deviations of noise that a ring holds
LARGEST_SIGMA = 2**26  # of a client's noise: squares of up to 33 sigma fit into 64 bits (`engine.discrete_gaussian`)


@dataclass(frozen=True)
class SecureAggregation:
    """The settings of secure sums; constant."""

    clip: float = 8.0  # c, of each number of a change W - w
    levels: int = 2**22  # in -c .. c
    bits: int = 32  # b: the ring has 2^b elements
    neighbours: int = 8  # k, even; in a smaller cohort, all others
    threshold: float = 0.5  # share of the clients, and of the neighbours of each, that has to report

    def check(self, num_clients: int, noise: int = 0) -> None:
        """Raises ConfigError if a sum over so many clients can exceed the ring. noise: deviation of each client's."""
        unit, limit = self.levels // 2, 2 ** (self.bits - 1)
        tail = math.ceil(TAIL * noise * num_clients**0.5)
        if num_clients * unit + tail >= limit:
            beyond = f", and its noise to {TAIL} standard deviations, {tail}" if noise else ""
            raise ConfigError(
                f"secure_aggregation: a sum of {num_clients} clients goes up to {num_clients} x levels / 2 = "
                f"{num_clients * unit}{beyond}, a ring of {self.bits} bits holds less than {limit}"
                + ("" if noise else f", {(limit - 1) // unit} clients")
                + "; set more bits, or fewer levels"
            )

    def least(self, num_clients: int) -> int:
        """Of so many clients that agree on masks, or neighbours of one, those that have to report."""
        return max(1, math.ceil(self.threshold * num_clients - 1e-9))  # the product in float64 may be a little more

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
        total_R = averaging.total_R if averaging.fixed else np.full(averaging.num_rows, most)
        weight_E = np.rint(weight_E / most * unit) / unit
        scaled = replace(averaging, weight_E=weight_E, total_R=total_R, of_changes=True)
        neighbour_NX = self.graph(ids_N, address)
        needed, least = self.least(neighbour_NX.shape[1]), self.least(len(ids_N))
        neighbour_MX = neighbour_NX[np.searchsorted(ids_N, ids_M)]
        return scaled, SecureSum(self.clip, unit, self.bits, needed, least, neighbour_MX, private)

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
    """Bits that a client of a secure sum receives and uploads in addition to models (Bonawitz et al., Section 7.1.1).

    Two public keys and two encrypted shares for each neighbour; the masked vector; a share for each neighbour.
    columns: of a row that are uploaded.
    """
    count = secure.neighbour_MX.shape[1]
    return KEY_BITS * 4 * count, rows * (columns + 1) * secure.bits + KEY_BITS * (2 + 3 * count)


def missing(secure: SecureSum, ids_M: np.ndarray, arrived_M: np.ndarray) -> str:
    """Why the sum of the clients that arrived cannot be read; empty: it can."""
    reported, dead = reports(secure, ids_M, arrived_M)
    alive_n = secure.neighbour_MX.shape[1] - dead.sum(1)
    gone, holders = np.unique(secure.neighbour_MX[reported][dead], return_counts=True)
    clients, counts = np.concatenate([ids_M[reported], gone]), np.concatenate([alive_n, holders])
    for client, count in zip(clients.tolist(), counts.tolist(), strict=True):
        if count < secure.needed:
            return (
                f"{count} neighbours of client {client} report, its masks need {secure.needed}; the sum is lost, and "
                "models stay as they were"
            )
    if 0 < len(reported) < secure.least:
        who = "client reports" if len(reported) == 1 else "clients report"
        return f"{len(reported)} {who}, the sum needs {secure.least}; it is lost, and models stay as they were"
    return ""


def reports(secure: SecureSum, ids_M: np.ndarray, arrived_M: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The first position of each client that arrived, and which of its neighbours did not, bool (n, X)."""
    arrived = np.flatnonzero(arrived_M)
    ids, first = np.unique(ids_M[arrived], return_index=True)
    return arrived[first], ~np.isin(secure.neighbour_MX[arrived[first]], ids)
