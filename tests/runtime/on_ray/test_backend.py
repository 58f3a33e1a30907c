"""No figure depends on how many chunks share a call."""

import numpy as np
import torch

from cfl_ray.core.clients import Clients, ClientState, RoundStats
from cfl_ray.core.work import Address, AverageDeferred, Losses, Train
from cfl_ray.engine.in_process import InProcessBackend
from cfl_ray.setup.prepare import prepare


def test_figures_do_not_depend_on_the_calls(experiment, two_hosts):
    """Two rounds without a known cost of work, two with a large and two with a small one."""
    setup = prepare(experiment(data={"partition": {"clients": 20}}))
    backend = two_hosts(setup)
    models_KP = torch.stack([setup.network().new_model(0, k) for k in range(2)])
    ids, row_M = np.arange(20), np.arange(20) % 2
    weight_RM = np.eye(2)[row_M].T
    found = []
    for one in (backend, InProcessBackend(setup.worker())):
        state, figures = ClientState("momentum", setup.network().spec.head), []
        for round, seconds in enumerate([None, None, 0.02, 0.02, 1e-6, 1e-6], 1):
            if one is backend:
                backend._seconds_of_cost = dict.fromkeys([Train, Losses, AverageDeferred], seconds)
            clients = Clients(
                ids, setup.federation.num_samples_N[ids], setup.network().spec, setup.local, one, 0, round, RoundStats()
            )
            updates = clients.train(clients.send(models_KP, row_M), average=weight_RM, client_state=state)
            assert updates.training.address == Address(0, round, 1)
            figures += [updates.averaged(models_KP), torch.from_numpy(updates.train_loss_M)]
            figures.append(torch.from_numpy(clients.losses(clients.broadcast(models_KP))))
        keys = sorted(one.client_states.keys())
        assert [client for _, client in keys] == ids.tolist()
        found.append([*figures, *one.client_states.tensors(keys)])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    backend.pool.stop()
