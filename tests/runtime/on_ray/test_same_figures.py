"""The same figures, bit for bit, in this process and on hosts, for every method."""

import pytest
from checksums import EARLY
from closeness import close

from cfl_ray import run, simulate
from cfl_ray.methods import REGISTRY

# one for each way in which clients, states and models are used
FEW = ["apfl", "autocfl", "cfl", "ditto", "fedavg", "fedccfa", "feddrift", "fedem", "fesem", "ifca", "stocfl"]
OTHERS = sorted(set(REGISTRY) - set(FEW))
SCHEDULE = [
    {"round": 2, "join": [10, 11], "change": [{"clients": "2-3", "relabel": 1}]},
    {"round": 3, "leave": [0, 1]},
    {"round": 4, "change": [{"clients": [4, 5], "data_of": [5, 4]}]},
]
COHORT = {
    "fraction": 0.75,
    "availability": {"kind": "diurnal", "chance": 0.8, "amplitude": 0.2, "period": 4.0},
    "dropout": 0.2,
}


@pytest.fixture(params=[FEW, pytest.param(OTHERS, marks=pytest.mark.slow)], ids=["few", "others"])
def methods(request):
    return request.param


@pytest.fixture
def whole(experiment, methods):
    """Methods with clients that join, leave, are unreachable and drop out, and all three protocols."""

    def make(runtime=None, **changes):
        return experiment(
            methods=[{name: EARLY.get(name, {})} for name in methods],
            schedule=SCHEDULE,
            cohort=COHORT,
            evaluation={"tuned_epochs": 1},
            runtime={"engine": "manual"} | (runtime or {}),  # less CPU; the tests below train sequentially
            **changes,
        )

    return make


_EXPECTED = {}


def arrays(results):
    """{(method, diagnostic, round): array}; numbers are among the figures."""
    return {
        (label, name, round): one.value
        for label, method in results.methods.items()
        for name, found in method.diagnostics.items()
        for round, one in found.items()
        if one.axes
    }


@pytest.fixture
def expected(whole, methods, figures):
    """The figures and arrays of the methods in this process, computed once."""
    if len(methods) not in _EXPECTED:
        results = simulate(whole())
        _EXPECTED[len(methods)] = figures(results), arrays(results)
    return _EXPECTED[len(methods)]


def test_the_experiment_has_something_to_get_wrong(whole, methods, expected, figures):
    first, other = expected[0], figures(simulate(whole(seed=1, rounds=1)))
    assert all(len(first[label]) == 4 and first[label][0] != other[label][0] for label in methods)
    same = {"fedavg", "fednova"}  # equal numbers of steps
    others = set(methods) - same
    assert len({str(first[label]) for label in others}) == len(others)
    rounds = [metrics for _, metrics in first["ditto" if methods is FEW else "local"]]
    assert any(metrics.get("clients_dropped", 0) > 0 for metrics in rounds)
    assert [metrics["clients_online"] for metrics in rounds] == [10, 12, 10, 10]


def test_hosts_do_not_change_a_bit(whole, methods, expected, figures, cluster):
    hosts = 2 if methods is FEW else 3
    results = run(whole(runtime={"hosts": hosts}))
    assert figures(results) == expected[0] and results.run_info["hosts"] == f"{hosts} on 1 node"
    found = arrays(results)
    assert found.keys() == expected[1].keys()
    reporting = {"stocfl", "ifca", "fesem"} if methods is FEW else {"fedclust", "fedgroup", "pacfl"}
    assert {label for label, _, _ in found} > reporting
    for key, value in found.items():
        assert close(value, expected[1][key], 1e-5), key


RULES = ["median", {"trimmed_mean": {"share": 0.2}}, {"multi_krum": {"attackers": 1}}, "norm_clipping"]


@pytest.mark.slow
def test_hosts_do_not_change_a_bit_of_robust_averages_among_attackers(experiment, figures, cluster):
    """One average, one per cluster, private columns, deferred results, and several of a client; momentum is kept."""
    pairs = [*(("fedavg", rule) for rule in RULES), *zip(("ifca", "stocfl", "fedper", "fesem"), RULES)]
    methods = [{name: {"aggregation": rule}} for name, rule in pairs]
    methods += [{name: {"aggregation": RULES[at]}} for at, name in ((0, "fedem"), (2, "fedrc"))]
    changes = {
        "methods": methods,
        "rounds": 2,
        "local": {"persist": True},
        "attack": {"kind": "colluders", "fraction": 0.3, "scale": 2},
        "cohort": {"fraction": 1.0},
    }
    expected = figures(simulate(experiment(**changes)))
    assert len({str(expected[label]) for label in expected if label.startswith("fedavg")}) == len(RULES)
    assert all("accuracy_honest" in metrics for rounds in expected.values() for _, metrics in rounds)
    assert figures(run(experiment(**changes, runtime={"hosts": 3}))) == expected


@pytest.mark.slow
def test_hosts_train_in_the_precision_of_the_run(experiment, figures, cluster):
    def figures_of(carry_out, precision):
        runtime = {"hosts": 1, "engine": "sequential", "precision": precision}
        return figures(carry_out(experiment(methods=["fedavg"], rounds=1, runtime=runtime)))

    assert figures_of(run, "bf16") == figures_of(simulate, "bf16") != figures_of(simulate, "float32")


def test_hosts_do_not_change_a_bit_of_asynchronous_rounds(experiment, figures, cluster):
    changes = {
        "methods": ["ifca", "stocfl"],
        "cohort": {"clients": 6},
        "clock": {"kind": "lognormal", "sigma": 1.0},
        "asynchronous": {"buffer": 3},
    }
    expected = figures(simulate(experiment(**changes)))
    assert any(metrics["staleness"] > 0 for _, metrics in expected["ifca"])
    assert figures(run(experiment(**changes, runtime={"hosts": 2}))) == expected


@pytest.mark.slow
def test_hosts_do_not_change_a_bit_of_metrics_on_validation_data(experiment, figures, cluster):
    changes = {
        "methods": ["ifca", "fedem"],
        "data": {"validation": {"fraction": 0.3}},
        "schedule": SCHEDULE,
        "evaluation": {"tuned_epochs": 1},
    }
    expected = figures(simulate(experiment(**changes)))
    assert all("validation/accuracy_tuned" in metrics for rounds in expected.values() for _, metrics in rounds)
    assert figures(run(experiment(**changes, runtime={"hosts": 2}))) == expected
