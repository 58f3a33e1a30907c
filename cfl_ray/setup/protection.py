"""Privacy and secure sums of a setup, planned and checked by rounds without training."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from cfl_ray.config.privacy import ExamplesConfig
from cfl_ray.core.aggregation.rules import Mean
from cfl_ray.core.params import ParamSpec
from cfl_ray.core.privacy import PrivacyError
from cfl_ray.core.secure_aggregation import SecureAggregation
from cfl_ray.data.federation import Federation
from cfl_ray.errors import ConfigError
from cfl_ray.nn.network import Network
from cfl_ray.population.population import selected_of
from cfl_ray.privacy.examples import ExampleAccount, delta_of
from cfl_ray.privacy.noisy_sums import PrivateRun, rounded_norm
from cfl_ray.privacy.privacy_plan import PrivacyPlan, privacy_plan_of
from cfl_ray.setup.checks import check_batches
from cfl_ray.setup.dry_rounds import DryBackend
from cfl_ray.setup.setup import Setup

_DRY_FLOATS = 10**9  # floats of the models in all rounds without training that plan a private run


def protected(setup: Setup, network: Network) -> Setup:
    """The setup with the secure sums, and the privacy of clients and of samples, of its experiment.

    network: of the setup, which stays as it is.

    Raises ConfigError for a method that cannot be protected.
    """
    experiment, methods = setup.experiment, setup.methods
    if experiment.secure_aggregation is not None:
        setup = replace(setup, secure=SecureAggregation(**experiment.secure_aggregation.model_dump()))
        _check_secure(setup, network.spec)
    if experiment.private_clients is not None:
        setup = replace(setup, privacy={label: _privacy_of(setup, label, network) for label in methods})
    if experiment.privacy is not None and (examples := experiment.privacy.examples) is not None:
        setup = replace(setup, examples={label: _examples_of(setup, label, examples, network) for label in methods})
    return setup


def _privacy_of(setup: Setup, label: str, network: Network) -> PrivacyPlan:
    """The privacy of a method, planned by rounds without training. Raises ConfigError if it cannot be private."""
    if network.batch_statistics:
        raise ConfigError(
            "privacy: the model has statistics of batches, such as BatchNorm's; noise makes variances negative; use "
            "GroupNorm"
        )
    _check_mean(setup, label, "be private", "privacy.clip")
    count = setup.federation.num_clients
    plan = privacy_plan_of(setup.experiment, count, label, lambda private: _tried(setup, label, network.spec, private))
    if setup.secure is not None:
        norm = rounded_norm(setup.secure.levels // 2, network.spec.size)
        for clients in (_most_masked(setup), 1):
            share = plan.privacy.share_of_noise(norm, setup.secure.least(clients))
            setup.secure.check(clients, share)
    return plan


def check_joining(setup: Setup, label: str, federation: Federation) -> None:
    """Raises ConfigError if clients that join a live run would end it. federation: with those that join."""
    network = setup.network()
    check_batches(grown := replace(setup, federation=federation), network)
    if setup.secure is not None:
        setup.secure.check(_most_masked(grown))
    if label not in setup.examples:
        return
    delta_of(setup.examples[label].delta, federation.num_samples_N)
    try:
        for _ in _tried(setup, label, network.spec, latecomers=True):
            pass
    except PrivacyError as error:
        raise ConfigError(f"{label} cannot protect single samples of clients that join: {error}") from None


def _examples_of(setup: Setup, label: str, config: ExamplesConfig, network: Network) -> ExampleAccount:
    """The account of samples after all rounds, if every client takes part in each.

    Raises ConfigError for a method or model that DP-SGD cannot protect, and for a delta that is too large.
    """
    local = setup.local_of(label)
    obstacles = {
        "statistics of batches, such as BatchNorm's, mix samples; use GroupNorm": network.batch_statistics,
        f"{network.side_effect}": network.side_effect is not None,
        "its forward pass draws random numbers besides dropout of activations": network.random_forward,
    }
    if reason := next((reason for reason, holds in obstacles.items() if holds), None):
        raise ConfigError(f"privacy.examples needs gradients of single samples, and the model has none: {reason}")
    if local.drop_last:
        value = str(local.drop_last).lower()
        raise ConfigError(f"privacy.examples draws every sample by itself; {label} has local.drop_last: {value}")
    sizes_N = setup.federation.num_samples_N
    account = ExampleAccount(config.noise_multiplier, delta_of(config.delta, sizes_N), len(sizes_N))
    batches_N = local.batches_of(sizes_N)
    try:
        least, most = (_most_steps(setup, label, network.spec, size) for size in (1, int(sizes_N.max())))
    except PrivacyError as error:
        raise ConfigError(f"{label} cannot protect single samples: {error}") from None
    # the steps of a training are linear in the batches of an epoch, or a constant
    steps_N = least + np.ceil((most - least) * (batches_N - 1) / max(int(np.max(batches_N)) - 1, 1))
    account.charge(np.arange(len(sizes_N)), local, sizes_N, steps_N)
    return account


def _most_steps(setup: Setup, label: str, spec: ParamSpec, size: int) -> int:
    """The most local steps in a run of a client that takes part in every round. size: samples of every client."""
    total_N, last_N, done = np.zeros(setup.federation.num_clients), np.zeros(0), 0
    for _, stats in _tried(setup, label, spec, size=size, latecomers=_latecomers(setup)):
        last_N, done = np.zeros_like(total_N), done + 1
        for ids_M, _, _, steps_M in stats.example_steps:
            np.add.at(last_N, ids_M, steps_M)
        total_N += last_N
    return int((total_N + (setup.experiment.rounds - done) * last_N).max())


def _check_mean(setup: Setup, label: str, what: str, key: str) -> None:
    """Raises ConfigError for an aggregation rule that reads the updates of single clients."""
    method = setup.methods[label]
    if not isinstance(method.aggregation_rule, Mean):
        raise ConfigError(
            f"{label} cannot {what} with aggregation {method.aggregation}: the rule reads the updates of single "
            f"clients; use aggregation mean ({key} bounds every update)"
        )


def _tried(
    setup: Setup,
    label: str,
    spec: ParamSpec,
    private: PrivateRun | None = None,
    size: int = 1,
    latecomers: bool = False,
) -> Iterator[Any]:
    """Yields the first rounds of a method without training, in which it requests everything that its server reads.

    size: samples of every client. latecomers: see `DryRounds.play`.
    """
    dry = setup.dry_rounds(label, spec)
    dry = replace(dry, rounds=min(dry.rounds, max(2, _DRY_FLOATS // spec.size)), size=size)
    return dry.play(DryBackend(spec, dry.shape), private, latecomers)


def _latecomers(setup: Setup) -> bool:
    """Whether a client may take part for the first time when the others have clusters."""
    cohort, joins = setup.experiment.cohort, any(event.join for event in setup.experiment.schedule)
    late = setup.clock is not None and setup.clock.deadline is not None
    partial = setup.division.cohort < setup.federation.num_clients or cohort.dropout > 0
    return partial or joins or late or cohort.availability.kind != "always"


def _most_masked(setup: Setup) -> int:
    """The maximum number of clients in a secure sum."""
    poisson, cohort = setup.experiment.cohort.sampling == "poisson", setup.division.cohort
    selected = selected_of(cohort, setup.experiment.cohort.over_selection)
    return setup.federation.num_clients if poisson else min(selected, setup.federation.num_clients)


def _check_secure(setup: Setup, spec: ParamSpec) -> None:
    """Raises ConfigError for a method whose server reads more than sums, and for sums that can exceed the ring."""
    assert setup.secure is not None
    if (most := _most_masked(setup)) < 2:
        raise ConfigError(f"secure_aggregation hides clients among each other: at least 2 in a cohort, got {most}")
    setup.secure.check(most)
    for label in setup.methods:
        _check_mean(setup, label, "be aggregated securely", "secure_aggregation.clip")
        try:
            for _ in _tried(setup, label, spec):
                pass
        except PrivacyError as error:
            raise ConfigError(f"{label} cannot be aggregated securely: {error}") from None
