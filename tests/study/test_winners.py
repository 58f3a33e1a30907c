"""The study of a sweep's best trials."""

import pytest

from cfl_ray.config.study import Study, load_study
from cfl_ray.config.sweep import Trial
from cfl_ray.errors import ConfigError
from cfl_ray.study.study_plan import plan
from cfl_ray.study.sweep import RankedTrial
from cfl_ray.study.winners import at_the_edge, study_of_winners


def swept(parameters, settings=None, **keys) -> Study:
    methods = [
        "fedavg",
        {"ifca": {"label": "two", "num_clusters": 2, "local": {"epochs": 3}}},
        {"fedprox": {"mu": 1.0}},
    ]
    experiment = {"rounds": 2, "methods": methods, "local": {"optimizer": "adam", "optimizer_options": {"eps": 1e-6}}}
    sweep = {"parameters": parameters} | keys
    return Study(name="s", seeds=[0, 1], experiment=experiment, settings=settings or {}, sweep=sweep)


def winner(method, setting="all", **parameters) -> RankedTrial:
    parameters = {key.replace("__", "."): value for key, value in parameters.items()}
    return RankedTrial(setting, method, parameters, {0: 0.5}, trial=Trial(parameters, method))


def hashes(runs) -> dict[str, str]:
    return {f"{run.method}, {run.seed}": run.experiment.config_hash for run in runs}


def test_its_runs_are_those_of_the_best_trials(tmp_path):
    keys = {
        "local.lr": [0.1, 0.3],
        "local.optimizer_options.eps": [1e-6, 1e-8],
        "methods.two.num_clusters": [2, 4],
        "methods.fedprox.mu": [0.1, 1.0],
        "cohort.fraction": [0.5, 1.0],
    }
    study = swept(keys)
    best = [
        winner("fedavg", local__lr=0.1, local__optimizer_options__eps=1e-8, cohort__fraction=1.0),
        winner("two", local__lr=0.3, methods__two__num_clusters=4, cohort__fraction=1.0),
        winner("fedprox", local__lr=0.1, methods__fedprox__mu=0.1, cohort__fraction=1.0),
    ]
    found = study_of_winners(study, best)
    assert found.sweep is None and found.name == "s-best" and found.seeds == [0, 1]
    (tmp_path / "best.yaml").write_text(found.to_yaml())
    assert hashes(plan(load_study(tmp_path / "best.yaml"))) == hashes(plan(study, trials=[one.trial for one in best]))


def test_each_setting_has_its_own_list():
    study = swept({"local.lr": [0.1, 0.3]}, settings={"a": {"rounds": 3}, "b": {"methods": ["local"]}})
    found = study_of_winners(study, [winner("two", "a", local__lr=0.3), winner("local", "b", local__lr=0.1)])
    runs = {(run.setting, run.method): run.experiment for run in plan(found) if run.seed == 0}
    assert {key: (one.local.lr, one.rounds, one.local.epochs) for key, one in runs.items()} == {
        ("a", "two"): (0.3, 3, 3),
        ("b", "local"): (0.1, 2, 5),
    }


def test_a_shared_key_with_several_best_values_is_named():
    study = swept({"model.name": ["mlp", "linear"]})
    best = [winner("fedavg", model__name="mlp"), winner("fedprox", model__name="linear")]
    with pytest.raises(ConfigError, match=r"best values of model\.name differ: mlp for fedavg, linear for fedprox"):
        study_of_winners(study, best)


def test_values_at_the_edge_are_told():
    study = swept({"local.lr": [0.1, 0.3, 1.0], "local.optimizer": ["sgd", "adam"], "local.drop_last": [True, False]})
    other = {"local__optimizer": "adam", "local__drop_last": True}
    best = [winner(name, local__lr=value, **other) for name, value in (("fedavg", 0.3), ("two", 1.0), ("fedprox", 0.1))]
    assert at_the_edge(study, best) == ["two local.lr=1.0 (the largest)", "fedprox local.lr=0.1 (the least)"]
    drawn = swept({"local.lr": {"low": 0.01, "high": 1.0, "log": True}}, sampler="random", trials=3)
    # 5 % of two decades from either end: 0.0126 and 0.794
    lrs = {"fedavg": 0.012, "two": 0.013, "fedprox": 0.8}
    found = at_the_edge(drawn, [winner(name, local__lr=lr) for name, lr in lrs.items()])
    assert found == ["fedavg local.lr=0.012 (the least)", "fedprox local.lr=0.8 (the largest)"]
