"""Results that stay where they were trained until the method says how to average them: in this process and on Ray, bit for bit."""

import os
import signal
import sys
from pathlib import Path

import numpy as np
import pytest
import ray
import torch

from cfl_ray import Experiment
from cfl_ray.core import robust
from cfl_ray.core.clients import Clients, Own, Round
from cfl_ray.core.plugin import load_plugin
from cfl_ray.core.robust import Mean, Median, MultiKrum, NormClipping
from cfl_ray.core.work import Address, Losses
from cfl_ray.engine.local import InProcess
from cfl_ray.runtime.port import OnRay
from cfl_ray.runtime.setup import prepare

CLIENTS = 12
BAD = 3  # its data are not sound
EXPERIMENT = {
    "methods": ["fedavg"], "rounds": 1, "model": {"options": {"hidden": 4000}},  # results of 300 kB, which the object store keeps
    "local": {"epochs": 2, "batch_size": 8, "momentum": 0.9}, "runtime": {"engine": "sequential", "hosts": 2}, "tracking": {"enabled": False},
}  # fmt: skip
MIX = torch.rand(3, CLIENTS, generator=torch.Generator().manual_seed(0)) * (torch.arange(CLIENTS) % 3 == torch.arange(3)[:, None])


@pytest.fixture(scope="module")
def hosts(two_hosts, tmp_path_factory):
    """(setup, the port over two hosts)."""
    folder = tmp_path_factory.mktemp("pending")
    federation = load_plugin(f"{Path(__file__).parent / 'logged.py'}:LoggedFederation", "federation")
    ray.cloudpickle.register_pickle_by_value(sys.modules[federation.__module__])
    setup = prepare(Experiment(data=federation(CLIENTS, str(folder / "read.log"), huge=BAD), output=str(folder), **EXPERIMENT))
    yield setup, two_hosts(setup)


@pytest.fixture(params=["in process", "on Ray"])
def backend(request, hosts):
    return fresh(hosts)[request.param]


def fresh(hosts) -> dict[str, object]:
    setup, on_ray = hosts
    return {"in process": InProcess(setup.worker("cpu", "sequential")), "on Ray": OnRay(on_ray.pool)}


def clients(hosts, backend, ids=range(CLIENTS), number=1, rule=Mean()) -> Clients:
    setup, ids = hosts[0], np.array(list(ids))
    return Clients(ids, setup.federation.size_N[ids], setup.network().spec, setup.local, backend, 0, number, Round(), aggregation=rule)


def start(hosts) -> torch.Tensor:
    return torch.stack([hosts[0].network().new_model(0, index) for index in (0, 1)])


def results(hosts, backend, between=lambda: None) -> list[torch.Tensor]:
    """Trains once, averages at once and twice later, with the clients' own columns kept as well."""
    models_KP, asked = start(hosts), clients(hosts, backend)
    sent = asked.send(models_KP, np.arange(CLIENTS) % 2)
    updates = asked.train(sent, mix=torch.ones(1, CLIENTS), mix_later=True, keep=asked.spec.all, own=Own("head", asked.spec.head, private=False))
    between()
    later = [asked.mix(updates, MIX), asked.mix(updates, torch.ones(1, CLIENTS))]
    rows = [updates.kept_MF, updates.mixed(models_KP[:1]), later[0].mixed(models_KP[[0, 1, 0]]), later[1].mixed(models_KP[:1])]
    return [*rows, torch.from_numpy(updates.ok_M), torch.from_numpy(later[0].weight_R)]


def test_sums_are_those_of_the_results_without_rejected_clients(hosts, backend):
    kept_MF, at_once, grouped, later, ok_M, weight_R = results(hosts, backend)
    assert ok_M.tolist() == [client != BAD for client in range(CLIENTS)]
    weight_KM = MIX.double() * ok_M
    expected = (weight_KM @ kept_MF.nan_to_num().double()) / weight_KM.sum(1, keepdim=True)
    assert torch.allclose(grouped.double(), expected, rtol=0, atol=1e-6)
    assert weight_R.tolist() == pytest.approx(weight_KM.sum(1).tolist(), rel=1e-6)
    assert torch.equal(later, at_once), "the same average, whenever it is asked for"


def test_ray_gives_the_same_bits(hosts):
    here, there = (results(hosts, backend) for backend in fresh(hosts).values())
    assert all(torch.equal(one.nan_to_num(), other.nan_to_num()) for one, other in zip(here, there, strict=True))


def test_a_host_that_dies_before_the_mix_takes_nothing_with_it(hosts, actors):
    in_process, on_ray = fresh(hosts).values()
    killed = []

    def kill():
        killed.append(actors("ClientHost")[0])
        os.kill(killed[0], signal.SIGKILL)

    assert all(torch.equal(one.nan_to_num(), other.nan_to_num()) for one, other in zip(results(hosts, in_process), results(hosts, on_ray, kill), strict=True))
    assert killed and [line for line in on_ray.pool.notes if "its work is done again" in line]


@pytest.mark.parametrize("rule", [Median(), MultiKrum(2), NormClipping()], ids=lambda rule: rule.name)
def test_robust_averages_of_them_are_the_same_bits_with_a_host_killed(hosts, actors, rule, monkeypatch):
    """Cut into ranges of columns, so that both hosts have work. A rejected client is no member."""
    monkeypatch.setattr(robust, "_RANGE", 1 << 15)
    rows = []
    for backend in fresh(hosts).values():
        asked = clients(hosts, backend, rule=rule)
        updates = asked.train(asked.send(start(hosts), np.arange(CLIENTS) % 2), mix_later=True, keep=asked.spec.all)
        if rows:
            os.kill(actors("ClientHost")[0], signal.SIGKILL)
        rows.append(asked.mix(updates, MIX).mixed(start(hosts)[[0, 1, 0]]))
        if rule == Median():
            mine = np.setdiff1d(np.flatnonzero(MIX[0]), [BAD])
            assert np.allclose(rows[-1][0], np.median(updates.kept_MF[mine].double(), 0), rtol=0, atol=1e-6)
    assert torch.equal(*rows) and hosts[1].pool.notes


def test_a_selection_mixes_its_own(hosts, backend):
    """Fewer clients than were trained; what one asks for that was not trained stays as it is."""
    models_KP = start(hosts)
    asked = clients(hosts, backend, [0, 1, 2, 5])
    updates = asked.train(asked.send(models_KP[:1]), mix_later=True, keep=asked.spec.all)
    some = asked.select(np.array([1, 3])).mix(updates, torch.ones(1, 2)).mixed(models_KP[:1])
    assert torch.allclose(some[0], updates.kept_MF[[1, 3]].mean(0), atol=1e-6)
    assert torch.equal(clients(hosts, backend, [7]).mix(updates, torch.ones(1, 1)).mixed(models_KP[:1]), models_KP[:1])


def test_rows_without_a_sound_result_keep_their_model(hosts, backend):
    models_KP = start(hosts)
    asked = clients(hosts, backend, [BAD, 4])
    updates = asked.train(asked.send(models_KP[:1]), mix_later=True)
    mixed = asked.mix(updates, torch.eye(2))
    assert torch.equal(mixed.mixed(models_KP)[0], models_KP[0]) and not torch.equal(mixed.mixed(models_KP)[1], models_KP[1])
    assert mixed.weight_R.tolist() == [0, 1]


def test_two_exchanges_of_a_round_are_kept_apart(hosts, backend):
    models_KP, asked = start(hosts), clients(hosts, backend, [0, 1])
    first, second = (asked.train(asked.send(models_KP[k : k + 1]), mix_later=True, keep=asked.spec.all) for k in (0, 1))
    for updates in (second, first):
        mixed = asked.mix(updates, torch.ones(1, 2)).mixed(models_KP[:1])
        assert torch.allclose(mixed[0], updates.kept_MF.mean(0), atol=1e-6)


@pytest.mark.parametrize("address", [Address(0, 2, 1), Address(0, 1, -1)], ids=["the next round", "an evaluation"])
def test_results_are_dropped_with_their_round(hosts, backend, address):
    asked = clients(hosts, backend, [0, 1])
    updates = asked.train(asked.send(start(hosts)[:1]), mix_later=True)
    assert sum(map(len, backend.memory._pending.values())) == 2
    backend.run(Losses(address, np.array([0]), (start(hosts)[:1],), num_models=1))
    assert not backend.memory._pending
    with pytest.raises(KeyError):
        asked.mix(updates, torch.ones(1, 2))


def test_mixing_costs_one_upload_and_no_more(hosts, backend):
    asked = clients(hosts, backend, [0, 1])
    updates = asked.train(asked.known(start(hosts)[:1]), mix_later=True, keep=asked.spec.head)
    asked.mix(updates, torch.ones(1, 2)), asked.mix(updates, torch.ones(1, 2))
    assert (asked.books.ledger.down_bits, asked.books.ledger.up_bits) == (0, 2 * 32 * asked.spec.size)
