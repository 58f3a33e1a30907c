"""Client states on hosts: written to the files of a checkpoint, and read from there, by the processes that use them."""

import shutil
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from federations import clients_of

from cfl_ray.checkpoint import segments
from cfl_ray.checkpoint.lease import SharedDirectory
from cfl_ray.checkpoint.store import CheckpointStore
from cfl_ray.core.backend import SavedState
from cfl_ray.core.clients import ClientState
from cfl_ray.engine.in_process import InProcessBackend
from cfl_ray.errors import RunError
from cfl_ray.runtime.on_ray.client_states import RayClientStates
from cfl_ray.runtime.on_ray.ray_backend import RayBackend
from cfl_ray.runtime.on_ray.stored import StoredValue
from cfl_ray.setup.prepare import prepare

IDS = np.arange(12)


class Run:
    """A method with client states, in this process or on hosts, and its checkpoints."""

    def __init__(self, setup, folder, pool=None):
        self.setup, self.store = setup, CheckpointStore(folder, "hash")
        self.store.take_lease()
        self.backend = RayBackend(pool, self.store.lease.shared) if pool else InProcessBackend(setup.worker())

    @property
    def states(self):
        return self.backend.client_states

    def round(self, round, ids=IDS):
        clients, start = clients_of(self.setup, self.backend, ids, round), self.setup.network().new_model(0, 0)
        clients.train(clients.send(start[None]), client_state=ClientState("mine", clients.spec.head))
        return self.save(round)

    def save(self, round):
        return self.store.save(round, {}, {}, self.states)

    def kinds(self):
        return {type(self.states[key]) for key in self.states.keys()}  # noqa: SIM118

    def values(self):
        return list(self.states.tensors(sorted(self.states.keys())))

    def saved(self):
        loaded = CheckpointStore(self.store.directory, "hash").load()
        return [saved.tensor() for _, saved in sorted(loaded.client_states())]


def assert_equal(one, other):
    assert len(one) == len(other) == len(IDS) and all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.fixture(scope="module")
def setup(module_experiment):
    return prepare(module_experiment())


@pytest.fixture(scope="module")
def pool(setup, two_hosts):
    return two_hosts(setup).pool


@pytest.fixture
def nothing_passes_here(monkeypatch):
    """No value is read, put or written by the server."""

    def refuse(*_):
        raise AssertionError("a client's state passed through the server")

    monkeypatch.setattr(RayClientStates, "tensor", refuse)
    monkeypatch.setattr(SavedState, "tensor", refuse)
    return monkeypatch


def test_hosts_write_read_and_merge_states(setup, pool, tmp_path, nothing_passes_here):
    """Eight rounds of some clients each; segments are merged in several of them."""
    nothing_passes_here.setattr(segments, "FAN_OUT", 3)
    run = Run(setup, tmp_path / "on_ray", pool)
    for round in range(1, 9):
        run.round(round, IDS if round == 1 else IDS[round % 4 :: 4])
        assert run.kinds() == {SavedState}
    nothing_passes_here.undo()
    assert max(file.segment for file in run.store.files) == 8 and len({file.segment for file in run.store.files}) < 6
    here = Run(setup, tmp_path / "here")
    for round in range(1, 9):
        here.round(round, IDS if round == 1 else IDS[round % 4 :: 4])
    assert_equal(run.values(), here.values())
    assert_equal(run.saved(), here.values())


def test_a_resumed_run_reads_states_on_its_hosts(setup, pool, tmp_path, nothing_passes_here):
    Run(setup, tmp_path / "run", pool).round(1)
    run, here = Run(setup, tmp_path / "run", pool), Run(setup, tmp_path / "here")
    run.backend.restore(run.store.load().client_states())
    run.round(2, IDS[[2, 5, 8]])
    nothing_passes_here.undo()
    here.round(1), here.round(2, IDS[[2, 5, 8]])
    assert_equal(run.values(), here.values())


def test_hosts_without_the_run_directory_have_the_server_write(setup, pool, tmp_path):
    """Values stay in the object store; those of a checkpoint are put there when they are used."""
    run, here = Run(setup, tmp_path / "on_ray", pool), Run(setup, tmp_path / "here")
    run.backend = RayBackend(pool, SharedDirectory(run.store.directory, "the token of another directory"))
    run.round(1), here.round(1)
    assert run.kinds() == {StoredValue}
    assert_equal(run.saved(), here.values())
    run.backend.restore(run.store.load().client_states())
    assert run.kinds() == {SavedState}
    run.round(2, IDS[:3]), here.round(2, IDS[:3])
    assert [type(run.states["mine", client]) for client in (0, 2, 3)] == [StoredValue, StoredValue, SavedState]
    run.round(3, IDS[2:5]), here.round(3, IDS[2:5])
    assert_equal(run.saved(), here.values())


def test_files_that_are_removed_are_still_read(setup, pool, tmp_path):
    """By the server, which has them mapped: a round, and a checkpoint of everything."""
    run, here = Run(setup, tmp_path / "on_ray", pool), Run(setup, tmp_path / "here")
    run.round(1), here.round(1)
    shutil.rmtree(run.store.folder)
    assert "everything was saved again" in run.round(2, IDS[:3])
    here.round(2, IDS[:3])
    assert_equal(run.saved(), here.values())
    assert run.kinds() == {SavedState}
    assert {Path(run.states[key].entry.file).exists() for key in run.states.keys()} == {True}  # noqa: SIM118


def test_a_state_that_was_altered_is_refused_by_the_host_that_reads_it(setup, pool, tmp_path):
    run = Run(setup, tmp_path / "on_ray", pool)
    run.round(1), run.round(2)
    (file,) = {run.states[key].entry.file for key in run.states.keys()}  # noqa: SIM118
    content = bytearray(Path(file).read_bytes())
    content[-1] ^= 1
    Path(file).write_bytes(content)
    with pytest.raises(RunError, match=f"{Path(file).name} was altered: a client state in it; resume"):
        run.round(3)
    assert CheckpointStore(run.store.directory, "hash").load().round == 1


def test_a_host_that_is_lost_has_its_files_written_here(setup, pool, tmp_path, monkeypatch):
    """One of two hosts dies when the files are to be written: a file for each client."""
    monkeypatch.setattr(segments, "STATE_FILE_BYTES", 100)
    run, here = Run(setup, tmp_path / "on_ray", pool), Run(setup, tmp_path / "here")
    write = RayClientStates.write

    def dies_before(states, files):
        assert all(map(states._shares, pool.hosts))
        process = psutil.Process(pool.hosts[0].pid)
        process.kill()
        psutil.wait_procs([process], timeout=60)
        return write(states, files)

    with monkeypatch.context() as once:
        once.setattr(RayClientStates, "write", lambda states, files: dies_before(states, files) if files else [])
        run.round(1)
    here.round(1)
    assert_equal(run.saved(), here.values())
    parts = [int(file.name.partition("-")[2].partition(".")[0]) for file in run.store.files]
    assert len(parts) == len(IDS) and any(part % 2 for part in parts), "none was written by the server"
    run.round(2), here.round(2)
    assert_equal(run.saved(), here.values())
