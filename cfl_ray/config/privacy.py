"""The section `privacy`."""

from typing import Literal

from pydantic import Field, model_validator

from cfl_ray.config.section import ConfigSection


class SignatureConfig(ConfigSection):
    """Noise on each vector that the server reads of a single client: features of updates, results of `describe`."""

    noise_multiplier: float = Field(
        gt=0, description="standard deviation of the noise, in units of `clip`; charged without amplification"
    )
    clip: float = Field(1.0, gt=0, description="bound of the vector's Euclidean norm")


class ExtrapolationConfig(ConfigSection):
    """Simulation of a larger federation by a smaller one."""

    cohort: int = Field(ge=1, description="expected clients of a round in the larger federation")
    population: int = Field(ge=1, description="its clients")


class PrivacyConfig(ConfigSection):
    """Central differential privacy of clients: clipped uploads, noise on every sum, a budget (docs/privacy.md)."""

    target_epsilon: float | None = Field(
        None,
        gt=0,
        description="budget: without noise_multiplier, z is solved for it and for `rounds`; with it, the run ends "
        "before a round that would exceed it",
    )
    noise_multiplier: float | None = Field(
        None, gt=0, description="z, standard deviation of the noise on a sum, in units of `clip`"
    )
    delta: float | None = Field(None, gt=0, lt=1, description="delta, below 1 / N; null: N^-1.1")
    clip: float = Field(1.0, gt=0, description="C, bound of the Euclidean norm of a client's whole upload")
    clipping: Literal["flat", "per_layer", "adaptive"] = Field(
        "flat",
        description="flat: the whole upload to C; per_layer: each of B tensors to C / sqrt(B); adaptive: to C, which "
        "follows a quantile of the norms (Andrew et al. 2021)",
    )
    quantile: float = Field(0.5, gt=0, lt=1, description="gamma of adaptive clipping: share of uploads within C")
    clip_lr: float = Field(0.2, gt=0, description="eta of adaptive clipping, step of log C")
    count_noise: float | None = Field(
        None, gt=0, description="sigma_b of adaptive clipping, noise on the count; null: a twentieth of the cohort"
    )
    noise: Literal["secret", "reproducible"] = Field(
        "secret",
        description="secret: noise and Poisson cohorts are drawn from a random key of the run, in privacy.key; "
        "reproducible: from the seed, for tests: not private",
    )
    signatures: SignatureConfig | None = Field(
        None, description="noise on vectors of single clients; null: a method whose server reads them is refused"
    )
    extrapolate: ExtrapolationConfig | None = Field(
        None,
        description="noise and epsilon of a larger federation, for the signal-to-noise ratio of its cohort "
        "(noise_cohort_size of pfl-research): an extrapolation, no guarantee for the simulated clients; null: none",
    )

    @model_validator(mode="after")
    def _is_bounded(self) -> "PrivacyConfig":
        if self.target_epsilon is None and self.noise_multiplier is None:
            raise ValueError("give target_epsilon, noise_multiplier or both")
        return self

    @property
    def unused(self) -> dict[str, str]:
        """Keys that have no effect, and why."""
        if self.clipping == "adaptive":
            return {}
        reason = f"privacy.clipping is {self.clipping}"
        return {f"privacy.{name}": reason for name in ("quantile", "clip_lr", "count_noise")}
