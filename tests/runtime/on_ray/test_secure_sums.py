"""Secure sums over hosts are those of this process, bit for bit, in calls, collected by the server and in a tree."""

import numpy as np
import pytest
import torch
from federations import protected

from cfl_ray.core.clients import Clients
from cfl_ray.core.secure_aggregation import SecureAggregation
from cfl_ray.engine.in_process import InProcessBackend
from cfl_ray.privacy.noisy_sums import Noise, Privacy, PrivateRun
from cfl_ray.runtime.on_ray import backend as on_ray
from cfl_ray.runtime.on_ray import collect
from cfl_ray.setup.prepare import prepare


@pytest.fixture(scope="module")
def setup(module_experiment):
    return prepare(module_experiment())


@pytest.fixture(scope="module")
def backends(setup, two_hosts):
    return two_hosts(setup), InProcessBackend(setup.worker())


@pytest.mark.parametrize("way", ["calls", "server", "tree", "private"])
def test_sums_do_not_depend_on_hosts(way, setup, backends, monkeypatch):
    weight_RM = torch.tensor([[1.0, 0, 2, 0, 3, 0], [0, 1, 0, 0, 0, 1]])
    private = None
    if way == "private":  # the noise of the clients, too
        private, weight_RM = PrivateRun(Privacy(1.0, 0.5, 6.0), Noise(b"key")), weight_RM > 0
    if way not in ("calls", "private"):
        monkeypatch.setattr(on_ray, "_WITH_RESULT_BYTES", 0)
    if way == "tree":
        monkeypatch.setattr(collect.Collected, "use_tree", property(lambda self: True))
    network, ids = setup.network(), np.arange(6)
    found = []
    for backend in backends:
        clients = Clients(ids, np.ones(6, np.int64), network.spec, setup.local, backend, seed=0, round=1)
        secure = SecureAggregation(neighbours=2)
        clients = protected(clients, masks=secure, absent=np.array([7]), noise=private)
        start_KP = torch.stack([network.new_model(0, k) for k in range(2)])
        found.append(clients.train(clients.send(start_KP, ids % 2), average=weight_RM).averaged(start_KP))
        assert not clients.stats.lost_sums
    assert found[0].equal(found[1]) and not found[0].equal(start_KP)
