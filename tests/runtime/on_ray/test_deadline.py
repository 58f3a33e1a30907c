"""A client whose work never ends delays a round by two deadlines at most; later exchanges do not wait for it."""

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

from cfl_ray import Experiment, run, simulate
from cfl_ray.checkpoint.store import CheckpointStore
from cfl_ray.core.clients import Clients, ClientState, LocalTraining
from cfl_ray.core.local_sgd import LocalSGD
from cfl_ray.core.work import Address, EvaluateClients, Rows
from cfl_ray.plugins.loading import load_plugin
from cfl_ray.setup.prepare import prepare

pytestmark = pytest.mark.slow  # hosts are ended and started again

LOGGED = Path(__file__).parents[1] / "logged.py"
HANGING = f"{LOGGED}:hanging"
STUCK, DEADLINE = 3, 4
CLIENTS = 64  # chunks of two


@pytest.fixture(scope="module")
def backend(two_hosts, tmp_path_factory):
    """The backend over two hosts; reading the data of client 3 never ends."""
    folder = tmp_path_factory.mktemp("deadline")
    federation = load_plugin(f"{LOGGED}:LoggedFederation", "federation")
    ray.cloudpickle.register_pickle_by_value(sys.modules[federation.__module__])
    setup = prepare(
        Experiment(
            data=federation(CLIENTS, str(folder / "read.log"), stuck=STUCK),
            output=str(folder),
            methods=["fedavg"],
            rounds=1,
            model={"options": {"hidden": 16}},
            tracking={"enabled": False},
            runtime={"engine": "sequential", "hosts": 2, "round_deadline": DEADLINE},
        )
    )
    yield two_hosts(setup)


@pytest.fixture
def ended(backend):
    """Returns a function: number of hosts that were ended since its last call, or since the test began."""
    backend.pool.notes = []

    def count():
        lines, backend.pool.notes = backend.pool.notes, []
        lines = [line for line in lines if "for client hosts" not in line]  # on a busy machine they start slowly
        assert all(f"was at work for more than {DEADLINE} s and was started again" in line for line in lines), lines
        return len(lines)

    return count


def clients(backend, ids, number) -> Clients:
    return clients_of(backend.pool.setup, backend, ids, number)


def start(backend) -> torch.Tensor:
    return backend.pool.setup.network().new_model(0, 0)[None]


def test_the_rest_of_a_chunk_counts_and_later_exchanges_do_not_wait(backend, ended):
    asked, models_KP = clients(backend, range(CLIENTS), 1), start(backend)
    others = [client for client in range(CLIENTS) if client != STUCK]
    updates = asked.train(
        asked.send(models_KP),
        average=torch.ones(1, CLIENTS),
        defer_aggregation=True,
        features=asked.spec.all,
        client_state=ClientState("mine"),
    )
    assert ended() >= 2, "with the chunk, and alone"
    assert updates.valid_M.tolist() == [client != STUCK for client in range(CLIENTS)]
    assert close(updates.averaged(models_KP)[0], updates.features_MF[others].mean(0), 1e-5)
    assert updates.weight_R.tolist() == pytest.approx([63])
    assert asked.stats.late == {STUCK: f"did not finish within {DEADLINE} s"} and not asked.stats.rejected
    assert sorted(client for _, client in [*backend.client_states.keys()]) == others
    assert sorted(asked.stats.train_loss) == others

    averaged = asked.average(updates, torch.ones(1, CLIENTS)).averaged(models_KP)
    assert close(averaged[0], updates.features_MF[others].mean(0), 1e-5)
    is_stuck = [client == STUCK for client in range(CLIENTS)]
    assert np.isinf(asked.losses(asked.send(models_KP))).all(1).tolist() == is_stuck
    features_MF, valid_M = asked.describe(lambda client, anchor_P: client.x.sum(0))
    assert features_MF.shape == (CLIENTS, 8) and (~valid_M).tolist() == is_stuck
    assert ended() == 0, "a late client is not waited for twice in a round"


def test_a_round_of_late_clients_only_changes_nothing(backend, ended):
    asked, models_KP = clients(backend, [STUCK], 2), start(backend)
    updates = asked.train(asked.send(models_KP), average=torch.ones(1, 1), features=asked.spec.head)
    assert ended() == 2 and not updates.valid_M.any() and torch.equal(updates.averaged(models_KP), models_KP)
    deferred = asked.train(asked.send(models_KP), defer_aggregation=True)
    assert asked.average(deferred, torch.ones(1, 1)).weight_R.tolist() == [0]


def test_an_evaluation_has_its_own_late_clients(backend, ended):
    """A client that was late in the round is tested all the same; one that is late in the test has no score."""
    ids, tables, row = np.array([0, STUCK]), (start(backend),), Rows(0, np.zeros(2, int))
    work = EvaluateClients(Address(0, 2, -1), ids, tables, start=row, max_test_samples=9)
    assert not np.isnan(backend.run(work).arrays["scores"]).any() and ended() == 0
    tuning = {"tune": LocalSGD(steps=1), "steps_M": np.ones(2, int)}
    outcome = backend.run(EvaluateClients(Address(0, 2, -2), ids, tables, start=row, **tuning))
    assert np.isnan(outcome.arrays["scores"]).all(1).tolist() == [False, True]
    assert outcome.excluded[1].late and ended() >= 2


def test_a_client_is_not_excluded_for_a_host_that_halts(backend, ended, actors, until):
    """SIGSTOP halts it without a trace: its client is tried again on another host and finishes there."""
    asked, models_KP = clients(backend, [0, 1, 2], 3), start(backend)
    backend.pool.nodes(seconds=300)  # a host that is still starting gets no work
    os.kill(backend.pool.hosts[0].pid, signal.SIGSTOP)
    updates = asked.train(asked.send(models_KP), average=torch.ones(1, 3), features=asked.spec.all)
    assert updates.valid_M.all() and not asked.stats.excluded and ended() == 1
    until(lambda: len(actors("ClientHost")) == 2)


def test_a_chain_with_a_late_client_is_excluded(backend, ended):
    asked, models_KP = clients(backend, [1, STUCK], 4), start(backend)
    updates = asked.train(asked.send(models_KP), how=LocalTraining(chained=True), average=torch.ones(1, 2))
    assert not updates.valid_M.any() and torch.equal(updates.averaged(models_KP), models_KP)
    reason = f"its chain of 2 clients did not finish within {2 * DEADLINE} s"
    assert asked.stats.late == dict.fromkeys([1, STUCK], reason)
    backend.pool.notes = []


def test_a_run_with_a_training_that_never_ends(
    backend, experiment, logged, cluster, notes, actors, tmp_path, meanwhile, until
):
    """Its model computes for ever. The server is killed while it waits for that; no host is left behind."""
    settings = {
        "methods": ["fedavg"],
        "cohort": {"fraction": 1.0},
        "rounds": 2,
        "model": {"name": HANGING, "options": {}},
    }
    stuck = experiment(data=logged(6, odd=STUCK), runtime={"round_deadline": DEADLINE}, **settings)
    seen = []

    def kill():
        until(lambda: watcher.rounds and any(client == STUCK for _, client in logged.read()[seen[0] :]))
        seen.append(actors("ServerActor"))
        os.kill(seen[1][-1], signal.SIGKILL)

    watcher = notes(lambda number: seen or seen.append(len(logged.read())))
    meanwhile(kill)
    results = run(stuck, tmp_path / "stuck", watcher)
    assert [record.metrics["clients_late"] for record in results["fedavg"].records] == [1, 1] and len(seen) == 2
    assert watcher.lines.count(f"client {STUCK}: did not finish within {DEADLINE} s; left out of this round") >= 2
    assert [line for line in watcher.lines if "the server died and was started again" in line]
    until(lambda: len(actors("ClientHost")) == 2)  # those of the backend, which it starts again itself

    without = experiment(data=logged(6), schedule=[{"round": 1, "leave": [STUCK]}], **settings)
    simulate(without, tmp_path / "without")
    models = [
        CheckpointStore(tmp_path / name / "fedavg", one.config_hash).load().tensors["models_KP"]
        for name, one in (("stuck", stuck), ("without", without))
    ]
    assert close(*models, 1e-6)
