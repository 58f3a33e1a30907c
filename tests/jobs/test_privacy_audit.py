"""The audit of private runs: its bound is below the claim, and above it if clipping is broken."""

import pytest
from scipy.stats import binom

from cfl_ray.engine import reduce
from cfl_ray.privacy.noisy_sums import Privacy
from jobs.privacy_audit import audit, lower_bound, p_value

pytest.importorskip("dp_accounting")


def test_the_bound_of_pure_privacy_is_that_of_the_binomial():
    """With delta 0, so many right guesses have the chance of a binomial with e^eps / (1 + e^eps)."""
    for epsilon in (0.0, 1.0):
        chance = 1 / (1 + 2.718281828459045**-epsilon)
        assert p_value(100, 50, 40, epsilon, 0.0) == pytest.approx(binom.sf(39, 50, chance))
    assert lower_bound(100, 50, 25, 0.0) == 0
    assert 2.7 < lower_bound(100, 50, 50, 0.0) < 2.9, "0.05^(1/50) = e^eps / (1 + e^eps)"


def test_a_run_is_within_its_claim_and_caught_without_clipping(monkeypatch):
    settings = {"clients": 100, "rounds": 3, "guesses": 60, "noise_multiplier": 4.0}
    found = audit("fedavg", **settings)
    assert found["bound"] <= found["claim"] < 2.5
    monkeypatch.setattr(reduce, "clip_together", lambda clip, changes: True)
    broken = audit("fedavg", **settings)
    assert broken["right"] == 60 and broken["bound"] > broken["claim"]


def test_noise_of_the_clients_is_within_its_claim_and_too_little_of_it_is_caught(monkeypatch):
    settings = {"clients": 100, "rounds": 3, "guesses": 60, "noise_multiplier": 4.0, "secure": True}
    found = audit("fedavg", **settings)
    assert found["bound"] <= found["claim"] < 2.7
    monkeypatch.setattr(Privacy, "share_of_noise", lambda self, norm, least: 3)
    broken = audit("fedavg", **settings)
    assert broken["right"] == 60 and broken["bound"] > broken["claim"]
