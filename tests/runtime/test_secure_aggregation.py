"""Runs with secure aggregation as a whole: resumption, lost sums, refusals."""

import math

import pytest
from small_runs import interrupt_once, metrics_of

from cfl_ray import Experiment, resume, simulate
from cfl_ray.config.unused import warnings_of
from cfl_ray.errors import ConfigError, Interrupted
from cfl_ray.privacy.privacy_plan import describe
from cfl_ray.setup.prepare import prepare


def secure(**sections) -> Experiment:
    common = {
        "rounds": 3,
        "methods": [{"ifca": {"num_clusters": 2}}],
        "data": {"shift": {"kind": "rotated"}, "partition": {"clients": 12}},
        "model": "mlp",
        "cohort": {"fraction": 0.5, "dropout": 0.2},
        "secure_aggregation": {"neighbours": 4, "threshold": 0.25},
        "tracking": {"enabled": False},
        "runtime": {"engine": "sequential", "checkpoint_every": 1},
    }
    return Experiment(**common | sections)


def metrics(results, label="ifca"):
    return metrics_of(results[label])


@pytest.mark.parametrize("privacy", [None, {"noise_multiplier": 1.0, "noise": "reproducible"}])
def test_a_resumed_run_has_the_same_bits(privacy, tmp_path, monkeypatch):
    whole = metrics(simulate(secure(privacy=privacy)))
    seen = interrupt_once(monkeypatch, in_round=2)
    with pytest.raises(Interrupted):
        simulate(secure(privacy=privacy), tmp_path / "run")
    assert metrics(resume(tmp_path / "run", on_ray=False)) == whole
    assert seen[0].equal(seen[1])
    assert sum(one.get("clients_dropped", 0) for one in whole), "masks of clients that dropped out were removed"


PRIVATE = {"target_epsilon": 20.0, "noise": "reproducible"}


def test_a_private_run_has_noise_of_the_clients_and_an_account_without_amplification():
    """Noise that lasts for the target by the moments of N(0, z^2), all of the rounds charged in full."""
    pytest.importorskip("dp_accounting")
    one = secure(privacy=PRIVATE)
    plan, found = prepare(one).privacy["ifca"], metrics(simulate(one))
    assert plan.sampling.kind == "all" and plan.sampling.discrete
    assert found[-1]["epsilon"] == pytest.approx(plan.epsilon(plan.after(3))) and 19.9 < found[-1]["epsilon"] <= 20
    rho = 3 / (2 * plan.privacy.noise_multiplier**2)
    assert found[-1]["epsilon"] < rho + 2 * (rho * math.log(1 / plan.delta)) ** 0.5, "the bound of Bun and Steinke"
    lines = describe(plan, "ifca", 3)
    assert any(line.endswith("it holds against the server, too") for line in lines)
    assert "  no amplification by sampling: clients drop out" in lines
    assert prepare(secure(privacy=PRIVATE, cohort={"fraction": 0.5})).privacy["ifca"].sampling.reason == (
        "the server of secure sums knows the cohort"
    )
    more = secure(privacy=PRIVATE | {"extrapolate": {"cohort": 60, "population": 1000}})
    extrapolated = prepare(more).privacy["ifca"]
    assert extrapolated.sampling.population == 1000 and extrapolated.sampling.discrete
    given = {"neighbours": 4, "clip": 2.0}
    wanted = "secure_aggregation.clip (2.0) has no effect: privacy.clip bounds changes"
    assert wanted in warnings_of(secure(privacy=PRIVATE, secure_aggregation=given))


def test_lost_sums_are_counted():
    found = metrics(simulate(secure(cohort={"fraction": 0.5, "dropout": 0.6}, secure_aggregation={"threshold": 1.0})))
    assert any(one.get("sums_lost") for one in found)


def test_over_selected_clients_of_the_largest_sum():
    """1.1 times 50 clients are 55, although the product in float64 is more: 55 x 74 < 2^12 <= 56 x 74."""
    data, cohort = {"partition": {"clients": 60}}, {"clients": 50, "over_selection": 1.1}
    prepare(
        secure(data=data, cohort=cohort, clock={"kind": "constant"}, secure_aggregation={"levels": 148, "bits": 13})
    )


@pytest.mark.parametrize(
    "sections, message",
    [
        (
            {"methods": ["pacfl"]},
            "pacfl cannot be aggregated securely: its server reads descriptions of single clients",
        ),
        ({"methods": [{"fedavg": {"aggregation": "median"}}]}, "securely with aggregation median"),
        ({"cohort": {"clients": 1}}, "hides clients among each other: at least 2 in a cohort, got 1"),
        ({"secure_aggregation": {"bits": 22}}, "6 x levels / 2 = 12582912, a ring of 22 bits holds less than 2097152"),
        (
            {"privacy": {"noise_multiplier": 1.0, "clipping": "adaptive"}},
            "privacy.clipping adaptive, and secure_aggregation: the server counts the uploads within the norm",
        ),
        (
            {"privacy": {"noise_multiplier": 0.01}, "secure_aggregation": {"levels": 2}},
            "the noise of each of 3 clients has a standard deviation of 1 steps, it must be 3",
        ),
        (
            {"privacy": {"noise_multiplier": 20.0}, "secure_aggregation": {"bits": 25}},
            "6 x levels / 2 = 12582912, and its noise to 9 standard deviations, .* a ring of 25 bits holds less than",
        ),
        (
            {"clock": {"kind": "constant"}, "asynchronous": {"buffer": 2}},
            "secure_aggregation, and asynchronous.buffer 2: masks cancel among clients of the same round",
        ),
    ],
)
def test_refusals(sections, message):
    with pytest.raises(ConfigError, match=message):
        prepare(secure(**sections))
