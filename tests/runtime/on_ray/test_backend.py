"""No figure depends on how many chunks share a call."""

import numpy as np
import torch

from cfl_ray.checkpoint.store import CheckpointStore
from cfl_ray.core.clients import Clients, ClientState, RoundStats
from cfl_ray.core.work import Address, AverageDeferred, Losses, Train
from cfl_ray.engine.in_process import InProcessBackend
from cfl_ray.runtime.on_ray import backend as backend_module
from cfl_ray.runtime.on_ray.stored import put_all
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
        states = dict(one.changed())
        assert sorted(client for _, client in states) == ids.tolist()
        found.append([*figures, *(states[key] for key in sorted(states))])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    backend.pool.stop()


def test_states_of_a_checkpoint_are_put_when_they_are_used(experiment, two_hosts, tmp_path, monkeypatch):
    """Three of twelve clients train: three states are put; the others are saved anew from where they are."""
    setup = prepare(experiment())
    head, ids = setup.network().spec.head, np.arange(12)
    first, on_ray = InProcessBackend(setup.worker()), two_hosts(setup)

    def train(backend, ids, round):
        clients = Clients(
            ids, setup.federation.num_samples_N[ids], setup.network().spec, setup.local, backend, 0, round, RoundStats()
        )
        return clients.train(
            clients.send(setup.network().new_model(0, 0)[None]), client_state=ClientState("mine", head)
        )

    train(first, ids, 1)
    store = CheckpointStore(tmp_path / "one", "hash")
    store.save(1, {}, {}, first)
    put = []
    monkeypatch.setattr(
        backend_module, "put_all", lambda entries: put_all(put.append(key) or (key, value) for key, value in entries)
    )
    for backend in (first, on_ray):
        backend.restore(CheckpointStore(tmp_path / "one", "hash").load().client_states())
    assert put == []
    for file in (tmp_path / "one" / "checkpoints").iterdir():
        file.unlink()  # as merging segments does
    train(first, ids[[2, 5, 8]], 2), train(on_ray, ids[[2, 5, 8]], 2)
    assert sorted(client for _, client in put) == [2, 5, 8]
    states = [dict(backend.changed(everything=True)) for backend in (first, on_ray)]
    assert states[0].keys() == states[1].keys() and len(states[0]) == 12
    assert all(torch.equal(value, states[1][key]) for key, value in states[0].items())
    on_ray.pool.stop()
