"""Data of earlier rounds: the union of the versions that differ."""

import numpy as np
import pytest
import torch
from closeness import close
from federations import Stage, planted
from torch import nn

from cfl_ray.core.client_program import ClientProgram
from cfl_ray.core.clients import LocalTraining
from cfl_ray.core.local_sgd import LocalSGD
from cfl_ray.data import federation_from_arrays
from cfl_ray.data.changes import ChangingFederation, DataChange
from cfl_ray.data.replay import ReplayedFederation, distinct_rounds


def mlp():
    return nn.Sequential(nn.Flatten(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4))


@pytest.fixture
def changing():
    """Client 0 changes before rounds 3 and 5, client 1 changes before round 3 and back before round 5."""
    changes = [DataChange(3, (0, 1), offset=1), DataChange(5, (0,), data_of=(4,)), DataChange(5, (1,), back_to=2)]
    return ChangingFederation(planted(6, samples=30), changes)


def test_equal_data_of_several_rounds_count_once(changing):
    ids = np.array([0, 1, 2])
    rounds, sizes = distinct_rounds(changing, 6, ids, [(1, 2, 3, 6), (1, 3, 6), (0, 4, 6)])
    assert rounds == ((2, 3, 6), (6, 3), (6,)) and sizes.tolist() == [90, 60, 30]
    with pytest.raises(ValueError, match=r"client 1 can replay data of rounds 0 \.\. 6, got round 7"):
        distinct_rounds(changing, 6, ids, [(1,), (7,), (1,)])


def test_the_union_is_that_of_the_data_of_these_rounds(changing):
    union = ReplayedFederation(changing, 6, {0: (2, 3, 6), 1: (3,)})
    for read in ("train", "test"):
        parts = [getattr(changing.at(round), read)(0) for round in (2, 3, 6)]
        found = getattr(union, read)(0)
        assert all(torch.equal(found[i], torch.cat([part[i] for part in parts])) for i in (0, 1))
        assert torch.equal(getattr(union, read)(1)[1], getattr(changing.at(3), read)(1)[1])
        assert torch.equal(getattr(union, read)(2)[1], getattr(changing.at(6), read)(2)[1])
    counts = [len(union.test(client)[1]) for client in range(6)]
    assert union.num_test_samples(np.arange(6)).tolist() == counts and counts[0] > counts[2]
    versions = [union.data_version(client) for client in (0, 1, 2)]
    assert len(versions[0]) == 3 and versions[1:] == [changing.at(3).data_version(1), changing.at(6).data_version(2)]


@pytest.mark.parametrize("engine", ["sequential", "manual", "vectorised", "span"])
def test_clients_train_and_compare_models_on_the_union(changing, engine):
    """As clients do whose present data are that union."""
    parts = [[changing.at(round).train(client) for round in rounds] for client, rounds in enumerate([(2, 6), (3,)])]
    x, y = (torch.cat([pair[i] for client in parts for pair in client]).numpy() for i in (0, 1))
    owner = np.repeat([0, 1], [60, 30])
    whole = federation_from_arrays(x, y, owner, x_test=x, y_test=y, test_clients=owner, num_classes=4)
    local, results = LocalSGD(epochs=2, batch_size=20, lr=0.3), []
    for federation, rounds in ((changing, [(1, 2, 6), (4,)]), (whole, None)):
        one = Stage(federation, mlp, local, engine)
        clients = one.clients([0, 1], round=6)
        if rounds is not None:
            clients = clients.replaying(rounds)
        assert clients.num_samples_M.tolist() == [60, 30]
        sent = clients.send(one.model()[None])
        average = torch.from_numpy(clients.weights()[None])
        row_P = clients.train(sent, how=LocalTraining(program=ClientProgram(trace=1)), average=average).averaged(
            default=one.model()[None]
        )
        losses = clients.select(np.array([False, True])).losses(sent)
        results.append((row_P, clients.losses(sent), losses))
    for found, expected in zip(*results):
        assert close(torch.as_tensor(found), torch.as_tensor(expected), 1e-6)


def test_clients_without_changes_replay_their_present_data(changing):
    one = Stage(changing, mlp)
    clients = one.clients([2, 3], round=6).replaying([(1, 4), (0,)])
    assert clients.replay is None and clients.num_samples_M.tolist() == [30, 30]
