"""The estimate of traffic equals the traffic that a run counts."""

import io
import re
from dataclasses import dataclass, replace

import pytest
import torch
from rich.console import Console
from torch import nn

import cfl_ray
from cfl_ray.cli import estimate
from cfl_ray.core.local_sgd import LocalSGD
from cfl_ray.data.federation import DataShape
from cfl_ray.errors import RunError
from cfl_ray.methods import REGISTRY, resolve
from cfl_ray.methods.fedavg import FedAvg
from cfl_ray.setup.dry_rounds import DryRounds, traffic
from cfl_ray.setup.prepare import prepare


def test_estimated_traffic_is_that_of_a_run(tmp_path, monkeypatch):
    """Of two rounds of every method."""
    monkeypatch.chdir(tmp_path)
    experiment = cfl_ray.Experiment(
        rounds=2,
        methods=["all"],
        data={"source": "synthetic", "synthetic_shape": [6], "synthetic_samples": 100, "partition": {"clients": 8}},
        cohort={"fraction": 1.0},
        model={"name": "mlp", "options": {"hidden": 4}},
        local={"epochs": 1},
        evaluation={"every": 2},
        tracking={"enabled": False},
        runtime={"engine": "manual"},
    )
    results = cfl_ray.simulate(experiment)
    spec = prepare(experiment).network().spec
    assert set(results.methods) == set(REGISTRY)
    for label, method in resolve(experiment.methods).items():
        expected = traffic(DryRounds(method, 8, 8, LocalSGD(epochs=1), spec, DataShape((6,), 10)))
        down, up = (expected.rounds[0][side] + expected.rounds[-1][side] for side in (0, 1))
        final = results[label].final
        assert (final["mbit_down"], final["mbit_up"]) == pytest.approx((down, up), rel=1e-12), label


def test_estimated_traffic_counts_all_phases(tmp_path):
    """IFCA-CAM warms up for five rounds; FL+HC clusters all clients in round 5."""
    experiment = cfl_ray.Experiment(
        rounds=8,
        methods=["ifca_cam", "fl_hc"],
        data={"source": "synthetic", "synthetic_shape": [6], "synthetic_samples": 20, "partition": {"clients": 8}},
        cohort={"fraction": 0.5},
        tracking={"enabled": False},
        output=str(tmp_path),
    )
    found, results = estimate.estimate(experiment), cfl_ray.simulate(experiment)
    for label, result in results.methods.items():
        total = result.final["mbit_down"] + result.final["mbit_up"]
        assert found.traffic[label].total(8) == pytest.approx(total), label


@pytest.mark.parametrize(
    "sections",
    [
        {"cohort": {"clients": 6, "dropout": 0.3}},
        {"cohort": {"clients": 6, "availability": {"kind": "bernoulli", "chance": 0.3}}},
        {"cohort": {"clients": 6, "over_selection": 1.5}, "clock": {"kind": "lognormal"}},
        {"cohort": {"clients": 6}, "clock": {"kind": "lognormal", "seconds_per_sample": 0.1, "deadline": 3}},
    ],
)
def test_estimated_traffic_is_that_of_the_clients_that_take_part(tmp_path, sections):
    """Clients that drop out send nothing, late and surplus ones receive models alone."""
    experiment = cfl_ray.Experiment(
        rounds=5,
        methods=["fedavg", {"ifca": {"num_clusters": 3}}],
        data={"source": "synthetic", "synthetic_shape": [6], "synthetic_samples": 20, "partition": {"clients": 12}},
        tracking={"enabled": False},
        output=str(tmp_path),
        **sections,
    )
    found, results = estimate.estimate(experiment), cfl_ray.simulate(experiment)
    for label, result in results.methods.items():
        total = result.final["mbit_down"] + result.final["mbit_up"]
        assert found.traffic[label].total(5) == pytest.approx(total, rel=1e-9), label


def test_a_round_of_all_clients_has_no_surplus():
    sent = estimate.TrafficEstimate(((8.0, 8.0), (4.0, 4.0)), 1, 0, {}, clients=(12, 6), cohort=6)
    assert sent.of_clients(uploads=6, unused=3).rounds == ((8, 8), (6, 4))
    assert sent.of_clients(uploads=3, unused=0).rounds == ((4, 4), (2, 2))


def test_every_step_of_a_method_is_tried():
    """The first state, a round and the models that clients predict with."""
    for broken, message in (
        ({"init": lambda self, start: None}, "<lambda> .* returned None, expected a State"),
        ({"round": lambda self, state, clients, rng: [state]}, r"returned list of 1, expected a State"),
        ({"serve": lambda self, state, clients: state}, r"returned .*State.*, expected a Serving"),
    ):
        method = dataclass(frozen=True)(type("Broken", (FedAvg,), broken, name="broken_of_estimate"))
        with pytest.raises(RunError, match=message):
            estimate.estimate(cfl_ray.Experiment(methods=[method], data={"partition": {"clients": 4}}))


def shown(found):
    console = Console(width=200, record=True)
    estimate.show(found, console)
    return console.export_text()


def test_clients_that_miss_the_deadline_are_counted(tmp_path):
    """As in the run: devices are equal, clients with more samples are later."""
    experiment = cfl_ray.Experiment(
        rounds=4,
        methods=["fedavg"],
        data={"partition": {"clients": 8, "kind": "dirichlet", "min_samples": 10}},
        clock={"kind": "constant", "seconds_per_sample": 0.01, "deadline": 8},
        tracking={"enabled": False},
        output=str(tmp_path),
    )
    found = estimate.estimate(experiment)
    frame = cfl_ray.simulate(experiment)["fedavg"].to_frame()
    missed, selected = frame["clients_past_deadline"].sum(), 4 * found.cohort
    assert 0 < missed < selected
    assert found.late["fedavg"] == missed / selected
    assert f"that miss clock.deadline, and are not trained: fedavg {missed / selected:.0%}" in shown(found)


def test_an_asynchronous_round_has_the_clients_of_a_buffer(tmp_path):
    experiment = cfl_ray.Experiment(
        rounds=12,
        methods=["fedavg"],
        data={"source": "synthetic", "synthetic_shape": [8], "synthetic_samples": 20, "partition": {"clients": 12}},
        clock={"kind": "lognormal"},
        asynchronous={"buffer": 2, "concurrency": 12},
        tracking={"enabled": False},
        output=str(tmp_path),
    )
    found = estimate.estimate(experiment)
    assert "a server step: 2 clients, " in shown(found)
    final, rounds = cfl_ray.simulate(experiment)["fedavg"].final, experiment.rounds
    first, *_, later = found.traffic["fedavg"].rounds
    expected = sum(first) + (rounds - 1) * sum(later)
    assert expected == pytest.approx(final["mbit_down"] + final["mbit_up"])


@pytest.mark.parametrize("asynchronous", [{}, {"buffer": 2}])
def test_the_virtual_time_is_that_of_the_run(tmp_path, asynchronous):
    """Of all rounds, as they are fewer than 20."""
    experiment = cfl_ray.Experiment(
        rounds=6,
        methods=["fedavg", {"ifca": {"num_clusters": 2}}],
        data={"source": "synthetic", "synthetic_shape": [8], "synthetic_samples": 20, "partition": {"clients": 12}},
        cohort={"clients": 5},
        clock={"kind": "lognormal", "jitter": 0.3},
        asynchronous=asynchronous,
        tracking={"enabled": False},
        output=str(tmp_path),
    )
    found, results = estimate.estimate(experiment), cfl_ray.simulate(experiment)
    for label, result in results.methods.items():
        assert found.seconds[label] * 6 == pytest.approx(result.final["virtual_seconds"], rel=1e-9)
    what = "server step" if asynchronous else "round"
    assert f"virtual time of a {what}, mean of the first 6: fedavg {found.seconds['fedavg']:.4g} s" in shown(found)


def test_what_a_client_keeps_is_shown_in_bytes(tmp_path):
    """A model, its head, K mixture weights; the momentum buffer with `persist`; nothing."""
    methods = ["fedavg", "ditto", "fedper", {"fedem": {"num_models": 3}}, {"fedsoft": {"num_clusters": 2}}]
    data = {"source": "synthetic", "synthetic_shape": [8], "synthetic_classes": 4, "partition": {"clients": 5}}
    model = {"name": "mlp", "options": {"hidden": 6}}
    common = {"data": data, "model": model, "output": str(tmp_path)}
    found = estimate.estimate(cfl_ray.Experiment(methods=methods, **common))
    size, head = 8 * 6 + 6 + 6 * 4 + 4, 6 * 4 + 4
    assert {label: traffic.kept for label, traffic in found.traffic.items()} == {
        "fedavg": {},
        "ditto": {"personal": size},
        "fedper": {"head": head},
        "fedem": {"mixture weights": 3},
        "fedsoft": {"mixture weights": 2, "personal": size},
    }
    rows = [[cell.strip() for cell in line.split("│")] for line in shown(found).splitlines()]
    kept = {row[1]: row[-2] for row in rows if len(row) > 2}
    assert {label: kept[label] for label in ("fedavg", "fedem", "ditto")} == {
        "fedavg": "-",
        "fedem": f"{4 * 3} bytes",
        "ditto": f"{4 * size} bytes",
    }
    soft = found.traffic["fedem"]
    without = replace(soft, kept={})
    assert found.server_bytes("fedem", soft) - found.server_bytes("fedem", without) == 2 * 4 * 3 * 5
    persistent = {"momentum": 0.9, "persist": True}
    methods = ["fedavg", "fedper", {"fedem": {"num_models": 3}}]
    kept = estimate.estimate(cfl_ray.Experiment(methods=methods, local=persistent, **common)).traffic
    assert kept["fedem"].kept == {"mixture weights": 3, "momentum": 3 * size}
    assert kept["fedavg"].kept == {"momentum": size} and kept["fedper"].kept == {"head": head + size}
    own = {"fedavg": {"label": "own", "local": persistent}}
    kept = estimate.estimate(cfl_ray.Experiment(methods=["fedavg", own], **common)).traffic
    assert kept["fedavg"].kept == {} and kept["own"].kept == {"momentum": size}


def test_the_copies_of_augmented_samples_count_for_a_host(tmp_path):
    """Three epochs of 50 samples of 2 x 6 x 5 float32."""
    data = {"source": "synthetic", "synthetic_shape": [2, 6, 5], "synthetic_samples": 50, "partition": {"clients": 4}}
    own = {"fedavg": {"label": "augmented", "local": {"augment": ["flip"]}}}
    local = {"epochs": 3, "batch_size": 10}
    found = estimate.estimate(cfl_ray.Experiment(methods=["fedavg", own], data=data, local=local, output=str(tmp_path)))
    plain, augmented = (found.host_bytes(label, found.traffic[label]) for label in ("fedavg", "augmented"))
    assert augmented - plain == 3 * 50 * 60 * 4


def test_the_memory_of_pairs_of_clients_is_shown_and_counted(tmp_path):
    """20 x 400^2 bytes of PACFL, which reaches all 400; one of 400 clients with IFCA costs a few bytes."""
    experiment = cfl_ray.Experiment(
        methods=["ifca", "pacfl"],
        data={"source": "synthetic", "synthetic_shape": [8], "synthetic_samples": 20, "partition": {"clients": 400}},
        cohort={"clients": 10},
        output=str(tmp_path),
    )
    found = estimate.estimate(experiment)
    text = shown(found)
    line = r"pacfl compares 400 clients with each other \(reachable\): 3.2 MB of the server's memory; [\d,]+ MB are"
    assert re.search(line, text) and "ifca compares" not in text
    traffic = found.traffic["pacfl"]
    assert found.server_bytes("pacfl", traffic) - replace(found, compared={}).server_bytes("pacfl", traffic) == 3.2e6


def test_models_that_the_server_keeps_for_clients_are_shown_and_counted(tmp_path):
    """3 clients in each of 4 rounds: 12 of 20, or 8 of 8. Of each 8 copies of 8 x 6 + 6 + 6 x 4 + 4 = 82 float32.

    With FedCCFA four copies of 4 rows of 6 + 1 and 6 numbers, and two models of each client that is tested, or four of
    each of the 3 clients of a cohort.
    """
    for clients, kept, tested in ((20, 12, None), (8, 8, None), (8, 8, 4)):
        experiment = cfl_ray.Experiment(
            rounds=4,
            methods=["fedavg", "pfedgraph", "fedcac", "fedccfa"],
            data={
                "source": "synthetic",
                "synthetic_shape": [8],
                "synthetic_classes": 4,
                "partition": {"clients": clients},
            },
            model={"name": "mlp", "options": {"hidden": 6}},
            cohort={"clients": 3},
            evaluation={"clients": tested},
            output=str(tmp_path),
        )
        found = estimate.estimate(experiment)
        models = 2 * kept if tested is None else 4 * 3
        needed = {"fedavg": 0, "fedccfa": kept * 4 * (7 + 6) * 4 * 4 + models * 82 * 4}
        for label, sent in found.traffic.items():
            models, pairs = (sent.models + 1) * 4 * 82 * 4, found.compared.get(label, (0, 0))[1]
            own = needed.get(label, kept * 82 * 4 * 8)
            assert found.server_bytes(label, sent) == 450e6 + models + own + pairs + 50 * clients, label
        text = shown(found)
        assert f"fedcac keeps a model and a mask on the server for each of up to {kept} clients: 0.0 MB of" in text
        assert "fedccfa keeps a classifier on the server for each of up to" in text
        assert "fedavg keeps" not in text


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn, self.head = nn.LSTM(4, 3, batch_first=True), nn.Linear(3, 10)

    def forward(self, x):
        return self.head(self.rnn(x)[0][:, -1])


def test_the_engine_is_named_with_the_reason(tmp_path):
    data = {"source": "synthetic", "synthetic_shape": [5, 4], "partition": {"clients": 4}}

    def lines(factory, runtime):
        experiment = cfl_ray.Experiment(
            methods=["fedavg"], data=data, model={"name": factory}, runtime=runtime, output=str(tmp_path)
        )
        return [text for text in shown(estimate.estimate(experiment)).splitlines() if "engine" in text]

    (found,) = lines(Recurrent, {})
    assert found.startswith("engine sequential: estimated ")
    assert "; not span, manual: module rnn: lstm returns several values" in found
    assert lines(Recurrent, {"engine": "sequential"}) == ["engine sequential: as configured"]
    (found,) = lines("mlp", {})
    assert found.startswith("engine manual: estimated ") and "sequential" in found
    if not torch.cuda.is_available():
        elsewhere = {"gpus_per_host": 0.5, "address": "ray://far:10001"}  # a cluster, whose resources are not checked
        assert lines("mlp", elsewhere) == ["engine auto: chosen on the hosts, whose GPUs this machine lacks"]


def test_measured_times_are_multiples_of_the_least(tmp_path, monkeypatch):
    data = {"source": "synthetic", "synthetic_shape": [5, 4], "partition": {"clients": 4}}
    found = estimate.estimate(cfl_ray.Experiment(methods=["fedavg"], data=data, output=str(tmp_path)))
    times = {"sequential": 3e-4, "span": "its layers", "manual": 1e-4}
    monkeypatch.setattr(estimate, "time_engines", lambda *_: times)
    console = Console(width=200, record=True, file=io.StringIO())
    estimate.show_engine_times(found, console)
    head, *lines = console.export_text().splitlines()
    assert head.startswith("measured in this process (cpu)")
    assert lines == [
        "  manual 0.1 ms, 1.00 of the least",
        "  sequential 0.3 ms, 3.00 of the least",
        "  span cannot: its layers",
    ]
