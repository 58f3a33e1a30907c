"""Samples on the device: each client is copied there once per version of its data, as far as the limit allows."""

from collections import Counter

import numpy as np
import pytest
import torch
from fake_memory import FakeMemory
from federations import Spoiled, Stage, attack_of, linear, planted, uneven
from torch import nn

from cfl_ray.core.local_sgd import LocalSGD
from cfl_ray.core.work import Address, EvaluateClients, EvaluateShared, Rows
from cfl_ray.data.chained import ChainedFederation
from cfl_ray.data.changes import ChangingFederation, DataChange
from cfl_ray.engine.samples import SampleCache
from cfl_ray.nn.network import Network

SIZE = 200 * (16 * 4 + 8)  # bytes of a planted client


def stage_of(federation, limit: int | None, engine: str = "sequential") -> tuple[Stage, Counter]:
    """A stage whose worker keeps samples, and how often each client's samples were read."""
    stage, reads = Stage(federation, linear, LocalSGD(lr=0.1), engine), Counter()
    memory = FakeMemory(10**9)
    memory.device = stage.network.device
    stage.backend.worker.samples = SampleCache(memory, limit)
    part = getattr(federation, "_base", federation)
    read = part.train
    part.train = lambda client: (reads.update([client]), read(client))[1]
    return stage, reads


def play(stage: Stage, *rounds: int, ids=None) -> list[torch.Tensor]:
    found = []
    for number in rounds:
        clients = stage.clients(ids, number)
        updates = clients.train(clients.send(stage.model()[None]), average=torch.ones(1, len(clients.ids_M)))
        found.append(updates.averaged(default=stage.model()[None]))
    return found


@pytest.mark.parametrize("engine", ["sequential", "vectorised"])
def test_every_client_is_read_once(engine):
    stage, reads = stage_of(planted(8), None, engine)
    again, all_reads = stage_of(planted(8), 0, engine)
    assert all(map(torch.equal, play(stage, 1, 2, 3), play(again, 1, 2, 3)))
    assert set(reads.values()) == {1} and set(all_reads.values()) == {3}
    assert stage.backend.worker.samples.used == 8 * SIZE <= stage.backend.worker.samples.limit == int(0.3 * 10**9)


def test_of_tests_are_read_once_per_version_of_the_data():
    federation = ChangingFederation(planted(3), [DataChange(3, (1,), offset=1)])
    stage, _ = stage_of(federation, None)
    reads, test = Counter(), federation._base.test
    federation._base.test = lambda client, *rest: (reads.update([client]), test(client, *rest))[1]
    scores = []
    for number in (1, 2, 3, 4):
        address, start = Address(0, number, -1), Rows(0, np.zeros(3, int))
        work = EvaluateClients(address, np.arange(3), (stage.model()[None],), start=start)
        scores.append(stage.backend.run(work).arrays["scores"])
    assert reads == {0: 1, 1: 2, 2: 1}
    assert np.array_equal(scores[0], scores[1]) and np.array_equal(scores[2], scores[3])
    changed = [client for client in range(3) if not np.array_equal(scores[1][client], scores[2][client])]
    assert changed == [1]


def test_shared_test_sets_are_read_once_until_the_data_change():
    federation = ChangingFederation(planted(3), [DataChange(3, (1,), offset=1)])
    assert federation.num_test_sets() == 2
    stage, _ = stage_of(federation, None)
    again, _ = stage_of(ChangingFederation(planted(3), [DataChange(3, (1,), offset=1)]), 0)
    reads, test_set = Counter(), federation._base.test_set
    federation._base.test_set = lambda index: (reads.update([index]), test_set(index))[1]
    found = []
    for one in (stage, again):
        for number in (1, 2, 3, 4):
            count = one.backend.worker.federation.at(number).num_test_sets()
            start = Rows(0, np.zeros(count, int))
            work = EvaluateShared(Address(0, number, -1), np.arange(count), (one.model()[None],), start=start)
            found.append(one.backend.run(work).arrays["confusion"])
    assert [len(of_round) for of_round in found[:4]] == [2, 2, 3, 3]
    assert all(map(np.array_equal, found[:4], found[4:])) and not np.array_equal(found[2][1], found[2][2])
    assert reads == {0: 1 + 1, 1: 1 + 1 + 1}, "the third is derived from the second"


def test_of_losses_are_the_same_ones():
    stage, reads = stage_of(planted(3), None)
    play(stage, 1)
    clients = stage.clients(round=2)
    clients.losses(clients.broadcast(stage.model()[None]))
    assert set(reads.values()) == {1}


def test_the_least_recently_used_are_dropped():
    stage, reads = stage_of(planted(4), 2 * SIZE + 1)
    for ids in ([0, 1], [0], [2], [0], [1]):
        play(stage, 1, ids=ids)
        assert stage.backend.worker.samples.used <= 2 * SIZE
    assert reads == {0: 1, 1: 2, 2: 1}


def test_a_client_beyond_the_limit_is_not_kept():
    stage, reads = stage_of(planted(2), SIZE - 1)
    play(stage, 1, 2)
    assert reads == {0: 2, 1: 2} and stage.backend.worker.samples.used == 0


def test_invalid_data_are_not_kept():
    stage, reads = stage_of(Spoiled([1], clients=3), None)
    play(stage, 1, 2)
    assert reads == {0: 1, 1: 2, 2: 1} and stage.stats.rejected == {1: "its data have values that are not finite"}


def test_changed_data_are_read_anew_and_others_are_not():
    def changing():
        return ChangingFederation(planted(4), [DataChange(2, (1,), offset=1), DataChange(4, (2,), data_of=(1,))])

    (stage, reads), (again, _) = stage_of(changing(), None), stage_of(changing(), 0)
    found = play(stage, 1, 2, 3, 4)
    assert all(map(torch.equal, found, play(again, 1, 2, 3, 4)))
    assert len({row.abs().sum().item() for row in found}) == 3, "the changes have an effect"
    assert reads == {0: 1, 1: 1 + 1 + 1, 2: 1, 3: 1}


def test_versions_name_what_the_data_depend_on():
    first, second = planted(4), uneven([5, 5], (1, 4, 4), 4)
    chain = ChainedFederation((ChangingFederation(first, [DataChange(2, (1,), offset=1)]), second))
    versions = [[chain.at(number).data_version(client) for client in range(6)] for number in (1, 2)]
    assert [before == after for before, after in zip(*versions)] == [True, False, True, True, True, True]
    assert versions[0][0] is first and versions[0][5] is second


def test_another_federation_has_other_samples():
    stage, reads = stage_of(planted(2), None)
    play(stage, 1)
    stage.backend.use(planted(2, seed=5))
    found = play(stage, 2)
    other, _ = stage_of(planted(2, seed=5), None)
    assert torch.equal(found[0], play(other, 2)[0]) and stage.backend.worker.samples.used == 2 * SIZE


def test_labels_of_attackers_are_not_kept():
    rows = []
    for limit in (None, 0):
        stage, _ = stage_of(planted(4), limit)
        stage.backend.worker.attack = attack_of("label_flip", {1}, from_round=2)
        rows.append(play(stage, 1, 2, 1))
    assert all(map(torch.equal, *rows)) and torch.equal(rows[0][0], rows[0][2])
    assert not torch.equal(rows[0][0], rows[0][1])


def test_samples_that_a_network_changes_in_place_are_read_anew():
    def in_place():
        return nn.Sequential(nn.ReLU(inplace=True), nn.Flatten(), nn.Linear(16, 4))

    found = []
    for limit in (None, 0):
        stage, reads = stage_of(planted(2), limit)
        stage.network = stage.backend.worker.network = Network(in_place, (1, 4, 4))
        found.append(play(stage, 1, 2))
    assert all(map(torch.equal, *found)) and set(reads.values()) == {2}


@pytest.mark.cpu
def test_nothing_is_kept_on_a_cpu():
    stage = Stage(planted(2), linear)
    play(stage, 1)
    assert stage.backend.worker.samples.used == 0 and np.isfinite(list(stage.stats.train_loss.values())).all()
