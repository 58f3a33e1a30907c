"""Fencing: of several processes that hold a store, the one that took the lease last writes; the others refuse."""

import numpy as np
import pytest
import torch
from filelock import FileLock

from cfl_ray import load_run, simulate
from cfl_ray.checkpoint import lease
from cfl_ray.checkpoint import store as checkpoint_store
from cfl_ray.checkpoint.manifest import CheckpointManifest
from cfl_ray.checkpoint.store import CheckpointStore
from cfl_ray.core.work import Address, ClientState, Work
from cfl_ray.engine.client_state import ClientStateStore
from cfl_ray.errors import RunError

MINE = Work(Address(0, 1, 0), np.zeros(0, np.int64), (), ClientState("mine"))


def store(folder) -> CheckpointStore:
    """A store as a server opens it."""
    found = CheckpointStore(folder / "fedavg", "hash")
    found.take_lease()
    found.load()
    return found


def save(store, round, value):
    states = ClientStateStore()
    states.keep(MINE, {0: torch.full((4,), float(value))}, {})
    store.save(round, {"models_KP": torch.full((2, 3), float(value))}, {}, states)


def files(folder):
    return {path.name: path.read_bytes() for path in (folder / "fedavg" / "checkpoints").iterdir()}


def test_a_directory_that_is_gone_has_no_other_server(tmp_path):
    """Another process has made the folder again, such as one that delivers results."""
    mine = store(tmp_path)
    save(mine, 1, 1)
    (tmp_path / "fedavg").rename(tmp_path / "moved")
    (tmp_path / "fedavg").mkdir()
    with pytest.raises(RunError, match=r"fedavg/writer.json is gone, so nothing more can be saved"):
        save(mine, 2, 2)


def test_the_older_of_two_servers_writes_nothing(tmp_path):
    old = store(tmp_path)
    save(old, 1, 1)
    new, before = store(tmp_path), files(tmp_path)
    with pytest.raises(RunError, match=r"another server has taken over .*fedavg \(epoch 2; this server has 1\)"):
        save(old, 2, -2)
    assert files(tmp_path) == before
    save(new, 2, 2)
    loaded = CheckpointStore(tmp_path / "fedavg", "hash").load()
    assert loaded.round == 2 and (loaded.tensors["models_KP"] == 2).all()


@pytest.mark.parametrize("step", ["_next_segment", "_write_segment"])
def test_a_server_that_was_overtaken_saves_nothing(step, tmp_path, monkeypatch):
    """The newer one saves when the older one has taken the number of its segment, or has written it."""
    old = store(tmp_path)
    save(old, 1, 1)
    do, newer = getattr(CheckpointStore, step), []

    def overtaken(this, *arguments):
        found = do(this, *arguments)
        if this is old and not newer:
            newer.append(store(tmp_path))
            save(newer[0], 2, 2)
        return found

    monkeypatch.setattr(CheckpointStore, step, overtaken)
    with pytest.raises(RunError, match="another server has taken over"):
        save(old, 2, -2)
    loaded = CheckpointStore(tmp_path / "fedavg", "hash").load()
    assert loaded.round == 2 and not loaded.refused and (loaded.tensors["models_KP"] == 2).all()
    assert [float(value.tensor()[0]) for _, value in loaded.client_states()] == [2.0]


def test_a_server_that_was_overtaken_before_it_took_a_number_removes_no_segment_of_the_newer_one(tmp_path, monkeypatch):
    """The newer one saves after the older one has checked its lease, and again before the older one writes."""
    old, saved, newer = store(tmp_path), [], []
    save(old, 1, 1)
    make, write = checkpoint_store.private_folder, CheckpointStore._write_segment

    def saves_of_the_newer(round):
        saved.append(round)
        save(newer[0], round, round)

    def overtaken(folder):
        make(folder)
        if not newer:
            newer.append(store(tmp_path))
            saves_of_the_newer(2)

    def writing(this, *arguments):
        if this is old:
            saves_of_the_newer(3)
        return write(this, *arguments)

    monkeypatch.setattr(checkpoint_store, "private_folder", overtaken)
    monkeypatch.setattr(CheckpointStore, "_write_segment", writing)
    with pytest.raises(RunError, match="another server has taken over"):
        save(old, 4, -4)
    loaded = CheckpointStore(tmp_path / "fedavg", "hash").load()
    assert loaded.round == saved[-1] and not loaded.refused
    assert (loaded.tensors["models_KP"] == saved[-1]).all()


def test_the_lease_cannot_be_taken_while_a_manifest_is_written(tmp_path, monkeypatch):
    monkeypatch.setattr(lease, "_LOCK_SECONDS", 0.1)
    old, write, refused = store(tmp_path), CheckpointManifest.write, []

    def taken(manifest, file):
        with pytest.raises(RunError, match="held by another server"):
            store(tmp_path)
        refused.append(file)
        write(manifest, file)

    monkeypatch.setattr(CheckpointManifest, "write", taken)
    save(old, 1, 1)
    assert refused


def test_a_live_run_whose_models_are_read_goes_on(experiment, notes, tmp_path):
    read = []

    def after_round(number):
        read.append(load_run(tmp_path / "run")["ditto"].trained.round)

    simulate(experiment(), tmp_path / "run", notes(after_round))
    assert read == [1, 2, 3, 4]


def test_a_process_that_only_reads_takes_nothing(tmp_path):
    old = store(tmp_path)
    save(old, 1, 1)
    assert CheckpointStore(tmp_path / "fedavg", "hash").load().round == 1
    save(old, 2, 2)
    with FileLock(tmp_path / "fedavg" / "writer.lock", timeout=0):
        pass  # released
