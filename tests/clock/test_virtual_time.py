"""Virtual time of runs: which clients count, when rounds end, and asynchronous rounds with clients in flight."""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from small_runs import metrics_of, simulate_until

from cfl_ray import Experiment, resume, simulate
from cfl_ray.clock.devices import Clock, Load, Speed
from cfl_ray.clock.from_config import hinge_staleness, polynomial_staleness
from cfl_ray.clock.virtual_time import Asynchrony, Flights, VirtualTime
from cfl_ray.config.asynchronous import AsynchronousConfig
from cfl_ray.config.unused import warnings_of
from cfl_ray.core.clients import Traffic
from cfl_ray.core.local_sgd import LocalSGD
from cfl_ray.core.state import State
from cfl_ray.data.federation import DataShape
from cfl_ray.data.synthetic import SyntheticFederation
from cfl_ray.errors import ConfigError
from cfl_ray.methods import REGISTRY
from cfl_ray.nn.network import Network
from cfl_ray.population.population import Cohort, Population
from cfl_ray.setup.dry_rounds import DryRounds, load_of, traffic, why_synchronous

EQUAL = {"kind": "constant", "seconds_per_sample": 0.1, "down_mbps": None, "up_mbps": None}
UNEQUAL = {"kind": "lognormal", "sigma": 1.2, "jitter": 0.2}
CLUSTERED = ["fedavg", {"fedprox": {"mu": 0.1}}, {"ifca": {"num_clusters": 2}}, "stocfl"]
RECORDED = ("accuracy", "train_loss", "virtual_seconds", "staleness", "clients_dropped", "mbit_down", "ari")


def time_of(seconds, deadline=None, sizes=None):
    """Virtual time in which client i trains for seconds[i]."""

    def given(clients):
        return Speed(np.array(seconds)[clients], np.full(len(clients), np.inf), np.full(len(clients), np.inf))

    clock = Clock(given, 0, deadline=deadline)
    return VirtualTime(clock, Load(64.0, 32.0), LocalSGD(), sizes or (lambda ids: np.ones(len(ids), np.int64)))


class TestCohort:
    def test_the_first_that_finish_count(self):
        time, traffic = time_of([5.0, 1.0, 3.0, 2.0]), Traffic()
        cohort = time.wait_for(1, Cohort(np.arange(4), 0), wanted=2)
        assert cohort.ids_M.tolist() == [1, 3] and (cohort.surplus, cohort.past_deadline) == (2, 0)
        time.count_unused(cohort.surplus, traffic)
        time.end_round()
        assert time.now == 2.0 and (traffic.down_bits, traffic.up_bits) == (128, 0)

    def test_equal_times_count_in_the_order_of_ids(self):
        assert time_of([1.0] * 4).wait_for(1, Cohort(np.array([0, 2, 3]), 0), 2).ids_M.tolist() == [0, 2]

    @pytest.mark.parametrize(
        "last, wanted, ids, surplus, past_deadline, now",
        [(9.0, 4, [1, 2], 0, 2, 4.0), (2.0, 2, [1, 3], 2, 0, 2.0)],
        ids=["it waits for a client", "enough clients finish earlier"],
    )
    def test_a_round_ends_at_the_deadline_at_the_latest(self, last, wanted, ids, surplus, past_deadline, now):
        time = time_of([5.0, 1.0, 3.0, last], deadline=4.0)
        cohort = time.wait_for(1, Cohort(np.arange(4), 0), wanted)
        assert cohort.ids_M.tolist() == ids
        assert (cohort.surplus, cohort.past_deadline) == (surplus, past_deadline)
        time.end_round()
        assert time.now == now

    def test_a_phase_that_needs_all_clients_lasts_until_the_deadline_if_some_miss_it(self):
        """As a round of a cohort does; the weights of clients that receive nothing take no time."""
        time = time_of([5.0, 1.0, 3.0, 2.0], deadline=4.0)
        for waits, now in ((False, 0.0), (True, 4.0)):
            assert time.in_time(1, np.arange(4), waits).tolist() == [False, True, True, True]
            assert time.missed == waits
            time.end_round()
            assert (time.now, time.missed) == (now, 0)
        assert time.in_time(2, np.arange(1, 4)).all()
        time.end_round()
        assert time.now == 4.0 + 3.0

    def test_epochs_count_and_so_do_batches_that_are_not_full(self):
        """Two epochs of 5 samples in batches of 2 are 10 samples; 3 steps of batches of 2 are 6."""
        for local, samples in ((LocalSGD(epochs=2, batch_size=2), 10), (LocalSGD(steps=3, batch_size=2), 6)):
            time = time_of([1.0], sizes=lambda ids: np.full(len(ids), 5))
            time.local = local
            assert time.seconds(1, np.array([0])).tolist() == [samples]


class TestFlights:
    """Server steps with a buffer of 2 and 3 clients at work; times of the 6 clients are given."""

    def step(self, flights, round, assign=None, concurrency=3, population=None, **kwargs):
        state = State(torch.zeros(1, 3) + round, np.zeros(6, np.int32) if assign is None else np.array(assign))
        population = population or Population(6, (), 0)
        ids, received = flights.next_cohort(
            round, state, concurrency, population, kwargs.get("availability", Always()), kwargs.get("dropout", 0.0)
        )
        self.discarded = flights.stale
        stale = [round - 1 - received.version_of[client] for client in ids.tolist()]
        flights.advance(round, state, State(torch.zeros(1, 3) + round + 1, state.assign_N))
        return ids.tolist(), stale, flights.time.now

    def flights(self, seconds=(1.0, 2.0, 4.0, 8.0, 16.0, 32.0), **settings):
        config, constant = AsynchronousConfig(**({"buffer": 2} | settings)), partial(polynomial_staleness, power=0)
        return Flights(Asynchrony(config.buffer, constant, config), time_of(seconds))

    def test_the_earliest_updates_form_a_step_and_the_others_stay_in_flight(self, monkeypatch):
        """0, 1 and 2 begin; at 1 s 3 takes the place of 0, at 2 s the step; 4 begins, 2 and 3 finish at 4 s and 9 s."""
        in_turn(monkeypatch)
        flights = self.flights()
        assert self.step(flights, 1) == ([0, 1], [0, 0], 2.0)
        assert flights.client_F.tolist() == [2, 3] and flights.finish_F.tolist() == [4.0, 9.0]
        # 0 begins at 2 s with version 1, and is done at 3 s; 1 begins there, 2 is done at 4 s
        assert self.step(flights, 2) == ([0, 2], [0, 1], 4.0)
        assert sorted(flights.client_F.tolist()) == [1, 3] and flights.versions.past.keys() == {0, 1}

    def test_with_equal_times_and_a_buffer_for_all_rounds_are_synchronous(self):
        flights = self.flights(seconds=[2.0] * 6, buffer=3)
        for round in range(1, 5):
            ids, stale, now = self.step(flights, round)
            assert ids == Population(6, (), 0).draw(round, 0.5).ids_M.tolist()
            assert stale == [0, 0, 0] and now == 2.0 * round and not len(flights.client_F)

    def test_updates_that_arrive_together_wait_for_the_next_step_in_their_order(self, monkeypatch):
        in_turn(monkeypatch)
        flights = self.flights(seconds=[2.0] * 6, buffer=1)
        assert [self.step(flights, round) for round in (1, 2, 3)] == [([0], [0], 2.0), ([1], [1], 2.0), ([2], [2], 2.0)]

    def test_too_stale_updates_are_discarded(self, monkeypatch):
        in_turn(monkeypatch)
        flights = self.flights(seconds=[2.0] * 6, buffer=1, max_staleness=1)
        steps = [self.step(flights, round)[:2] for round in (1, 2)]
        assert steps == [([0], [0]), ([1], [1])]
        assert self.step(flights, 3) == ([0], [1], 4.0)  # client 2, done at 2 s, is two steps late
        assert self.discarded == 1
        assert all(version >= 1 for version in flights.versions.past)

    def test_clients_that_leave_or_drop_out_are_counted(self, monkeypatch):
        in_turn(monkeypatch)
        flights = self.flights()
        self.step(flights, 1)
        flights.leave(np.array([2]))
        assert flights.client_F.tolist() == [3] and flights.dropped == 1
        dropping = self.flights()
        counts = []
        for round in range(1, 30):
            state = State(torch.zeros(1, 3), np.zeros(6, np.int32))
            dropping.next_cohort(round, state, 3, Population(6, (), 0), Always(), 0.5)
            counts.append(dropping.dropped)
            dropping.advance(round, state, state)
        assert np.mean(counts) == pytest.approx(2, abs=1)  # as many as report

    def test_each_cluster_has_a_buffer_of_its_own(self, monkeypatch):
        """Clients 0, 2 and 4 are one cluster; 1 waits in the buffer of the other until 3 is done at 10 s."""
        in_turn(monkeypatch)
        flights, assign = self.flights(per_cluster=True), [0, 1, 0, 1, 0, 1]
        assert self.step(flights, 1, assign) == ([0, 2], [0, 0], 4.0)
        assert flights.client_F[flights.arrived_F].tolist() == [1]
        seen = [self.step(flights, round, assign) for round in range(2, 8)]
        assert all(len({assign[client] for client in ids}) == 1 for ids, _, _ in seen)
        assert any(assign[ids[0]] == 1 and max(stale) > 0 for ids, stale, _ in seen)

    def test_a_cluster_smaller_than_a_buffer_waits_for_its_members(self, monkeypatch):
        in_turn(monkeypatch)
        flights = self.flights(seconds=[1.0] * 6, buffer=3, per_cluster=True)
        assert self.step(flights, 1, [1, 0, 0, 0, 0, 0])[0] == [0]

    def test_a_step_takes_what_there_is_if_no_further_client_can_be_reached(self):
        flights = self.flights(buffer=2)
        population = Population(6, (), 0)
        population.is_online_N = np.arange(6) == 2
        population.online = np.array([2])
        assert self.step(flights, 1, population=population)[0] == [2]


class Always:
    always = True


def in_turn(monkeypatch):
    """Clients are drawn in the order of their ids."""
    monkeypatch.setattr(Population, "_reachable", lambda self, round, wanted, *_: self.online[:wanted])


def test_staleness_functions():
    tau = np.array([0, 1, 3, 8])
    assert polynomial_staleness(tau, power=0.5).tolist() == pytest.approx([1, 2**-0.5, 0.5, 1 / 3])
    assert hinge_staleness(tau, slope=10, limit=4).tolist() == pytest.approx([1, 1, 1, 1 / 41])


# ---- runs


def figures(results):
    return {
        label: [[record.metrics.get(name) for name in RECORDED] for record in method.records]
        for label, method in results.methods.items()
    }


@pytest.fixture
def timed(experiment):
    """Makes an experiment with a clock, and returns its results."""

    def make(**changes):
        defaults = {"methods": CLUSTERED, "rounds": 6, "cohort": {"clients": 5}, "clock": UNEQUAL}
        return experiment(**(defaults | changes))

    return make


def test_a_clock_changes_no_result(timed):
    plain, with_clock = (simulate(timed(clock=clock, rounds=3)) for clock in ({}, UNEQUAL))
    for label in plain.methods:
        a, b = plain[label].records, with_clock[label].records
        assert [one.metrics["accuracy"] for one in a] == [one.metrics["accuracy"] for one in b]
        assert "virtual_seconds" not in a[-1].metrics
        seconds = [one.metrics["virtual_seconds"] for one in b]
        assert seconds == sorted(seconds) and seconds[0] > 0


def test_over_selection_waits_less(timed):
    waits, counts = {}, {}
    for factor in (1.0, 2.0):
        records = simulate(timed(methods=["fedavg"], cohort={"clients": 4, "over_selection": factor}))["fedavg"].records
        waits[factor] = records[-1].metrics["virtual_seconds"]
        counts[factor] = [(one.metrics["cohort_size"], one.metrics.get("clients_surplus")) for one in records]
    assert waits[2.0] < waits[1.0] / 2
    assert counts == {1.0: [(4, None)] * 6, 2.0: [(4, 4)] * 6}


def test_a_deadline_leaves_late_clients_out(timed):
    records = simulate(timed(methods=["fedavg"], clock=UNEQUAL | {"deadline": 1.0}))["fedavg"].records
    late = [one.metrics.get("clients_past_deadline", 0) for one in records]
    assert sum(late) > 0 and [one.metrics["cohort_size"] for one in records] == [5 - count for count in late]
    assert all(one.metrics["virtual_seconds"] <= one.round + 1e-9 for one in records)


def on_devices(tmp_path, forward_ms, **clock):
    """A clock in which client i has a forward pass of forward_ms[i] milliseconds and 1 Mbit/s."""
    rows = "".join(f"{milliseconds},1000\n" for milliseconds in forward_ms)
    (tmp_path / "devices.csv").write_text("computation,communication\n" + rows)
    return {"kind": "trace", "file": str(tmp_path / "devices.csv")} | clock


@pytest.mark.parametrize("method", ["fedclust", "pacfl"])
def test_the_seconds_of_a_one_shot_clustering_with_a_late_client(timed, tmp_path, method):
    """By hand: a training step takes three forward passes. One epoch on n = 20 samples, 2 * 650 floats of 32 bits."""
    wanted = {"methods": [method], "rounds": 2, "cohort": {"clients": 3}, "local": {"epochs": 1, "batch_size": 10}}
    wanted |= {"data": {"source": "digits", "partition": {"clients": 4, "samples": 20}}}
    wanted |= {"model": {"name": "mlp", "options": {"hidden": 0}}, "evaluation": {"every": 1}}
    clock = on_devices(tmp_path, [10, 20, 40, 1000], deadline=10.0)
    first, second = (one.metrics for one in simulate(timed(**wanted, clock=clock))[method].records)
    of_client = [3 * milliseconds / 1000 * 20 + 2 * 650 * 32 / 1e6 for milliseconds in (10, 20, 40)]
    assert (first["virtual_seconds"], first["clients_past_deadline"]) == (10.0, 1)
    last = second["virtual_seconds"] - first["virtual_seconds"]
    assert last == pytest.approx(10.0 if second.get("clients_past_deadline") else of_client[-1])


def test_weights_of_clients_that_receive_nothing_take_no_time(timed, tmp_path):
    """FedEM's `damped` divides by the samples of all clients, of which most are not in the cohort."""
    wanted = {"rounds": 3, "cohort": {"clients": 2}, "clock": on_devices(tmp_path, range(10, 130, 10))}
    seconds = [
        simulate(timed(methods=[{"fedem": {"damped": damped}}], **wanted))["fedem"].final["virtual_seconds"]
        for damped in (False, True)
    ]
    assert seconds[0] == seconds[1] > 0


@pytest.mark.parametrize("asynchronous", [{}, {"buffer": 2}])
def test_availability_follows_virtual_time(timed, tmp_path, asynchronous):
    """Clients 0 to 5 can be reached in the first 30 seconds, the others after that."""
    rows = "".join(f"{client},{1 if client < 6 else 2},{1 if client < 6 else 99}\n" for client in range(12))
    (tmp_path / "trace.csv").write_text("client,from,to\n" + rows)
    availability = {"kind": "trace", "file": str(tmp_path / "trace.csv")}
    clock = {"kind": "constant", "seconds_per_sample": 0.1, "availability_seconds": 30.0}
    changes = {"methods": ["local"], "rounds": 26, "asynchronous": asynchronous, "clock": clock}
    results = simulate(timed(**changes, cohort={"clients": 4, "availability": availability}), tmp_path / "run")
    records = results["local"].records
    late = next(record.round for record in records if record.metrics["trained_share"] > 0.5)
    assert records[late - 2].metrics["virtual_seconds"] >= 30
    assert records[0].metrics["trained_share"] <= 0.5 and records[1].metrics["virtual_seconds"] < 30


@pytest.mark.parametrize("asynchronous", [{}, {"buffer": 2}])
def test_time_goes_on_until_a_client_can_be_reached(timed, tmp_path, asynchronous):
    """All clients can be reached in the hours 2 and 4 only."""
    rows = "".join(f"{client},{hour},{hour}\n" for client in range(12) for hour in (2, 4))
    (tmp_path / "trace.csv").write_text("client,from,to\n" + rows)
    cohort = {"clients": 2, "availability": {"kind": "trace", "file": str(tmp_path / "trace.csv")}}
    clock = EQUAL | {"seconds_per_sample": 60, "availability_seconds": 3600.0}
    changes = {"methods": ["local"], "rounds": 4, "asynchronous": asynchronous, "clock": clock}
    records = simulate(timed(**changes, cohort=cohort))["local"].records
    seconds = [record.metrics["virtual_seconds"] for record in records]
    assert seconds[0] == 3600 and 3600 < seconds[1] < seconds[3] and len(set(seconds)) == 4


@pytest.mark.parametrize("length", [0.1, 0.3, 1 / 3, 3600.0])
def test_each_wait_reaches_the_next_round_of_the_availability(length):
    time = time_of([1.0])
    time.clock = replace(time.clock, availability_seconds=length)
    for moment in range(1, 300):
        time.wait_for_availability()
        assert time.now // length == moment


def test_asynchronous_rounds_with_equal_devices_and_a_buffer_for_all_are_synchronous(timed):
    """Bit for bit: methods, mini-batches, momentum, and a server optimiser."""
    methods = [*CLUSTERED, {"fedavg": {"server_optimizer": {"fedadam": {}}, "label": "adam"}}, "ditto", "fednova"]
    changes = {
        "methods": methods,
        "rounds": 3,
        "clock": EQUAL,
        "local": {"momentum": 0.9, "epochs": 1, "batch_size": 8},
    }
    one = simulate(timed(**changes))
    other = simulate(timed(**changes, asynchronous={"buffer": 5}))
    for label in one.methods:
        before, after = (metrics_of(results[label]) for results in (one, other))
        assert [metrics.pop("staleness") for metrics in after] == [0.0] * 3
        assert after == before, label


def test_discarded_updates_were_sent(timed):
    """A model each way for every update that arrived: three in a step, and those that were too stale for it."""
    settings = {"buffer": 3, "max_staleness": 1}
    result = simulate(timed(methods=["fedavg"], rounds=8, asynchronous=settings, cohort={"clients": 9}))["fedavg"]
    stale = sum(record.metrics.get("updates_stale", 0) for record in result.records)
    model = sum(tensor.numel() for tensor in result.state_dict().values()) * 32 / 1e6
    arrived = (3 * 8 + stale) / 12 * model
    assert stale and result.final["mbit_up"] == pytest.approx(arrived) == result.final["mbit_down"]


@pytest.mark.parametrize("method, per_cluster", [("fedavg", False), ("ifca", True)])
def test_a_run_resumes_with_clients_in_flight(timed, tmp_path, method, per_cluster):
    """The schedule lets a client leave and another join while others are in flight."""
    settings = {"buffer": 2, "staleness": {"kind": "polynomial"}, "per_cluster": per_cluster, "max_staleness": 6}
    events = [{"round": 1, "join": []}, {"round": 4, "leave": [0, 1, 2]}, {"round": 6, "join": [11]}]
    changes = {"methods": [method], "rounds": 10, "asynchronous": settings, "schedule": events[1:]}
    changes["cohort"] = {"clients": 5, "dropout": 0.2}
    whole = figures(simulate(timed(**changes), tmp_path / "whole"))
    simulate_until(5, timed(**changes), tmp_path / "run")
    found = figures(resume(tmp_path / "run", on_ray=False))
    assert found == whole
    staleness = [row[RECORDED.index("staleness")] for row in whole[method]]
    assert max(staleness) > 0


def test_the_methods_of_asynchronous_rounds():
    """Which methods run asynchronously, and why the others do not (docs/time.md)."""
    network = Network(lambda: torch.nn.Sequential(torch.nn.Linear(8, 6), torch.nn.ReLU(), torch.nn.Linear(6, 3)), (8,))
    shape = SyntheticFederation(4, input=(8,), classes=3, groups=1, samples=4, seed=0).shape

    def why(method, rounds=20):
        return why_synchronous(DryRounds(method, 12, 4, LocalSGD(), network.spec, shape, rounds))

    found = {name: why(REGISTRY[name]()) for name in REGISTRY}
    refused = {"cflgp", "cgpfl", "fedac", "fedcac", "fedem", "fedrc", "fedsoft", "fesem", "fesem_cam", "pfedgraph"}
    refused |= {"fedccfa", "fedamp", "feroma", "fedpac", "fedproto", "scaffold"}
    assert {name for name, reason in found.items() if reason} == refused
    alternating = REGISTRY["ifca_cam"](schedule="alternating", warmup_rounds=5)
    assert "models that the server computes within the round" in why(alternating) and not why(alternating, rounds=5)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"clock": {}, "asynchronous": {"buffer": 2}}, "asynchronous.buffer needs virtual time"),
        ({"clock": {}, "cohort": {"over_selection": 1.5}}, "cohort.over_selection needs virtual time"),
        ({"asynchronous": {"buffer": 6}}, "asynchronous.buffer is 6, but only 5 clients are at work"),
        ({"asynchronous": {"buffer": 4, "concurrency": 3}}, "only 3 clients are at work"),
        (
            {"asynchronous": {"buffer": 4, "concurrency": 13}},
            "concurrency: 13 clients at work, but the federation has 12",
        ),
        ({"asynchronous": {"buffer": 2}, "cohort": {"clients": 5, "over_selection": 2}}, "wait for no cohort"),
        ({"asynchronous": {"buffer": 2}, "clock": UNEQUAL | {"deadline": 3}}, "have no deadline"),
        (
            {"asynchronous": {"buffer": 2}, "methods": ["fesem"]},
            "fesem cannot run asynchronously: its clients",
        ),
        ({"asynchronous": {"buffer": 2}, "methods": [{"stocfl": {"global_update": "chain"}}]}, "each other's results"),
        (
            {"asynchronous": {"buffer": 2}, "methods": [{"fedavg": {"aggregation": "median"}}]},
            "aggregation median .*; leave out the method or the buffer",
        ),
    ],
)
def test_impossible_combinations_are_refused(timed, changes, message):
    with pytest.raises(ConfigError, match=message):
        simulate(timed(**changes))


def test_keys_without_effect_are_named():
    warnings = warnings_of(Experiment(asynchronous={"concurrency": 4, "per_cluster": True}))
    assert [line.partition(" (")[0] for line in warnings] == ["asynchronous.concurrency", "asynchronous.per_cluster"]


@pytest.mark.parametrize(
    ("method", "down", "up", "trainings", "tests"),
    [
        ("fedavg", 1, 1, 1, 0),
        ("ifca", 4, 1 + 1 / 27, 1, 4),  # receives and compares K models, and uploads its choice
        ("stocfl", 2, 2, 2, 0),  # trains two
        ("fedem", 3, 3, 3, 3),  # the E step
        ("autocfl", 1, 1, 1, 0),  # after the phase in which all 8 clients take part, not the 4 of a round
        ("ifca_cam", 6, 2 + 1 / 27, 2, 8),  # after the warm-up; the global model's logits count as a test
        ("per_fedavg", 1, 1, 1, 0),  # two batches in half as many steps
        ("pfedme", 1, 1, 5, 0),  # five gradients of each batch
        ("apfl", 1, 1, 2, 0),  # the gradients of both models
        ("moon", 1, 1, 1, 2 * 3),  # passes of two models on every batch of three epochs
    ],
)
def test_the_load_of_a_client_is_that_of_the_last_phase(method, down, up, trainings, tests):
    spec, shape = Network(lambda: torch.nn.Linear(8, 3), (8,)).spec, DataShape((8,), 3)
    local = LocalSGD(epochs=3, batch_size=5)
    dry = DryRounds(REGISTRY[method](), 4, 4, local, spec, shape, rounds=10, size=20)
    found = load_of(dry)
    assert found == Load(32 * spec.size * down, pytest.approx(32 * spec.size * up), trainings, tests)
    later = traffic(replace(dry, num_clients=8, size=1)).rounds[-1]
    assert later == pytest.approx((found.down_bits * 4 / 8 / 1e6, found.up_bits * 4 / 8 / 1e6))
