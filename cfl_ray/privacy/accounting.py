"""The accountant: epsilon of Gaussian releases of clients' data, by Google's dp-accounting.

Every sum of a round is a Gaussian mechanism on the clients of the round; every signature is a Gaussian mechanism on
its client. Two federations are adjacent if the data of a client are removed, so that it uploads zeros ("poisson",
"all"), or replaced by other data ("fixed"). Replacement changes a sum by up to 2 C, so its noise multiplier is z / 2. A
signature always counts as replaced.
"""

import logging
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from math import ceil, exp, inf, log, log10, sqrt
from typing import Any, Literal

from cfl_ray.errors import ConfigError
from cfl_ray.privacy.noisy_sums import Releases

Kind = Literal["poisson", "fixed", "all"]

# Steps of the grid of privacy losses. A coarser grid gives a larger epsilon, never a smaller one: one that is at most a
# thousandth larger, if epsilon has _STEPS steps, and _STEPS_BY_ROUND times the root of the number of sampled rounds, as
# the rounding of each round's loss adds to its variance.
_FINE, _COARSE = 1e-4, 1e-3
_STEPS, _STEPS_BY_ROUND = 2000, 70
_LONGEST = 1000.0  # privacy loss up to which the first grid has the step _COARSE; a longer grid has a longer step
_COARSEST = 100.0  # dp-accounting overflows beyond log(1.8e308) = 709
_LARGEST_Z = 1e4  # no model can be trained with a larger noise multiplier
_PRECISION = 1.001  # factor to which the least noise multiplier is found
_SECANTS = 6  # most steps towards it before its bisection


@dataclass(frozen=True)
class Sampling:
    """How the cohort of a round is drawn. reason: why the kind "all" has no amplification."""

    kind: Kind
    population: int  # N
    cohort: float  # q N, expected clients of a round
    reason: str = ""
    discrete: bool = False  # noise of whole numbers, added by the clients; only of the kind "all"

    @property
    def rate(self) -> float:
        """The sampling rate q."""
        return 1.0 if self.kind == "all" else self.cohort / self.population

    @property
    def relation(self) -> str:
        """The relation of adjacent federations, as text."""
        return "replace one client" if self.kind == "fixed" else "add or remove one client"


def accountant(replaces: bool = False) -> tuple[Any, Any]:
    """The module dp_accounting, and its accountant of Renyi moments for adding or removing, or replacing, a record."""
    try:
        import dp_accounting as dp
    except ImportError:
        raise ConfigError("privacy needs dp-accounting; install it with: pip install 'cfl-ray[privacy]'") from None
    from dp_accounting.rdp import RdpAccountant

    logging.getLogger("absl").addFilter(_is_worth_showing)
    relation = dp.NeighboringRelation.REPLACE_ONE if replaces else dp.NeighboringRelation.ADD_OR_REMOVE_ONE
    return dp, RdpAccountant(neighboring_relation=relation)


def _is_worth_showing(record: logging.LogRecord) -> bool:
    """False for the warning about each order of moments that the accountant leaves out: epsilon holds without it."""
    return "Excluding this order" not in record.getMessage()


def epsilon(releases: Releases, sampling: Sampling, delta: float, signature_multiplier: float | None = None) -> float:
    """The epsilon of all releases at `delta`.

    signature_multiplier: noise multiplier of signatures; None: no signatures are released.
    """
    parts = [(z, count, False) for z, count in releases.unsampled.items()]
    known = releases.known if sampling.rate < 1 else 0
    for z, count in sorted(releases.sampled.items()):  # at worst, a client is known to be in those with the least noise
        shown = min(count, known)
        parts += [(z, times, sampled) for times, sampled in ((shown, False), (count - shown, True)) if times]
        known -= shown
    if releases.signatures and signature_multiplier is not None:
        # a signature changes by up to 2 C, a sum by C, or by 2 C if `fixed`, for which _composed_moments halves all z
        half = 1.0 if sampling.kind == "fixed" else 0.5
        parts.append((signature_multiplier * half, releases.signatures, False))
    if not parts:
        return 0.0
    found = _epsilon(tuple(parts), sampling, delta)
    if sampling.kind == "fixed":  # the bound with amplification may exceed the exact value without
        z = sum(count / z**2 for z, count, _ in parts) ** -0.5
        found = min(found, _epsilon(((z / 2, 1, False),), replace(sampling, kind="all"), delta))
    return found


@cache
def _epsilon(parts: tuple[tuple[float, int, bool], ...], sampling: Sampling, delta: float) -> float:
    if sampling.kind == "fixed" or sampling.discrete:
        return _composed_moments(parts, sampling, delta)
    rho = sum(count / (2 * z**2) for z, count, _ in parts)
    bound = rho + 2 * sqrt(rho * log(1 / delta))  # without amplification by sampling: Bun and Steinke, Proposition 1.3
    if bound > _LONGEST:
        bound = _composed_moments(parts, sampling, delta)  # tighter, and as slow as a grid
    sampled_rounds = sum(count for _, count, sampled in parts if sampled and sampling.rate < 1)
    steps = max(_STEPS, _STEPS_BY_ROUND * sqrt(sampled_rounds))
    longest = max(bound, *(1 / (2 * z**2) for z, _, _ in parts))
    interval = min(_COARSE * 10 ** max(ceil(log10(longest / _LONGEST)), 0), _COARSEST)
    while True:
        found = _composed_distributions(parts, sampling, delta, interval)
        if found >= steps * interval or interval <= _FINE:
            return found
        interval = max(interval / 10, _FINE)


def _composed_moments(parts: tuple[tuple[float, int, bool], ...], sampling: Sampling, delta: float) -> float:
    dp, losses = accountant(replaces=sampling.kind == "fixed")
    for z, count, sampled in parts:
        event: Any = dp.GaussianDpEvent(z / 2 if sampling.kind == "fixed" else z)
        if sampling.discrete:  # its bound: Theorem 14 of Canonne et al.
            event = dp.ZCDpEvent(rho=1 / (2 * z**2), xi=0)
        if sampled and sampling.rate < 1:
            event = (
                dp.SampledWithoutReplacementDpEvent(sampling.population, round(sampling.cohort), event)
                if sampling.kind == "fixed"
                else dp.PoissonSampledDpEvent(sampling.rate, event)
            )
        losses.compose(event, count)
    return float(losses.get_epsilon(delta))


def _composed_distributions(
    parts: tuple[tuple[float, int, bool], ...], sampling: Sampling, delta: float, interval: float
) -> float:
    """The same from the distributions of privacy losses, as PLDAccountant composes them."""
    accountant()  # raises ConfigError without dp-accounting
    from dp_accounting.pld.privacy_loss_distribution import identity

    losses = identity(interval)
    for z, count, sampled in parts:
        if sampled and sampling.kind == "poisson" and sampling.rate < 1:
            losses = losses.compose(_loss(z, sampling.rate, interval).self_compose(count))
        else:  # as one release with less noise
            losses = losses.compose(_loss(z / sqrt(count), 1.0, interval))
    return float(losses.get_epsilon_for_delta(delta))


@lru_cache(maxsize=16)
def _loss(z: float, rate: float, interval: float) -> Any:
    """The distribution of the privacy loss of one release: most of the time of an epsilon, and that of every round."""
    from dp_accounting.pld.privacy_loss_distribution import from_gaussian_mechanism

    return from_gaussian_mechanism(z, value_discretization_interval=interval, sampling_prob=rate)


def solved_multiplier(target: float, epsilon_of: Callable[[float], float]) -> float:
    """The least noise multiplier, to within a factor of _PRECISION, whose epsilon is at most `target`.

    epsilon_of: epsilon of the plan by noise multiplier. Raises ConfigError if no multiplier up to 1e4 is enough.
    """
    is_too_little = _Threshold(target, epsilon_of)
    low, high = 0.01, 1.0
    while is_too_little(high):
        low, high = high, 2 * high
        if high > _LARGEST_Z:
            raise ConfigError(
                f"privacy.target_epsilon: {target:g} is not reached with a noise multiplier of {_LARGEST_Z:g}"
            )
    is_too_little.approach(low)
    while high / low > _PRECISION:
        middle = (low * high) ** 0.5
        if is_too_little(middle):
            low = middle
        else:
            high = middle
    return high


class _Threshold:
    """Whether the epsilon of a noise multiplier is above the target. It is computed where earlier ones do not tell."""

    def __init__(self, target: float, epsilon_of: Callable[[float], float]):
        self.target, self.epsilon_of = target, epsilon_of
        self.above, self.below = 0.0, inf  # the nearest multipliers whose epsilon is known to be above, and not above
        self.points: list[tuple[float, float]] = []  # log z, log(epsilon / target)

    def __call__(self, z: float) -> bool:
        if self.above < z < self.below:
            found = self.epsilon_of(z)
            self.above, self.below = (z, self.below) if found > self.target else (self.above, z)
            if 0 < found < inf:
                self.points.append((log(z), log(found / self.target)))
        return z <= self.above

    def approach(self, low: float) -> None:
        """Narrows the threshold, which is above `low`: epsilon is nearly a power of z, so secants soon meet it."""
        for _ in range(_SECANTS):
            if not self.points or self.below <= max(self.above, low) * _PRECISION:
                return
            (x, y), slope = self.points[-1], -1.0
            if len(self.points) > 1:
                before = self.points[-2]
                slope = min((y - before[1]) / (x - before[0]), -0.1)
            # on the other side of the threshold, if the last multiplier was as near as that
            guess = exp(x - y / slope) * (_PRECISION**0.3 if y > 0 else _PRECISION**-0.3)
            if not max(self.above, low) < guess < self.below:
                return
            self(guess)


def last_round(target: float, rounds: int, epsilon_after: Callable[[int], float]) -> int:
    """The last round, at most `rounds`, after which epsilon is at most `target`; 0: it is larger after round 1."""
    if epsilon_after(rounds) <= target:  # as usual: then nothing is searched
        return rounds
    return bisect_right(range(1, rounds), target, key=epsilon_after)
