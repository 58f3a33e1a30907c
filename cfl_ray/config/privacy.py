"""The section `privacy`."""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from cfl_ray.config.section import ConfigSection

Clip = Annotated[float, Field(gt=0, le=1e9)]
Multiplier = Annotated[float, Field(ge=0.01, le=1e4)]  # less noise protects nothing, and more leaves nothing to train


class SignatureConfig(ConfigSection):
    """Noise on each vector that the server reads of a single client: features of updates, results of `describe`."""

    noise_multiplier: Multiplier = Field(
        description="standard deviation of the noise, in units of `clip`; charged without amplification"
    )
    clip: Clip = Field(1.0, description="bound of the vector's Euclidean norm")


class ExtrapolationConfig(ConfigSection):
    """Simulation of a larger federation by a smaller one."""

    cohort: int = Field(ge=1, le=10**10, description="expected clients of a round in the larger federation")
    population: int = Field(ge=1, le=10**10, description="its clients")


class ExamplesConfig(ConfigSection):
    """DP-SGD in the local training: what a client uploads protects each of its samples, also against the server."""

    noise_multiplier: Multiplier = Field(
        description="z, standard deviation of the noise on the sum of a batch's gradients, in units of `clip`"
    )
    clip: Clip = Field(1.0, description="C, bound of the Euclidean norm of a sample's gradient")
    delta: float | None = Field(
        None, gt=0, lt=1, description="delta, below 1 / n of the largest client; null: n^-1.1 of the largest client"
    )


class PrivacyConfig(ConfigSection):
    """Differential privacy: of clients, by noise on sums, or of single samples, by DP-SGD (docs/privacy.md)."""

    target_epsilon: float | None = Field(
        None,
        gt=0,
        le=1000,
        description="budget: without noise_multiplier, z is solved for it and for `rounds`; with it, the run ends "
        "before a round that would exceed it",
    )
    noise_multiplier: Multiplier | None = Field(
        None, description="z, standard deviation of the noise on a sum, in units of `clip`"
    )
    delta: float | None = Field(None, gt=0, lt=1, description="delta, below 1 / N; null: N^-1.1")
    clip: Clip = Field(1.0, description="C, bound of the Euclidean norm of a client's whole upload")
    clipping: Literal["flat", "per_layer", "adaptive"] = Field(
        "flat",
        description="flat: the whole upload to C; per_layer: each of B tensors to C / sqrt(B); adaptive: to C, which "
        "follows a quantile of the norms (Andrew et al. 2021)",
    )
    quantile: float = Field(0.5, gt=0, lt=1, description="gamma of adaptive clipping: share of uploads within C")
    clip_lr: float = Field(0.2, gt=0, le=100, description="eta of adaptive clipping, step of log C")
    count_noise: float | None = Field(
        None, ge=1e-3, description="sigma_b of adaptive clipping, noise on the count; null: a twentieth of the cohort"
    )
    noise: Literal["secret", "reproducible"] = Field(
        "secret",
        description="secret: noise, and cohorts that amplify, are drawn from a random key of the run, in privacy.key; "
        "reproducible: from the seed, for tests: not private",
    )
    signatures: SignatureConfig | None = Field(
        None, description="noise on vectors of single clients; null: a method whose server reads them is refused"
    )
    examples: ExamplesConfig | None = Field(
        None, description="privacy of single samples; null: none. It needs no noise on sums, and can be given beside it"
    )
    extrapolate: ExtrapolationConfig | None = Field(
        None,
        description="noise and epsilon of a larger federation, for the signal-to-noise ratio of its cohort "
        "(noise_cohort_size of pfl-research): an extrapolation, no guarantee for the simulated clients; null: none",
    )

    @model_validator(mode="after")
    def _is_bounded(self) -> "PrivacyConfig":
        if not self.of_clients and self.examples is None:
            raise ValueError("give target_epsilon, noise_multiplier or both, or examples")
        return self

    @property
    def of_clients(self) -> bool:
        """Whether sums have noise, which protects whole clients."""
        return self.target_epsilon is not None or self.noise_multiplier is not None
