"""Whole runs in this process: every registered method with every engine, clients that join and leave, and resuming."""

import functools
import re
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from checksums import EARLY
from covering import covering
from federations import Spoiled
from small_runs import PLANTED, Reports, figures, interrupt_once, merged

import cfl_ray
from cfl_ray.checkpoint.store import CheckpointStore
from cfl_ray.cli.live_client import ask, status
from cfl_ray.errors import ConfigError, Interrupted, RunError
from cfl_ray.lifecycle.driver import Watcher
from cfl_ray.methods import REGISTRY
from cfl_ray.methods.fedavg import FedAvg
from cfl_ray.methods.ifca import IFCA
from cfl_ray.results.results import MethodResult

WITH_CLIENT_STATE = {
    "ditto",
    "local",
    "fedper",
    "fedrep",
    "fedbabu",
    "lg_fedavg",
    "cgpfl",
    "fedac",
    "fedsoft",
    "apfl",
    "pfedme",
    "fedas",
    "fedccfa",
    "scaffold",
    "fedproto",
    "moon",
    "fedrod",
    "fedala",
    "fedpac",
}


def make_experiment(output: Path, methods=("fedavg",), rounds=6, **sections) -> cfl_ray.Experiment:
    """Ten clients in two groups, of which half take part in a round; sections are merged into these settings."""
    data = {"synthetic_samples": 40, "partition": {"clients": 10}}
    # tests/results/test_newcomers.py verifies the models of every method
    changes = {"cohort": {"fraction": 0.5}, "evaluation": {"verify": False}, "output": str(output)}
    base = merged(PLANTED, {"data": data} | changes)
    return cfl_ray.Experiment(**merged(base, {"methods": list(methods), "rounds": rounds, **sections}))


@pytest.fixture
def experiment(tmp_path):
    return lambda *arguments, **sections: make_experiment(tmp_path / "out", *arguments, **sections)


class Crash(Watcher):
    """Raises `Killed` after a round of a method, where a killed driver would stop."""

    def __init__(self, label, after):
        self.label, self.after = label, after

    def round(self, label, report):
        if (label, report.round) == (self.label, self.after):
            raise Killed


class Killed(Exception):
    pass


def some_methods(names):
    """Entries of an experiment's methods, with options that let clusters form early."""
    return [{name: EARLY.get(name, {})} for name in names]


EVERY_METHOD = some_methods(REGISTRY)
LOCALS = {
    "vectorised, mini-batches": {"batch_size": 3, "momentum": 0.5},
    "span, full batch": {"batch_size": None, "epochs": 2, "weight_decay": 0.01},
}


@pytest.fixture(scope="module")
def run_of_methods(tmp_path_factory):
    """Returns a function: engine, LOCALS -> figures and reassigned clients of each method; a run is made once.

    They are those that together make every kind of request. 7 samples with 16 inputs are few enough that
    `span` applies to full batches.
    """

    @functools.cache
    def of(engine: str, local: str):
        data, evaluation = {"synthetic_samples": 7}, {"local_samples": 1000, "every": 3}
        runtime, local = {"engine": engine}, LOCALS[local]
        folder, watcher = tmp_path_factory.mktemp("every"), Reports()
        run = make_experiment(
            folder, some_methods(covering()), 3, local=local, runtime=runtime, data=data, evaluation=evaluation
        )
        found = cfl_ray.simulate(run, watcher=watcher)
        return {name: (figures(found[name]), [one.reassigned for one in watcher.of[name]]) for name in found.methods}

    return of


def assert_figures_agree(found, expected) -> None:
    """Shares (accuracies, F1) to 2 of 1000 test images; others, losses among them, to 1e-4 of their size or of 1."""
    for (_, metrics), (_, others) in zip(expected, found, strict=True):
        assert others.keys() == metrics.keys()
        for metric, value in metrics.items():
            is_share = metric.startswith(("accuracy", "macro"))
            tolerance = {"abs": 2e-3} if is_share else {"rel": 1e-4, "abs": 1e-4}
            assert others[metric] == pytest.approx(value, **tolerance), metric


@pytest.mark.parametrize("name", covering())  # the others leave the engines the same requests
@pytest.mark.parametrize("local", LOCALS)
def test_engines_agree(name, local, run_of_methods):
    """Metrics that depend on every parameter to 1e-4; accuracies to 2 of 1000 test images; clusters exactly.

    These methods catch each of eleven mutants of the vectorised engine: without momentum, sample weights, proximal
    terms, moving anchors, frozen outputs, own losses or steps, moved tensors; with weight on padding, and with the
    anchor of another client or the loss of another step.
    """
    expected, expected_moves = run_of_methods("sequential", local)[name]
    found, moves = run_of_methods(local.partition(",")[0], local)[name]
    assert_figures_agree(found, expected)
    assert moves == expected_moves


SCHEDULE = [  # clients join or leave before every round; 8 and 9, whose first event is a join, are absent at first
    {"round": 1, "leave": [0]},
    {"round": 2, "join": [9]},
    {"round": 3, "join": [8], "leave": [9, 2]},
    {"round": 4, "join": [0, 9], "change": [{"clients": [3], "relabel": 1}]},
    {"round": 5, "leave": [4]},
    {"round": 6, "join": [2]},
]
NOTES = [
    ["left: client 0"],
    ["joined: client 9"],
    ["left: clients 2, 9", "joined: client 8"],
    ["joined: clients 0, 9", "data changed: client 3"],
    ["left: client 4"],
    ["joined: client 2"],
]
LEAVER = 4  # leaves and does not come back
SHORT_SCHEDULE = [SCHEDULE[0], SCHEDULE[1], SCHEDULE[2] | {"leave": [9, 2, LEAVER]}, SCHEDULE[3]]
SHORT_NOTES = [NOTES[0], NOTES[1], ["left: clients 2, 4, 9", "joined: client 8"], NOTES[3]]


@dataclass
class Undisturbed:
    """A run with joins, leaves and dropped clients that was not interrupted."""

    run: cfl_ray.Experiment
    directory: Path
    result: MethodResult
    reports: list

    def checkpoint(self, directory: Path, name: str):
        return CheckpointStore(directory / name, self.run.config_hash).load()


def undisturbed_runs(names, folder: Path, rounds: int, schedule: list) -> dict[str, Undisturbed]:
    """A run of these methods, by name."""
    run = make_experiment(
        folder / "out",
        some_methods(names),
        rounds,
        schedule=schedule,
        cohort={"fraction": 0.75, "availability": 0.9, "dropout": 0.2},
        runtime={"checkpoint_every": 2},
    )
    watcher = Reports()
    found = cfl_ray.simulate(run, folder / "run", watcher)
    return {name: Undisturbed(run, folder / "run", found[name], watcher.of[name]) for name in names}


@pytest.fixture(scope="module")
def every_undisturbed(tmp_path_factory):
    """Every method, in one run."""
    return undisturbed_runs(REGISTRY, tmp_path_factory.mktemp("every"), 4, SHORT_SCHEDULE)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """Returns the undisturbed run of a method; each is made once."""
    return functools.cache(lambda name: undisturbed_runs([name], tmp_path_factory.mktemp(name), 6, SCHEDULE)[name])


def trained_clients(checkpoint) -> list[int]:
    """Clients that have trained since they joined."""
    return np.flatnonzero(~checkpoint.tensors["server.local_scores_N2"].isnan().any(1)).tolist()


@pytest.mark.parametrize("name", REGISTRY)
class TestEveryMethod:
    def test_clients_join_and_leave_before_any_round(self, name, every_undisturbed):
        """Before the first and the last round included; metrics are those of clients online."""
        whole = every_undisturbed[name]
        records, kinds = whole.result.records, ("left", "joined", "data changed")
        assert [record.metrics["clients_online"] for record in records] == [7, 8, 6, 8]
        assert all(np.isfinite(value) for record in records for value in record.metrics.values())
        assert "newcomer_accuracy" in whole.result.summary
        assert [[note for note in report.notes if note.startswith(kinds)] for report in whole.reports] == SHORT_NOTES

    def test_a_client_that_left_has_no_cluster_and_no_state(self, name, every_undisturbed):
        whole = every_undisturbed[name]
        last = whole.checkpoint(whole.directory, name)
        assert last.round == 4 and last.tensors["assign_N"][LEAVER] == -1
        trained = trained_clients(last)
        assert LEAVER not in trained and len(trained) > 5
        owners = sorted({client for (_, client), _ in last.client_states()})
        assert owners == (trained if name in WITH_CLIENT_STATE else [])
        if name == "stocfl":
            assert last.tensors["seen_S"].tolist().count(LEAVER) == 0
            assert len(last.tensors["seen_S"]) == len(last.tensors["signature_SF"]) > 5


RESUMED = {  # the round in which the run is interrupted, and methods
    "before the first checkpoint": (1, ("fedavg", "ditto")),
    "between two": (3, ("fedavg", "ditto", "stocfl", "cfl", "fedac")),
    "with a checkpoint": (4, ("ditto", "stocfl")),
    "the last round": (6, ("cfl", "fedac")),
}
RESUMED_RUNS = [
    pytest.param(name, after, id=f"{name}-{when}") for when, (after, names) in RESUMED.items() for name in names
]


@pytest.mark.parametrize("name, after", RESUMED_RUNS)
def test_resumes_after_any_round(name, after, undisturbed, tmp_path):
    """An interrupted run that is resumed equals the undisturbed run: metrics, models and client states, bit for bit.

    Methods without client state and with it, with signatures, with clusters that split and that adapt. That the state
    of every method comes back from a checkpoint is tested in test_planted.py.
    """
    whole, broken = undisturbed(name), tmp_path / "broken"
    with pytest.raises(Killed):
        cfl_ray.simulate(whole.run, broken, Crash(name, after))
    if after > 1:
        assert LEAVER in trained_clients(whole.checkpoint(broken, name)) or after == 6
    resumed = cfl_ray.resume(broken, on_ray=False)[name]
    assert figures(resumed) == figures(whole.result) and len(whole.result.records) == 6
    assert resumed.summary == whole.result.summary
    assert saved(whole.checkpoint(broken, name)) == saved(whole.checkpoint(whole.directory, name))


def saved(checkpoint):
    """Round, state, traffic and client states of a checkpoint, in a form that compares bit for bit."""
    client_states = {key: state.tensor().numpy().tobytes() for key, state in checkpoint.client_states()}
    tensors = {key: value.numpy().tobytes() for key, value in checkpoint.tensors.items()}
    return checkpoint.round, tensors, checkpoint.values["state"], checkpoint.values["traffic"], client_states


class TestRunDirectories:
    def test_a_finished_method_is_not_run_again(self, experiment, tmp_path):
        run = experiment(["fedavg", "local"], 3, runtime={"engine": "manual", "checkpoint_every": 1})
        with pytest.raises(Killed):
            cfl_ray.simulate(run, tmp_path / "run", Crash("local", 2))
        watcher, again = Reports(), Reports()
        resumed = cfl_ray.resume(tmp_path / "run", watcher, on_ray=False)
        assert [report.round for report in watcher.reports] == [3]
        assert figures(resumed["fedavg"]) == figures(cfl_ray.simulate(run)["fedavg"])
        repeated = cfl_ray.resume(tmp_path / "run", again, on_ray=False)
        assert figures(repeated["local"]) == figures(resumed["local"]) and again.reports == []

    def test_methods_made_in_python_are_resumed_with_their_options(self, experiment, tmp_path):
        run = experiment([IFCA(num_clusters=3), FedAvg], 3)
        whole = cfl_ray.simulate(run)
        with pytest.raises(Killed):
            cfl_ray.simulate(run, tmp_path / "run", Crash("ifca", 2))
        resumed = cfl_ray.resume(tmp_path / "run", on_ray=False)
        found, expected = (
            {label: figures(result) for label, result in results.methods.items()} for results in (resumed, whole)
        )
        assert found == expected

    def test_an_interrupted_run_of_a_federation_names_the_call_that_resumes_it(self, tmp_path, monkeypatch):
        federation = cfl_ray.federation_from_arrays(np.eye(20, dtype="float32"), np.arange(20) % 2, np.arange(20) // 5)
        run = cfl_ray.Experiment(data=federation, rounds=2, methods=["fedavg"], tracking={"enabled": False})
        interrupt_once(monkeypatch, 2)
        call = re.escape(f"go on with: cfl_ray.resume('{tmp_path}/run', experiment=..., on_ray=False)")
        with pytest.raises(Interrupted, match=f"{call}$"):
            cfl_ray.simulate(run, tmp_path / "run")
        assert status(tmp_path / "run").next == f"cfl_ray.resume('{tmp_path}/run', experiment=...)"
        with pytest.raises(RunError, match=r"is not live.*go on with `cfl_ray\.resume\("):
            ask(tmp_path / "run", "stop")
        with pytest.raises(
            ConfigError, match=r"does not hold arrays made in Python: give it the experiment, resume\(RUN"
        ):
            cfl_ray.resume(tmp_path / "run", on_ray=False)
        assert len(cfl_ray.resume(tmp_path / "run", experiment=run, on_ray=False)["fedavg"].records) == 2


class TestRepeating:
    def test_another_seed_gives_other_figures(self, experiment):
        one, again, other = (cfl_ray.simulate(experiment(rounds=2, seed=seed))["fedavg"] for seed in (0, 0, 1))
        assert figures(one) == figures(again) != figures(other)

    def test_a_method_is_not_disturbed_by_those_before_it(self, experiment):
        alone = cfl_ray.simulate(experiment(["stocfl"], 3))["stocfl"]
        assert figures(cfl_ray.simulate(experiment(["ditto", "local", "stocfl"], 3))["stocfl"]) == figures(alone)

    def test_one_client_per_chunk_changes_rounding_only(self, experiment):
        """Float32 sums are rounded within a chunk: other chunks, another last bit."""
        together, apart = (
            figures(
                cfl_ray.simulate(
                    experiment(["stocfl"], 3, cohort={"fraction": 1.0}, runtime={"clients_per_host": clients})
                )["stocfl"]
            )
            for clients in (None, 1)
        )
        for (_, one), (_, other) in zip(together, apart):
            assert one["test_loss"] == pytest.approx(other["test_loss"], rel=1e-5)
            assert one["num_clusters"] == other["num_clusters"]


def test_newcomers_of_stocfl_are_placed_before_they_train(experiment):
    """They join in the last round and are not drawn: their cluster follows from their signature alone."""
    run = experiment(
        [{"stocfl": {"tau": 0.5}}],
        8,
        data={"synthetic_samples": 200},
        local={"epochs": 5, "batch_size": 25},
        cohort={"clients": 1},
        schedule=[{"round": 8, "join": [6, 7, 8, 9]}],
    )
    watcher = Reports()
    result = cfl_ray.simulate(run, watcher=watcher)["stocfl"]
    assert {client for client, _ in watcher.reports[-1].reassigned} >= {6, 7, 8, 9}
    assert result.final["ari"] == 1 and result.final["num_clusters"] == 2
    assert result.summary["newcomer_accuracy"] > 0.9


class TestFigures:
    P = 16 * 16 + 16 + 16 * 4 + 4  # MLP 16-16-4

    def test_traffic_adds_up(self, experiment):
        """rounds * (m / N) * P * 32 / 10^6 for FedAvg each way; K times that down for IFCA, one number more up."""
        results = cfl_ray.simulate(experiment(["fedavg", {"ifca": {"num_clusters": 3}}, "local"], 3))
        records = zip(*(results[name].records for name in ("fedavg", "ifca", "local")))
        for number, (fedavg, ifca, local) in enumerate(records, 1):
            share = number * 5 / 10 * 32 / 1e6
            assert fedavg.metrics["mbit_down"] == fedavg.metrics["mbit_up"] == pytest.approx(share * self.P)
            assert ifca.metrics["mbit_down"] == pytest.approx(share * 3 * self.P)
            assert ifca.metrics["mbit_up"] == pytest.approx(share * (self.P + 1))
            assert local.metrics["mbit_down"] == local.metrics["mbit_up"] == 0

    def test_rejected_clients_are_counted_and_named(self, experiment):
        federation, watcher, names = (
            Spoiled([3], clients=6, samples=40),
            Reports(),
            ["fedavg", "ditto", "ifca", "stocfl"],
        )
        settings = {"cohort": {"fraction": 1.0}, "runtime": {"engine": "sequential"}}
        results = cfl_ray.simulate(experiment(names, 2, data=federation, **settings), watcher=watcher)
        note = "client 3: its data have values that are not finite; left out of this round"
        for name in names:
            assert [record.metrics["clients_rejected"] for record in results[name].records] == [1, 1], name
            assert [report.notes for report in watcher.of[name]] == [(note,)] * 2, name
            assert all(np.isfinite(value) for value in results[name].final.values()), name

    @pytest.mark.filterwarnings("error::RuntimeWarning")
    def test_scores_are_not_defined_where_no_client_could_be_tested(self, experiment):
        """Per-FedAvg tests clients after they adapt, which none of these can; newcomers among them. No warning."""
        federation, schedule = Spoiled(range(4), clients=4, samples=40), [{"round": 2, "join": [3]}]
        run = experiment(["per_fedavg"], 2, data=federation, schedule=schedule, evaluation={"tuned_epochs": 1})
        final = cfl_ray.simulate(run)["per_fedavg"].final
        undefined = ("accuracy", "accuracy_std", "accuracy_p10", "macro_f1", "test_loss", "accuracy_tuned")
        assert all(np.isnan(final[name]) for name in undefined) and final["clients_rejected"] == 4

    def test_dropped_clients_are_counted(self, experiment):
        result = cfl_ray.simulate(experiment(rounds=5, cohort={"fraction": 1.0, "dropout": 0.5}))["fedavg"]
        dropped = [record.metrics.get("clients_dropped", 0.0) for record in result.records]
        assert 0 < sum(dropped) < 50
        down = np.diff([0.0, *(record.metrics["mbit_down"] for record in result.records)])
        assert down == pytest.approx([(10 - count) / 10 * self.P * 32 / 1e6 for count in dropped])

    def test_a_run_evaluates_as_often_as_configured_and_at_the_end(self, experiment):
        records = cfl_ray.simulate(experiment(rounds=5, evaluation={"every": 2}))["fedavg"].records
        assert [record.round for record in records if "accuracy" in record.metrics] == [2, 4, 5]

    def test_personal_methods_are_served_personally(self, experiment):
        """Groups disagree about every label: one model is right for half (+ 5 %), personal models for more."""
        run = experiment(
            ["fedavg", "local", "ditto"],
            6,
            cohort={"fraction": 1.0},
            data={"synthetic_samples": 60},
            local={"epochs": 2, "batch_size": 25},
            evaluation={"local_samples": 500},
        )
        found = cfl_ray.simulate(run)
        assert found["fedavg"].final["accuracy"] < 0.55
        assert min(found[name].final["accuracy"] for name in ("local", "ditto")) > 0.7
        assert found["local"].final["accuracy_local"] == pytest.approx(found["local"].final["accuracy"])


def test_threads_are_given_back(experiment):
    torch.set_num_threads(2)
    try:
        cfl_ray.simulate(experiment(rounds=1))
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(1)
