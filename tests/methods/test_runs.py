"""Whole runs in this process: every registered method with every engine, through joins, leaves, dropout and an interruption."""

import numpy as np
import pytest
import torch
from federations import Spoiled

import cfl_ray
from cfl_ray.core.errors import ConfigError
from cfl_ray.methods import REGISTRY
from cfl_ray.methods.fedavg import FedAvg
from cfl_ray.methods.ifca import IFCA
from cfl_ray.runtime.checkpoint import CheckpointStore
from cfl_ray.runtime.driver import Watcher


@pytest.fixture(autouse=True)
def no_figures(monkeypatch):
    """Drawing takes longer than these runs, and has tests of its own."""
    monkeypatch.setattr("cfl_ray.runtime.driver.write_figures", lambda *arguments: None)


CLOCKS = {"round_seconds"}
SCHEDULE = [{"round": 2, "join": [8]}, {"round": 4, "leave": [1, 8], "change": [{"clients": [2, 3], "relabel": 1}]}, {"round": 5, "join": [9, 1]}]


@pytest.fixture
def experiment(tmp_path):
    """Makes an Experiment on ten synthetic clients in two groups; sections are merged into these."""

    def make(methods=("fedavg",), rounds=6, **sections) -> cfl_ray.Experiment:
        data = {"source": "synthetic", "synthetic_shape": [1, 4, 4], "synthetic_classes": 4, "synthetic_groups": 2, "synthetic_samples": 60, "partition": {"clients": 10}}
        base = {
            "data": data, "model": {"name": "mlp", "options": {"hidden": 16}}, "local": {"epochs": 2, "batch_size": 25, "lr": 0.3}, "cohort": {"fraction": 0.5},
            "runtime": {"engine": "sequential"}, "tracking": {"enabled": False}, "output": str(tmp_path / "out"),
        }  # fmt: skip
        merged = {name: base.get(name, {}) | value if isinstance(value, dict) else value for name, value in sections.items()}
        return cfl_ray.Experiment(methods=list(methods), rounds=rounds, **base | merged)

    return make


def figures(result) -> list[tuple[int, dict[str, float]]]:
    """Every record without what the clock says."""
    return [(record.round, {name: value for name, value in record.metrics.items() if name not in CLOCKS}) for record in result.records]


class Notes(Watcher):
    def __init__(self):
        self.reports = []

    def round(self, label, report):
        self.reports.append(report)


class Crash(Watcher):
    """Fails after a round of a method, as the driver would when it is killed there."""

    def __init__(self, label, after):
        self.label, self.after = label, after

    def round(self, label, report):
        if (label, report.round) == (self.label, self.after):
            raise Killed


class Killed(Exception):
    pass


@pytest.mark.parametrize("local", [{"batch_size": 25, "momentum": 0.5}, {"batch_size": None, "weight_decay": 0.01}], ids=["mini-batches", "full batch"])
@pytest.mark.parametrize("name", REGISTRY)
def test_engines_agree(name, local, experiment):
    """Figures that depend on every parameter, to 1e-4; accuracies to 2 of 1000 test images; clusters exactly."""
    data = {"synthetic_samples": 7}  # few enough, of 16 inputs, that `span` applies to full batches
    watchers, found = {}, {}
    for engine in ("sequential", "vectorised", "span"):
        watchers[engine] = Notes()
        run = experiment([name], 4, local=local, runtime={"engine": engine}, data=experiment().data.model_dump(exclude={"federation"}) | data)
        found[engine] = figures(cfl_ray.simulate(run, watcher=watchers[engine])[name])
    for engine in ("vectorised", "span"):
        for (_, expected), (_, other) in zip(found["sequential"], found[engine], strict=True):
            assert other.keys() == expected.keys()
            for metric, value in expected.items():
                tolerance = 2e-3 if metric.startswith(("accuracy", "macro")) else 1e-4
                assert other[metric] == pytest.approx(value, abs=tolerance), (engine, metric)
        assert [report.moved for report in watchers[engine].reports] == [report.moved for report in watchers["sequential"].reports]


@pytest.mark.parametrize("name", REGISTRY)
class TestResume:
    """A run that stopped anywhere and goes on is the run that never stopped: every figure, every model, every memory, bit for bit."""

    @pytest.mark.parametrize("after, every", [(1, 1), (4, 1), (3, 2), (6, 1), (1, 4)])
    def test_is_as_if_nothing_had_happened(self, name, after, every, experiment, tmp_path):
        """Stopped after a round with a checkpoint, one without (it is done again), the last one, and before the first checkpoint."""
        run = experiment([name], schedule=SCHEDULE, cohort={"dropout": 0.2}, runtime={"checkpoint_every": every, "engine": "sequential"})
        whole = cfl_ray.simulate(run, tmp_path / "whole")
        with pytest.raises(Killed):
            cfl_ray.simulate(run, tmp_path / "broken", Crash(name, after))
        resumed = cfl_ray.resume(tmp_path / "broken", on_ray=False)
        assert figures(resumed[name]) == figures(whole[name]) and len(whole[name].records) == 6
        assert resumed[name].summary == whole[name].summary
        assert self.saved(run, tmp_path / "broken" / name) == self.saved(run, tmp_path / "whole" / name)

    def saved(self, run, directory):
        """Round, state, ledger and memory of the last checkpoint, in a form that compares bit for bit."""
        checkpoint = CheckpointStore(directory, run.config_hash).load()
        memory = {key: value.numpy().tobytes() for key, value in checkpoint.memory()}
        tensors = {key: value.numpy().tobytes() for key, value in checkpoint.tensors.items()}
        return checkpoint.round, tensors, checkpoint.values["state"], checkpoint.values["ledger"], memory


class TestRunDirectories:
    def test_a_finished_method_is_not_run_again(self, experiment, tmp_path):
        run = experiment(["fedavg", "local"], 3)
        with pytest.raises(Killed):
            cfl_ray.simulate(run, tmp_path / "run", Crash("local", 2))
        watcher = Notes()
        resumed = cfl_ray.resume(tmp_path / "run", watcher, on_ray=False)
        assert [report.round for report in watcher.reports] == [3]
        assert figures(resumed["fedavg"]) == figures(cfl_ray.simulate(run)["fedavg"])
        again = Notes()
        assert figures(cfl_ray.resume(tmp_path / "run", again, on_ray=False)["local"]) == figures(resumed["local"]) and again.reports == []

    def test_methods_made_in_python_are_resumed_with_their_options(self, experiment, tmp_path):
        run = experiment([IFCA(num_clusters=3), FedAvg], 3)
        whole = cfl_ray.simulate(run)
        with pytest.raises(Killed):
            cfl_ray.simulate(run, tmp_path / "run", Crash("ifca", 2))
        resumed = cfl_ray.resume(tmp_path / "run", on_ray=False)
        assert {label: figures(result) for label, result in resumed.methods.items()} == {label: figures(result) for label, result in whole.methods.items()}

    def test_a_directory_belongs_to_one_run(self, experiment, tmp_path):
        cfl_ray.simulate(experiment(rounds=1), tmp_path / "run")
        with pytest.raises(ConfigError, match="holds a run of this config already; go on with it by `cfl-ray resume"):
            cfl_ray.simulate(experiment(rounds=1), tmp_path / "run")
        with pytest.raises(ConfigError, match=r"belongs to another config \(hash \w{12}, this one has \w{12}\); choose another folder"):
            cfl_ray.simulate(experiment(rounds=2), tmp_path / "run")
        with pytest.raises(ConfigError, match="holds no run: there is no"):
            cfl_ray.resume(tmp_path / "nothing", on_ray=False)


class TestRepeating:
    def test_the_same_seed_gives_the_same_figures_bit_for_bit(self, experiment):
        run = experiment(REGISTRY, 3, cohort={"availability": 0.8, "dropout": 0.2})
        one, other = cfl_ray.simulate(run), cfl_ray.simulate(run)
        assert all(figures(one[name]) == figures(other[name]) for name in REGISTRY)

    def test_another_seed_gives_others(self, experiment):
        one, other = (cfl_ray.simulate(experiment(rounds=2, seed=seed))["fedavg"] for seed in (0, 1))
        assert figures(one) != figures(other)

    def test_a_method_is_not_disturbed_by_those_before_it(self, experiment):
        alone = cfl_ray.simulate(experiment(["stocfl"], 3))["stocfl"]
        assert figures(cfl_ray.simulate(experiment(["ditto", "local", "stocfl"], 3))["stocfl"]) == figures(alone)

    def test_one_client_per_piece_changes_rounding_only(self, experiment):
        """Pieces are the unit within which sums are rounded: other pieces, the last bit of a float32."""
        together, apart = (cfl_ray.simulate(experiment(["stocfl"], 3, cohort={"fraction": 1.0}, runtime={"clients_per_host": n}))["stocfl"] for n in (None, 1))
        for (_, one), (_, other) in zip(figures(together), figures(apart)):
            assert one["test_loss"] == pytest.approx(other["test_loss"], abs=1e-5) and one["num_clusters"] == other["num_clusters"]


@pytest.mark.parametrize("name", REGISTRY)
class TestComingAndGoing:
    def test_in_any_round(self, name, experiment):
        """Somebody comes or goes before every round, the first and the last included; figures are of those online."""
        events = [{"round": 1, "leave": [0]}, {"round": 2, "join": [9]}, {"round": 3, "join": [8], "leave": [9, 2]}, {"round": 4, "join": [0, 9]}, {"round": 5, "leave": [4]}]
        watcher = Notes()
        result = cfl_ray.simulate(experiment([name], 5, schedule=events), watcher=watcher)[name]
        assert [record.metrics["clients_online"] for record in result.records] == [7, 8, 7, 9, 8]  # 8 and 9 are absent at first, 0 is not
        assert all(np.isfinite(value) for record in result.records for value in record.metrics.values())
        assert "newcomer_accuracy" in result.summary
        assert [report.notes for report in watcher.reports] == [
            ("left: clients 0",), ("joined: clients 9",), ("left: clients 2, 9", "joined: clients 8"), ("joined: clients 0, 9",), ("left: clients 4",)
        ]  # fmt: skip

    def test_a_leaver_has_no_cluster_and_no_memory_left(self, name, experiment, tmp_path):
        run = experiment([name], 3, cohort={"fraction": 1.0}, schedule=[{"round": 3, "leave": [5, 6]}])
        cfl_ray.simulate(run, tmp_path / "run")
        last = CheckpointStore(tmp_path / "run" / name, run.config_hash).load()
        assert set(last.tensors["assign_N"][[5, 6]].tolist()) == {-1}
        assert last.tensors["server.held_N2"].isnan().any(1).tolist() == [client in (5, 6) for client in range(10)]
        owners = {client for (_, client), _ in last.memory()}
        keeps = name in ("ditto", "local", "fedper", "lg_fedavg", "cgpfl", "fedac")
        assert owners == (set(range(10)) - {5, 6} if keeps else set())
        if name == "stocfl":
            assert last.tensors["seen_S"].tolist() == [0, 1, 2, 3, 4, 7, 8, 9] and len(last.tensors["signature_SF"]) == 8


def test_newcomers_of_stocfl_are_placed_before_they_train(experiment):
    """They come in the last round and are not drawn: their cluster follows from their signature alone."""
    data = experiment().data.model_dump(exclude={"federation"}) | {"synthetic_samples": 200}
    run = experiment([{"stocfl": {"tau": 0.5}}], 8, data=data, local={"epochs": 5}, cohort={"clients": 1}, schedule=[{"round": 8, "join": [6, 7, 8, 9]}])
    watcher = Notes()
    result = cfl_ray.simulate(run, watcher=watcher)["stocfl"]
    assert {client for client, _ in watcher.reports[-1].moved} >= {6, 7, 8, 9}
    assert result.final["ari"] == 1 and result.final["num_clusters"] == 2
    assert result.summary["newcomer_accuracy"] > 0.9


class TestFigures:
    P = 16 * 16 + 16 + 16 * 4 + 4  # MLP 16-16-4

    def test_traffic_adds_up(self, experiment):
        """rounds * (m / N) * P * 32 / 10^6 for FedAvg each way; K times that down for IFCA, one number more up."""
        results = cfl_ray.simulate(experiment(["fedavg", {"ifca": {"num_clusters": 3}}, "local"], 4))
        for number, (fedavg, ifca, local) in enumerate(zip(*(results[name].records for name in ("fedavg", "ifca", "local"))), 1):
            share = number * 5 / 10 * 32 / 1e6
            assert fedavg.metrics["mbit_down"] == fedavg.metrics["mbit_up"] == pytest.approx(share * self.P)
            assert ifca.metrics["mbit_down"] == pytest.approx(share * 3 * self.P) and ifca.metrics["mbit_up"] == pytest.approx(share * (self.P + 1))
            assert local.metrics["mbit_down"] == local.metrics["mbit_up"] == 0

    @pytest.mark.parametrize("name", REGISTRY)
    def test_rejected_clients_are_counted_and_named(self, name, experiment):
        federation = Spoiled([3], clients=6)
        watcher = Notes()
        result = cfl_ray.simulate(experiment([name], 2, data=federation, cohort={"fraction": 1.0}), watcher=watcher)[name]
        assert [record.metrics["clients_rejected"] for record in result.records] == [1, 1]
        assert [report.notes for report in watcher.reports] == [("client 3: its data have values that are not finite; left out of this round",)] * 2
        assert all(np.isfinite(value) for value in result.final.values())

    def test_dropped_clients_are_counted(self, experiment):
        result = cfl_ray.simulate(experiment(rounds=5, cohort={"fraction": 1.0, "dropout": 0.5}))["fedavg"]
        dropped = [record.metrics.get("clients_dropped", 0.0) for record in result.records]
        assert 0 < sum(dropped) < 50
        down = np.diff([0.0, *(record.metrics["mbit_down"] for record in result.records)])
        assert down == pytest.approx([(10 - count) / 10 * self.P * 32 / 1e6 for count in dropped])

    def test_a_run_evaluates_as_often_as_it_is_told_and_at_the_end(self, experiment):
        records = cfl_ray.simulate(experiment(rounds=5, evaluation={"every": 2}))["fedavg"].records
        assert [record.round for record in records if "accuracy" in record.metrics] == [2, 4, 5]

    def test_personal_methods_are_served_personally(self, experiment):
        """Groups disagree: personal models beat one model for all, which gets at most half right (and 5 % for noise)."""
        found = cfl_ray.simulate(experiment(["fedavg", "local", "ditto"], 6, cohort={"fraction": 1.0}))
        assert found["fedavg"].final["accuracy"] < 0.55 < 0.7 < min(found[name].final["accuracy"] for name in ("local", "ditto"))
        assert found["local"].final["accuracy_local"] == pytest.approx(found["local"].final["accuracy"])


def test_threads_are_given_back(experiment):
    torch.set_num_threads(2)
    try:
        cfl_ray.simulate(experiment(rounds=1))
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(1)
