"""The privacy plan of a method, made before its run: noise, sampling as the accountant may assume it, budget."""

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import numpy as np

from cfl_ray.config import Experiment
from cfl_ray.config.privacy import PrivacyConfig
from cfl_ray.core.privacy import PrivacyError
from cfl_ray.errors import ConfigError
from cfl_ray.population.population import count_of
from cfl_ray.privacy.accounting import Sampling, epsilon, last_round, solved_multiplier
from cfl_ray.privacy.noisy_sums import AdaptiveClip, Noise, Privacy, PrivateRun, Releases

_ROUNDING = 1e-9  # relative tolerance of epsilon


@dataclass(frozen=True)
class PrivacyPlan:
    """Clipping and noise of every round, and its releases."""

    privacy: Privacy
    sampling: Sampling
    delta: float
    config: PrivacyConfig
    rounds: tuple[Releases, ...]  # of the first rounds; every later round has the releases of the last of these

    def after(self, rounds: int) -> Releases:
        """The releases of a run of `rounds` rounds."""
        return self._more(Releases(), 0, rounds)

    def epsilon(self, releases: Releases) -> float:
        """Epsilon of these releases."""
        signatures = self.privacy.signatures
        multiplier = None if signatures is None else signatures.noise_multiplier
        return epsilon(releases, self.sampling, self.delta, multiplier)

    def last_round(self, releases: Releases, done: int, rounds: int) -> int:
        """The last round, at most `rounds`, that the budget allows to a run that has completed `done` rounds."""
        if self.config.target_epsilon is None:
            return rounds
        limit = self.config.target_epsilon * (1 + _ROUNDING)
        return done + last_round(limit, rounds - done, lambda more: self.epsilon(self._more(releases, done, more)))

    def _more(self, releases: Releases, done: int, rounds: int) -> Releases:
        """`releases`, those of the first `done` rounds, plus those of the next `rounds` rounds."""
        planned = self.rounds[done : done + rounds]
        parts = [(releases, 1), *((part, 1) for part in planned), (self.rounds[-1], rounds - len(planned))]
        sampled, unsampled = Counter[float](), Counter[float]()
        for part, times in parts:
            for total, counts in ((sampled, part.sampled), (unsampled, part.unsampled)):
                total.update({z: times * count for z, count in counts.items() if times * count})
        signatures = sum(part.signatures * times for part, times in parts)
        shown = sum(part.shown * times for part, times in parts)
        return Releases(sampled, unsampled, np.array([signatures], np.int32), shown)


def privacy_plan_of(
    experiment: Experiment, num_clients: int, label: str, dry_rounds: Callable[[PrivateRun], Iterable[object]]
) -> PrivacyPlan:
    """The plan of a method. Raises ConfigError if it cannot be private, or exceeds the budget in round 1.

    dry_rounds: iterates over rounds of the method without training, which charge the given run.
    """
    config = experiment.private_clients
    assert config is not None
    sampling = _sampling(experiment, config, num_clients)
    delta = config.delta or sampling.population**-1.1
    if delta >= 1 / sampling.population:
        raise ConfigError(
            f"privacy.delta must be below 1 / {sampling.population} clients = {1 / sampling.population:.3g}, got "
            f"{delta:g}: a larger one would permit publishing the data of a client"
        )
    cohort = _expected_cohort(experiment, num_clients)
    unit = Privacy(
        noise_multiplier=1.0,
        norm=config.clip,
        cohort=cohort,
        per_layer=config.clipping == "per_layer",
        signatures=config.signatures,
        noise_scale=cohort / config.extrapolate.cohort if config.extrapolate else 1.0,
    )
    rounds = _releases(unit, label, dry_rounds)

    def with_noise(z: float) -> PrivacyPlan:
        adaptive = AdaptiveClip(config.quantile, config.clip_lr, config.count_noise or max(cohort / 20, z))
        privacy = replace(unit, noise_multiplier=z, adaptive=adaptive if config.clipping == "adaptive" else None)
        return PrivacyPlan(privacy, sampling, delta, config, tuple(part.scaled(z) for part in rounds))

    def epsilon_of(z: float) -> float:
        plan = with_noise(z)
        return plan.epsilon(plan.after(experiment.rounds))

    z = config.noise_multiplier
    if z is None:
        assert config.target_epsilon is not None
        z = solved_multiplier(config.target_epsilon, epsilon_of)
    plan = with_noise(z)
    _ = plan.privacy.sum_multiplier  # raises ConfigError for too little noise on the count
    if not plan.last_round(Releases(), 0, experiment.rounds):
        raise ConfigError(
            f"privacy.target_epsilon: {label} exceeds {config.target_epsilon:g} in round 1 with noise multiplier {z:g} "
            f"(epsilon {plan.epsilon(plan.after(1)):.3g}); give more noise or a larger budget"
        )
    return plan


def _releases(privacy: Privacy, label: str, dry_rounds: Callable[[PrivateRun], Iterable[object]]) -> list[Releases]:
    """The releases of each of the first rounds."""
    run, releases = PrivateRun(privacy, Noise(b"")), []
    try:
        for _ in dry_rounds(run):
            run.end_round()
            releases.append(run.releases)
            run.releases = Releases()
    except PrivacyError as error:
        raise ConfigError(f"{label} cannot be private: {error}") from None
    return releases


def _expected_cohort(experiment: Experiment, num_clients: int) -> float:
    """The expected cohort, q N or m."""
    cohort = experiment.cohort
    if cohort.sampling == "poisson":
        return cohort.clients or cohort.fraction * num_clients
    return cohort.clients or count_of(cohort.fraction, num_clients)


def _sampling(experiment: Experiment, config: PrivacyConfig, num_clients: int) -> Sampling:
    cohort, expected = experiment.cohort, _expected_cohort(experiment, num_clients)
    if config.extrapolate is not None:
        if config.extrapolate.cohort > config.extrapolate.population:
            raise ConfigError(
                f"privacy.extrapolate: cohort must be at most population, {config.extrapolate.population}, got "
                f"{config.extrapolate.cohort}"
            )
        if experiment.secure_aggregation is None:
            return Sampling("poisson", config.extrapolate.population, config.extrapolate.cohort)
        num_clients, expected = config.extrapolate.population, config.extrapolate.cohort
    reasons = {
        "the availability of clients is not a draw with equal chances": cohort.availability.kind != "always",
        "clients drop out": cohort.dropout > 0,
        "clients join or leave": any(event.join or event.leave for event in experiment.schedule),
        "runtime.round_deadline leaves out slow clients": experiment.runtime.round_deadline is not None,
        "clock.deadline leaves out slow clients": getattr(experiment.clock, "deadline", None) is not None,
        "cohort.over_selection leaves out slow clients": cohort.over_selection > 1,
        "every client is in every round": expected >= num_clients,
        "the server of secure sums knows the cohort": experiment.secure_aggregation is not None,
    }
    if reason := next((text for text, holds in reasons.items() if holds), ""):
        return Sampling("all", num_clients, expected, reason, discrete=experiment.secure_aggregation is not None)
    return Sampling(cohort.sampling, num_clients, expected)


def describe(plan: PrivacyPlan, label: str, rounds: int) -> list[str]:
    """The plan as lines of text, for `cfl-ray check`."""
    last = plan.last_round(Releases(), 0, rounds)
    privacy, sampling, config = plan.privacy, plan.sampling, plan.config
    first = (
        f"privacy of {label}: epsilon {plan.epsilon(plan.after(last)):.3g} at delta {plan.delta:.3g} after "
        f"{last} rounds ({sampling.relation}); noise multiplier {privacy.noise_multiplier:.4g}, clip {privacy.norm:g}, "
        f"expected cohort {privacy.cohort:g}"
    )
    target = config.target_epsilon or 0
    notes = {
        f"ends after round {last} of {rounds}: the next one would exceed epsilon {target:g}": last < rounds,
        f"no amplification by sampling: {sampling.reason}": sampling.kind == "all",
        "an extrapolation to a larger federation, no guarantee for these clients": config.extrapolate is not None,
        "noise is drawn from the seed: reproducible, not private": config.noise == "reproducible",
        "clients add the noise, in shares that are enough if secure_aggregation.threshold of them report: it holds "
        "against the server, too": sampling.discrete,
        "clip is that of round 1, and then follows a quantile of the norms": privacy.adaptive is not None,
        "vectors of single clients have noise of their own, and each is charged": privacy.signatures is not None,
        "all clients have equal weights": True,
        "assignments and metrics of clients are diagnostics of the simulation: not private": True,
    }
    return [first, *(f"  {text}" for text, holds in notes.items() if holds)]
