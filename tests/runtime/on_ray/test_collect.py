"""Totals have the same bits in one process, added up by the server, and combined by hosts in a tree; secure ones too.

No figure depends on how many chunks share a call.
"""

import os
import signal

import numpy as np
import pytest
import torch
from federations import clients_of, protected

from cfl_ray.core.clients import Clients, ClientState
from cfl_ray.core.local_sgd import LocalSGD
from cfl_ray.core.secure_aggregation import SecureAggregation
from cfl_ray.core.work import Address, AverageDeferred, Averaging, Losses, Rows, Train
from cfl_ray.engine.in_process import InProcessBackend
from cfl_ray.privacy.noisy_sums import Noise, Privacy, PrivateRun
from cfl_ray.runtime.on_ray import collect
from cfl_ray.runtime.on_ray import ray_backend as backend_module
from cfl_ray.runtime.on_ray.chunk_queue import ChunkQueue
from cfl_ray.runtime.on_ray.collect import Collected
from cfl_ray.runtime.on_ray.ray_backend import Exchange, RayBackend
from cfl_ray.setup.prepare import prepare

CLIENTS = 24


@pytest.fixture(scope="module")
def pair(module_experiment, two_hosts):
    """(in process, on two hosts)."""
    setup = prepare(module_experiment(data={"partition": {"clients": CLIENTS}}, runtime={"retries": 9}))
    return InProcessBackend(setup.worker("cpu", "sequential")), two_hosts(setup)


@pytest.fixture
def backends(pair):
    """New backends over them, so that nothing is known of the test before, which may have killed a host."""
    in_process, on_ray = pair
    on_ray.pool.nodes(seconds=300)
    on_ray.pool.notes = []
    return in_process, RayBackend(on_ray.pool)


@pytest.fixture
def collected(monkeypatch):
    """Sums of any size stay on the hosts until they are collected."""
    monkeypatch.setattr(backend_module, "_WITH_RESULT_BYTES", 0)


@pytest.fixture
def by_tree(monkeypatch, collected):
    """Sums of any size are combined by the hosts, two at a time."""
    monkeypatch.setattr(Collected, "use_tree", True)
    monkeypatch.setattr(collect, "_GROUP", 2)


def training(network, round=1) -> Train:
    """Three output rows; two models; client 5 is averaged into two rows."""
    draw = np.random.default_rng(0)
    weight_RM = draw.random((3, CLIENTS)) * (np.arange(CLIENTS) % 3 == np.arange(3)[:, None])
    weight_RM[0, 5] = 1.0
    models = torch.stack([network.new_model(0, 0), network.new_model(0, 1)])
    return Train(
        Address(0, round, 1),
        np.arange(CLIENTS),
        (models,),
        start=Rows(0, draw.integers(0, 2, CLIENTS)),
        local=LocalSGD(1, None, 8, 0.1, 0.9, 0.0),
        steps_M=np.full(CLIENTS, 3),
        averaging=Averaging.of(weight_RM, CLIENTS),
    )


def assert_equal(first, second):
    assert list(first.means) == list(second.means) == [0, 1, 2]
    assert all(torch.equal(first.means[out], second.means[out]) for out in first.means)
    assert np.array_equal(first.arrived_R, second.arrived_R)


def test_the_tree_has_the_bits_of_one_process(backends, by_tree):
    in_process, on_ray = backends
    work = training(in_process.worker.network)
    assert_equal(on_ray.run(work), in_process.run(work))


def test_without_the_tree_too(backends, collected):
    in_process, on_ray = backends
    work = training(in_process.worker.network)
    assert_equal(on_ray.run(work), in_process.run(work))


def test_small_sums_come_with_the_results(backends, monkeypatch):
    in_process, on_ray = backends
    work = training(in_process.worker.network)
    monkeypatch.setattr(Collected, "__init__", lambda *_: pytest.fail("nothing is to be collected"))
    assert_equal(on_ray.run(work), in_process.run(work))


def test_models_that_are_too_large_for_a_call_go_through_the_object_store(backends, monkeypatch):
    in_process, on_ray = backends
    work = training(in_process.worker.network)
    monkeypatch.setattr(backend_module, "_IN_CALL_BYTES", 0)
    assert_equal(on_ray.run(work), in_process.run(work))
    assert len(on_ray._rows[id(work.tables[0])][1]) == 2, "each of the two models was put once"


@pytest.mark.parametrize("way", ["calls", "server", "tree", "private"])
def test_secure_sums_do_not_depend_on_hosts(way, backends, monkeypatch):
    weight_RM = torch.tensor([[1.0, 0, 2, 0, 3, 0], [0, 1, 0, 0, 0, 1]])
    private = None
    if way == "private":  # the noise of the clients, too
        private, weight_RM = PrivateRun(Privacy(1.0, 0.5, 6.0), Noise(b"key")), weight_RM > 0
    if way not in ("calls", "private"):
        monkeypatch.setattr(backend_module, "_WITH_RESULT_BYTES", 0)
    if way == "tree":
        monkeypatch.setattr(collect.Collected, "use_tree", property(lambda self: True))
    setup, ids = backends[1].pool.setup, np.arange(6)
    network = setup.network()
    found = []
    for backend in backends:
        clients = Clients(ids, np.ones(6, np.int64), network.spec, setup.local, backend, seed=0, round=1)
        secure = SecureAggregation(neighbours=2)
        clients = protected(clients, masks=secure, absent=np.array([7]), noise=private)
        start_KP = torch.stack([network.new_model(0, k) for k in range(2)])
        found.append(clients.train(clients.send(start_KP, ids % 2), average=weight_RM).averaged(start_KP))
        assert not clients.stats.lost_sums
    assert found[0].equal(found[1]) and not found[0].equal(start_KP)


def test_figures_do_not_depend_on_the_calls(backends):
    """Two rounds without a known cost of work, two with a large and two with a small one."""
    in_process, backend = backends
    setup = backend.pool.setup
    models_KP = torch.stack([setup.network().new_model(0, k) for k in range(2)])
    ids, row_M = np.arange(20), np.arange(20) % 2
    weight_RM = np.eye(2)[row_M].T
    found = []
    for one in (backend, in_process):
        state, figures = ClientState("momentum", setup.network().spec.head), []
        for round, seconds in enumerate([None, None, 0.02, 0.02, 1e-6, 1e-6], 1):
            if one is backend:
                backend._seconds_of_cost = dict.fromkeys([Train, Losses, AverageDeferred], seconds)
            clients = clients_of(setup, one, ids, round)
            updates = clients.train(clients.send(models_KP, row_M), average=weight_RM, client_state=state)
            assert updates.training.address == Address(0, round, 1)
            figures += [updates.averaged(models_KP), torch.from_numpy(updates.train_loss_M)]
            figures.append(torch.from_numpy(clients.losses(clients.broadcast(models_KP))))
        keys = sorted(one.client_states.keys())
        assert [client for _, client in keys] == ids.tolist()
        found.append([*figures, *one.client_states.tensors(keys)])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.slow
def test_what_a_dead_host_has_returned_is_not_done_again(backends, monkeypatch):
    """It is killed after its first result has arrived: that is in the sum once."""
    in_process, on_ray = backends
    work = training(in_process.worker.network)
    expected, receive, killed = in_process.run(work), Exchange.receive, []

    def kill_first(exchange, chunks, returns):
        receive(exchange, chunks, returns)
        if not killed:
            killed.append(on_ray.pool.hosts[0].pid)
            os.kill(killed[0], signal.SIGKILL)

    monkeypatch.setattr(Exchange, "receive", kill_first)
    monkeypatch.setattr(ChunkQueue, "_even", lambda *_: 0.0)  # several calls for each host
    assert_equal(on_ray.run(work), expected)
    assert killed and any("host 0 died" in note for note in on_ray.pool.notes)


@pytest.mark.slow
@pytest.mark.parametrize("fault", [signal.SIGKILL, signal.SIGSTOP])
def test_a_host_that_dies_or_hangs_while_the_tree_is_built(fault, backends, by_tree, monkeypatch):
    """The other host's totals are kept; what this one did is done again. `round_deadline` has no part in it."""
    monkeypatch.setattr(collect, "_WAIT_SECONDS", 3)
    in_process, on_ray = backends
    work = training(in_process.worker.network)
    expected, ask, killed = in_process.run(work), Collected.__init__, []

    def kill_first(*args):
        if not killed:  # before its totals are asked for: those that it has given are used
            killed.append(on_ray.pool.hosts[0].pid)
            os.kill(killed[0], fault)
        ask(*args)

    monkeypatch.setattr(Collected, "__init__", kill_first)
    assert_equal(on_ray.run(work), expected)
    assert killed and any("host 0 died" in note for note in on_ray.pool.notes)


def test_totals_of_many_hosts_and_nodes_meet_in_groups():
    """Seven hosts on three nodes; combining is done by hosts of the same node first."""
    calls = []

    class Combine:
        def __init__(self, host):
            self.host = host

        def remote(self, last, *totals):
            calls.append((self.host, last, totals))
            return sum(totals)

    class Host:
        def __init__(self, number, node):
            self.number, self.node = number, node
            self.actor = type("Actor", (), {"combine": Combine(number)})

    nodes = ["a", "a", "a", "b", "b", "b", "c"]
    totals = [collect._Total(10**number, Host(number, node)) for number, node in enumerate(nodes)]
    assert collect._combined(totals) == 1111111  # every total once
    assert [(last, len(parts)) for _, last, parts in calls] == [(False, 3), (False, 3), (True, 3)]
