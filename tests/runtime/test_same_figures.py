"""Promise 2: the same figures, bit for bit, in this process, on one host and on three, for every method."""

import pytest

from cfl_ray import run, simulate
from cfl_ray.methods import REGISTRY

EARLY = {  # options that bring every phase into the first rounds
    "autocfl": {"min_rounds": 1, "max_rounds": 2}, "cfl": {"eps1": 10.0, "eps2": 0.0, "min_rounds": 1}, "fedac": {"tune_after": 1, "tune_every": 2, "pca_every": 2},
    "fedgroup": {"num_clusters": 3, "alpha": 3, "pretrain_steps": 5}, "fl_hc": {"cluster_round": 2}, "ifca_cam": {"warmup_rounds": 1},
}  # fmt: skip
METHODS = sorted(REGISTRY)
SCHEDULE = [{"round": 2, "join": [10, 11], "change": [{"clients": "2-3", "relabel": 1}]}, {"round": 3, "leave": [0, 1]}, {"round": 4, "change": [{"clients": [4, 5], "data_of": [5, 4]}]}]
COHORT = {"fraction": 0.75, "availability": {"kind": "diurnal", "chance": 0.8, "amplitude": 0.2, "period": 4.0}, "dropout": 0.2}


@pytest.fixture
def whole(experiment):
    """Everything at once: all methods, clients that come, go, are unreachable and drop out, and all three protocols."""

    def make(**changes):
        return experiment(methods=[{name: EARLY.get(name, {})} for name in METHODS], schedule=SCHEDULE, cohort=COHORT, evaluation={"tuned_epochs": 1}, **changes)

    return make


def test_the_experiment_has_something_to_get_wrong(whole, figures):
    first, other = figures(simulate(whole())), figures(simulate(whole(seed=1)))
    assert all(len(first[label]) == 4 and first[label] != other[label] for label in METHODS)
    same = {"fedavg", "fednova"}  # equal numbers of steps
    assert len({str(first[label]) for label in METHODS if label not in same}) == len(METHODS) - len(same)
    rounds = [metrics for _, metrics in first["ditto"]]
    assert any(metrics.get("clients_dropped", 0) > 0 for metrics in rounds)
    assert [metrics["clients_online"] for metrics in rounds] == [10, 12, 10, 10]


def test_hosts_do_not_change_a_bit(whole, figures, cluster):
    expected = figures(simulate(whole()))
    for hosts in (1, 3):
        results = run(whole(runtime={"hosts": hosts}))
        assert figures(results) == expected and results.facts["hosts"] == f"{hosts} on 1 node"


RULES = ["median", {"trimmed_mean": {"share": 0.2}}, {"multi_krum": {"attackers": 1}}, "norm_clipping"]


def test_hosts_do_not_change_a_bit_of_robust_averages_among_attackers(experiment, figures, cluster):
    """One average, one per cluster, private columns, and results that are mixed later; clients keep their momentum."""
    pairs = [*(("fedavg", rule) for rule in RULES), *zip(("ifca", "stocfl", "fedper", "fesem"), RULES)]
    methods = [{name: {"aggregation": rule}} for name, rule in pairs]
    changes = {"methods": methods, "rounds": 2, "local": {"persist": True}, "attack": {"kind": "colluders", "fraction": 0.3, "scale": 2}, "cohort": {"fraction": 1.0}}
    expected = figures(simulate(experiment(**changes)))
    assert len({str(expected[label]) for label in expected if label.startswith("fedavg")}) == len(RULES)
    assert all("accuracy_honest" in metrics for rounds in expected.values() for _, metrics in rounds)
    assert figures(run(experiment(**changes, runtime={"hosts": 3}))) == expected
