"""Models for clients outside the federation: every method by its own rule, as docs/concepts/newcomers.md says."""

import re
from pathlib import Path

import numpy as np
import pytest
import torch

import cfl_ray
from cfl_ray.errors import ConfigError, DataError
from cfl_ray.methods import REGISTRY
from cfl_ray.results.newcomers import rules_of

PAGE = Path(__file__).parents[2] / "docs" / "concepts" / "newcomers.md"
SECTIONS = {
    "rounds": 3,
    "model": {"options": {"hidden": 16}},
    "data": {"source": "digits", "shift": {"kind": "rotated"}, "partition": {"clients": 8, "samples": 40}},
    "local": {"epochs": 10, "batch_size": 10},
    "cohort": {"fraction": 0.5},
    "evaluation": {"every": 3},
    "tracking": {"enabled": False},
    "runtime": {"engine": "manual"},
}
OPTIONS = {
    "autocfl": {"min_rounds": 1, "max_rounds": 1},
    "fl_hc": {"cluster_round": 1},
    "ifca_cam": {"warmup_rounds": 1},
}


@pytest.fixture(scope="module")
def results():
    methods = [{name: OPTIONS.get(name, {})} for name in sorted(REGISTRY)]
    return cfl_ray.simulate(cfl_ray.Experiment(methods=methods, **SECTIONS))


def test_the_page_has_the_rule_of_every_method(results):
    """The message has the lines that are missing."""
    page = PAGE.read_text()
    lines = [f"| {name} | {' | '.join(rules_of(results[name].trained))} |" for name in sorted(REGISTRY)]
    missing = [line for line in lines if line not in page]
    assert not missing, "\n".join(missing)


@pytest.mark.parametrize("name", sorted(REGISTRY))
def test_a_newcomer_gets_a_model_by_each_rule_or_the_reason(name, results):
    result = results[name]
    state, (x, y) = result.trained.state, result.train(3)
    before = (state.models_KP.clone(), state.assign_N.copy(), result.predict(x, like=3))
    rules = rules_of(result.trained)
    for rule, arguments in zip(rules, ((x, y), (x,)), strict=False):
        if rule.startswith("refused"):
            with pytest.raises(ConfigError, match=rf"{name}: .*adapt\(x, y\)"):
                result.place(*arguments)
            continue
        newcomer = result.place(*arguments)
        assert newcomer.cluster >= -1 and newcomer.why
        assert result.predict(x, like=newcomer).shape == y.shape
    adapted = result.adapt(x, y)
    accuracy = (result.predict(x, like=adapted) == y.numpy()).mean()
    assert accuracy > 0.3 or name in ("per_fedavg", "cgpfl"), "it has trained on these samples; these make small steps"
    assert torch.equal(state.models_KP, before[0]) and np.array_equal(state.assign_N, before[1])
    assert np.array_equal(result.predict(3, x), before[2]), "the trained method is as before"


def test_samples_of_a_member_are_placed_with_it(results):
    """IFCA and FedClust place the training samples of a client where they place the client."""
    for name in ("ifca", "fedclust"):
        result = results[name]
        served = result.assignments().set_index("client")["served_by"]
        for client in range(8):
            assert result.place(*result.train(client)).cluster == served[client]


def test_assignments_say_who_serves_whom_and_why(results):
    frame = results["ifca"].assignments()
    strangers = frame[frame["cluster"] < 0]
    assert (frame["served_by"] >= 0).all() and set(frame["why"]) <= {
        "it is a member",
        results["ifca"].trained.steps.method.placement,
    }
    assert "it is a member" not in set(strangers["why"])
    assert set(results["fedavg_plus"].assignments()["why"]) == {"all models vote"}
    assert "its own columns (head) in that model" in set(results["fedper"].assignments()["why"])


def test_what_does_not_fit_is_named(results):
    x, y = results["ifca"].train(0)
    with pytest.raises(DataError, match=r"inputs have shape \(2, 3\), expected"):
        results["ifca"].place(np.zeros((2, 3)))
    with pytest.raises(DataError, match=r"targets have shape \(1,\), expected \(\d+,\): one for each input"):
        results["ifca"].place(x, y[:1])


def test_without_labels_several_models_need_classes():
    data = cfl_ray.federation_from_arrays(np.eye(24), np.eye(24)[:, :1], np.arange(24) // 6, targets="real")
    result = cfl_ray.simulate(
        cfl_ray.Experiment(
            rounds=1, methods=["ifca", "fedavg"], task="regression", data=data, tracking={"enabled": False}
        )
    )
    with pytest.raises(
        ConfigError, match=r"ifca has \d cluster models, and without labels .* give them, place\(x, y\)"
    ):
        result["ifca"].place(np.eye(24))
    assert result["fedavg"].place(np.eye(24)).why == "the only model"


def test_the_page_shows_what_runs():
    (source,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.S)
    exec(compile(source, "newcomers.md", "exec"), {})
