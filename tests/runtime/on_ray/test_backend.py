"""No figure depends on how many chunks share a call, and what a call returns is bounded."""

from types import SimpleNamespace

import numpy as np
import torch
from federations import clients_of

from cfl_ray.core.clients import ClientState
from cfl_ray.core.work import Address, AverageDeferred, Describe, Losses, Rows, Train
from cfl_ray.engine.in_process import InProcessBackend
from cfl_ray.methods.pacfl import PrincipalVectors
from cfl_ray.runtime.on_ray.backend import Exchange
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
            clients = clients_of(setup, one, ids, round)
            updates = clients.train(clients.send(models_KP, row_M), average=weight_RM, client_state=state)
            assert updates.training.address == Address(0, round, 1)
            figures += [updates.averaged(models_KP), torch.from_numpy(updates.train_loss_M)]
            figures.append(torch.from_numpy(clients.losses(clients.broadcast(models_KP))))
        keys = sorted(one.client_states.keys())
        assert [client for _, client in keys] == ids.tolist()
        found.append([*figures, *one.client_states.tensors(keys)])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    backend.pool.stop()


def test_the_descriptions_of_clients_are_in_the_budget_of_a_call(experiment):
    """Of 4 bytes a number: its length if the function has it, else that of the anchor, at most that of the sketch."""
    setup = prepare(experiment())
    start, shape = setup.network().new_model(0, 0), setup.federation.shape
    backend, first, ids = SimpleNamespace(pool=SimpleNamespace(setup=setup)), Rows(0, np.zeros(3, int)), np.arange(3)

    def bytes_of(function, anchor=None, sketch=None):
        tables = () if anchor is None else (start[None],)
        options = {"function": function, "anchor": anchor, "sketch": sketch, "local": setup.local}
        work = Describe(Address(0, 1, 1), ids, tables, **options)
        return Exchange(backend, work, 0).left_bytes

    def change(client, anchor_P):
        return anchor_P

    assert bytes_of(change, first) == 4 * len(start)
    assert bytes_of(change, first, 5) == bytes_of(change, None, 5) == 4 * 5
    assert bytes_of(change, first, 10**6) == 4 * len(start)
    assert bytes_of(change) == 0  # not known
    vectors = PrincipalVectors(3, None)
    assert bytes_of(vectors) == 4 * 3 * np.prod(shape.input) * shape.num_classes
