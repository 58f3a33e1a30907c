"""Deferred results stay where they were trained until the method averages them: the same bits in process and on Ray."""

import os
import signal
import sys
from pathlib import Path

import numpy as np
import pytest
import ray
import torch
from closeness import close
from federations import clients_of

from cfl_ray import Experiment
from cfl_ray.core.aggregation import apply
from cfl_ray.core.aggregation.rules import Mean, Median, MultiKrum
from cfl_ray.core.clients import Clients, ClientState
from cfl_ray.core.work import Address, CombineColumns, Losses
from cfl_ray.engine.in_process import InProcessBackend
from cfl_ray.plugins.loading import load_plugin
from cfl_ray.runtime.on_ray.client_states import RayClientStates
from cfl_ray.runtime.on_ray.ray_backend import RayBackend
from cfl_ray.setup.prepare import prepare

CLIENTS = 12
INVALID = 3  # a client whose data are not valid
EXPERIMENT = {
    "methods": ["fedavg"],
    "rounds": 1,
    "model": {"options": {"hidden": 4000}},  # results of 300 kB, which the object store keeps
    "local": {"epochs": 2, "batch_size": 8, "momentum": 0.9},
    "runtime": {"engine": "sequential", "hosts": 2},
    "tracking": {"enabled": False},
}
WEIGHTS = torch.rand(3, CLIENTS, generator=torch.Generator().manual_seed(0)) * (
    torch.arange(CLIENTS) % 3 == torch.arange(3)[:, None]
)


@pytest.fixture(scope="module")
def hosts(two_hosts, tmp_path_factory):
    """(setup, the backend over two hosts)."""
    folder = tmp_path_factory.mktemp("deferred")
    federation = load_plugin(f"{Path(__file__).parents[1] / 'logged.py'}:LoggedFederation", "federation")
    ray.cloudpickle.register_pickle_by_value(sys.modules[federation.__module__])
    setup = prepare(
        Experiment(data=federation(CLIENTS, str(folder / "read.log"), huge=INVALID), output=str(folder), **EXPERIMENT)
    )
    yield setup, two_hosts(setup)


@pytest.fixture(params=["in process", "on Ray"])
def backend(request, hosts):
    return fresh(hosts)[request.param]


def fresh(hosts) -> dict[str, object]:
    setup, on_ray = hosts
    return {"in process": InProcessBackend(setup.worker("cpu", "sequential")), "on Ray": RayBackend(on_ray.pool)}


def clients(hosts, backend, ids=range(CLIENTS), number=1, rule=Mean()) -> Clients:
    return clients_of(hosts[0], backend, ids, number, aggregation=rule)


def start(hosts) -> torch.Tensor:
    return torch.stack([hosts[0].network().new_model(0, index) for index in (0, 1)])


def results(hosts, backend, between=lambda: None) -> list[torch.Tensor]:
    """Trains once, averages at once and twice later; the clients keep their heads as well."""
    models_KP, asked = start(hosts), clients(hosts, backend)
    sent = asked.send(models_KP, np.arange(CLIENTS) % 2)
    updates = asked.train(
        sent,
        average=torch.ones(1, CLIENTS),
        defer_aggregation=True,
        features=asked.spec.all,
        client_state=ClientState("head", asked.spec.head, private=False),
    )
    between()
    later = [asked.average(updates, WEIGHTS), asked.average(updates, torch.ones(1, CLIENTS))]
    rows = [
        updates.features_MF,
        updates.averaged(models_KP[:1]),
        later[0].averaged(models_KP[[0, 1, 0]]),
        later[1].averaged(models_KP[:1]),
    ]
    return [*rows, torch.from_numpy(updates.valid_M), torch.from_numpy(later[0].weight_R)]


def test_sums_are_those_of_the_results_without_rejected_clients(hosts, backend):
    features_MF, at_once, grouped, later, valid_M, weight_R = results(hosts, backend)
    assert valid_M.tolist() == [client != INVALID for client in range(CLIENTS)]
    weight_KM = WEIGHTS.double() * valid_M
    expected = (weight_KM @ features_MF.nan_to_num().double()) / weight_KM.sum(1, keepdim=True)
    assert close(grouped.double(), expected, 1e-6)
    assert weight_R.tolist() == pytest.approx(weight_KM.sum(1).tolist(), rel=1e-6)
    assert torch.equal(later, at_once), "the same average, at once or later"


def test_ray_gives_the_same_bits(hosts):
    here, there = (results(hosts, backend) for backend in fresh(hosts).values())
    assert all(torch.equal(one.nan_to_num(), other.nan_to_num()) for one, other in zip(here, there, strict=True))


@pytest.mark.slow
def test_a_host_that_dies_before_the_average_loses_nothing(hosts):
    in_process, on_ray = fresh(hosts).values()

    def kill():
        os.kill(on_ray.pool.ready()[0].pid, signal.SIGKILL)

    pairs = zip(results(hosts, in_process), results(hosts, on_ray, kill), strict=True)
    assert all(torch.equal(one.nan_to_num(), other.nan_to_num()) for one, other in pairs)
    assert [line for line in on_ray.pool.notes if "its work is done again" in line]


@pytest.mark.slow
def test_a_robust_average_has_the_same_bits_with_a_host_killed(hosts, monkeypatch):
    """Cut into ranges of columns, so that both hosts have work. A rejected client is no member."""
    monkeypatch.setattr(apply, "_RANGE", 1 << 15)
    rows = []
    for backend in fresh(hosts).values():
        asked = clients(hosts, backend, rule=Median())
        updates = asked.train(
            asked.send(start(hosts), np.arange(CLIENTS) % 2), defer_aggregation=True, features=asked.spec.all
        )
        if rows:
            os.kill(hosts[1].pool.ready()[0].pid, signal.SIGKILL)
        rows.append(asked.average(updates, WEIGHTS).averaged(start(hosts)[[0, 1, 0]]))
        members = np.setdiff1d(np.flatnonzero(WEIGHTS[0]), [INVALID])
        median_P = np.median(updates.features_MF[members].double(), 0)
        assert close(rows[-1][0], median_P, 1e-6)
    assert torch.equal(*rows) and hosts[1].pool.notes


@pytest.mark.parametrize("rule", [Median(), MultiKrum(2)], ids=lambda rule: rule.name)
def test_ranges_of_columns_are_fetched_once(hosts, rule, monkeypatch):
    """No object is read for two of the ranges; the mean of whole results is that of their parts."""
    monkeypatch.setattr(apply, "_RANGE", 1 << 15)
    sources = []
    places = RayClientStates.places

    def noted(states, work, host):
        found = places(states, work, host)
        if isinstance(work, CombineColumns):
            members = len(work.members)
            for unit in range(len(work.ids_M)):
                sources.append({source for i in range(members) for source, _ in found[unit * members + i]})
        return found

    monkeypatch.setattr(RayClientStates, "places", noted)
    rows, one_row = [], torch.ones(1, CLIENTS)
    for backend in fresh(hosts).values():
        asked = clients(hosts, backend, rule=rule)
        updates = asked.train(asked.send(start(hosts)[:1]), defer_aggregation=True)
        rows.append(asked.average(updates, one_row).averaged(start(hosts)[:1]))
    assert torch.equal(*rows) and len(sources) > 10
    assert sum(map(len, sources)) == len(set().union(*sources)), "an object was read for two ranges"


def test_a_selection_averages_its_own_results(hosts, backend):
    """Fewer clients than were trained; without any trained client the model stays as it is."""
    models_KP = start(hosts)
    asked = clients(hosts, backend, [0, 1, 2, 5])
    updates = asked.train(asked.send(models_KP[:1]), defer_aggregation=True, features=asked.spec.all)
    some = asked.select(np.array([1, 3])).average(updates, torch.ones(1, 2)).averaged(models_KP[:1])
    assert close(some[0], updates.features_MF[[1, 3]].mean(0), 1e-5)
    untrained = clients(hosts, backend, [7]).average(updates, torch.ones(1, 1))
    assert torch.equal(untrained.averaged(models_KP[:1]), models_KP[:1])


def test_rows_without_a_valid_result_keep_their_model(hosts, backend):
    models_KP = start(hosts)
    asked = clients(hosts, backend, [INVALID, 4])
    updates = asked.train(asked.send(models_KP[:1]), defer_aggregation=True)
    later = asked.average(updates, torch.eye(2))
    averaged_KP = later.averaged(models_KP)
    assert torch.equal(averaged_KP[0], models_KP[0]) and not torch.equal(averaged_KP[1], models_KP[1])
    assert later.weight_R.tolist() == [0, 1]


def test_two_exchanges_of_a_round_are_kept_apart(hosts, backend):
    models_KP, asked = start(hosts), clients(hosts, backend, [0, 1])
    first, second = (
        asked.train(asked.send(models_KP[k : k + 1]), defer_aggregation=True, features=asked.spec.all) for k in (0, 1)
    )
    for updates in (second, first):
        averaged_KP = asked.average(updates, torch.ones(1, 2)).averaged(models_KP[:1])
        assert close(averaged_KP[0], updates.features_MF.mean(0), 1e-5)


@pytest.mark.parametrize("address", [Address(0, 2, 1), Address(0, 1, -1)], ids=["the next round", "an evaluation"])
def test_results_are_dropped_with_their_round(hosts, backend, address):
    asked = clients(hosts, backend, [0, 1])
    updates = asked.train(asked.send(start(hosts)[:1]), defer_aggregation=True)
    assert sum(map(len, backend.client_states._deferred.values())) == 2
    backend.run(Losses(address, np.array([0]), (start(hosts)[:1],), num_models=1))
    assert not backend.client_states._deferred
    with pytest.raises(KeyError):
        asked.average(updates, torch.ones(1, 2))


def test_averaging_costs_one_upload_and_no_more(hosts, backend):
    asked = clients(hosts, backend, [0, 1])
    updates = asked.train(asked.known_models(start(hosts)[:1]), defer_aggregation=True, features=asked.spec.head)
    asked.average(updates, torch.ones(1, 2)), asked.average(updates, torch.ones(1, 2))
    assert (asked.stats.traffic.down_bits, asked.stats.traffic.up_bits) == (0, 2 * 32 * asked.spec.size)
