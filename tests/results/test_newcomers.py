"""Models for clients outside the federation: every method by its own rule, as docs/concepts/newcomers.md says."""

import re
from pathlib import Path

import numpy as np
import pytest
import torch
from closeness import close

import cfl_ray
from cfl_ray.core.method import VOTE, Method
from cfl_ray.core.serving import Serving
from cfl_ray.errors import ConfigError, DataError
from cfl_ray.methods import REGISTRY
from cfl_ray.methods.ifca import IFCA
from cfl_ray.results import newcomers

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
    "feddrift": {"first_models": "each"},  # several models
    "fedgwc": {"epsilon": 10.0},
    "fl_hc": {"cluster_round": 1},
    "ifca_cam": {"warmup_rounds": 1},
}


class ByLoss(IFCA, name="by_loss"):
    """IFCA whose `serve` compares losses."""

    def serve(self, state, clients):
        return Serving(state.models_KP, clients.losses(clients.known_models(state.models_KP)).argmin(1))


@pytest.fixture(scope="module")
def results():
    methods = [{name: OPTIONS.get(name, {})} for name in sorted(REGISTRY)]
    methods.append({"apfl": {"adaptive": True, "alpha": 0.9, "label": "apfl-adaptive"}})
    return cfl_ray.simulate(cfl_ray.Experiment(methods=methods, **SECTIONS))


def rules_of(trained):
    """The rules of `place(x, y)`, `place(x)` and `adapt(x, y)` for a method, as text."""
    serving, method = trained.serve(trained.online[:1]), trained.checked_method.method
    training = "round of the method, of which it keeps its own columns" if serving.client_state else "local training"
    adapted = "the method's own training" if serving.tune is not None else f"one {training}"
    if serving.weight_MK is not None:
        return (
            method.placement,
            VOTE if method.placement == VOTE else newcomers._MEAN_MIXTURE,
            f"one local training of {newcomers._LARGEST}",
        )
    if serving.client_state is not None and method.untrained:
        refused = f"refused: {method.untrained}"
        return refused if method.placement == Method.placement else method.placement, refused, adapted
    if serving.tune is not None:
        return "the method's own training", "refused: clients predict after a training on labels", adapted
    if trained.num_clusters == 1 and method.placement == Method.placement:
        return newcomers._ONLY, newcomers._ONLY, adapted
    return method.placement, f"{newcomers._ENTROPY}, or the only model", adapted


def test_the_page_has_the_rule_of_every_method(results):
    """A row for all methods with the same rules, by the words that are explained below the table."""
    short = {
        f"{newcomers._ENTROPY}, or the only model": "least entropy",
        "one round of the method, of which it keeps its own columns": "one round",
        f"one local training of {newcomers._LARGEST}": "one training of the largest",
        "one local training": "one training",
    }
    expected = {name: [short.get(rule, rule) for rule in rules_of(results[name].trained)] for name in REGISTRY}
    rows = [line.strip("| ").split(" | ") for line in PAGE.read_text().splitlines() if line.startswith("| ")]
    assert {name: rules for names, *rules in rows[1:] for name in names.split(", ")} == expected


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
    small_steps = ("per_fedavg", "fedbabu", "cgpfl")
    assert accuracy > 0.3 or name in small_steps, "it has trained on these samples; these make small steps"
    assert torch.equal(state.models_KP, before[0]) and np.array_equal(state.assign_N, before[1])
    assert np.array_equal(result.predict(3, x), before[2]), "the trained method is as before"


def softmax(result, row_P, x) -> torch.Tensor:
    """Probabilities (n, C) of a model of the server, with the frozen model of additive methods."""
    with torch.no_grad():
        return result.trained.module(row_P, result.trained.serve(np.array([0])).frozen_P)(x).softmax(-1)


@pytest.mark.parametrize("name", sorted(REGISTRY))
def test_without_labels_the_model_is_the_only_one_of_least_entropy_or_the_mean_of_all(name, results):
    result = results[name]
    state, (x, _) = result.trained.state, result.train(3)
    serving = result.trained.serve(result.trained.online)
    rule = rules_of(result.trained)[1]
    if rule.startswith("refused"):
        return
    with torch.no_grad():
        newcomer = result.place(x)
        found = newcomer.model(x).softmax(-1)
    if serving.weight_MK is not None:
        mean_K = torch.from_numpy(serving.weight_MK.mean(0)).float()
        expected = sum(weight * softmax(result, row_P, x) for weight, row_P in zip(mean_K, serving.models_KP))
    else:
        rows = [k for k in range(state.num_clusters) if state.members_K[k]] or range(state.num_clusters)
        p_of = {k: softmax(result, serving.models_KP[k], x) for k in rows}
        entropy_of = {k: torch.special.entr(p).sum(1).mean().item() for k, p in p_of.items()}
        assert newcomer.cluster == min(entropy_of, key=entropy_of.__getitem__)
        expected = p_of[newcomer.cluster]
    assert close(found, expected, 1e-5)


@pytest.mark.parametrize("name", sorted(REGISTRY))
def test_with_labels_the_model_is_the_only_one_or_that_of_least_loss_by_rules_that_say_so(name, results):
    result = results[name]
    state, rule = result.trained.state, rules_of(result.trained)[0]
    if rule != "the only model" and "least loss" not in rule:
        return  # the tests of the method have its rule
    for client in range(8):
        x, y = result.train(client)
        loss_K = [-softmax(result, row_P, x).log()[range(len(y)), y].mean().item() for row_P in state.models_KP]
        newcomer = result.place(x, y)
        with torch.no_grad():
            found = newcomer.model(x).softmax(-1)
        assert close(found, softmax(result, state.models_KP[int(np.argmin(loss_K))], x), 1e-5)
        assert len(loss_K) == 1 or newcomer.cluster == np.argmin(loss_K)


def test_a_newcomer_of_adaptive_apfl_has_the_global_model_and_then_a_mixture_with_its_own_alpha(results):
    result = results["apfl-adaptive"]
    x, y = result.train(3)
    (row_P,) = result.trained.state.models_KP
    with torch.no_grad():
        assert close(result.place(x, y).model(x).softmax(-1), softmax(result, row_P, x), 1e-5)
    assert (result.predict(x, like=result.adapt(x, y)) == y.numpy()).mean() > 0.3


def test_samples_of_a_member_are_placed_with_it(results):
    """IFCA and FedClust place the training samples of a client where they place the client."""
    for name in ("ifca", "fedclust"):
        result = results[name]
        served = result.assignments().set_index("client")["served_by"]
        for client in range(8):
            assert result.place(*result.train(client)).cluster == served[client]


def test_predictions_are_by_the_models_of_the_last_evaluation():
    """Clients choose on `choice_samples` samples, and by losses that a server of a secure run does not read."""
    for sections in ({"evaluation": {"choice_samples": 1}}, {"secure_aggregation": {}, "cohort": {"fraction": 1.0}}):
        result = cfl_ray.simulate(cfl_ray.Experiment(methods=[ByLoss()], **SECTIONS | sections))["by_loss"]
        recorded = result.client_metrics().query("round == 3").set_index("client")["accuracy"]
        for client in range(8):
            x, y = result.test(client)
            assert np.mean(result.predict(x, like=client) == y.numpy()) == pytest.approx(recorded[client])
        assert result.place(*result.train(0)).cluster >= 0


def test_assignments_say_who_serves_whom_and_why(results):
    frame = results["ifca"].assignments()
    strangers = frame[frame["cluster"] < 0]
    assert (frame["served_by"] >= 0).all() and set(frame["why"]) <= {
        "it is a member",
        results["ifca"].trained.checked_method.method.placement,
    }
    assert "it is a member" not in set(strangers["why"])
    assert set(results["fedavg_plus"].assignments()["why"]) == {"all models vote"}
    own = "its own columns (head) in that model"
    assert set(results["fedper"].assignments()["why"]) == {own, "its private layers begin untrained"}


@pytest.mark.parametrize("method, model", [("ifca_cam", "the global model"), ("fl_hc", "the model before clustering")])
def test_before_there_are_clusters_the_only_model_is_that_of_no_cluster(method, model):
    result = cfl_ray.simulate(cfl_ray.Experiment(methods=[method], **SECTIONS | {"rounds": 1}))[method]
    frame, (x, y) = result.assignments(), result.train(0)
    assert set(frame["served_by"]) == {-1} and set(frame["why"]) == {model}
    placed = [result.place(x, y), result.place(x)]
    assert [(one.cluster, one.why) for one in placed] == [(-1, model), (-1, "the only model")]
    assert result.adapt(x, y).why == f"{model}, after the local training of a round"


def test_before_there_are_clusters_the_reason_is_that_of_clients_without_a_cluster():
    """No client meets the deadline, so that no cluster forms."""
    clock = {"kind": "constant", "seconds_per_sample": 1, "deadline": 0.001}
    sections = SECTIONS | {"rounds": 1, "clock": clock, "methods": ["pacfl", "fl_hc"]}
    results = cfl_ray.simulate(cfl_ray.Experiment(**sections))
    for name, why in (("pacfl", "the first model"), ("fl_hc", "the model before clustering")):
        result = results[name]
        placed, adapted = result.place(*result.train(0)), result.adapt(*result.train(0))
        assert set(result.assignments()["why"]) == {why} and (placed.cluster, placed.why) == (-1, why)
        assert adapted.why == f"{why}, after the local training of a round"
    with pytest.raises(ConfigError, match="pacfl has no cluster after round 1; give the number of a client"):
        results["pacfl"].model(0)


def test_the_only_model_serves_clients_without_a_cluster_as_cluster_0():
    sections = SECTIONS | {"cohort": {"clients": 2}, "rounds": 1}
    result = cfl_ray.simulate(cfl_ray.Experiment(methods=["feddrift"], **sections))["feddrift"]
    waiting = result.assignments().query("cluster == -1")
    assert len(waiting) == 6 and set(waiting.served_by) == {0}
    assert result.place(*result.train(0)).cluster == 0


def test_images_as_they_are_stored_are_scaled_and_normalised(results):
    result = results["ifca"]
    x, y = result.train(3)
    stored = (x * 16).to(torch.uint8)  # the digits have values 0 .. 16
    assert torch.equal(result.trained.inputs(stored), x) and torch.equal(result.trained.inputs(stored.numpy()), x)
    assert result.place(stored, y).cluster == result.place(x, y).cluster


def test_what_does_not_fit_is_named(results):
    x, y = results["ifca"].train(0)
    with pytest.raises(DataError, match=r"inputs have shape \(2, 3\), expected"):
        results["ifca"].place(np.zeros((2, 3)))
    with pytest.raises(DataError, match=r"samples and labels of shape \(1,\), expected one label for each"):
        results["ifca"].place(x, y[:1])
    broken = torch.where(torch.arange(len(x)).view(-1, *[1] * (x.ndim - 1)) == 1, torch.nan, x)
    for result in (results["ifca"], results["fedper"]):
        for act in (result.place, result.adapt):
            with pytest.raises(DataError, match="the samples have labels .* expected"):
                act(x, torch.full_like(y, 10))
            with pytest.raises(DataError, match="the inputs have values that are not finite"):
                act(broken, y)
            with pytest.raises(DataError, match="labels that are not whole numbers"):
                act(x, y + 0.5)
            with pytest.raises(DataError, match="labels as words .'pear'., expected numbers: places in"):
                act(x, ["pear"] * len(y))
    with pytest.raises(DataError, match="the inputs have values that are not finite"):
        results["ifca"].place(broken)
    with pytest.raises(ConfigError, match="a client is named by its number, from 0, got 'a'"):
        results["ifca"].predict(x, like="a")
    with pytest.raises(DataError, match="the inputs have values that are not finite"):
        results["ifca"].predict(broken, like=0)
    for wrong in (None, "a", np.array([None, 1.0])):
        with pytest.raises(DataError, match="inputs must be an array of numbers, got"):
            results["ifca"].predict(wrong, like=0)
    with pytest.raises(DataError, match="labels must be an array of numbers, got"):
        results["ifca"].place(x, np.array([None] * len(y)))


def test_tokens_are_in_the_vocabulary():
    tokens = np.random.default_rng(0).integers(0, 6, (40, 3))
    data = cfl_ray.federation_from_arrays(tokens, tokens[:, 0] // 3, np.arange(40) // 10, vocabulary=6)

    def model():
        return torch.nn.Sequential(torch.nn.Embedding(6, 4), torch.nn.Flatten(), torch.nn.Linear(12, 2))

    sections = {"rounds": 1, "data": data, "model": model, "tracking": {"enabled": False}}
    result = cfl_ray.simulate(cfl_ray.Experiment(methods=["fedavg"], **sections))["fedavg"]
    assert result.predict(tokens, like=0).shape == (40,)
    with pytest.raises(DataError, match=r"the inputs have tokens 6 .. 11, expected 0 .. 5"):
        result.predict(tokens + 6, like=0)
    with pytest.raises(DataError, match="the inputs have tokens that are not whole numbers"):
        result.predict(tokens + 0.5, like=0)


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
    names = {}
    exec(compile(source, "newcomers.md", "exec"), names)
    assert names["newcomer"].cluster in range(4) and isinstance(names["own"], torch.nn.Module)
