import multiprocessing
import os

import numpy as np
import pytest

from cfl_ray.config.data import SOURCE_KINDS
from cfl_ray.data import build, open_shards
from cfl_ray.data.shard_writer import shard_bytes, write_shards
from cfl_ray.errors import DataError


def prepare(folder, barrier):
    barrier.wait()
    build(SOURCE_KINDS.of(source="digits"), 0, folder)


def test_processes_that_prepare_at_the_same_time_leave_one_complete_folder(tmp_path):
    context = multiprocessing.get_context("fork")
    barrier = context.Barrier(3)
    processes = [context.Process(target=prepare, args=(tmp_path, barrier)) for _ in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0, 0, 0]
    (folder,) = tmp_path.iterdir()
    open_shards(folder, verify=True)


def test_a_failed_write_leaves_nothing(planned, tmp_path):
    def fail(what, done, total):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_shards(tmp_path / "shards", planned(), {}, progress=fail)
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_names_the_folder(planned, tmp_path):
    def full(what, done, total):
        raise OSError("Error writing bytes to file. Detail: [errno 28] No space left on device")  # as pyarrow

    with pytest.raises(DataError, match=r"shards cannot be written below .*No space left on device; set data.shards"):
        write_shards(tmp_path / "shards", planned(), {}, progress=full)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_another_process_wrote_stays(planned, tmp_path):
    for made_by in ("first", "second"):
        write_shards(tmp_path / "shards", planned(), {"made_by": made_by})
    assert open_shards(tmp_path / "shards").recipe == {"made_by": "first"}
    assert [path.name for path in tmp_path.iterdir()] == ["shards"]


def test_a_folder_of_other_things_is_not_touched(planned, tmp_path):
    (tmp_path / "shards").mkdir()
    (tmp_path / "shards" / "thesis.txt").write_text("mine")
    with pytest.raises(DataError, match=f"cannot be written to {tmp_path}/shards"):
        write_shards(tmp_path / "shards", planned(), {})
    assert os.listdir(tmp_path / "shards") == ["thesis.txt"]


def test_the_same_plan_gives_the_same_bytes(planned, tmp_path):
    for name in "ab":
        write_shards(tmp_path / name, planned(shift={"kind": "rotated"}), {})
    for path in (tmp_path / "a").iterdir():
        assert path.read_bytes() == (tmp_path / "b" / path.name).read_bytes()


def test_shard_bytes_is_what_the_files_hold(planned, toy, tmp_path):
    plan = planned(clients=8, images=toy(n=4000, shape=(3, 16, 16)))
    write_shards(tmp_path / "shards", plan, {})
    assert np.isclose(
        sum(path.stat().st_size for path in (tmp_path / "shards").iterdir()), shard_bytes(plan), rtol=0.01
    )


def test_progress_reaches_the_number_of_clients(planned, tmp_path, monkeypatch):
    monkeypatch.setattr("cfl_ray.data.shard_writer.FILE_BYTES", 16 * 150)
    seen = []
    write_shards(tmp_path / "shards", planned(clients=8), {}, progress=lambda *now: seen.append(now))
    assert seen == [("writing clients", 3, 8), ("writing clients", 6, 8), ("writing clients", 8, 8)]


def test_a_folder_that_cannot_be_made_is_named_with_the_keys_that_choose_it(planned, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(
        DataError, match=r"below .*/file/shards: Not a directory; set data.shards, or output, below which"
    ):
        write_shards(tmp_path / "file/shards/x", planned(), {})
