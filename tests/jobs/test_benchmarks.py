"""The benchmarks where they need neither Ray nor minutes."""

import copy
import inspect
import sys
from contextlib import nullcontext
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from closeness import close

from benchmarks import compare
from benchmarks.workloads import OWN_MODULES, Workload
from jobs.benchmarks import clustering, in_process, methods, modules
from jobs.benchmarks.__main__ import BENCHMARKS
from jobs.benchmarks.nodes import speedup
from jobs.benchmarks.scale import CALL_SECONDS, simulate_round


@pytest.mark.parametrize("what", BENCHMARKS)
def test_every_benchmark_takes_its_options(what):
    module, options = BENCHMARKS[what]
    parameters = inspect.signature(getattr(import_module(f"jobs.benchmarks.{module}"), what)).parameters
    assert len(parameters) == len(options)


class TestMethods:
    """Passes of a round and CPU seconds of every method."""

    def test_passes_are_three_a_trained_sample_and_one_a_compared_one(self, monkeypatch):
        """3 clients of 8 samples and 2 epochs: 3 x 8 x 2 x 3 of FedAvg, and 3 x 8 x K more of IFCA."""
        small = replace(methods.SMALL, clients=3, samples=8, batch=4)
        monkeypatch.setattr(methods, "SMALL", small)
        monkeypatch.setattr(methods, "DATA", methods.DATA | {"synthetic_samples": 8, "partition": {"clients": 4}})
        assert methods.passes("fedavg", 1) == 3 * 8 * 2 * 3
        assert methods.passes("ifca", 1) == 3 * 8 * 2 * 3 + 3 * 8 * methods.GROUPS

    def test_methods_above_their_passes_and_those_that_manual_does_not_train_are_marked(self, monkeypatch, capsys):
        monkeypatch.setattr(methods, "REGISTRY", {"fedavg": None, "slow": None, "moon": None})
        monkeypatch.setattr(methods, "passes", lambda name, rounds: {"slow": 20.0}.get(name, 10.0))
        taken = {"fedavg": (1.0, True), "slow": (2.5, True), "moon": (1.1, False)}
        monkeypatch.setattr(methods, "seconds", lambda name, rounds, of_fedavg: taken[name])
        monkeypatch.setattr(methods, "rounds_of", lambda *_: nullcontext(SimpleNamespace(rounds=lambda *_: iter("ab"))))
        methods.methods(1)
        assert capsys.readouterr().out.splitlines()[-3:] == [
            "| fedavg | 1.00 | 1.00 | 1.00 |  |",
            "| slow | 2.00 | 2.50 | 1.25 | above |",
            "| moon | 1.00 | 1.10 | 1.10 | in `sequential` |",
        ]


class TestModules:
    """The tables of own modules: the plain loop takes 1 and 2 s, others what is given."""

    @staticmethod
    def case(name, reasons=(), far=(), **seconds):
        return modules.Case(OWN_MODULES[name], "manual", {"plain loop": [1, 2]} | seconds, dict(reasons), dict(far))

    def test_cells_are_the_ratio_of_least_times_and_the_median_ratio(self):
        """0.5 / 1, and (0.5 / 1 + 0.5 / 2) / 2; the best engine has the least seconds."""
        case = self.case("LSTM", {"compiled": "it is recurrent"}, manual=(0.5, 0.5), sequential=(0.9, 0.8))
        text = modules.section([case], 2)
        assert "| LSTM | 1.000, 1.500 | 0.50, 0.38 | 0.80, 0.65 | cannot |" in text
        assert "- LSTM: compiled: it is recurrent" in text and "JAX" not in text
        assert "| LSTM | `manual` | 0.50 | 0.50 (`manual`) |" in modules.expected([case])

    def test_peers_are_beside_the_best_engine_or_have_their_reason(self):
        peers = {"JAX by hand": (0.25, 0.5)}
        case = self.case("Transformer", {"pfl-research": "no venv"}, {"JAX by hand": 2e-6}, compiled=(0.5, 1), **peers)
        case.versions["JAX by hand"] = {"jax": "1.0"}
        text = modules.section([case, self.case("LSTM", sequential=(1, 2))], 2)
        assert "**0.50, 0.50** (`compiled`) | cannot | cannot | cannot | 0.25, 0.25 |" in text
        assert "JAX by hand: at most 2e-06 of the change" in text and "(jax 1.0)" in text
        assert "- Transformer: pfl-research: no venv" in text and text.count("| LSTM |") == 1

    def test_the_page_has_the_parts_that_are_written(self):
        page = (compare.ROOT / "docs" / "performance.md").read_text()
        for begin in (modules.BEGIN, modules.BEGIN_EXPECTED, methods.BEGIN):
            assert "\nnew\n" in compare.with_section(page, "new", begin)

    def test_a_system_that_cannot_run_has_the_last_error_as_reason(self):
        case, missing = self.case("LSTM"), modules.Peer("other", "no_such_script", "plain")
        with (
            pytest.raises(compare.CannotRun, match="no_such_script"),
            modules.peer_round(missing, Path(sys.executable), case),
        ):
            pass


@pytest.mark.parametrize("name", ["fedclust", "pacfl", "stocfl"])
def test_a_method_recovers_the_planted_groups(name):
    seconds, peak, clusters = clustering.cluster(name, 60)
    assert clusters == clustering.GROUPS and seconds > 0 and peak > 0


def test_signatures_are_as_long_as_those_of_real_clients():
    """850 floats are the final layer of LeNet-5 for three channels, whose 62,006 parameters the papers count."""
    case = clustering.CLUSTERINGS["fedclust"]
    spec = clustering.ParamSpec.of(clustering.recipe(case.model, case.options, case.input, 10)())
    assert (spec.size, spec.head.count) == (62_006, case.length)
    assert clustering.CLUSTERINGS["stocfl"].length == clustering.CLUSTERINGS["stocfl"].method.sketch
    pacfl = clustering.CLUSTERINGS["pacfl"]
    assert pacfl.vectors % pacfl.method.vectors == 0 and clustering.signatures(pacfl, 3).shape == (3, 6 * 784)


class TestScale:
    """Rounds with simulated hosts, cut, handed out and collected by the real server code."""

    def test_as_many_clients_as_hosts_are_one_for_each(self):
        found = simulate_round(100, 100, 1, 10)
        assert found.calls == 100 and found.waited == pytest.approx(100 * CALL_SECONDS)

    def test_hosts_wait_little_for_a_server_that_makes_calls_one_after_another(self):
        """One second of work for each of 200 hosts; the server needs 0.6 seconds to make one call for each of them."""
        found = simulate_round(200, 20_000, 1, 10, np.full(20_000, 0.01))
        assert found.calls < 500 and found.waited < 1

    def test_hosts_are_busy_with_costs_drawn_log_normally(self):
        draw = np.random.default_rng(0)
        found = simulate_round(100, 10_000, 1, 10, draw.lognormal(0, 1, 10_000))
        assert found.busy > 0.95 and found.calls < 2_000

    def test_the_servers_traffic_does_not_depend_on_the_number_of_hosts(self):
        """K models of float32 out, and K in, whether 3 nodes or 10 have the hosts; each link carries less than 10 s."""
        columns, clusters = 11_000_000, 50
        for hosts in (30, 100):
            traffic = simulate_round(hosts, 10_000, clusters, columns).traffic
            sent, received = traffic.sent["node 0"], traffic.received["node 0"]
            assert sent == received == clusters * columns * 4
            assert traffic.seconds < 10

    def test_small_totals_are_added_up_by_the_server(self):
        traffic = simulate_round(20, 1000, 1, 10_000).traffic
        assert traffic.received["node 0"] == 20 * 10_000 * 16

    def test_smaller_ones_come_with_the_results(self):
        found = simulate_round(20, 1000, 1, 1000)
        assert found.traffic.received["node 0"] == found.calls * 1000 * 16 <= 8 << 20


class TestNodes:
    """The speedup by nodes, with simulated hosts."""

    def test_two_nodes_are_nearly_twice_as_fast_with_a_large_cohort(self):
        times, best = speedup(2, 2_000, 0, 10_000)
        assert 1.8 < times <= best == 2

    def test_more_hosts_than_clients_are_of_no_use(self):
        times, best = speedup(8, 20, 1, 10_000)
        assert times < 2 and best < 2


class TestMixtures:
    """The plain loops beside FedEM and FedAvg."""

    WORK = Workload("", "lenet5", {}, 10, 2, 20, 8, 1, shuffle=False)

    def test_one_model_is_fedavg_and_equal_models_share_each_sample(self):
        """Equal models have responsibility 1 / 3 for all samples: three steps at a third of the learning rate."""
        torch.manual_seed(0)
        three = in_process.PlainLoop(self.WORK, 3)
        first = copy.deepcopy(three.modules[0].state_dict())
        for module in three.modules:
            module.load_state_dict(first)
        one = in_process.PlainLoop(replace(self.WORK, lr=self.WORK.lr / 3), 1)
        one.modules[0].load_state_dict(first)
        for loop, models in ((three, 3), (one, 1)):
            weight_Kn = loop.responsibilities(loop.x[0], loop.y[0])
            assert close(weight_Kn, torch.full((models, 20), 1 / models), 1e-6)
            loop.batches = lambda samples: torch.arange(samples).split(8)
            loop.round()
        for found, expected, start in zip(
            three.modules[2].parameters(), one.modules[0].parameters(), first.values(), strict=True
        ):
            assert close(found, expected, 1e-5) and not close(found, start, 1e-5)

    @pytest.mark.parametrize("method", ["fedavg", {"fedem": {"num_models": 3}}])
    def test_our_rounds_run_in_this_process(self, method):
        with in_process.our_round(self.WORK, method, "sequential") as run:
            assert [run().round for _ in range(2)] == [1, 2]
