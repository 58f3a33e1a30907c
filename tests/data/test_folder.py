import os
import pickle
import re
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from pyarrow import fs

from cfl_ray.data import folder as folder_module
from cfl_ray.data import open_shards
from cfl_ray.data.changes import ChangingFederation, DataChange
from cfl_ray.data.folder import Folder
from cfl_ray.data.shard_writer import write_shards
from cfl_ray.errors import DataError


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("CFL_RAY_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def remote(planned, cache, tmp_path, monkeypatch):
    """A federation on a filesystem that is not this machine's, read without long pauses, and the same one on disk."""
    pytest.importorskip("fsspec")
    monkeypatch.setattr(folder_module, "_PAUSES", (0.001, 0.002, 0.004))
    uri = f"fsspec+memory://bucket/{tmp_path.name}"
    plan = planned(clients=5)
    for folder in (uri, tmp_path / "local"):
        write_shards(folder, plan, {})
    yield uri, tmp_path / "local"
    filesystem, path = fs.FileSystem.from_uri(uri)
    filesystem.delete_dir(path)


def test_files_of_another_filesystem_are_fetched_once_and_mapped(remote, cache):
    uri, local = remote
    federation, expected = open_shards(uri), open_shards(local)
    federation.scale = 1.0  # as that of real numbers, whose size a warning is about
    assert federation.warnings == []
    assert len(list(cache.glob("*.arrow"))) == 1  # the index; data when they are needed
    assert all(torch.equal(federation.train(client)[0], expected.train(client)[0]) for client in range(5))
    fetched = {path: path.stat().st_mtime_ns for path in cache.glob("*.arrow")}
    again = pickle.loads(pickle.dumps(federation))
    assert torch.equal(again.train(4)[0], expected.train(4)[0]) and again.uri == uri
    assert {path: path.stat().st_mtime_ns for path in cache.glob("*.arrow")} == fetched and len(fetched) == 2
    assert {path.name for path in cache.iterdir() if path.suffix != ".arrow"} == {"locks"}


def test_files_of_clients_are_named_and_fetched_before_they_are_read(remote, cache):
    uri, local = remote
    federation, clients = open_shards(uri), np.arange(5)
    assert open_shards(local).files_of(clients) is None, "nothing is fetched from a folder of this machine"
    assert federation.files_of(clients).tolist() == [0] * 5
    moved = ChangingFederation(federation, [DataChange(round=2, ids=(0,), data_of=(4,))]).at(2)
    assert moved.files_of(clients).tolist() == [0] * 5
    assert len(list(cache.glob("*.arrow"))) == 1
    moved.fetch(clients[:1])
    assert len(list(cache.glob("*.arrow"))) == 2


def overwrite(uri, name, change):
    filesystem, path = fs.FileSystem.from_uri(uri)
    with filesystem.open_input_stream(f"{path}/{name}") as stream:
        content = bytearray(stream.read())
    with filesystem.open_output_stream(f"{path}/{name}") as stream:
        stream.write(bytes(change(content)))


def test_processes_of_a_machine_that_need_a_file_fetch_it_once(remote, cache, monkeypatch):
    """Eight threads with a file lock each, as eight processes have."""
    uri, _ = remote
    fetch, fetches = Folder._fetch, []

    def slow(folder, name, *rest):
        fetches.append(name)
        time.sleep(0.2)
        fetch(folder, name, *rest)

    monkeypatch.setattr(Folder, "_fetch", slow)
    federations = [open_shards(uri) for _ in range(8)]
    with ThreadPoolExecutor(8) as pool:
        samples = list(pool.map(lambda federation: federation.train(0)[0], federations))
    assert all(torch.equal(x, samples[0]) for x in samples)
    assert len(fetches) == len(set(fetches)) == 2  # the index and one file of samples


def test_reads_that_fail_are_tried_again(remote, cache, monkeypatch):
    """Three times; a file that is missing is not tried again."""
    uri, local = remote
    paused, failures = [], [OSError("connection reset")] * 3
    monkeypatch.setattr(folder_module.time, "sleep", paused.append)

    class Flaky:
        def __init__(self, filesystem):
            self.filesystem = filesystem

        def open_input_stream(self, path):
            if failures:
                raise failures.pop()
            return self.filesystem.open_input_stream(path)

    open_uri = folder_module._open_uri
    monkeypatch.setattr(folder_module, "_open_uri", lambda uri: (Flaky(open_uri(uri)[0]), open_uri(uri)[1]))
    federation = open_shards(uri)
    failures += [OSError("connection reset")] * 3
    assert torch.equal(federation.train(0)[0], open_shards(local).train(0)[0])
    assert paused == [*folder_module._PAUSES] * 2
    assert Folder(uri).read("absent") is None and len(paused) == 6
    failures += [OSError("connection reset")] * 4
    with pytest.raises(DataError, match="cannot be fetched: connection reset"):
        federation.test_set(0)


def test_altered_and_truncated_files_are_not_kept(remote, cache):
    uri, _ = remote
    overwrite(uri, "train-00000.arrow", lambda content: content[:-1])
    overwrite(uri, "test-00000.arrow", lambda content: content[:600] + bytes([content[600] ^ 1]) + content[601:])
    federation = open_shards(uri)
    with pytest.raises(DataError, match=re.escape(f"{uri}/train-00000.arrow is damaged: expected bytes")):
        federation.train(0)
    with pytest.raises(DataError, match=re.escape(f"{uri}/test-00000.arrow is damaged: expected sha256")):
        federation.test_set(0)
    assert len([path for path in cache.iterdir() if path.is_file()]) == 1


def test_a_damaged_copy_in_the_cache_is_found(remote, cache):
    uri, local = remote
    open_shards(uri).train(0)
    kept = cache / f"{open_shards(local).manifest.train[0].sha256}.arrow"
    kept.write_bytes(kept.read_bytes()[:-1])
    assert torch.equal(open_shards(uri).train(0)[0], open_shards(local).train(0)[0])  # another size: fetched again
    kept.write_bytes(bytes(kept.stat().st_size))
    with pytest.raises(DataError, match="is damaged: expected sha256"):
        open_shards(uri, verify=True)


def test_missing_files(remote):
    uri, _ = remote
    filesystem, path = fs.FileSystem.from_uri(uri)
    filesystem.delete_file(f"{path}/train-00000.arrow")
    with pytest.raises(DataError, match="train-00000.arrow is missing"):
        open_shards(uri).train(0)
    with pytest.raises(DataError, match="holds no shards"):
        open_shards(uri + "/nothing")


def test_file_uris_are_local(planned, tmp_path):
    write_shards(f"file://{tmp_path}/shards", planned(), {})
    assert open_shards(f"file://{tmp_path}/shards").uri == str(tmp_path / "shards")


@pytest.mark.parametrize("uri", ["nonsense://bucket/x", "fsspec+nonsense://bucket/x"])
def test_unknown_filesystems(uri):
    with pytest.raises(DataError, match="is not a folder or URI that pyarrow can open"):
        open_shards(uri)


def test_children_of_a_uri_keep_its_query():
    assert Folder("fsspec+memory://bucket/a/?region=eu").child("b").uri == "fsspec+memory://bucket/a/b?region=eu"


def test_the_cache_has_a_limit_and_keeps_what_was_used_lately(cache, monkeypatch):
    monkeypatch.setenv("CFL_RAY_CACHE_GB", "0.000003")
    cache.mkdir()
    for hours, name in enumerate("abcd"):
        (cache / f"{name}.arrow").write_bytes(bytes(1000))
        os.utime(cache / f"{name}.arrow", (time.time() - 3600 * hours - 60, 0))
    folder_module.make_room(500)
    assert sorted(path.name for path in cache.iterdir()) == ["a.arrow", "b.arrow"]
    folder_module.make_room(10**6)
    assert [path.name for path in cache.iterdir()] == ["a.arrow"], "used in the last hour"


def test_room_is_made_while_another_process_removes_files(cache, monkeypatch):
    """A link without a target is as a file that is gone after its folder was listed."""
    monkeypatch.setenv("CFL_RAY_CACHE_GB", "0")
    cache.mkdir()
    (cache / "gone.arrow").symlink_to("nowhere")
    (cache / "old.arrow").write_bytes(bytes(1000))
    os.utime(cache / "old.arrow", (0, 0))
    folder_module.make_room(500)
    assert not (cache / "old.arrow").exists()


def test_a_limit_of_the_cache_that_is_no_number(monkeypatch):
    monkeypatch.setenv("CFL_RAY_CACHE_GB", "50 GB")
    with pytest.raises(DataError, match="CFL_RAY_CACHE_GB is '50 GB', expected a number of GB"):
        folder_module.make_room(500)


def test_a_file_that_is_fetched_takes_the_room_of_old_ones(remote, cache, monkeypatch):
    monkeypatch.setenv("CFL_RAY_CACHE_GB", "0")
    (cache / "old.arrow").write_bytes(bytes(1000))
    os.utime(cache / "old.arrow", (0, 0))
    open_shards(remote[0])
    assert not (cache / "old.arrow").exists() and list(cache.glob("*.arrow"))


def test_a_file_of_the_cache_that_is_used_stays(remote, cache):
    uri, _ = remote
    open_shards(uri).train(0)
    for file in cache.glob("*.arrow"):
        os.utime(file, (0, 0))
    open_shards(uri).train(0)
    assert all(file.stat().st_atime > 1 for file in cache.glob("*.arrow"))


@pytest.mark.parametrize(
    "uri, opened",
    [
        ("s3://bucket/x", "s3://bucket/x?allow_delayed_open=true"),
        ("s3://bucket/x?region=eu", "s3://bucket/x?region=eu&allow_delayed_open=true"),
        ("s3://bucket/x?allow_delayed_open=false", "s3://bucket/x?allow_delayed_open=false"),
        ("gs://bucket/x", "gs://bucket/x"),
    ],
)
def test_small_files_are_written_to_s3_by_one_request(uri, opened):
    assert folder_module._in_one_request(uri) == opened
    if uri.startswith("s3:") and "region" in opened:  # without a region, pyarrow asks for it
        assert fs.FileSystem.from_uri(opened)[1] == "bucket/x", "pyarrow knows the option"
