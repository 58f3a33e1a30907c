"""Privacy of single samples: the account of each client, which methods may be private, records, resumption."""

import numpy as np
import pytest
import torch
from federations import Stage, linear, planted
from small_runs import interrupt_once, metrics_of
from torch import nn

from cfl_ray import Experiment, resume, simulate
from cfl_ray.config.unused import warnings_of
from cfl_ray.core.clients import LocalTraining
from cfl_ray.core.local_sgd import ExampleNoise, LocalSGD
from cfl_ray.errors import ConfigError, Interrupted
from cfl_ray.methods import REGISTRY
from cfl_ray.privacy.examples import ExampleAccount, describe
from cfl_ray.setup.prepare import prepare

dp = pytest.importorskip("dp_accounting")

PRIVATE = {"examples": {"noise_multiplier": 1.0, "clip": 0.5}, "noise": "reproducible"}
ALLOWED = (
    "cfl cflgp cgpfl ditto fedac fedamp fedavg fedavg_plus fedbn fedclust fedgroup fedper fedprox fedprox_plus fesem "
    "fesem_cam fl_hc lg_fedavg local"
)
CHOICE, STEPS = "the choice among models", "results of steps of its own, such as steps of several gradients"
REFUSED = {
    "ifca": CHOICE,
    "ifca_cam": CHOICE,
    "pacfl": "descriptions",
    "stocfl": "descriptions",
    "fednova": "further numbers",
    "pfedme": STEPS,
    "per_fedavg": STEPS,
    "apfl": STEPS,
    "fedrep": STEPS,
    "fedem": "results of weighted samples",
}


def experiment(**sections) -> Experiment:
    common = {
        "rounds": 3,
        "methods": ["fedavg"],
        "data": {"shift": {"kind": "rotated"}, "partition": {"clients": 6, "samples": 80}},
        "model": {"name": "mlp", "options": {"hidden": 0}},
        "local": {"epochs": 1, "batch_size": 20},
        "cohort": {"fraction": 0.5},
        "privacy": PRIVATE,
        "tracking": {"enabled": False},
        "runtime": {"engine": "sequential", "checkpoint_every": 1},
    }
    return Experiment(**common | sections)


def figures(results, label="fedavg"):
    return metrics_of(results[label])


def test_the_account_is_that_of_the_steps_of_each_client():
    """Composed step by step with the accountant of dp-accounting."""
    account = ExampleAccount(1.1, 1e-5, 3)
    local = LocalSGD(batch_size=10, examples=ExampleNoise(1.1, 1.0))
    account.charge(np.array([0, 2]), local, np.array([100, 8]), np.array([10, 4]))
    account.charge(np.array([2]), local, np.array([8]), np.array([4]))
    expected = [0.0, 0.0, 0.0]
    for client, rate, steps in ((0, 0.1, 10), (2, 1.0, 8)):
        moments = dp.rdp.RdpAccountant()
        for _ in range(steps):
            moments.compose(dp.PoissonSampledDpEvent(rate, dp.GaussianDpEvent(1.1)))
        expected[client] = moments.get_epsilon(1e-5)
    assert account.epsilon_N().tolist() == pytest.approx(expected)
    account.charge(np.array([4]), local, np.array([100]), np.array([10]))
    assert account.epsilon_N()[[0, 4]].tolist() == pytest.approx([expected[0]] * 2), "a client that joined"


def test_a_training_of_another_batch_size_has_its_own_rate():
    own = LocalSGD(batch_size=10, examples=ExampleNoise(1.1, 1.0))
    stage, account = Stage(planted(clients=2), linear, own, "sequential"), ExampleAccount(1.1, 1e-5, 2)
    clients = stage.clients([0])
    clients.train(clients.send(torch.zeros(1, 68)), how=LocalTraining(sgd=LocalSGD(batch_size=None)))
    for training in stage.stats.example_steps:
        account.charge(*training)
    assert account.account_N2.tolist() == [[1, 1], [0, 0]], "one step with all samples"


def test_the_known_value_of_dp_sgd():
    """z 1.1, q 250 / 60,000, 60 epochs of MNIST: 2.5617157 by the accountant of Opacus 1.6 (RDPAccountant)."""
    account = ExampleAccount(1.1, 1e-5, 1)
    local = LocalSGD(batch_size=250, examples=ExampleNoise(1.1, 1.0))
    account.charge(np.array([0]), local, np.array([60_000]), np.array([60 * 240]))
    assert account.epsilon_N()[0] == pytest.approx(2.5617157, rel=1e-6)


def test_records_carry_it_and_the_plan_bounds_it():
    setup = prepare(experiment())
    values = [one["example_epsilon"] for one in figures(simulate(experiment()))]
    plan = setup.examples["fedavg"]
    assert values == sorted(values) and 0 < values[0] < values[-1] <= plan.epsilon_N().max() * (1 + 1e-9)
    whole = figures(simulate(experiment(cohort={"fraction": 1.0})))[-1]["example_epsilon"]
    assert whole == pytest.approx(prepare(experiment(cohort={"fraction": 1.0})).examples["fedavg"].epsilon_N().max())
    (line, note) = describe(experiment().privacy.examples, "fedavg", plan, 3)
    assert line.startswith("privacy of samples of fedavg: epsilon ") and "noise multiplier 1, clip 0.5" in line


@pytest.mark.parametrize("name", ["fedgroup", "fesem_cam", "ditto"])
def test_the_plan_counts_the_steps_of_the_first_round_too(name):
    """A cold start of 50 steps; a warm-up of 3 epochs."""
    method = {"fesem_cam": {"warmup_epochs": 3}} if name == "fesem_cam" else name
    setup = prepare(experiment(methods=[method], cohort={"fraction": 1.0}))
    epoch_N = setup.local.steps_of(setup.federation.num_samples_N)
    expected = {"fedgroup": 50 + 3 * epoch_N, "fesem_cam": (3 + 2 * 2) * epoch_N, "ditto": 3 * 2 * epoch_N}
    assert setup.examples[name].account_N2[:, 0].tolist() == expected[name].tolist()


def test_every_client_has_its_own_epsilon_in_the_diagnostics():
    (result,) = simulate(experiment()).methods.values()
    values = result.diagnostics["example_epsilon_of_clients"][3].value
    assert len(values) == 6 and values.max() == pytest.approx(result.final["example_epsilon"])
    assert len(set(values.tolist())) > 2, "sizes and participation differ"


@pytest.mark.parametrize("name", ALLOWED.split())
def test_methods_that_use_results_of_training_alone(name):
    setup = prepare(experiment(methods=[name], cohort={"fraction": 1.0}))
    assert setup.examples[name].epsilon_N().min() > 0


@pytest.mark.parametrize("name", REFUSED)
def test_methods_whose_server_reads_more_are_refused(name):
    with pytest.raises(ConfigError, match=f"{name} cannot protect single samples: its server reads {REFUSED[name]} of"):
        prepare(experiment(methods=[name], rounds=10))


def test_every_method_is_allowed_or_refused():
    for name in sorted(set(REGISTRY) - set(ALLOWED.split()) - set(REFUSED)):
        with pytest.raises(ConfigError, match=f"{name} cannot protect single samples"):
            prepare(experiment(methods=[name], cohort={"fraction": 1.0}, model={"name": "mlp"}))


LATE = [{"cohort": {"fraction": 0.5}}, {"schedule": [{"round": 2, "join": [5]}]}, {"cohort": {"dropout": 0.1}}]


@pytest.mark.parametrize("sections", LATE)
def test_clients_without_a_cluster_that_come_late_are_tried_before_the_run(sections):
    """Those of CFL-GP choose by the loss; those of the other methods do not."""
    whole = {"cohort": {"fraction": 1.0} | sections.get("cohort", {})}
    with pytest.raises(ConfigError, match="cflgp cannot protect single samples: its server reads the choice"):
        prepare(experiment(methods=["cflgp"], **sections | whole))
    prepare(experiment(methods=[name for name in ALLOWED.split() if name != "cflgp"], **sections | whole))


@pytest.mark.parametrize("noise", ["secret", "reproducible"])
def test_a_resumed_run_has_the_same_noise_and_account(noise, tmp_path, monkeypatch):
    private = PRIVATE | {"noise": noise}
    whole = figures(simulate(experiment(privacy=private)))
    seen = interrupt_once(monkeypatch, in_round=2)
    with pytest.raises(Interrupted):
        simulate(experiment(privacy=private), tmp_path / "run")
    resumed = figures(resume(tmp_path / "run", on_ray=False))
    assert seen[0].equal(seen[1])
    assert [one["example_epsilon"] for one in resumed] == [one["example_epsilon"] for one in whole]
    assert (resumed == whole) == (noise == "reproducible"), "another run draws other noise"


def test_sums_may_have_noise_beside_it_and_be_secure():
    both = figures(simulate(experiment(privacy=PRIVATE | {"noise_multiplier": 1.0}, secure_aggregation={})))[-1]
    assert both["epsilon"] > 0 and both["example_epsilon"] > 0


@pytest.mark.parametrize(
    "sections, message",
    [
        ({"privacy": {"examples": {"noise_multiplier": 1.0, "delta": 0.5}}}, "examples.delta must be below 1 / "),
        ({"local": {"drop_last": True, "batch_size": 9}}, "draws every sample by itself; fedavg has local.drop_last"),
        (
            {"model": lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.BatchNorm1d(8), nn.Linear(8, 10))},
            "the model has none: statistics of batches, such as BatchNorm's, mix samples; use GroupNorm",
        ),
        (
            {"runtime": {"engine": "vectorised"}},
            "vectorised cannot train these clients: local training has clipped gradients",
        ),
    ],
)
def test_refusals(sections, message):
    with pytest.raises(ConfigError, match=message):
        prepare(experiment(**sections))


def test_keys_of_noise_on_sums_have_no_effect_alone():
    warning = "privacy.clip (2.0) has no effect: privacy has neither target_epsilon nor noise_multiplier"
    assert warning in warnings_of(experiment(privacy=PRIVATE | {"clip": 2.0}))
