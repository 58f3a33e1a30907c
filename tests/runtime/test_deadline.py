"""A client whose work never ends holds up a round for two deadlines at most: the others count, and the next exchanges do not wait."""

import os
import signal
import sys
from pathlib import Path

import numpy as np
import pytest
import ray
import torch

from cfl_ray import Experiment, run, simulate
from cfl_ray.core.clients import Clients, Own, Round
from cfl_ray.core.local import LocalSGD
from cfl_ray.core.plugin import load_plugin
from cfl_ray.core.work import Address, Rows
from cfl_ray.core.work import TestClients as OwnTest
from cfl_ray.runtime.checkpoint import CheckpointStore
from cfl_ray.runtime.setup import prepare

HANGING = f"{Path(__file__).parent / 'logged.py'}:hanging"
STUCK, DEADLINE = 3, 4
CLIENTS = 64  # pieces of two


@pytest.fixture(scope="module")
def on_ray(two_hosts, tmp_path_factory):
    """The port over two hosts; reading the data of client 3 never ends."""
    folder = tmp_path_factory.mktemp("deadline")
    federation = load_plugin(f"{Path(__file__).parent / 'logged.py'}:LoggedFederation", "federation")
    ray.cloudpickle.register_pickle_by_value(sys.modules[federation.__module__])
    setup = prepare(
        Experiment(
            data=federation(CLIENTS, str(folder / "read.log"), stuck=STUCK), output=str(folder), methods=["fedavg"], rounds=1,
            model={"options": {"hidden": 16}}, tracking={"enabled": False}, runtime={"engine": "sequential", "hosts": 2, "round_deadline": DEADLINE},
        )
    )  # fmt: skip
    yield two_hosts(setup)


@pytest.fixture
def ended(on_ray):
    """Returns a function: how many hosts were ended since the test began, or since it was last asked."""
    on_ray.pool.notes = []

    def count():
        lines, on_ray.pool.notes = on_ray.pool.notes, []
        assert all(f"was at work for more than {DEADLINE} s and was started again" in line for line in lines), lines
        return len(lines)

    return count


def clients(on_ray, ids, number) -> Clients:
    setup, ids = on_ray.pool.setup, np.array(list(ids))
    return Clients(ids, setup.federation.size_N[ids], setup.network().spec, setup.local, on_ray, 0, number, Round())


def start(on_ray) -> torch.Tensor:
    return on_ray.pool.setup.network().new_model(0, 0)[None]


def test_the_rest_of_a_piece_counts_and_later_exchanges_of_the_round_do_not_wait(on_ray, ended):
    asked, models_KP = clients(on_ray, range(CLIENTS), 1), start(on_ray)
    others = [client for client in range(CLIENTS) if client != STUCK]
    updates = asked.train(asked.send(models_KP), mix=torch.ones(1, CLIENTS), mix_later=True, keep=asked.spec.all, own=Own("mine"))
    assert ended() >= 2, "with the piece, and alone"
    assert updates.ok_M.tolist() == [client != STUCK for client in range(CLIENTS)]
    assert torch.allclose(updates.mixed(models_KP)[0], updates.kept_MF[others].mean(0), atol=1e-5) and updates.weight_R.tolist() == pytest.approx([63])
    assert asked.books.late == {STUCK: f"did not finish within {DEADLINE} s"} and not asked.books.rejected
    assert sorted(client for (_, client), _ in on_ray.changed(everything=True)) == others == sorted(asked.books.train_loss)

    assert torch.allclose(asked.mix(updates, torch.ones(1, CLIENTS)).mixed(models_KP)[0], updates.kept_MF[others].mean(0), atol=1e-5)
    assert np.isinf(asked.losses(asked.send(models_KP))).all(1).tolist() == [client == STUCK for client in range(CLIENTS)]
    features_MF, ok_M = asked.describe(lambda client, anchor_P: client.x.sum(0))
    assert features_MF.shape == (CLIENTS, 8) and ok_M.tolist() == [client != STUCK for client in range(CLIENTS)]
    assert ended() == 0, "nobody waits twice in a round"


def test_a_round_of_nobody_else_changes_nothing(on_ray, ended):
    asked, models_KP = clients(on_ray, [STUCK], 2), start(on_ray)
    updates = asked.train(asked.send(models_KP), mix=torch.ones(1, 1), keep=asked.spec.head)
    assert ended() == 2 and not updates.ok_M.any() and torch.equal(updates.mixed(models_KP), models_KP)
    assert asked.mix(asked.train(asked.send(models_KP), mix_later=True), torch.ones(1, 1)).weight_R.tolist() == [0]


def test_an_evaluation_waits_for_itself(on_ray, ended):
    """A client that was late in the round is tested all the same; one that is late then has no score."""
    work = OwnTest(Address(0, 2, -1), np.array([0, STUCK]), (start(on_ray),), start=Rows(0, np.zeros(2, int)), images=9)
    assert not np.isnan(on_ray.run(work).arrays["scores"]).any() and ended() == 0
    work = OwnTest(Address(0, 2, -2), np.array([0, STUCK]), (start(on_ray),), start=Rows(0, np.zeros(2, int)), tune=LocalSGD(steps=1), steps_M=np.ones(2, int))
    outcome = on_ray.run(work)
    assert np.isnan(outcome.arrays["scores"]).all(1).tolist() == [False, True] and outcome.left_out[1].late and ended() >= 2


def test_a_host_that_stops_is_not_held_against_its_client(on_ray, ended, actors, meanwhile, until):
    """Frozen as no signal can tell it: its client is tried again on another and finishes there."""
    asked, models_KP = clients(on_ray, [0, 1, 2], 3), start(on_ray)
    for pid in actors("ClientHost")[:1]:
        os.kill(pid, signal.SIGSTOP)
    updates = asked.train(asked.send(models_KP), mix=torch.ones(1, 3), keep=asked.spec.all)
    assert updates.ok_M.all() and not asked.books.left_out and ended() == 1
    until(lambda: len(actors("ClientHost")) == 2)


def test_a_chain_that_one_holds_up_is_left_out(on_ray, ended):
    asked, models_KP = clients(on_ray, [1, STUCK], 4), start(on_ray)
    updates = asked.train(asked.send(models_KP), mix=torch.ones(1, 2), relay=True)
    assert not updates.ok_M.any() and torch.equal(updates.mixed(models_KP), models_KP)
    assert asked.books.late == dict.fromkeys([1, STUCK], f"its chain of 2 clients did not finish within {2 * DEADLINE} s")
    on_ray.pool.notes = []


def test_a_run_with_a_training_that_never_ends(on_ray, experiment, logged, cluster, notes, actors, tmp_path, figures, meanwhile, until):
    """Its model computes for ever. The server is killed while everybody waits for it; no host stays behind."""
    settings = {"methods": ["fedavg"], "cohort": {"fraction": 1.0}, "rounds": 2, "model": {"name": HANGING, "options": {}}}
    stuck = experiment(data=logged(6, odd=STUCK), runtime={"round_deadline": DEADLINE}, **settings)
    seen = []

    def kill():
        until(lambda: watcher.rounds and any(who == STUCK for _, who in logged.read()[seen[0] :]))
        seen.append(actors("ServerActor"))
        os.kill(seen[1][-1], signal.SIGKILL)

    watcher = notes(lambda number: seen or seen.append(len(logged.read())))
    meanwhile(kill)
    until(lambda: len(actors("ClientHost")) == 2)  # those of the port: one was ended just now
    before = set(actors("ClientHost"))
    results = run(stuck, tmp_path / "stuck", watcher)
    assert [record.metrics["clients_late"] for record in results["fedavg"].records] == [1, 1] and len(seen) == 2
    assert watcher.lines.count(f"client {STUCK}: did not finish within {DEADLINE} s; left out of this round") >= 2
    assert [line for line in watcher.lines if "the server died and was started again" in line]
    until(lambda: set(actors("ClientHost")) == before)

    without = experiment(data=logged(6), schedule=[{"round": 1, "leave": [STUCK]}], **settings)
    simulate(without, tmp_path / "without")
    models = [CheckpointStore(tmp_path / name / "fedavg", one.config_hash).load().tensors["models_KP"] for name, one in (("stuck", stuck), ("without", without))]
    assert torch.allclose(*models, rtol=0, atol=1e-6)
