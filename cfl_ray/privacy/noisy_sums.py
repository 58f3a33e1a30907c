"""Differential privacy of clients: the server receives only sums of clipped uploads, with noise on every sum.

    S_r = sum over clients i in row r of clip(W_i - w_i, C) + N(0, (z C)^2 I);        theta_r <- theta_r + S_r / D_r

C bounds the whole upload of a client in an exchange, all its models together, so that the sums of all rows change by at
most C if a client's data are removed. D_r is a constant, the expected number of clients: q N, or q N / R of R rows that
share the clients; all clients have equal weights. With several exchanges, a round is a Gaussian mechanism with noise
multiplier z / sqrt(exchanges).

With secure aggregation, client i uploads whole numbers, and every client adds a share of the noise; the shares of the t
clients that have to report are enough (P. Kairouz, Z. Liu, T. Steinke, The Distributed Discrete Gaussian Mechanism for
Federated Learning with Secure Aggregation, ICML 2021, arXiv:2102.06387, Algorithm 1 without the rotation, Theorem 1):

    q_i = randomised rounding of L clip(W_i - w_i, C) / C, of d numbers, repeated until its norm is at most D
    D^2 = min((L + sqrt(d))^2, L^2 + d / 4 + L + sqrt(d) / 2),    y_i = q_i + N_Z(0, sigma^2),    sigma = z D / sqrt(t)

The sum of t discrete Gaussians N_Z is as private as N(0, t sigma^2) up to terms below 10 t exp(-pi^2 sigma^2), which
are below the rounding of the account for sigma >= 3.

H. B. McMahan et al., Learning Differentially Private Recurrent Language Models, ICLR 2018, arXiv:1710.06963. Adaptive
clipping: G. Andrew et al., NeurIPS 2021, arXiv:1905.03871, Algorithm 1:

    z_D = (z^-2 - (2 sigma_b)^-2)^(-1/2);    b = mean of [norm_i <= C], with noise sigma_b on the count
    C <- C exp(-eta (b - gamma))
"""

import hashlib
import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cfl_ray.config.privacy import SignatureConfig
from cfl_ray.core.params import Columns, ParamSpec
from cfl_ray.core.privacy import PrivacyError
from cfl_ray.core.rng import secret_stream
from cfl_ray.core.secure_aggregation import LARGEST_SIGMA
from cfl_ray.core.work import Address, Averaging, Clip, Outcome, RingNoise, SecureSum, Train
from cfl_ray.errors import ConfigError


@dataclass(frozen=True)
class Noise:
    """Gaussian noise from a random key. secret: the key; empty in a dry run, which draws no noise."""

    secret: bytes

    def seed(self, purpose: str) -> int:
        """A seed for other draws, in 0 .. 2^63 - 1."""
        return int.from_bytes(hashlib.blake2b(self.secret + purpose.encode(), digest_size=8).digest(), "little") >> 1

    def normal(self, address: Address, index: int, size: int, purpose: str) -> np.ndarray:
        """Standard normal numbers, float64 (size,). index: an output row, or a client."""
        if not self.secret:
            return np.zeros(size)
        return secret_stream(self.secret, address.round, address.exchange, index, purpose).standard_normal(size)


@dataclass(frozen=True)
class AdaptiveClip:
    """C follows a quantile of the norms."""

    quantile: float  # gamma
    lr: float  # eta
    count_noise: float  # sigma_b


@dataclass(frozen=True)
class Privacy:
    """Clipping and noise of every round of a private run; constant."""

    noise_multiplier: float  # z, given or solved for a target
    norm: float  # C of the first round
    cohort: float  # expected number of clients of a round, q N
    per_layer: bool = False
    adaptive: AdaptiveClip | None = None
    signatures: SignatureConfig | None = None  # noise on vectors of single clients
    noise_scale: float = 1.0  # factor of the added noise; below 1 in an extrapolation to larger cohorts

    @property
    def sum_multiplier(self) -> float:
        """z_D, noise multiplier of sums; above z with adaptive clipping, whose count is released too."""
        if self.adaptive is None:
            return self.noise_multiplier
        rest = self.noise_multiplier**-2 - (2 * self.adaptive.count_noise) ** -2
        if rest <= 0:
            given = self.adaptive.count_noise
            raise ConfigError(f"privacy.count_noise must be above {self.noise_multiplier / 2:g}, z / 2, got {given:g}")
        return rest**-0.5

    def share_of_noise(self, norm: int, least: int) -> int:
        """Sigma of the noise that each client adds to a secure sum.

        norm: bound of the norm of a client's whole numbers. least: number of clients that have to report. Raises
        ConfigError for noise that cannot be drawn or accounted for.
        """
        share = math.ceil(self.sum_multiplier * self.noise_scale * norm / least**0.5)
        if not 3 <= share <= LARGEST_SIGMA:
            raise ConfigError(
                f"privacy, and secure_aggregation.levels: the noise of each of {least} clients has a standard "
                f"deviation of {share} steps, it must be 3 .. {LARGEST_SIGMA}; set "
                f"{'more' if share < 3 else 'fewer'} levels"
            )
        return share


def rounded_norm(unit: int, columns: int) -> int:
    """D, bound of the norm of `columns` whole numbers, rounded from numbers of norm `unit`, L."""
    root = columns**0.5
    return math.floor(min(unit + root, (unit**2 + columns / 4 + unit + root / 2) ** 0.5)) + 1


@dataclass
class Releases:
    """The releases so far: the state of the accountant, part of every checkpoint."""

    # rounds by effective noise multiplier, 1 / sqrt(sum of 1 / z^2 over the releases of the round)
    sampled: Counter[float] = field(default_factory=Counter)  # with the cohort
    unsampled: Counter[float] = field(default_factory=Counter)  # with all clients
    signatures_N: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int32))  # number of vectors of each client
    shown: int = 0  # rounds of `sampled` in which vectors show that some clients are in the cohort

    @property
    def signatures(self) -> int:
        """The largest number of vectors of a client."""
        return int(self.signatures_N.max(initial=0))

    @property
    def known(self) -> int:
        """The most rounds of `sampled` in which a vector shows that its client is in the cohort: no amplification."""
        return min(self.shown, self.signatures)

    def scaled(self, z: float) -> "Releases":
        """The releases of the same rounds with `z` times their noise on sums."""
        sampled, unsampled = (
            Counter({z * multiplier: count for multiplier, count in counts.items()})
            for counts in (self.sampled, self.unsampled)
        )
        return replace(self, sampled=sampled, unsampled=unsampled)


class PrivateRun:
    """The privacy state of a method's run, which changes from round to round: clipping norm and releases."""

    def __init__(self, privacy: Privacy, noise: Noise) -> None:
        self.privacy, self.noise = privacy, noise
        self.norm = privacy.norm  # C
        self.releases = Releases()
        self._round = {True: 0.0, False: 0.0}  # sum of 1 / z^2 of the current round: of the cohort, of all clients
        self._shows = False  # whether the server has read vectors of clients of the cohort in this round

    # ---- exchanges

    def clip(self, spec: ParamSpec, private: Columns | None) -> Clip:
        """The clipping of a client's upload. private: columns that are not uploaded."""
        ends = spec.ends if self.privacy.per_layer else (spec.size,)
        return Clip(self.norm, ends, private)

    def fixed(self, averaging: Averaging, models: int, num_clients: int | None) -> Averaging:
        """Sums with constant denominators, which replace the means of `averaging`.

        models: number of models that each client trains. num_clients: number of all clients, if all take part; None: a
        cohort takes part. Raises PrivacyError for weights that differ, and for clients that are in several sums.
        """
        weight_E = averaging.weight_E * averaging.total_R[averaging.out_E]
        if len(weight_E) and not np.allclose(weight_E, weight_E[0], rtol=1e-9):
            raise PrivacyError(
                f"privacy needs equal weights of all clients, got {weight_E.min():g} .. {weight_E.max():g}; "
                "the weight of a client depends on its data"
            )
        if len(averaging.client_E) != len(np.unique(averaging.client_E)):
            raise PrivacyError("privacy needs every client in one average of an exchange, got clients in several")
        expected = self.privacy.cohort if num_clients is None else float(num_clients)
        total = expected * models / max(averaging.num_rows, 1)  # 0 rows: no client has been in a cluster yet
        return replace(
            averaging,
            weight_E=np.full(len(weight_E), 1 / total),
            total_R=np.full(averaging.num_rows, total),
            of_changes=True,
            fixed=True,
        )

    def in_ring(self, secure: SecureSum, columns: int) -> SecureSum:
        """The secure sum to which clients add noise. columns: number of values in all models of a client."""
        norm = rounded_norm(secure.unit, columns)
        share = self.privacy.share_of_noise(norm, secure.least) if self.noise.secret else 0
        return replace(secure, clip=self.norm, noise=RingNoise(self.noise.secret, share, norm))

    def charge(self, sampled: bool) -> None:
        """Charges the release of the sums of an exchange."""
        self._round[sampled] += self.privacy.sum_multiplier**-2

    def noised(
        self, outcome: Outcome, averaging: Averaging, address: Address, columns: int, work: Train, sampled: bool
    ) -> Outcome:
        """The outcome with noise on the sum of every row, also of rows without clients; charges the release.

        work: the training whose results are averaged, perhaps before `norm` changed.
        """
        assert work.clip is not None
        privacy, means = self.privacy, dict[int, Tensor]()
        scale = privacy.sum_multiplier * work.clip.norm * privacy.noise_scale
        for row in range(averaging.num_rows):
            noise_P = torch.from_numpy(self.noise.normal(address, row, columns, "sum")).mul_(
                scale / averaging.total_R[row]
            )
            change_P = outcome.means.get(row)
            means[row] = (noise_P if change_P is None else noise_P.add_(change_P)).float()
        self.charge(sampled)
        if privacy.adaptive is not None:
            models = work.models_per_client
            expected = float(averaging.total_R.sum()) / models
            self._adapt(privacy.adaptive, outcome.arrays["unclipped"][::models], expected, address, sampled)
        return replace(outcome, means=means, arrived_R=np.ones(averaging.num_rows))

    def _adapt(
        self, adaptive: AdaptiveClip, unclipped_M: np.ndarray, expected: float, address: Address, sampled: bool
    ) -> None:
        """Moves C towards the quantile, by a noisy count of unclipped uploads. expected: expected number of clients."""
        noise = adaptive.count_noise * self.privacy.noise_scale * self.noise.normal(address, -1, 1, "count")[0]
        share = 0.5 + (float((unclipped_M - 0.5).sum()) + noise) / expected
        self.norm *= math.exp(-adaptive.lr * (min(max(share, 0.0), 1.0) - adaptive.quantile))
        self._round[sampled] += (2 * adaptive.count_noise) ** -2

    def signatures_of(
        self, vectors_MF: Tensor, ids_M: np.ndarray, address: Address, what: str, sampled: bool
    ) -> Tensor:
        """Vectors of single clients, clipped and with noise; charges a release of each.

        Values that are not finite count as 0. sampled: whether the clients are of the cohort, which the vectors show.
        Raises PrivacyError without `privacy.signatures`.
        """
        signatures = self.privacy.signatures
        if signatures is None:
            raise PrivacyError(
                f"its server reads {what} of single clients, which noise on sums does not protect; give "
                "privacy.signatures, which adds noise to each of them, or choose a method whose server only adds up"
            )
        vectors = vectors_MF.double().nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)
        norm_M1 = vectors.norm(dim=1, keepdim=True).clamp(min=1e-300)
        vectors *= (signatures.clip / norm_M1).clamp(max=1.0)
        scale = signatures.noise_multiplier * signatures.clip
        for row, client in zip(vectors, ids_M.tolist(), strict=True):
            row.add_(torch.from_numpy(self.noise.normal(address, client, len(row), "signature")), alpha=scale)
        more = int(ids_M.max(initial=-1)) + 1 - len(self.releases.signatures_N)
        if more > 0:
            self.releases.signatures_N = np.pad(self.releases.signatures_N, (0, more))
        np.add.at(self.releases.signatures_N, ids_M, 1)
        self._shows |= sampled and len(ids_M) > 0
        return vectors.float()

    # ---- rounds

    def end_round(self) -> None:
        """Adds the releases of the round to `releases`."""
        self.releases.shown += self._shows and self._round[True] > 0
        self._shows = False
        for sampled, counts in ((True, self.releases.sampled), (False, self.releases.unsampled)):
            if inverse := self._round[sampled]:
                counts[round(inverse**-0.5, 12)] += 1
            self._round[sampled] = 0.0

    def to_values(self) -> dict[str, Any]:
        """The state for a checkpoint, as JSON values."""
        releases = self.releases
        return {
            "norm": self.norm,
            "sampled": [[z, count] for z, count in releases.sampled.items()],
            "unsampled": [[z, count] for z, count in releases.unsampled.items()],
            "shown": releases.shown,
        }

    def restore(self, values: Mapping[str, Any], signatures_N: np.ndarray) -> None:
        """The inverse of `to_values`. Raises KeyError, TypeError or ValueError for invalid values."""
        self.norm = float(values["norm"])
        sampled, unsampled = (Counter({float(z): int(n) for z, n in values[key]}) for key in ("sampled", "unsampled"))
        shown = int(values.get("shown", sampled.total()))  # an earlier format does not have it
        self.releases = Releases(sampled, unsampled, signatures_N, shown)
