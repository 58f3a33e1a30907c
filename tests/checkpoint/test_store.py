"""Checkpoints: loaded as saved, atomic, damaged ones passed over, space that follows what changed."""

import ctypes
import json
import os
import re
import resource
import shutil
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from cfl_ray.checkpoint import manifest, segments, store
from cfl_ray.checkpoint.segments import segments_to_merge
from cfl_ray.checkpoint.store import CheckpointStore
from cfl_ray.core.work import Address, ClientState, Work
from cfl_ray.engine.client_state import ClientStateStore
from cfl_ray.errors import RunError

HASH = "0123456789ab"
MINE = Work(Address(0, 1, 0), np.zeros(0, np.int64), (), ClientState("mine"))


class Saver:
    """Saves rounds as a round loop does: in round r every client of `trained` has a state full of r."""

    def __init__(self, folder, keep_last=3, config_hash=HASH):
        self.folder, self.store = folder / "checkpoints", CheckpointStore(folder, config_hash, keep_last)
        self.states = ClientStateStore()
        self.written = []  # bytes of every save

    def save(self, round, trained=(), values=None, pinned=(), **tensors):
        self.states.keep(MINE, {client: torch.full((4,), float(round)) for client in trained}, {})
        before = self.files()
        tensors = tensors or {
            "models_KP": torch.full((2, 3), float(round)),
            "assign_N": torch.arange(5, dtype=torch.int32) + round,
        }
        remark = self.store.save(
            round,
            tensors,
            values or {"state": {"phase": "cluster"}, "traffic": {"down_bits": 10 * round}},
            self.states,
            pinned,
        )
        self.written.append(sum(size for name, size in self.files().items() if name not in before))
        return remark

    def forget(self, *clients):
        self.states.forget(np.array(clients))

    def files(self):
        return {path.name: path.stat().st_size for path in self.folder.iterdir()} if self.folder.is_dir() else {}

    def segments(self):
        return len({file.segment for file in self.store.files})

    def entry_files(self):
        return sorted(name for name in self.files() if name.endswith(".safetensors"))

    def again(self):
        """The saver of another process, with what it loaded."""
        other = Saver(self.folder.parent, self.store.keep_last)
        other.states.restore(other.store.load().client_states())
        return other


@pytest.fixture
def saver(tmp_path):
    return Saver(tmp_path / "fedavg")


def reopened(saver, **changes) -> CheckpointStore:
    """The store as another process opens it."""
    return CheckpointStore(saver.folder.parent, **{"config_hash": HASH, "keep_last": saver.store.keep_last} | changes)


def assert_round(loaded, round, states):
    assert loaded.round == round and loaded.values == {
        "state": {"phase": "cluster"},
        "traffic": {"down_bits": 10 * round},
    }
    assert loaded.tensors["models_KP"].tolist() == [[round] * 3] * 2 and loaded.tensors["assign_N"].dtype == torch.int32
    assert loaded.tensors["assign_N"].tolist() == [round + n for n in range(5)]
    assert {key: saved.tensor().tolist() for key, saved in loaded.client_states()} == {
        ("mine", client): [float(last)] * 4 for client, last in states.items()
    }


class TestPinned:
    def test_a_pinned_round_stays_with_its_files_until_it_is_not_pinned(self, tmp_path):
        """Of thirty rounds with merges, the last and the pinned one are kept, also by a process that goes on."""
        saver = Saver(tmp_path / "fedavg", keep_last=1)
        for round in range(1, 31):
            saver.save(round, [0, round % 5], pinned=[2] if round > 1 else [])
            if round == 15:
                saver = saver.again()
        assert saver.store.rounds() == [2, 30]
        assert_round(reopened(saver).load_as(lambda found: found, 2), 2, {0: 2, 1: 1, 2: 2})
        saver.save(31, pinned=[31])
        assert saver.store.rounds() == [31]
        assert {file.name for file in saver.store.files} == {*saver.entry_files()}

    def test_a_copy_has_the_pinned_rounds(self, saver, tmp_path):
        for round in (1, 2, 3):
            saver.save(round, [round], pinned=[1])
        other = CheckpointStore(tmp_path / "other", "ba9876543210", 1)
        assert saver.store.copy_to(other) == 3 and other.rounds() == [1, 3]
        assert_round(other.load_as(lambda found: found, 1), 1, {1: 1})
        (saver.folder / saver.store._manifest(1).files[0].name).unlink()
        with pytest.raises(RunError, match="cannot be read"):
            saver.store.copy_to(CheckpointStore(tmp_path / "third", "ba9876543210", 1))


class TestSavedIsLoaded:
    def test_newest_with_the_latest_value_of_every_client_state(self, saver):
        saver.save(1, [0, 1, 2])
        saver.save(2, [1])
        saver.save(3)
        assert_round(reopened(saver).load(), 3, {0: 1, 1: 2, 2: 1})

    def test_nothing_saved_is_nothing_loaded(self, saver):
        assert saver.store.load() is None and saver.store.rounds() == []

    def test_the_state_of_a_client_that_left_is_dropped(self, saver):
        saver.save(1, [0, 1])
        saver.forget(0)
        saver.save(2)
        assert_round(reopened(saver).load(), 2, {1: 1})

    def test_a_client_that_joins_again_has_its_new_state(self, saver):
        saver.save(1, [0, 1, *range(5, 400)])
        saver.forget(0)
        saver.save(2, [1])
        saver.save(3, [0])
        saver.forget(0)
        saver.save(4, [0])
        assert saver.segments() == 4
        assert_round(reopened(saver).load(), 4, {0: 4, 1: 2} | dict.fromkeys(range(5, 400), 1))

    def test_views_and_slices_are_saved_by_value(self, saver):
        whole = torch.arange(12.0).reshape(3, 4)
        saver.states.keep(MINE, {0: whole[2]}, {})
        saver.save(
            1,
            a=whole[1:],
            b=whole.T,
            c=torch.tensor(7),
            d=torch.zeros(0, 3),
            e=torch.zeros(3, 0),
            f=torch.tensor([True, False]),
        )
        loaded = reopened(saver).load()
        assert torch.equal(loaded.tensors["a"], whole[1:]) and torch.equal(loaded.tensors["b"], whole.T)
        assert loaded.tensors["c"].item() == 7
        assert loaded.tensors["d"].shape == (0, 3) and loaded.tensors["e"].shape == (3, 0)
        assert loaded.tensors["f"].tolist() == [True, False]
        assert dict(loaded.client_states())["mine", 0].tensor().tolist() == [8, 9, 10, 11]

    def test_one_tensor_under_two_names_is_saved_under_both(self, saver):
        """As before the first update, where several models of a state are the common start."""
        first = torch.arange(6.0)
        saver.save(1, models=first, start=first, part=first[:0], rest=first[3:])
        loaded = reopened(saver).load().tensors
        assert {name: value.tolist() for name, value in loaded.items()} == {
            "models": first.tolist(),
            "start": first.tolist(),
            "part": [],
            "rest": [3, 4, 5],
        }

    def test_names_of_client_states_may_hold_slashes(self, saver):
        saver.states.restore([(("a/b", 7), torch.ones(2))])
        saver.states.keep(Work(Address(0, 1, 0), np.zeros(0), (), ClientState("a/b")), {7: torch.ones(2)}, {})
        saver.save(1)
        assert [key for key, _ in reopened(saver).load().client_states()] == [("a/b", 7)]

    def test_a_store_that_loaded_goes_on_saving(self, saver):
        """The next checkpoint of the resumed run needs the files of the first part."""
        saver.save(1, [0, 1, *range(5, 40)])
        saver.save(2, [1])
        other = saver.again()
        other.save(3, [2])
        assert other.segments() == 3
        assert_round(reopened(saver).load(), 3, {0: 1, 1: 2, 2: 3} | dict.fromkeys(range(5, 40), 1))

    def test_a_round_that_is_done_again_replaces_its_checkpoint(self, saver):
        saver.save(1, [0])
        saver.save(2, [0, 1])
        (saver.folder / "000002.json").unlink()
        other = saver.again()
        other.save(2, [0, 1])
        other.save(2, [0, 1])
        assert_round(reopened(saver).load(), 2, {0: 2, 1: 2})

    def test_what_is_loaded_stands_without_the_files(self, saver):
        saver.save(1, [0, 1])
        loaded = saver.store.load()
        states = dict(loaded.client_states())
        for name in saver.entry_files():
            (saver.folder / name).unlink()
        assert states["mine", 1].tensor().tolist() == [1] * 4 and loaded.tensors["models_KP"].tolist() == [[1] * 3] * 2

    @pytest.mark.parametrize("seed", range(2))
    def test_every_kept_checkpoint_after_any_history(self, tmp_path, monkeypatch, seed):
        """Clients train, leave and join again; tensors change, grow, shrink, come and go; files are merged."""
        monkeypatch.setattr(segments, "FAN_OUT", 3)
        monkeypatch.setattr(segments, "FILE_BYTES", 700)
        monkeypatch.setattr(segments, "STATE_FILE_BYTES", 100)
        draw, saver, owns, told = np.random.default_rng(seed), Saver(tmp_path / "stocfl"), {}, {}
        state = {
            "signature_SF": torch.zeros(5, 3),
            "assign_N": torch.zeros(30, dtype=torch.int16),
            "phase": torch.tensor(0),
        }
        for round in range(1, 61):
            gone = [client for client in list(owns) if draw.random() < 0.1]
            saver.forget(*gone)
            trained = draw.choice(20, 4, replace=False).tolist()
            owns = {client: last for client, last in owns.items() if client not in gone} | dict.fromkeys(trained, round)
            state = dict(state)
            signature_SF = state["signature_SF"].clone()
            if draw.random() < 0.7:
                signature_SF[draw.integers(len(signature_SF), size=2)] = (
                    float("nan") if draw.random() < 0.2 else float(round)
                )
            if draw.random() < 0.3:
                signature_SF = torch.cat([signature_SF, torch.full((2, signature_SF.shape[1]), round / 2)])
            if draw.random() < 0.15:
                signature_SF = signature_SF[torch.from_numpy(draw.random(len(signature_SF)) < 0.7)]
            if not len(signature_SF) or draw.random() < 0.05:
                signature_SF = torch.full((4, int(draw.integers(2, 5))), round / 3)
            state["signature_SF"] = signature_SF
            if draw.random() < 0.5:
                state["assign_N"] = state["assign_N"].clone()
                state["assign_N"][draw.integers(30, size=3)] = round
            if draw.random() < 0.1:
                state["assign_N"].fill_(round)  # in place, against the rule: noticed all the same
            if draw.random() < 0.2:
                state.pop("centre", None) if draw.random() < 0.5 else state.update(
                    centre=torch.full((3, 2), float(round))
                )
            saver.save(round, trained, **state)
            told[round] = ({name: value.clone() for name, value in state.items()}, dict(owns))
            for kept in reopened(saver).rounds() if round % 3 == 0 else ():  # three rounds are kept: each is read once
                found = reopened(saver)._load(kept, ())
                tensors, owned = told[kept]
                assert found.tensors.keys() == tensors.keys()
                for name, value in found.tensors.items():
                    assert torch.equal(value.nan_to_num(-7), tensors[name].nan_to_num(-7))
                assert {client: saved.tensor()[0].item() for (_, client), saved in found.client_states()} == owned
            if draw.random() < 0.2:
                saver = saver.again()
                state = dict(saver.store.load().tensors)


class TestAtomic:
    def assert_untouched(self, saver, before):
        assert saver.files() == before
        assert_round(reopened(saver).load(), 1, {0: 1, 1: 1})

    @pytest.mark.parametrize("limit", [0, 100, 3000, 20_000])
    def test_a_full_disk_leaves_nothing_behind_and_is_named(self, saver, limit):
        """By a limit on the size of files: the first byte, a header, the values of an entry, the manifest."""
        saver.save(1, [0, 1])
        before = saver.files()
        tensors = {"models_KP": torch.full((2, 3), 2.0), "assign_N": torch.arange(5, dtype=torch.int32) + 2}
        values = {"state": {"phase": "cluster"}, "traffic": {"down_bits": 20}}
        large = {"more": torch.rand(1000)} if limit < 20_000 else {}
        with (
            limited(limit),
            pytest.raises(
                RunError, match=r"checkpoints/\S+\.(safetensors|json) could not be written: .*(too large|No space left)"
            ) as error,
        ):
            saver.save(2, [0], values if large else values | {"report": "x" * 30_000}, **tensors, **large)
        assert ("000002.json" in str(error.value)) == (limit == 20_000)
        self.assert_untouched(saver, before)
        other = saver.again()
        other.save(2, [0])
        assert_round(reopened(saver).load(), 2, {0: 2, 1: 1})

    def test_a_part_of_many_that_cannot_be_written_leaves_none(self, saver, monkeypatch):
        saver.save(1, [0, 1])
        before = saver.files()
        monkeypatch.setattr(segments, "STATE_FILE_BYTES", 150)
        written = iter([save_file, save_file])

        def full(*arguments):
            next(written, failing)(*arguments)

        def failing(*_):
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(segments, "save_file", full)
        with pytest.raises(RunError, match=r"000002-6.safetensors could not be written: No space left on device"):
            saver.save(2, range(20))
        self.assert_untouched(saver, before)

    def test_an_interruption_after_the_manifest_keeps_the_checkpoint(self, saver, monkeypatch):
        """It would be the only one of a run that is interrupted in round 1."""

        def interrupt(folder):
            raise KeyboardInterrupt

        monkeypatch.setattr(store, "sync", interrupt)
        with pytest.raises(KeyboardInterrupt):
            saver.save(1, trained=[0])
        assert CheckpointStore(saver.folder.parent, HASH).load().round == 1

    def test_a_folder_that_cannot_be_made_is_named(self, tmp_path):
        (tmp_path / "fedavg").write_text("a file is in the way")
        with pytest.raises(RunError, match=r"fedavg could not be written: File exists"):
            Saver(tmp_path / "fedavg").save(1)

    def test_a_folder_that_is_read_only_is_named(self, saver):
        saver.save(1, [0, 1])
        before = saver.files()
        saver.folder.chmod(0o500)
        with bound_by_permissions(), pytest.raises(RunError, match="could not be written: .*Permission denied"):
            saver.save(2, [0])
        saver.folder.chmod(0o700)
        self.assert_untouched(saver, before)

    def test_leftovers_of_a_killed_process_are_no_checkpoints_and_go_with_the_next(self, saver):
        saver.save(1)
        for name in (".tmpXYZ", ".4711.000002.json", "000002-0.safetensors"):
            (saver.folder / name).write_text("torn")
        other = saver.again()
        assert other.store.rounds() == [1]
        other.save(2)
        # 2 is taken, and 3 is left to an earlier process that may still save
        assert sorted(saver.files()) == ["000001-0.safetensors", "000001.json", "000002.json", "000004-0.safetensors"]


class TestVanished:
    def test_files_that_are_gone_are_not_built_on(self, saver):
        saver.save(1, range(30))
        saver.save(2, [0])
        (saver.folder / "000001-0.safetensors").unlink()
        assert "000001-0.safetensors cannot be read: No such file" in saver.save(3, [1])
        assert_round(reopened(saver).load(), 3, {0: 2, 1: 3} | dict.fromkeys(range(2, 30), 1))
        assert saver.save(4) is None and saver.segments() == 2

    def test_a_folder_that_is_gone_is_made_anew(self, saver):
        saver.save(1, range(30))
        shutil.rmtree(saver.folder)
        assert "everything was saved again" in saver.save(2, [0])
        assert_round(reopened(saver).load(), 2, {0: 2} | dict.fromkeys(range(1, 30), 1))

    def test_a_run_that_is_gone_is_not_made_anew(self, saver):
        saver.save(1)
        shutil.rmtree(saver.folder.parent)
        with pytest.raises(RunError, match="fedavg is gone, so nothing more can be saved"):
            saver.save(2)
        assert not saver.folder.parent.exists()

    @pytest.mark.parametrize("part", [0, 2])
    def test_what_was_altered_is_not_merged(self, saver, part):
        """A merge would give a flipped bit a checksum of its own. Rows are saved again; client states are lost."""
        saver.save(1, range(30))
        flip(saver.folder / f"000001-{part}.safetensors")
        if part == 0:
            assert re.search(r"000001-0.safetensors has sha256 \w{12}, expected", saver.save(2, range(29)))
            assert_round(reopened(saver).load(), 2, {29: 1} | dict.fromkeys(range(29), 2))
        else:
            with pytest.raises(RunError, match="000001-2.safetensors was altered: a client state in it; resume"):
                saver.save(2, range(29))

    def test_a_file_of_client_states_that_was_cut_is_not_read(self, saver):
        """It is mapped: reading what is no longer there would end the process."""
        saver.save(1, range(3000))
        os.truncate(saver.folder / "000001-2.safetensors", 4096)
        with pytest.raises(RunError, match=r"000001-2.safetensors has 4096 bytes, expected \d+"):
            saver.save(2, [0])

    def test_client_states_that_are_all_new_need_no_file_from_before(self, saver):
        saver.save(1, range(30))
        flip(saver.folder / "000001-2.safetensors")
        assert saver.save(2, range(30)) is None
        assert_round(reopened(saver).load(), 2, dict.fromkeys(range(30), 2))


@contextmanager
def bound_by_permissions():
    """Takes from this thread the capability by which root may write anywhere (CAP_DAC_OVERRIDE)."""
    libc = ctypes.CDLL(None, use_errno=True)
    header, sets = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()  # this thread; effective first
    assert libc.capget(header, sets) == 0
    before, sets[0] = sets[0], sets[0] & ~(1 << 1)
    assert libc.capset(header, sets) == 0
    try:
        yield
    finally:
        sets[0] = before
        assert libc.capset(header, sets) == 0


@contextmanager
def limited(size):
    """No file of this process may grow beyond `size` bytes."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def forged(change):
    """Alters a manifest and gives it the checksum of what it says then."""

    def forge(path):
        meta = json.loads(path.read_text())
        del meta["sha256"]
        change(meta)
        path.write_text(json.dumps(meta | {"sha256": manifest._digest(meta)}))

    return forge


def says(**fields):
    """Other fields in a manifest."""
    return forged(lambda meta: meta.update(fields))


def models_say(**fields):
    """The same of one of its tensors."""
    return forged(lambda meta: meta["tensors"]["models_KP"].update(fields))


def file_says(**fields):
    """The same of one of its files."""
    return forged(lambda meta: meta["files"][-1].update(fields))


def with_entries(**changed):
    """Replaces the entry file by one with such entries, and gives it the checksum it has then."""

    def replace(path):
        file = path.with_name(json.loads(path.read_text())["files"][-1]["name"])
        with safe_open(file, "pt") as old:
            names = old.keys()
            found = {name: old.get_tensor(name) for name in names}
        save_file({name: value for name, value in (found | changed).items() if value is not None}, file, {"gone": "[]"})
        file_says(bytes=file.stat().st_size, sha256=segments.sha256(file))(path)

    return replace


def garbage(path):
    """A header that promises more than there is, and the right checksum."""
    file = path.with_name(json.loads(path.read_text())["files"][-1]["name"])
    file.write_bytes(b"\xff" * 8 + file.read_bytes()[8:])
    file_says(sha256=segments.sha256(file))(path)


def flip(path):
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def change_value(path):
    path.write_text(path.read_text().replace('"down_bits": 20', '"down_bits": 21'))


def text(content):
    return lambda path: path.write_text(content)


def cut(size):
    return lambda path: os.truncate(path, size)


MANIFEST, ENTRIES = "000002.json", "000002-0.safetensors"
DAMAGE_OF_MANIFEST = {  # what is done to the manifest of round 2, and what the reason says
    "altered": (change_value, "000002.json was altered"),
    "no JSON": (text("{"), "000002.json is no JSON"),
    "no text": (lambda path: path.write_bytes(b"\xff\xfe\0"), "000002.json is no JSON"),
    "nested without end": (text("[" * 200_000), "000002.json is no JSON"),
    "truncated": (cut(40), "000002.json is no JSON"),
    "empty": (cut(0), "000002.json is no JSON"),
    "a list": (text("[1, 2]"), "000002.json is no checkpoint"),
    "NaN": (text("NaN"), "000002.json is no checkpoint"),
    "a number too long": (text('{"format": ' + "9" * 5000 + "}"), "000002.json is no JSON"),
    "a folder": (lambda path: (path.unlink(), path.mkdir()), "Is a directory"),
    "missing key": (forged(lambda meta: meta.pop("tensors")), "tensors: Field required"),
    "format NaN": (says(format=float("nan")), "has format nan, this version reads format 5"),
    "round in words": (says(round="two"), "round: Input should be a valid integer"),
    "round of another file": (says(round=7), "belongs to round 7, not 2"),
    "values in a list": (says(values=[]), "values: Input should be a valid dictionary"),
    "another method": (says(method="ifca"), "belongs to method ifca, not fedavg"),
    "another config": (says(config_hash="f" * 12), f"belongs to config_hash ffffffffffff, not {HASH}"),
    "huge tensor": (
        models_say(shape=[10**15, 3]),
        r"shape \[1000000000000000, 3\], more than \d+ bytes of files can hold",
    ),
    "huge empty tensor": (models_say(shape=[10**30, 0]), "Overflow"),
    "negative tensor": (models_say(shape=[-2, 3]), "negative dimension"),
    "more rows than saved": (models_say(shape=[4, 3]), "rows of models_KP are in none of its files"),
    "unknown type": (models_say(dtype="object"), "tensors.models_KP.dtype"),
    "file elsewhere": (file_says(name="../x.safetensors"), r"files.\d.name: String should match"),
    "missing tensor": (
        forged(lambda meta: meta["tensors"].update(more={"dtype": "bool", "shape": [3]})),
        "rows of more are in none",
    ),
    "missing row numbers": (with_entries(**{"rows/models_KP/0": None}), "000002-0.safetensors cannot be read"),
    "tensor of another type": (models_say(dtype="int32"), "rows of models_KP are in none"),
    "rows out of range": (with_entries(**{"rows/models_KP/0": torch.tensor([-9, 0])}), "out of bounds"),
    "header of garbage": (garbage, "000002-0.safetensors cannot be read: .*header"),
}
DAMAGE_OF_ENTRIES = {  # the same of its entry file
    "flipped bit": (flip, r"000002-0.safetensors has sha256 \w{12}, expected \w{12}"),
    "truncated entries": (cut(50), r"000002-0.safetensors has 50 bytes, expected \d+"),
    "missing entries": (Path.unlink, "000002-0.safetensors cannot be read: No such file"),
}
DAMAGE = [(MANIFEST, *damage) for damage in DAMAGE_OF_MANIFEST.values()]
DAMAGE += [(ENTRIES, *damage) for damage in DAMAGE_OF_ENTRIES.values()]


class TestDamage:
    @pytest.fixture(params=DAMAGE, ids=[*DAMAGE_OF_MANIFEST, *DAMAGE_OF_ENTRIES])
    def damaged(self, request, saver):
        saver.save(1, [0, 1])
        saver.save(2, [0])
        file, damage, reason = request.param
        damage(saver.folder / file)
        return saver, reason

    def test_the_checkpoint_before_is_used_and_the_reason_given(self, damaged):
        saver, reason = damaged
        loaded = reopened(saver).load()
        assert_round(loaded, 1, {0: 1, 1: 1})
        assert len(loaded.refused) == 1 and re.search(f"checkpoint of round 2: .*{reason}", loaded.refused[0]), (
            loaded.refused
        )

    def test_the_run_goes_on_from_there_and_mends_it(self, damaged):
        saver = damaged[0]
        if (folder := saver.folder / "000002.json").is_dir():
            folder.rmdir()  # a file cannot replace a folder, and no process of ours makes one
        saver.again().save(2, [0])
        assert_round(reopened(saver).load(), 2, {0: 2, 1: 1})

    def test_without_another_one_the_reason_is_given(self, damaged):
        saver, reason = damaged
        (saver.folder / "000001.json").unlink()
        with pytest.raises(
            RunError, match="no checkpoint in .*checkpoints can be used: checkpoint of round 2: "
        ) as error:
            reopened(saver).load()
        assert re.search(reason, str(error.value)), str(error.value)

    def test_checkpoints_of_another_config_or_method_are_refused(self, saver, tmp_path):
        saver.save(1)
        with pytest.raises(RunError, match=f"belongs to config_hash {HASH}, not ffffffffffff"):
            reopened(saver, config_hash="f" * 12).load()
        shutil.copytree(tmp_path / "fedavg", tmp_path / "ifca")
        with pytest.raises(RunError, match="belongs to method fedavg, not ifca"):
            CheckpointStore(tmp_path / "ifca", HASH).load()

    def test_a_foreign_one_copied_in_is_passed_over_and_keeps_no_good_one_out(self, saver, tmp_path):
        """It has a later round, so it is seen first in every load."""
        other = Saver(tmp_path / "ifca")
        for round in range(1, 10):
            other.save(round, [0])
        saver.store.keep_last = 1
        saver.save(1, [0, 1])
        shutil.copy(other.folder / "000009.json", saver.folder)
        again = saver.again()
        again.save(2, [0])
        again.save(3, [0])
        loaded = reopened(saver).load()
        assert_round(loaded, 3, {0: 3, 1: 1})
        assert "round 9" in loaded.refused[0] and "belongs to method ifca" in loaded.refused[0]

    def test_another_format_is_refused(self, saver, monkeypatch):
        saver.save(1)
        monkeypatch.setattr(manifest, "FORMAT", 6)
        with pytest.raises(RunError, match="has format 5, this version reads format 6"):
            reopened(saver).load()

    def test_an_old_damaged_checkpoint_does_not_stop_the_run(self, saver):
        saver.save(1)
        saver.save(2)
        (saver.folder / "000001.json").write_text("{")
        again = saver.again()
        again.save(3)
        assert reopened(saver).load().round == 3 and again.store.rounds() == [2, 3]


class TestAlteredClientStates:
    """Their values are compared when they are read: a checkpoint with 100 GB of them is loaded in seconds."""

    @pytest.fixture
    def altered(self, saver):
        """In a file that the checkpoints of rounds 2 and 3 need, and that of round 1 does not."""
        saver.save(1, [*range(100), 100])
        saver.save(2, [100])
        saver.save(3)
        assert [file.name for file in saver.store.files if file.segment == 2][0] == "000002-2.safetensors"
        flip(saver.folder / "000002-2.safetensors")
        return saver

    def test_the_value_is_refused_and_from_then_on_the_checkpoints_that_need_it(self, altered):
        loaded = reopened(altered).load()
        assert loaded.round == 3 and loaded.refused == ()
        states = dict(loaded.client_states())
        assert states["mine", 0].tensor().tolist() == [1.0] * 4
        for read in (states["mine", 100].tensor, lambda: segments.entry_rows(states["mine", 100].entry)[0]):
            with pytest.raises(RunError, match="000002-2.safetensors was altered: a client state in it; resume"):
                read()
        again = reopened(altered).load()
        assert_round(again, 1, dict.fromkeys(range(101), 1))
        assert [line[:22] for line in again.refused] == ["checkpoint of round 3:", "checkpoint of round 2:"]
        assert all("000002-2.safetensors was altered" in line for line in again.refused)

    def test_the_run_goes_on_from_there_and_nothing_of_it_is_left(self, altered):
        with pytest.raises(RunError):
            dict(reopened(altered).load().client_states())["mine", 100].tensor()
        saver = altered.again()
        for round in range(2, 6):
            saver.save(round, [100])
        assert_round(reopened(saver).load(), 5, dict.fromkeys(range(100), 1) | {100: 5})
        assert not [name for name in saver.files() if name.startswith("000002-")]

    def test_a_value_that_only_the_newest_checkpoint_has_is_compared_when_it_is_loaded(self, saver):
        """Power loss damages the newest files, and later no checkpoint would be without it."""
        saver.save(1, [0, 1])
        saver.save(2, [1])
        flip(saver.folder / "000002-2.safetensors")
        loaded = reopened(saver).load()
        assert_round(loaded, 1, {0: 1, 1: 1})
        assert "000002-2.safetensors was altered" in loaded.refused[0]

    def test_it_is_refused_in_a_folder_that_cannot_be_written(self, altered, monkeypatch):
        monkeypatch.setattr(segments, "open_private", lambda *_: (_ for _ in ()).throw(PermissionError("read-only")))
        with pytest.raises(RunError, match="was altered"):
            dict(reopened(altered).load().client_states())["mine", 100].tensor()

    def test_it_is_not_copied(self, altered, tmp_path):
        other = CheckpointStore(tmp_path / "longer", HASH)
        assert reopened(altered).copy_to(other) == 1
        assert_round(other.load(), 1, dict.fromkeys(range(101), 1))

    def test_a_bit_of_the_header_that_is_flipped_is_named_as_damage(self, saver):
        saver.save(1, [0, 1])
        saver.save(2, [0, 1])
        file = saver.folder / "000002-2.safetensors"
        whole = file.read_bytes()
        length = int.from_bytes(whole[:8], "little")
        for bit in range(0, 8 * (8 + length), 11):
            content = bytearray(whole)
            content[bit // 8] ^= 1 << bit % 8
            file.write_bytes(content)
            assert reopened(saver).load().round == 1, bit

    @pytest.mark.parametrize("name", ["clients", "sums", "header"])
    def test_all_but_the_values_is_compared_when_it_is_loaded(self, saver, name):
        saver.save(1, [0, 1])
        saver.save(2, [0, 1])
        file = saver.folder / "000002-2.safetensors"
        content = bytearray(file.read_bytes())
        length = int.from_bytes(content[:8], "little")
        begin = json.loads(content[8 : 8 + length]).get(f"{name}/mine/0", {"data_offsets": [-1]})["data_offsets"][0]
        content[8 + length + begin] ^= 1
        file.write_bytes(content)
        loaded = reopened(saver).load()
        assert_round(loaded, 1, {0: 1, 1: 1})
        assert re.search(r"000002-2.safetensors (has sha256 \w{12}, expected|cannot be read)", loaded.refused[0])


class TestSpace:
    def test_the_last_ones_are_kept_with_the_files_they_need(self, tmp_path):
        saver = Saver(tmp_path / "ditto", keep_last=2)
        for round in range(1, 8):
            saver.save(round, [round % 3])
        assert saver.store.rounds() == [6, 7]
        assert_round(reopened(saver).load(), 7, {0: 6, 1: 7, 2: 5})
        (saver.folder / "000007.json").unlink()
        assert_round(reopened(saver).load(), 6, {0: 6, 1: 4, 2: 5})

    def test_bytes_written_follow_what_changed(self, tmp_path):
        """1,000 rows and 1,000 client states of 1 KB, of which 10 each change: 2 % of writing everything."""
        saver, signature_SF = Saver(tmp_path / "stocfl"), torch.zeros(1000, 256)
        for round in range(1, 101):
            signature_SF = signature_SF.clone()
            signature_SF[torch.randperm(1000, generator=torch.Generator().manual_seed(round))[:10]] = round
            trained = range(7 * round, 7 * round + (1000 if round == 1 else 10))
            row = torch.full((256,), float(round))
            saver.states.keep(MINE, dict.fromkeys((client % 1000 for client in trained), row), {})
            saver.save(round, signature_SF=signature_SF)
        everything, changed = saver.written[0], 20 * 1024
        assert everything > 2_000_000
        assert sorted(saver.written)[50] < 1.7 * changed
        assert (
            sum(saver.written[1:]) < 99 * 3.5 * changed
        )  # written once, again in a merge of 16, and the whole each time as much has come

    def test_bytes_written_do_not_follow_what_there_is(self, tmp_path):
        """One client in 3,000 and in 300 clients; ten rows of 30,000 and of 3,000; a tensor that stays."""
        written = []
        for size in (300, 3000):
            saver, assign_N, still = (
                Saver(tmp_path / str(size)),
                torch.zeros(10 * size, dtype=torch.int32),
                torch.rand(size, 10),
            )
            for round in range(1, 12):
                assign_N = assign_N.clone()
                assign_N[torch.arange(10) * 7 + round] = round
                saver.save(round, range(size) if round == 1 else [round], assign_N=assign_N, still=still)
            written.append(saver.written[1:])
        assert max(map(max, written)) < 6000 and abs(sum(written[0]) - sum(written[1])) < 200

    def test_files_follow_what_is_alive_and_not_how_often_it_changed(self, saver):
        """At most twice what is alive for a checkpoint, of few files, however many rounds."""
        row, most, count = torch.zeros(256), 0, 0
        for round in range(1, 201):
            saver.states.keep(MINE, dict.fromkeys((round % 50, (7 * round) % 50), row + round), {})
            saver.save(round, assign_N=torch.full((50,), round))
            needed = sum(file.bytes for file in saver.store.files)
            alive = len(saver.states.keys()) * (1024 + 8) + 400
            most, count = max(most, needed / (alive + 2000)), max(count, saver.segments())
        assert 1.5 < most <= 2.1 and 10 < count <= 2 * (segments.FAN_OUT - 1) + 1
        assert sum(saver.files().values()) < 6 * 50 * 1200  # of three checkpoints

    def test_the_room_of_what_is_gone_is_given_back(self, saver):
        saver.states.keep(MINE, dict.fromkeys(range(100), torch.zeros(1000)), {})
        saver.save(1)
        for round in range(2, 100):
            saver.forget(round - 2)
            saver.save(round)
            alive = len(saver.states.keys()) * 4000
            assert sum(file.bytes for file in saver.store.files) <= 2 * alive + 20_000
        assert len(list(reopened(saver).load().client_states())) == 2

    def test_the_room_of_a_tensor_that_is_gone_is_given_back(self, saver):
        still = torch.zeros(100, 100)
        saver.save(1, signature_SF=torch.zeros(1000, 100), still=still)
        saver.save(2, still=still)
        saver.save(3, still=still, more=torch.zeros(1))
        assert sum(file.bytes for file in saver.store.files) < 2 * still.nbytes

    def test_files_are_few_whatever_their_sizes(self):
        """Random weights of all magnitudes: at most 15 segments for each power of 16, and few rewrites."""
        draw = np.random.default_rng(0)
        for _ in range(20):
            segments, moved, total, high = [10**9], 0, 0, 0
            for _ in range(500):
                new = int(10 ** draw.uniform(2, 6))
                total += new
                joined = segments_to_merge(segments, new)
                cut = len(segments) - joined
                moved, segments = moved + sum(segments[cut:]), [*segments[:cut], sum(segments[cut:]) + new]
                high = max(high, len(segments))
            assert high <= 15 * 4 + 1 and moved <= 4 * total, (high, moved / total)

    def test_large_ones_are_cut_into_files(self, saver, monkeypatch):
        monkeypatch.setattr(segments, "FILE_BYTES", 400)
        monkeypatch.setattr(segments, "STATE_FILE_BYTES", 400)
        saver.save(1, range(70), table=torch.arange(600.0).reshape(50, 12), row=torch.arange(900.0))
        assert len(saver.entry_files()) > 15 and max(saver.files()[name] for name in saver.entry_files()) < 1500
        loaded = reopened(saver).load()
        assert torch.equal(loaded.tensors["table"], torch.arange(600.0).reshape(50, 12)) and torch.equal(
            loaded.tensors["row"], torch.arange(900.0)
        )
        assert {client for (_, client), _ in loaded.client_states()} == set(range(70))

    def test_files_are_safetensors_and_json_only(self, saver):
        saver.save(1, [0])
        assert {file.suffix for file in saver.folder.rglob("*") if file.is_file()} == {".safetensors", ".json"}
        for file in saver.folder.glob("*.safetensors"):
            with safe_open(file, "pt") as found:
                assert found.keys()
