"""Own parts that cannot work are refused before a run; those that can are not, and keep their state."""

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import nn

from cfl_ray import Experiment, federation_from_arrays, option, simulate
from cfl_ray.errors import ConfigError, RunError
from cfl_ray.methods.fedavg import FedAvg
from cfl_ray.setup.prepare import prepare

DRAW = np.random.default_rng(0)
X = DRAW.normal(size=(120, 4)).astype(np.float32)
OWNER = np.arange(120) // 20
N, C = 6, 3
FEDERATIONS = {
    "classification": federation_from_arrays(X, np.arange(120) % C, OWNER),
    "regression": federation_from_arrays(X, X[:, :2], OWNER, targets="real"),
    "multi_label": federation_from_arrays(X, X[:, :2] > 0, OWNER, targets="binary"),
}
PARTS = {
    "aggregation": lambda part: {"methods": [{"fedavg": {"aggregation": part}}]},
    "attack": lambda part: {"attack": {"kind": part, "clients": [0]}},
    "availability": lambda part: {"cohort": {"fraction": 1.0, "availability": {"kind": part}}},
    "metric": lambda part: {"evaluation": {"metrics": [part]}},
}


def experiment(sections, task="classification") -> Experiment:
    common = {"rounds": 1, "methods": ["fedavg"], "cohort": {"fraction": 1.0}, "model": "mlp", "task": task}
    common |= {"tracking": {"enabled": False}, "runtime": {"engine": "manual"}, "data": FEDERATIONS[task]}
    return Experiment(**common | sections)


def part_of(tmp_path, source: str) -> str:
    (tmp_path / "mine.py").write_text(source + "\n")
    return f"{tmp_path}/mine.py:mine"


def rule(method: str, result: str) -> str:
    return f"class mine:\n    def {method}(self, first, weight_n):\n        return {result}"


def attack(method: str, result: str) -> str:
    return f"class mine:\n    def {method}(self, first, second, draw):\n        return {result}"


@pytest.mark.parametrize(
    "kind, source, place, message",
    [
        ("aggregation", rule("combine", "first"), "mine.combine", r"shape \(6, 8\), expected 8 numbers, shape \(8,\)"),
        ("aggregation", rule("combine", "'none'"), "mine.combine", "returned str 'none', expected 8 numbers"),
        ("aggregation", rule("weigh", "weight_n[1:]"), "mine.weigh", r"shape \(5,\), expected 6 numbers"),
        ("aggregation", rule("weigh", "first.wrong"), "mine.weigh", r"failed: AttributeError: .* \(line 3\)"),
        ("aggregation", rule("scale", "1.0"), "mine.scale", r"returned float 1.0, expected 6 numbers"),
        ("attack", "def mine(up, start, draw):\n    return up[1:]", "mine", "expected an upload like the one"),
        ("attack", attack("upload", "first + 'x'"), "mine.upload", r"failed: TypeError: .* \(line 3\)"),
        ("attack", attack("labels", "first[1:]"), "mine.labels", r"expected integer labels of shape \(6,\)"),
        ("availability", "def mine(clients, round, draw):\n    return clients / 2", "mine", "expected a bool for each"),
        ("availability", "def mine(clients, round, draw):\n    return wrong", "mine", r"NameError: .* \(line 2\)"),
        (
            "metric",
            "def mine(outputs, targets):\n    return outputs",
            "mine",
            "returns Tensor .*, expected one number",
        ),
        ("metric", "def mine(outputs, targets):\n    return outputs @ targets", "mine", r"\(line 2\); it gets outputs"),
    ],
)
def test_a_part_that_cannot_work_is_an_error_before_the_run(tmp_path, kind, source, place, message):
    sections = PARTS[kind](part_of(tmp_path, source))
    with pytest.raises(ConfigError, match=rf"{kind}.* {place} \(.*mine.py, line \d\) .*{message}.* before the run\)$"):
        prepare(experiment(sections))


def test_metrics_get_targets_of_the_task():
    seen = {}

    def own(outputs, targets):
        seen["outputs"], seen["targets"] = outputs, targets
        return np.float32("nan")

    for task, outputs, kind in (
        ("classification", (2 * C, C), torch.int64),
        ("regression", (4, 2), torch.float32),
        ("multi_label", (4, 2), torch.float32),
    ):
        prepare(experiment(PARTS["metric"](own), task))
        assert seen["outputs"].shape == outputs and seen["targets"].dtype == kind
        if task == "classification":
            assert seen["targets"].bincount().tolist() == [2] * C
        if task == "multi_label":
            assert seen["targets"].mean(0).tolist() == [0.5, 0.5]


@pytest.mark.parametrize("result", ["first[0] * float('nan')", "first[0]"])
def test_numbers_are_left_to_the_run(tmp_path, result):
    prepare(experiment(PARTS["aggregation"](part_of(tmp_path, rule("combine", result)))))


def test_rules_get_as_many_results_as_the_cohort_has_clients():
    class Krum:
        def weigh(self, squared_nn, weight_n):
            assert len(weight_n) == N
            assert np.array_equal(squared_nn, squared_nn.T) and squared_nn.shape == (N, N)
            return weight_n

    prepare(experiment(PARTS["aggregation"](Krum())))


def test_few_clients_need_no_rule():
    class Refusing:
        def combine(self, values_nF, weight_n):
            raise ValueError("too few")

    prepare(experiment(PARTS["aggregation"](Refusing()) | {"cohort": {"clients": 2}}))


def test_uploads_are_as_long_as_the_model():
    lengths = []

    def mine(upload_P, start_P, draw):
        lengths.append((len(upload_P), len(start_P)))
        return start_P

    simulate(experiment(PARTS["attack"](mine)))
    assert len(lengths) == 2 and len(set(lengths)) == 1, "one of the trial, one of the run"


def test_the_trial_leaves_the_state_of_a_part_alone():
    class Counting:
        def __init__(self):
            self.calls = 0

        def upload(self, upload_P, start_P, draw):
            self.calls += 1
            return upload_P

    made = Counting()
    prepare(experiment(PARTS["attack"](made)))
    assert made.calls == 0
    simulate(experiment(PARTS["attack"](made)))
    assert made.calls == 1


@dataclass(frozen=True)
class ManyClusters(FedAvg, name="many_clusters"):
    """A method that cannot work with fewer clients than clusters, nor with a client that returns zeros."""

    least: int = option(15, "least number of clients in the federation", low=1)

    def round(self, state, clients, rng):
        state = super().round(state, clients, rng)
        if len(state.assign_N) < self.least:
            raise ValueError(f"{len(state.assign_N)} clients, {self.least} clusters")
        return state


@pytest.mark.parametrize(
    "sections",
    [
        {"model": lambda shape, classes: nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, classes))},
        {"clock": {"kind": "constant"}, "cohort": {"clients": 3}},
        {"clock": {"kind": "constant"}, "cohort": {"clients": 4}, "asynchronous": {"buffer": 2}},
    ],
)
def test_a_method_that_needs_more_clients_than_a_trial_has_is_tried_with_all(sections):
    owner = np.arange(120) // 6
    data = federation_from_arrays(X, np.arange(120) % C, owner)
    settings = {"rounds": 1, "data": data, "tracking": {"enabled": False}, "local": {"epochs": 1}} | sections
    assert prepare(Experiment(methods=[ManyClusters()], **settings)).methods
    with pytest.raises(ValueError, match="20 clients, 30 clusters") as error:
        setup = prepare(Experiment(methods=[ManyClusters(least=30)], **settings))
        setup.time_of("many_clusters", setup.network().spec, lambda ids: np.full(len(ids), 6))
    place, trial = error.value.__notes__[-2:]
    assert "in ManyClusters.round, " in place
    assert trial.startswith("in a trial before the run, without training: 20 clients")


def test_the_place_of_an_error_is_named_once(tmp_path):
    simulated = Experiment(methods=[ManyClusters(least=9)], rounds=1, data=FEDERATIONS["classification"])
    with pytest.raises(RunError) as error:
        simulate(simulated)
    assert str(error.value).count(__file__) == 1 and "in ManyClusters.round, " in str(error.value)
