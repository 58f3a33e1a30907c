import json
import os
import re
import shutil

import pytest
import torch
from safetensors import safe_open

from cfl_ray.core.errors import RunError
from cfl_ray.runtime import checkpoint
from cfl_ray.runtime.checkpoint import CheckpointStore

HASH = "0123456789ab"


class Saver:
    """Saves rounds as a server would: in round r every client of `trained` owns a row full of r."""

    def __init__(self, folder, keep_last=3, config_hash=HASH):
        self.folder, self.store = folder, CheckpointStore(folder, config_hash, keep_last)
        self.memory = {}

    def save(self, round, trained=()):
        changed = {("mine", client): torch.full((4,), float(round)) for client in trained}
        self.memory |= changed
        tensors = {"models_KP": torch.full((2, 3), float(round)), "assign_N": torch.arange(5, dtype=torch.int32) + round}
        self.store.save(round, tensors, {"state": {"phase": "cluster"}, "ledger": {"down_bits": 10 * round}}, changed.items(), list(self.memory))

    def forget(self, client):
        del self.memory["mine", client]

    def file(self, round, name):
        return self.folder / "checkpoints" / f"{round:06d}" / name


@pytest.fixture
def saver(tmp_path):
    return Saver(tmp_path / "fedavg")


def reopened(saver, **changes) -> CheckpointStore:
    """The store as another process opens it."""
    return CheckpointStore(saver.folder, **{"config_hash": HASH, "keep_last": saver.store.keep_last} | changes)


def assert_round(loaded, round, memory):
    assert loaded.round == round and loaded.values == {"state": {"phase": "cluster"}, "ledger": {"down_bits": 10 * round}}
    assert loaded.tensors["models_KP"].tolist() == [[round] * 3] * 2 and loaded.tensors["assign_N"].dtype == torch.int32
    assert {key: value.tolist() for key, value in loaded.memory()} == {("mine", client): [float(last)] * 4 for client, last in memory.items()}


class TestSavedIsLoaded:
    def test_newest_with_the_latest_value_of_every_memory(self, saver):
        saver.save(1, [0, 1, 2])
        saver.save(2, [1])
        saver.save(3)
        assert_round(reopened(saver).load(), 3, {0: 1, 1: 2, 2: 1})

    def test_nothing_saved_is_nothing_loaded(self, saver):
        assert saver.store.load() is None and saver.store.rounds() == []

    def test_what_a_client_owned_is_gone_when_it_left(self, saver):
        saver.save(1, [0, 1])
        saver.forget(0)
        saver.save(2)
        assert_round(reopened(saver).load(), 2, {1: 1})

    def test_a_client_that_comes_again_owns_what_it_got_then(self, saver):
        saver.save(1, [0, 1])
        saver.forget(0)
        saver.save(2, [1])
        saver.save(3, [0])
        assert_round(reopened(saver).load(), 3, {0: 3, 1: 2})

    def test_views_and_slices_are_saved_by_value(self, saver):
        whole = torch.arange(12.0).reshape(3, 4)
        saver.store.save(1, {"a": whole[1:], "b": whole.T}, {}, [(("mine", 0), whole[2])], [("mine", 0)])
        loaded = reopened(saver).load()
        assert torch.equal(loaded.tensors["a"], whole[1:]) and torch.equal(loaded.tensors["b"], whole.T)
        assert dict(loaded.memory())["mine", 0].tolist() == [8, 9, 10, 11]

    def test_one_tensor_under_two_names_is_saved_under_both(self, saver):
        """As before the first update, where several models of a state are the common start."""
        first = torch.arange(6.0)
        saver.store.save(1, {"models": first, "start": first, "part": first[:0], "rest": first[3:]}, {}, [], [])
        loaded = reopened(saver).load().tensors
        assert {name: value.tolist() for name, value in loaded.items()} == {"models": first.tolist(), "start": first.tolist(), "part": [], "rest": [3, 4, 5]}

    def test_names_of_memory_may_hold_slashes(self, saver):
        saver.store.save(1, {"a": torch.ones(1)}, {}, [(("a/b", 7), torch.ones(2))], [("a/b", 7)])
        assert [key for key, _ in reopened(saver).load().memory()] == [("a/b", 7)]

    def test_a_store_that_loaded_goes_on_saving(self, saver):
        """The next checkpoint of the resumed run needs the memory files of the first part."""
        saver.save(1, [0, 1])
        saver.save(2, [1])
        other = Saver(saver.folder)
        other.memory = {key: value for key, value in other.store.load().memory()}
        other.save(3, [2])
        assert_round(reopened(saver).load(), 3, {0: 1, 1: 2, 2: 3})

    def test_a_round_that_is_done_again_replaces_its_checkpoint(self, saver):
        saver.save(1, [0])
        saver.save(2, [0, 1])
        other = Saver(saver.folder)
        shutil.rmtree(saver.file(2, ""))
        other.memory = dict(other.store.load().memory())
        other.save(2, [0, 1])
        other.save(2, [0, 1])
        assert_round(reopened(saver).load(), 2, {0: 2, 1: 2})


class TestAtomic:
    @pytest.mark.parametrize("step", ["save_file", "_meta_hash", "_sync"])
    def test_a_save_that_is_interrupted_leaves_the_checkpoint_before(self, saver, monkeypatch, step):
        """Fails while tensors are written, before the description is, and before the directory gets its name."""
        saver.save(1, [0, 1])
        real = getattr(checkpoint, step)

        def failing(*arguments, **named):
            if step != "save_file" or "state.safetensors" in str(arguments[1]):
                raise OSError("no space left on device")
            return real(*arguments, **named)

        monkeypatch.setattr(checkpoint, step, failing)
        with pytest.raises(OSError, match="no space left"):
            saver.save(2, [0])
        monkeypatch.undo()
        assert reopened(saver).rounds() == [1]
        assert_round(reopened(saver).load(), 1, {0: 1, 1: 1})

    def test_a_memory_file_that_is_interrupted_is_not_taken_for_one(self, saver, monkeypatch):
        saver.save(1, [0])
        monkeypatch.setattr(checkpoint, "_sync_file", lambda file: (_ for _ in ()).throw(OSError("killed")))
        with pytest.raises(OSError, match="killed"):
            saver.save(2, [0])
        monkeypatch.undo()
        assert_round(reopened(saver).load(), 1, {0: 1})
        other = Saver(saver.folder)
        other.memory = dict(other.store.load().memory())
        other.save(2, [0])
        assert_round(reopened(saver).load(), 2, {0: 2})

    def test_leftovers_of_a_killed_process_are_no_checkpoints(self, saver):
        saver.save(1)
        (saver.folder / "checkpoints" / ".000002.4711").mkdir()
        assert reopened(saver).rounds() == [1] and reopened(saver).load().round == 1


def change_value(path):
    meta = json.loads(path.read_text())
    meta["values"]["ledger"]["down_bits"] += 1
    path.write_text(json.dumps(meta))


def flip(path):
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


DAMAGE = {  # what is done to a file of round 2, and what the reason says
    "altered description": ("meta.json", change_value, "meta.json was altered"),
    "description that is no JSON": ("meta.json", lambda path: path.write_text("{"), "round 2"),
    "truncated description": ("meta.json", lambda path: os.truncate(path, 40), "round 2"),
    "missing description": ("meta.json", lambda path: path.unlink(), "No such file"),
    "flipped bit in the tensors": ("state.safetensors", flip, r"state.safetensors has sha256 \w{12}, expected \w{12}"),
    "truncated tensors": ("state.safetensors", lambda path: os.truncate(path, path.stat().st_size - 1), "has sha256"),
    "missing tensors": ("state.safetensors", lambda path: path.unlink(), "No such file"),
    "truncated memory": ("../../memory/000002-0.safetensors", lambda path: os.truncate(path, 50), r"memory file 000002-0.safetensors has sha256 \w+, expected \w+"),
    "missing memory": ("../../memory/000002-0.safetensors", lambda path: path.unlink(), "memory file 000002-0.safetensors is missing"),
}


class TestDamage:
    @pytest.fixture(params=DAMAGE)
    def damaged(self, request, saver):
        saver.save(1, [0, 1])
        saver.save(2, [0])
        file, damage, reason = DAMAGE[request.param]
        damage(saver.file(2, file))
        return saver, reason

    def test_the_checkpoint_before_is_used(self, damaged):
        assert_round(reopened(damaged[0]).load(), 1, {0: 1, 1: 1})

    def test_the_run_goes_on_from_there_and_mends_it(self, damaged):
        saver = Saver(damaged[0].folder)
        saver.memory = dict(saver.store.load().memory())
        saver.save(2, [0])
        assert_round(reopened(saver).load(), 2, {0: 2, 1: 1})

    def test_without_another_one_the_reason_is_given(self, damaged):
        saver, reason = damaged
        shutil.rmtree(saver.file(1, ""))
        with pytest.raises(RunError, match="no checkpoint in .*checkpoints can be used: round 2: ") as error:
            reopened(saver).load()
        assert re.search(reason, str(error.value)), str(error.value)

    def test_another_config_s_checkpoints_are_refused(self, saver):
        saver.save(1)
        with pytest.raises(RunError, match=f"belongs to config {HASH}, not ffffffffffff"):
            reopened(saver, config_hash="f" * 12).load()

    def test_another_format_is_refused(self, saver, monkeypatch):
        monkeypatch.setattr(checkpoint, "FORMAT", 99)
        saver.save(1)
        monkeypatch.undo()
        with pytest.raises(RunError, match=f"has format 99, this version reads {checkpoint.FORMAT}"):
            reopened(saver).load()

    def test_a_flipped_bit_in_the_memory_is_noticed(self, saver):
        saver.save(1, [0, 1])
        saver.save(2, [0])
        flip(saver.file(2, "../../memory/000002-0.safetensors"))
        assert_round(reopened(saver).load(), 1, {0: 1, 1: 1})

    def test_an_old_damaged_checkpoint_does_not_stop_the_run(self, saver):
        saver.save(1)
        saver.save(2)
        saver.file(1, "meta.json").write_text("{")
        saver.save(3)
        assert reopened(saver).load().round == 3


class TestSpace:
    def test_the_last_ones_are_kept_with_the_memory_they_need(self, tmp_path):
        saver = Saver(tmp_path / "ditto", keep_last=2)
        for round in range(1, 8):
            saver.save(round, [round % 3])
        assert saver.store.rounds() == [6, 7]
        assert_round(reopened(saver).load(), 7, {0: 6, 1: 7, 2: 5})
        shutil.rmtree(saver.file(7, ""))
        assert_round(reopened(saver).load(), 6, {0: 6, 1: 4, 2: 5})

    def test_files_follow_what_clients_own_and_not_how_often_it_changed(self, saver):
        """At most 2 * owned + 64 entries are written before they are rewritten, for the store and for each checkpoint it keeps."""
        most = 0
        for round in range(1, 201):
            saver.save(round, [round % 10, (round + 3) % 10])
            files = list((saver.folder / "memory").iterdir())
            most = max(most, sum(len(list(safe_open(file, "pt").keys())) for file in files))
        assert 84 - 2 <= most <= 2 * (2 * 10 + 64)
        assert len(saver.store.memory_files) <= 44
        last = {client: max(r for r in range(1, 201) if client in (r % 10, (r + 3) % 10)) for client in range(10)}
        assert_round(reopened(saver).load(), 200, last)

    def test_a_rewritten_memory_still_serves_the_checkpoints_before(self, saver):
        for round in range(1, 60):
            saver.save(round, [0, 1])
            for kept in saver.store.rounds():
                other = reopened(saver)
                found = other._load(kept)
                assert {client: value[0].item() for (_, client), value in found.memory()} == {0: kept, 1: kept}

    def test_large_memories_are_cut_into_files(self, saver, monkeypatch):
        monkeypatch.setattr(checkpoint, "_MEMORY_FILE_BYTES", 40)  # three rows of 16 bytes reach it
        saver.save(1, range(7))
        assert sorted(file.name for file in (saver.folder / "memory").iterdir()) == [f"000001-{part}.safetensors" for part in range(3)]
        assert_round(reopened(saver).load(), 1, dict.fromkeys(range(7), 1))

    def test_files_are_safetensors_and_json_only(self, saver):
        saver.save(1, [0])
        assert {file.suffix for file in saver.folder.rglob("*") if file.is_file()} == {".safetensors", ".json"}
        for file in saver.folder.rglob("*.safetensors"):
            with safe_open(file, "pt") as entries:
                assert entries.keys()
