"""Private runs as a whole: plan, budget, records, resumption, refusals."""

import stat
from types import SimpleNamespace

import pytest
from small_runs import interrupt_once, metrics_of, simulate_until
from torch import nn

from cfl_ray import Experiment, load_run, resume, simulate
from cfl_ray.config import load
from cfl_ray.config.unused import warnings_of
from cfl_ray.errors import ConfigError, Interrupted, RunError
from cfl_ray.methods.fedavg import FedAvg
from cfl_ray.population.population import Population
from cfl_ray.privacy.privacy_plan import describe
from cfl_ray.runtime.parts.private_run import ClientPrivacy
from cfl_ray.setup.prepare import prepare

pytest.importorskip("dp_accounting")

Z = 0.5  # noise multiplier; epsilon is above 2 from round 1 on, so that a coarse grid of privacy losses does


def experiment(**sections) -> Experiment:
    common = {
        "rounds": 4,
        "methods": [{"ifca": {"num_clusters": 2}}],
        "data": {"shift": {"kind": "rotated"}, "partition": {"clients": 12, "samples": 30}},
        "model": "mlp",
        "cohort": {"fraction": 0.5, "sampling": "poisson"},
        "privacy": {"noise_multiplier": Z, "noise": "reproducible"},
        "tracking": {"enabled": False},
        "runtime": {"engine": "manual", "checkpoint_every": 1},
    }
    return Experiment(**common | sections)


def figures(results, label="ifca"):
    return metrics_of(results[label])


def test_epsilon_grows_by_the_round_and_the_plan_says_its_end():
    values = [metrics["epsilon"] for metrics in figures(simulate(experiment()))]
    assert values == sorted(values) and len(set(values)) == 4
    plan = prepare(experiment()).privacy["ifca"]
    assert plan.epsilon(plan.after(4)) == values[-1]


def test_a_target_decides_the_noise():
    setup = prepare(experiment(privacy={"target_epsilon": 3.0}))
    plan = setup.privacy["ifca"]
    assert 2.98 < plan.epsilon(plan.after(4)) <= 3.0
    assert prepare(experiment(privacy={"target_epsilon": 2.5})).privacy["ifca"].privacy.noise_multiplier > (
        plan.privacy.noise_multiplier
    )


def test_a_run_ends_before_its_budget_is_exceeded(tmp_path):
    plan = prepare(experiment()).privacy["ifca"]
    target = (plan.epsilon(plan.after(2)) + plan.epsilon(plan.after(3))) / 2
    privacy = {"noise_multiplier": Z, "target_epsilon": target, "noise": "reproducible"}
    found = figures(simulate(experiment(privacy=privacy), tmp_path / "run"))
    assert len(found) == 2 and found[-1]["epsilon"] <= target
    assert found == figures(simulate(experiment(rounds=2)))


@pytest.mark.parametrize("noise", ["secret", "reproducible"])
def test_a_resumed_run_releases_the_same_sums(noise, tmp_path, monkeypatch):
    """A sum that is computed again has the same noise, so that it is released once."""
    seen = interrupt_once(monkeypatch, in_round=3)
    privacy = {"noise_multiplier": Z, "noise": noise, "clipping": "adaptive"}
    with pytest.raises(Interrupted):
        simulate(experiment(privacy=privacy), tmp_path / "run")
    resumed = figures(resume(tmp_path / "run", on_ray=False))
    assert seen[0].equal(seen[1]), "round 3 before it was saved, and again"
    assert len(resumed) == 4 and resumed[-1]["epsilon"] == figures(simulate(experiment()))[-1]["epsilon"]
    key = tmp_path / "run" / "ifca" / "privacy.key"
    assert key.exists() == (noise == "secret")
    if noise == "secret":
        assert stat.S_IMODE(key.stat().st_mode) == 0o600
        other = figures(simulate(experiment(privacy=privacy), tmp_path / "other"))
        assert other != resumed, "another run draws other noise and other cohorts"


def test_a_run_does_not_go_on_without_its_key(tmp_path):
    """With another key, a round that is computed again would be a second release."""
    private = experiment(privacy={"noise_multiplier": 1.0})
    simulate_until(2, private, tmp_path / "run")
    (tmp_path / "run/ifca/privacy.key").write_bytes(b"short")
    with pytest.raises(RunError, match="privacy.key: the key of this private run is absent or has 5 bytes instead"):
        resume(tmp_path / "run", on_ray=False)
    (tmp_path / "run/ifca/privacy.key").unlink()
    with pytest.raises(RunError, match="absent or has 0 bytes"):
        resume(tmp_path / "run", on_ray=False)


def test_an_extended_run_draws_the_noise_of_the_earlier_run(tmp_path):
    privacy = {"noise_multiplier": 1.0}
    simulate(experiment(rounds=2, privacy=privacy), tmp_path / "two")
    keys = [tmp_path / run / "ifca/privacy.key" for run in ("two", "four")]
    longer = simulate(experiment(privacy=privacy), tmp_path / "four", extend=tmp_path / "two")
    assert keys[0].read_bytes() == keys[1].read_bytes() and stat.S_IMODE(keys[1].stat().st_mode) == 0o600
    assert len(figures(longer)) == 4


def test_models_can_be_read_without_the_key_and_none_is_written(tmp_path):
    """Whoever has the key can subtract the noise, so a run may be handed on without it."""
    simulate(experiment(rounds=1, privacy={"noise_multiplier": 1.0}), tmp_path / "run")
    (tmp_path / "run/ifca/privacy.key").unlink()
    files = sorted((tmp_path / "run").rglob("*"))
    assert load_run(tmp_path / "run")["ifca"].model(0) is not None
    assert sorted((tmp_path / "run").rglob("*")) == files


def test_clients_cannot_join_or_leave_on_request(monkeypatch):
    from cfl_ray.runtime.round_loop import RoundLoop

    real, refused = RoundLoop._trained, []

    def asking(self, *arguments):
        with pytest.raises(ConfigError, match="ifca: clients cannot join or leave: the account of privacy") as error:
            self.requests.leave([0])
        refused.append(error)
        return real(self, *arguments)

    monkeypatch.setattr(RoundLoop, "_trained", asking)
    simulate(experiment(rounds=1))
    assert refused


def test_methods_with_signatures():
    privacy = {"noise_multiplier": Z, "noise": "reproducible", "signatures": {"noise_multiplier": 5.0}}
    found = figures(simulate(experiment(methods=["stocfl"], privacy=privacy)), "stocfl")
    plain = figures(simulate(experiment(methods=["fedavg"])), "fedavg")
    assert found[-1]["epsilon"] > plain[-1]["epsilon"], "two sums a round, and a vector of each client"


def test_a_round_without_clients_before_the_first_cluster():
    privacy = {"noise_multiplier": 1.0, "signatures": {"noise_multiplier": 1.0}}
    late = {"clock": {"kind": "constant", "deadline": 1e-9}}
    results = simulate(experiment(methods=[{"stocfl": {"weights": "uniform"}}], rounds=1, privacy=privacy, **late))
    assert results["stocfl"].final["cohort_size"] == 0 < results["stocfl"].final["epsilon"]


@pytest.mark.parametrize("last", [1, 2, 3])
def test_every_checkpoint_has_the_vectors_released_so_far(last, tmp_path):
    """Of each client another one in each round: the account of a resumed run counts all of them."""
    privacy = {"noise_multiplier": 1.0, "noise": "reproducible", "signatures": {"noise_multiplier": 1.0}}
    private = experiment(methods=["fesem"], cohort={"fraction": 1.0}, privacy=privacy)
    simulate_until(last, private, tmp_path / "run")
    assert figures(resume(tmp_path / "run", on_ray=False), "fesem") == figures(simulate(private), "fesem")


@pytest.mark.parametrize(
    "sections, message",
    [
        ({"methods": ["pacfl"]}, "pacfl cannot be private: its server reads descriptions of single clients"),
        ({"methods": ["fednova"]}, "fednova cannot be private: its server reads further numbers"),
        ({"methods": [{"fedavg": {"aggregation": "median"}}]}, "fedavg cannot be private with aggregation median"),
        ({"privacy": {"noise_multiplier": 1.0, "delta": 0.1}}, "privacy.delta must be below 1 / 12 clients"),
        (
            {"privacy": {"noise_multiplier": 1.0, "target_epsilon": 0.1}},
            "exceeds 0.1 in round 1 with noise multiplier 1",
        ),
        (
            {"privacy": {"noise_multiplier": 3.0, "clipping": "adaptive", "count_noise": 1.0}},
            "privacy.count_noise must be above 1.5, z / 2, got 1",
        ),
        (
            {"privacy": {"noise_multiplier": 3.0, "extrapolate": {"cohort": 9, "population": 5}}},
            "privacy.extrapolate: cohort must be at most population, 5, got 9",
        ),
        (
            {"model": lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 10), nn.BatchNorm1d(10))},
            "privacy: the model has statistics of batches, such as BatchNorm's; noise makes variances negative; use "
            "GroupNorm",
        ),
    ],
)
def test_refusals(sections, message):
    with pytest.raises(ConfigError, match=message):
        prepare(experiment(**sections))


def test_refusals_of_the_config():
    with pytest.raises(ConfigError, match="give target_epsilon, noise_multiplier or both"):
        experiment(privacy={})
    with pytest.raises(ConfigError, match="sampling poisson needs availability always, got bernoulli"):
        experiment(cohort={"sampling": "poisson", "availability": 0.5})
    warning = "privacy.quantile (0.3) has no effect: privacy.clipping is flat"
    assert warning in warnings_of(experiment(privacy={"noise_multiplier": 1.0, "quantile": 0.3}))


@pytest.mark.parametrize(
    "sections, kind, reason",
    [
        ({"cohort": {"fraction": 0.5, "sampling": "poisson"}}, "poisson", ""),
        ({"cohort": {"fraction": 0.5}}, "fixed", ""),
        ({"cohort": {"fraction": 1.0}}, "all", "every client is in every round"),
        ({"cohort": {"fraction": 0.5, "availability": 0.5}}, "all", "the availability of clients"),
        ({"cohort": {"fraction": 0.5, "dropout": 0.1}}, "all", "clients drop out"),
        ({"schedule": [{"round": 2, "leave": [0]}]}, "all", "clients join or leave"),
        (
            {"clock": {"kind": "lognormal"}, "cohort": {"fraction": 0.5, "over_selection": 1.3}},
            "all",
            "cohort.over_selection leaves out slow clients",
        ),
        ({"clock": {"kind": "constant", "deadline": 60.0}}, "all", "clock.deadline leaves out slow clients"),
    ],
)
def test_what_allows_amplification(sections, kind, reason):
    plan = prepare(experiment(methods=["fedavg"], **sections)).privacy["fedavg"]
    assert plan.sampling.kind == kind and plan.sampling.reason.startswith(reason)
    population = Population(12, [], seed=0)
    drawn = lambda: [population.draw(round, 0.5, poisson=kind == "poisson").ids_M.tolist() for round in range(9)]
    by_seed = drawn()
    ClientPrivacy(plan, 0, None, SimpleNamespace(population=population, requests=SimpleNamespace()))
    assert (drawn() == by_seed) == (kind == "all"), "cohorts that amplify are drawn from the key"


def test_clients_whose_data_change_are_no_random_cohort(monkeypatch):
    seen = []
    monkeypatch.setattr(FedAvg, "drift", lambda self, state, clients: seen.append(clients.protection.sampled) or state)
    changed = {"round": 2, "change": [{"clients": [0], "rotate": 90}]}
    simulate(experiment(methods=["fedavg"], rounds=2, schedule=[changed]))
    assert seen[-1] is False


def test_an_extrapolation_has_the_noise_of_a_larger_cohort():
    privacy = {"noise_multiplier": 1.0, "extrapolate": {"cohort": 600, "population": 10**6}}
    plan = prepare(experiment(privacy=privacy)).privacy["ifca"]
    assert plan.privacy.noise_scale == 6 / 600 and plan.sampling.population == 10**6
    assert any("an extrapolation to a larger federation" in line for line in describe(plan, "ifca", 4))


def test_an_override_makes_the_section():
    assert load(None, ["privacy.target_epsilon=8"]).privacy.target_epsilon == 8


def test_check_says_what_else_has_noise():
    signatures, adaptive = {"noise_multiplier": 5.0}, {"noise_multiplier": 1.0, "clipping": "adaptive"}
    plan = prepare(experiment(methods=["stocfl"], privacy={**adaptive, "signatures": signatures})).privacy["stocfl"]
    lines = describe(plan, "stocfl", 4)
    assert "  clip is that of round 1, and then follows a quantile of the norms" in lines
    assert "  vectors of single clients have noise of their own, and each is charged" in lines
    plain = describe(prepare(experiment()).privacy["ifca"], "ifca", 4)
    assert not set(lines[1:3]) & set(plain)
