"""Tasks, metrics, optimisers and schedules in whole runs: names of scores, files, resumption, refusals before a run."""

import json
from dataclasses import fields, replace

import numpy as np
import pytest
import torch
from small_runs import interrupt_once, metrics_of
from torch import nn

from cfl_ray import Experiment, Metric, Task, federation_from_arrays, load_run, resume, simulate
from cfl_ray.cli.printed_tables import comparison, metrics_line
from cfl_ray.config import LocalConfig
from cfl_ray.core.local_sgd import LocalSGD
from cfl_ray.core.schedules import cosine
from cfl_ray.core.server_optimizers import FedAvgM
from cfl_ray.core.tasks import TASKS
from cfl_ray.engine.failure import ClientFailure
from cfl_ray.errors import ConfigError, Interrupted
from cfl_ray.methods import REGISTRY
from cfl_ray.methods.fedavg import FedAvg
from cfl_ray.setup.prepare import prepare
from cfl_ray.tracking.record import summarise

DRAW = np.random.default_rng(0)
X = DRAW.normal(size=(120, 4)).astype(np.float32)
W = DRAW.normal(size=(4, 2)).astype(np.float32)
OWNER = np.arange(120) // 20
FEDERATIONS = {
    "regression": federation_from_arrays(X, X @ W, OWNER, targets="real"),
    "multi_label": federation_from_arrays(X, X @ W > 0, OWNER, targets="binary"),
    "classification": federation_from_arrays(X, (X[:, 0] > 0).astype(int), OWNER),
}
FIRST = {"regression": "mse", "multi_label": "subset_accuracy", "classification": "accuracy"}


def experiment(task="regression", **sections) -> Experiment:
    name = task if task in FEDERATIONS else "regression"
    common = {"rounds": 3, "methods": ["fedavg"], "cohort": {"fraction": 1.0}, "local": {"lr": 0.1, "epochs": 2}}
    runtime = {"engine": "manual", "checkpoint_every": 1}
    common |= {"tracking": {"enabled": False}, "runtime": runtime, "data": FEDERATIONS[name]}
    return Experiment(**common | {"task": task} | sections)


@pytest.mark.parametrize("task", FIRST)
def test_scores_have_the_names_of_the_task(task, tmp_path, drawn):
    """In records, files, results and tables."""
    first = FIRST[task]
    results = simulate(experiment(task, evaluation={"tuned_epochs": 1, "target": 0.9}), tmp_path / "run")
    final = results["fedavg"].final
    assert {first, f"{first}_local", f"{first}_tuned", f"{first}_std", "test_loss"} <= final.keys()
    assert (f"{first}_p90" in final) == (task == "regression"), "the worst tenth of the clients"
    assert ("accuracy" in final) == (task == "classification")
    shown = load_run(tmp_path / "run")["fedavg"]
    assert shown.final == final and first in shown.to_frame().columns
    clients = shown.client_metrics()
    last = clients[clients["round"] == 3]
    assert last[first].mean() == pytest.approx(final[first])
    assert last["loss"].mean() == pytest.approx(final["test_loss"], rel=1e-5)
    assert first in [str(column.header) for column in comparison(results).columns]
    assert metrics_line(final).startswith(f"{first} ")
    figure = f"artifacts/{first}_by_round.png"  # of a single method: those of the run are copies
    assert (tmp_path / "run" / figure).read_bytes() == (tmp_path / "run" / "fedavg" / figure).read_bytes()


def test_regression_learns_and_less_is_better():
    results = simulate(experiment(rounds=30, methods=["fedavg", "local"], evaluation={"target": 0.05}))
    result = results["fedavg"]
    errors = [record.metrics["mse"] for record in result.records]
    assert errors[-1] < 0.05 < errors[0] and result.final["r2"] > 0.9
    reached = next(number for number, error in enumerate(errors, 1) if error <= 0.05)
    assert result.summary["rounds_to_target"] == reached
    assert summarise(result.records, 0.05, None, "mse", higher_is_better=True)["rounds_to_target"] == 1
    predicted = result.predict(0, X[:20])
    assert predicted.shape == (20, 2) and ((predicted - X[:20] @ W) ** 2).mean() < 0.1


def test_next_token():
    """Each token follows from the one before; odd clients count down, so that one model errs for half of them."""

    class Bigrams(nn.Module):
        def __init__(self, num_classes):
            super().__init__()
            self.table = nn.Embedding(num_classes, num_classes)

        def forward(self, x):
            return self.table(x)

    x = DRAW.integers(0, 5, (120, 7))
    y = (x + np.where(OWNER % 2, -1, 1)[:, None]) % 5
    federation = federation_from_arrays(x, y, OWNER, targets="tokens", vocabulary=5)
    local = {"lr": 5.0, "epochs": 5}
    methods = ["fedavg", {"ifca": {"num_clusters": 2}}]
    results = simulate(
        experiment("next_token", data=federation, model=Bigrams, local=local, methods=methods, rounds=12)
    )
    final = {label: result.final for label, result in results.methods.items()}
    assert final["ifca"]["token_accuracy"] == 1 and final["fedavg"]["token_accuracy"] < 0.7
    assert 1 < final["ifca"]["perplexity"] < 1.5 < final["fedavg"]["perplexity"]
    assert results["ifca"].predict(0, x[:3]).tolist() == ((x[:3] + 1) % 5).tolist()


def test_parts_as_objects_in_python(tmp_path):
    def halving(t, total):
        return 0.5**t

    local = {"lr": 0.01, "optimizer": torch.optim.Adam, "optimizer_options": {"betas": [0.8, 0.9]}, "schedule": halving}
    methods = [FedAvg(server_optimizer=FedAvgM(momentum=0.5))]
    values = {"local": local, "methods": methods, "task": TASKS.builtin["regression"]}
    by_object = simulate(experiment(**values), tmp_path / "run")["fedavg"]
    (tmp_path / "rates.py").write_text("def halving(t, total):\n    return 0.5**t\n")
    named = local | {"optimizer": "adam", "schedule": f"{tmp_path}/rates.py:halving"}
    server = {"fedavgm": {"momentum": 0.5}}
    by_name = simulate(experiment(local=named, methods=[{"fedavg": {"server_optimizer": server}}]))["fedavg"]
    assert metrics_of(by_object) == metrics_of(by_name)


def test_mlflow_has_the_scores(tmp_path):
    from mlflow import MlflowClient

    store = f"sqlite:///{tmp_path}/mlflow.db"
    simulate(experiment(tracking={"uri": store}, rounds=2), tmp_path / "run")
    client = MlflowClient(store)
    runs = client.search_runs([client.get_experiment_by_name("cfl_ray").experiment_id])
    by_method = {run.data.tags.get("method"): run.data.metrics for run in runs}
    assert {"mse", "mae", "r2", "mse_local"} <= by_method["fedavg"].keys()
    assert {"fedavg/mse", "fedavg/mse_local"} <= by_method[None].keys()


class TestOwnMetric:
    @staticmethod
    def largest_output(outputs, targets):
        return outputs.max()

    def test_is_measured_beside_the_others_which_do_not_change(self, tmp_path):
        plain = metrics_of(simulate(experiment("classification"))["fedavg"])[-1]
        metrics = [self.largest_output, "micro_f1"]
        results = simulate(experiment("classification", evaluation={"metrics": metrics}), tmp_path / "run")
        final = metrics_of(results["fedavg"])[-1]
        clients = load_run(tmp_path / "run")["fedavg"].client_metrics()
        mean = clients[clients["round"] == 3]["largest_output"].mean()
        assert final.pop("largest_output") == pytest.approx(mean, rel=1e-5)
        assert final.pop("micro_f1") == final["accuracy"], "of classes they are equal"
        assert final == plain

    @pytest.mark.parametrize("view", ["cluster", "label", "holdout"])
    def test_is_measured_on_the_test_data_of_the_view(self, view):
        """Number of test samples: the whole test set, those of the client's labels, those held out."""
        y = np.where(OWNER < 3, 0, (X[:, 0] > 0).astype(int))
        tests = {} if view == "holdout" else {"x_test": X, "y_test": y, "view": view}
        federation = federation_from_arrays(X, y, OWNER, num_classes=2, **tests)
        metrics = [Metric("samples", lambda outputs, targets: len(targets))]
        found = simulate(experiment("classification", data=federation, evaluation={"metrics": metrics}, rounds=1))
        expected = {"cluster": 120, "label": (3 * (y == 0).sum() + 3 * 120) / 6, "holdout": 4}
        assert found["fedavg"].final["samples"] == expected[view]

    def test_a_wrong_value_names_the_line_and_the_client(self, tmp_path):
        (tmp_path / "own.py").write_text(
            "calls = []\n\ndef score(outputs, targets):\n    calls.append(1)\n"
            "    return 0.0 if len(calls) == 1 else 'high'\n"  # right in the trial before the run
        )
        metrics = [f"{tmp_path}/own.py:score"]
        with pytest.raises(ClientFailure, match=r"client \d+ failed while testing: metric score: .*own.py, line 3\)"):
            simulate(experiment("classification", evaluation={"metrics": metrics}))

    @pytest.mark.parametrize("name", ["test_loss", "loss", "accuracy_local", "mine_std", "Mine"])
    def test_a_name_that_is_taken_is_refused(self, name):
        metrics = [Metric(name, self.largest_output)]
        with pytest.raises(ConfigError, match="has the name of another metric|a name consists of"):
            prepare(experiment("classification", evaluation={"metrics": metrics}))

    @pytest.mark.filterwarnings("error::RuntimeWarning")
    @pytest.mark.parametrize("value", [float("inf"), -1e308])
    def test_may_be_infinite_or_beyond_float32(self, value, tmp_path):
        """Also as the score, with clusters: the run does not end, and what cannot be stored or drawn is undefined."""
        metrics = (Metric("perplexity", lambda outputs, targets: value),)
        task = replace(TASKS.builtin["regression"], metrics=metrics)
        result = simulate(experiment(task, methods=["ifca"]), tmp_path / "run")["ifca"]
        of_clusters = result.diagnostics["cluster_perplexity"][1].value
        assert np.isinf(result.final["perplexity"]) and np.isnan(of_clusters).all()

    def test_may_be_the_score_of_an_own_task(self):
        def loss(outputs, targets):
            return (outputs - targets).abs().mean(1)

        task = Task(loss, "real", (Metric("spread", lambda f, y: (f - y).abs().max(), higher_is_better=False),))
        final = simulate(experiment(task))["fedavg"].final
        assert {"spread", "spread_p90", "spread_local"} <= final.keys() and "mse" not in final


def test_every_key_of_the_section_local_reaches_the_engines():
    of_privacy = {"examples"}  # from privacy.examples
    keys = LocalConfig.model_fields.keys() - {"optimizer_options"}
    assert {item.name for item in fields(LocalSGD)} - of_privacy == keys


class TestSettingsOfAMethod:
    def test_are_those_of_the_section_with_changes(self):
        own = {"momentum": 0.9, "schedule": "cosine"}
        setup = prepare(experiment(methods=["fedprox", {"fedavg": {"local": own}}], local={"lr": 0.2, "epochs": 3}))
        assert setup.local_of("fedprox") == setup.local and setup.local.momentum == 0
        changed = setup.local_of("fedavg")
        assert (changed.lr, changed.epochs, changed.momentum) == (0.2, 3, 0.9)
        assert changed.in_round(5, 8).lr == 0.2 * cosine(5, 8) and setup.local.in_round(5, 8).lr == 0.2

    def test_train_like_the_same_settings_for_all(self):
        alone = experiment(rounds=2, methods=["fedavg"], local={"lr": 0.2, "momentum": 0.9})
        among = experiment(rounds=2, methods=["fedprox", {"fedavg": {"local": {"momentum": 0.9}}}], local={"lr": 0.2})
        expected, found = simulate(alone)["fedavg"], simulate(among)["fedavg"]
        assert found.final["test_loss"] == expected.final["test_loss"]
        assert (
            simulate(experiment(rounds=2, local={"lr": 0.2}))["fedavg"].final["test_loss"] != found.final["test_loss"]
        )

    def test_count_in_the_hash(self):
        plain, own = experiment(), experiment(methods=[{"fedavg": {"local": {"lr": 0.3}}}])
        assert plain.config_hash != own.config_hash
        assert (
            experiment(methods=[{"fedavg": {"local": None, "label": "mine"}}]).config_hash
            == experiment(methods=[{"fedavg": {}}]).config_hash
        )

    @pytest.mark.parametrize(
        ("local", "message"),
        [
            ({"momentun": 0.9}, r"methods: fedavg\.local: unknown key 'momentun' \(did you mean 'momentum'\?\)"),
            ({"lr": -1}, r"methods: fedavg\.local: lr: Input should be greater than 0, got -1"),
            (3, r"fedavg\.local: Input should be a valid dictionary, got 3"),
        ],
    )
    def test_that_are_invalid(self, local, message):
        with pytest.raises(ConfigError, match=message):
            prepare(experiment(methods=[{"fedavg": {"local": local}}]))

    def test_of_an_optimiser_that_the_method_cannot_have(self):
        with pytest.raises(ConfigError, match="fednova needs local.optimizer sgd"):
            prepare(experiment(methods=["fedavg", {"fednova": {"local": {"optimizer": "adam"}}}]))


class TestLearningRates:
    def test_of_rounds(self):
        setup = prepare(experiment(rounds=8, local={"lr": 0.2, "schedule": "cosine"}))
        assert [setup.local.in_round(t, 8).lr for t in range(1, 9)] == [0.2 * cosine(t, 8) for t in range(1, 9)]
        assert prepare(experiment(local={"lr": 0.2})).local.in_round(5, 8).lr == 0.2

    def test_a_factor_of_0_leaves_the_model_alone(self):
        local = {"lr": 0.1, "schedule": {"step": {"every": 2, "gamma": 0.0}}}
        losses = [one.metrics["test_loss"] for one in simulate(experiment(rounds=4, local=local))["fedavg"].records]
        assert losses[0] != losses[1] == losses[2] == losses[3]

    def test_a_resumed_run_has_the_same_bits(self, tmp_path, monkeypatch):
        """With moments on the server, and schedules of rounds and steps."""
        methods = [{"fedavg": {"server_optimizer": {"fedadam": {"lr": 0.1}}}}]
        local = {"optimizer": "adam", "lr": 0.05, "schedule": "cosine", "step_schedule": "linear", "batch_size": 5}
        values = {"methods": methods, "local": local, "rounds": 5}
        whole = simulate(experiment(**values))["fedavg"]
        seen = interrupt_once(monkeypatch, in_round=3)
        with pytest.raises(Interrupted):
            simulate(experiment(**values), tmp_path / "run")
        resumed = resume(tmp_path / "run", on_ray=False, experiment=experiment(**values))["fedavg"]
        assert seen[0].equal(seen[1]) and metrics_of(resumed) == metrics_of(whole)


class TestRefusals:
    @pytest.mark.parametrize(
        "sections, text",
        [
            ({"methods": ["pacfl"]}, "pacfl needs classes, the targets of the task are 'real': it compares subspaces"),
            ({"methods": ["fedavg_plus"]}, "fedavg_plus needs classes.*vote"),
            ({"methods": [{"ifca": {"select": "test_accuracy"}}]}, "ifca needs classes.*set select: train_loss"),
            ({"attack": {"kind": "label_flip", "fraction": 0.2}}, "attack.kind: label_flip needs classes"),
            (
                {"data": FEDERATIONS["classification"]},
                "regression needs targets 'real', the federation has 'class'",
            ),
            ({"evaluation": {"metrics": ["accuracy"]}}, "metric accuracy is for targets class"),
            (
                {"model": {"name": lambda num_classes: nn.Linear(4, 5)}},
                r"targets of the data need \(2, 2\)",
            ),
            ({"methods": ["fednova"], "local": {"optimizer": "adam"}}, "fednova needs local.optimizer sgd.*got adam"),
            (
                {"methods": ["per_fedavg"], "local": {"step_schedule": "linear"}},
                "got sgd and linear",
            ),
            ({"local": {"schedule": "cosin"}}, "unknown schedule 'cosin'.*did you mean 'cosine'"),
            ({"methods": [{"fednova": {"server_optimizer": "fedadam"}}]}, "fednova.server_optimizer must be none"),
            (
                {"methods": ["fednova"], "local": {"momentum": 0.5, "persist": True}},
                "fednova needs local.persist false or local.momentum 0, got persist true and momentum 0.5: a_i counts",
            ),
            (
                {"methods": [{"local": {"server_optimizer": "fedadam"}}]},
                "server_optimizer must be none.*averages no",
            ),
            ({"methods": [{"fedavg": {"server_optimizer": "fedadm"}}]}, "did you mean 'fedadam'"),
        ],
    )
    def test_before_a_run(self, sections, text):
        with pytest.raises(ConfigError, match=text):
            prepare(experiment(**sections))

    @pytest.mark.parametrize("key", ["momentum", "weight_decay", "persist"])
    def test_options_of_sgd_with_another_optimizer(self, key):
        with pytest.raises(ConfigError, match=f"{key} is that of sgd.*with optimizer adam"):
            experiment(local={"optimizer": "adam", key: True if key == "persist" else 0.5})

    def test_a_target_accuracy_above_1(self):
        with pytest.raises(ConfigError, match="an accuracy is above 0 and at most 1, got 3"):
            experiment("classification", evaluation={"target": 3})
        assert experiment(evaluation={"target": 3}).evaluation.target == 3


def test_defaults_do_not_change_the_hash_of_an_experiment():
    plain = Experiment()
    explicit = Experiment(
        task="classification",
        local={"optimizer": "sgd", "schedule": "constant"},
        evaluation={"metrics": []},
        methods=[{"fedavg": {"server_optimizer": "none"}}, "ifca", "stocfl"],
    )
    with_options = Experiment(methods=[{"fedavg": {}}, "ifca", "stocfl"])
    assert explicit.config_hash == with_options.config_hash
    assert len({plain.config_hash, Experiment(task="regression").config_hash}) == 2
    assert len({plain.config_hash, Experiment(local={"clip_norm": 1.0}).config_hash}) == 2


@pytest.mark.parametrize("task", ["regression", "multi_label"])
def test_every_method_that_needs_no_classes_runs(task):
    names = [name for name, cls in REGISTRY.items() if not cls().needs_classes]
    assert len(names) >= 19
    results = simulate(experiment(task, methods=names, rounds=2, evaluation={"every": 2}))
    for label, result in results.methods.items():
        assert np.isfinite(result.final[FIRST[task]]) and np.isfinite(result.final[f"{FIRST[task]}_local"]), label


def test_records_are_plain_json(tmp_path):
    simulate(experiment(rounds=1), tmp_path / "run")
    line = json.loads((tmp_path / "run" / "fedavg" / "metrics.jsonl").read_text())
    assert line["round"] == 1 and line["mse"] > 0
