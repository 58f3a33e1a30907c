import json
import os
import pickle
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import torch

from cfl_ray.data import open_shards
from cfl_ray.data.plan import make_plan
from cfl_ray.data.shard_writer import write_shards
from cfl_ray.data.shards import MANIFEST
from cfl_ray.errors import DataError
from cfl_ray.system.files import sha256


@pytest.fixture
def write(toy, config, tmp_path):
    """Writes a toy federation into tmp_path/shards and returns its folder and plan."""

    def make(images=None, normalize=None, folder="shards", **options):
        plan = make_plan(images or toy(), None, config(**options), seed=0)
        write_shards(tmp_path / folder, plan, {"made": "here"}, normalize)
        return tmp_path / folder, plan

    return make


def check_same(federation, plan, scale=255):
    """Every sample of the federation is the planned one."""
    for number, client in enumerate(plan.clients):
        parts = [(client.train, federation.train(number))]
        if plan.view == "holdout":
            parts.append((client.held_out, federation.holdout(number)))
        for rows, (x, y) in parts:
            pixels, labels = client.variant.train(rows)
            assert torch.equal(x, torch.from_numpy(pixels.astype(np.float32)) / scale) and y.tolist() == labels.tolist()
    for number, one in enumerate(plan.test_sets):
        x, y = federation.test_set(number)
        pixels, labels = one.variant.test(one.rows)
        assert torch.equal(x, torch.from_numpy(pixels.astype(np.float32)) / scale) and y.tolist() == labels.tolist()


@pytest.mark.parametrize(
    "options",
    [
        {"clients": 10, "shift": {"kind": "rotated"}},
        {"clients": 10, "view": "label", "shift": {"kind": "shifted"}},
        {"clients": 7, "view": "holdout", "kind": "dirichlet", "alpha": 1.0, "min_samples": 5},
    ],
)
def test_shards_hold_what_was_planned(write, options):
    folder, plan = write(**options)
    federation = open_shards(folder, verify=True)
    check_same(federation, plan)
    assert federation.num_samples_N.tolist() == [len(client.train) for client in plan.clients]
    assert federation.num_samples_N.dtype == np.int64
    assert federation.num_test_sets() == len(plan.test_sets) and federation.view == plan.view
    assert federation.recipe == {"made": "here"}
    ids = np.arange(federation.num_clients)
    assert federation.test_set_of(ids).tolist() == [client.test_set for client in plan.clients]
    assert (federation.group_N is None) == ("shift" not in options)
    if plan.labels_NC is not None:
        assert np.array_equal(federation.labels_of(ids), plan.labels_NC)


def test_reading_needs_no_pandas(write):
    """Hosts and server would otherwise import it, which takes 0.4 s and 35 MB in each."""
    folder, plan = write(clients=10)
    code = (
        "import sys; from cfl_ray.data import open_shards; x, y = open_shards(sys.argv[1]).train(3); "
        "print(len(y), 'pandas' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code, str(folder)], capture_output=True, text=True, check=True)
    assert done.stdout == f"{len(plan.clients[3].train)} False\n"


def test_several_files(write, monkeypatch):
    monkeypatch.setattr("cfl_ray.data.shard_writer.FILE_BYTES", 16 * 90)
    folder, plan = write(clients=9)
    federation = open_shards(folder)
    assert len(federation.manifest.train) == 5 and max(file.rows for file in federation.manifest.train) <= 90
    check_same(federation, plan)


def test_test_samples_are_those_of_the_base_class(write):
    from cfl_ray.data import Federation

    federation = open_shards(write(clients=10, view="label", shift={"kind": "rotated_labels", "angles": [0]})[0])
    for client in range(10):
        for limit in (None, 7):
            assert all(
                map(torch.equal, federation.test(client, limit, 3), Federation.test(federation, client, limit, 3))
            )
    assert not torch.equal(federation.test(0, 7, 3)[0], federation.test(0, 7, 4)[0])


def test_scale_and_normalisation_are_applied_on_reading(write, toy):
    images = toy(scale=255)
    federation = open_shards(write(images, normalize=[[0.5], [0.25]])[0])
    raw = federation._file(0)[0][: federation.num_samples_N[0]]
    assert raw.dtype == np.uint8
    assert torch.equal(federation.train(0)[0], (torch.from_numpy(raw.astype(np.float32)) / 255 - 0.5) / 0.25)


def test_names_stay_in_the_index_and_never_become_paths(write, toy):
    names = np.repeat(["../../etc/passwd", "a/b", "ü\n", "nul\0"], 100)
    folder, _ = write(toy(client=names), kind="writer", clients=None)
    federation = open_shards(folder)
    assert [federation.client_name(client) for client in range(4)] == sorted(set(names.tolist()))
    assert sorted(path.name for path in folder.iterdir()) == [
        "clients.arrow",
        "manifest.json",
        "test-00000.arrow",
        "train-00000.arrow",
    ]


def test_reading_maps_and_does_not_copy(write):
    federation = open_shards(write()[0])
    before = pa.total_allocated_bytes()
    x, y = federation._file(0)
    assert pa.total_allocated_bytes() == before and not x.flags.owndata and not x.flags.writeable
    first, last = federation._file(0)[0][:1], federation._file(0)[0][-1:]
    assert np.shares_memory(first, x) and np.shares_memory(last, x)
    federation.train(0)[0].zero_()  # the caller's own copy
    assert federation.train(0)[0].any()


def test_the_mapping_is_shared_pages_of_the_file(write):
    folder, _ = write()
    federation = open_shards(folder)
    address = federation._file(0)[0].ctypes.data
    maps = [line.split(maxsplit=5) for line in Path("/proc/self/maps").read_text().splitlines()]
    inside = [line for line in maps if int(line[0].split("-")[0], 16) <= address < int(line[0].split("-")[1], 16)]
    assert inside[0][5].strip() == str(folder / "train-00000.arrow")


def test_reading_costs_no_private_memory_and_no_file_descriptors(write, toy, monkeypatch):
    monkeypatch.setattr("cfl_ray.data.shard_writer.FILE_BYTES", 1 << 20)
    federation = open_shards(write(toy(n=20_000, shape=(1, 32, 32)), clients=100)[0])
    assert len(federation.manifest.train) == 20

    def usage():
        """Returns MiB of private memory and the number of open file descriptors."""
        status = Path("/proc/self/status").read_text().splitlines()
        anonymous = next(line for line in status if line.startswith("RssAnon"))
        return int(anonymous.split()[1]) / 1024, len(os.listdir("/proc/self/fd"))

    federation.train(0)
    mib, descriptors = usage()
    for client in 3 * list(range(100)):
        federation.train(client)
    assert usage()[0] - mib < 5 and usage()[1] == descriptors  # the 20 MB of pixels stay pages of the files


def test_it_pickles_as_its_path(write):
    federation = open_shards(write(clients=50)[0])
    federation.train(3)
    pickled = pickle.dumps(federation)
    assert len(pickled) < 400
    assert torch.equal(pickle.loads(pickled).train(49)[0], federation.train(49)[0])


def test_holdout_and_shared_test_sets_exclude_each_other(write):
    held_out = open_shards(write(view="holdout", folder="a")[0])
    assert held_out.num_test_sets() == 0 and held_out.labels_of(np.array([1])) is None
    assert held_out.test_set_of(np.array([1])).tolist() == [-1]
    assert torch.equal(held_out.test(1)[0], held_out.holdout(1)[0])
    shared = open_shards(write(folder="b")[0])
    with pytest.raises(DataError, match="view is cluster"):
        shared.holdout(0)
    for index in (-1, 1):
        with pytest.raises(IndexError, match=f"test set {index} of 1"):
            shared.test_set(index)


def change_manifest(folder, **changes):
    manifest = json.loads((folder / MANIFEST).read_text())
    (folder / MANIFEST).write_text(json.dumps(manifest | changes))
    return manifest


class TestDamage:
    @pytest.mark.parametrize("name", ["train-00000.arrow", "test-00000.arrow", "clients.arrow"])
    def test_missing(self, write, name):
        folder, _ = write()
        (folder / name).unlink()
        with pytest.raises(DataError, match=f"{name} is missing; delete the folder and run `cfl-ray prepare` again"):
            open_shards(folder)

    @pytest.mark.parametrize("name", ["train-00000.arrow", "test-00000.arrow", "clients.arrow"])
    def test_truncated(self, write, name):
        folder, _ = write()
        size = (folder / name).stat().st_size
        with open(folder / name, "r+b") as file:
            file.truncate(size - 9)
        with pytest.raises(
            DataError, match=f"{name} is damaged: expected bytes {size}, got {size - 9}; delete the folder"
        ):
            open_shards(folder)

    def test_altered(self, write):
        folder, _ = write()
        path = folder / "train-00000.arrow"
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 1
        path.write_bytes(content)
        with pytest.raises(
            DataError, match="train-00000.arrow is damaged: expected sha256 [0-9a-f]{64}, got [0-9a-f]{64}; delete"
        ):
            open_shards(folder, verify=True)

    def test_no_shards_at_all(self, tmp_path):
        with pytest.raises(DataError, match=r"holds no shards \(no manifest.json\); run `cfl-ray prepare`"):
            open_shards(tmp_path)

    def test_the_folder_above_the_shards(self, write):
        folder, _ = write()
        with pytest.raises(DataError, match=f"holds no shards .no manifest.json.; name the folder {folder}"):
            open_shards(folder.parent)

    @pytest.mark.parametrize(
        "change, where",
        [
            ({"version": 2}, "version"),
            ({"view": "other"}, "view"),
            ({"scale": 0}, "scale"),
            ({"extra": 1}, "extra"),
            ({"train": [{"name": "../secret.arrow", "rows": 1, "bytes": 1, "sha256": "0" * 64}]}, "train.0.name"),
            ({"train": [{"name": "/etc/passwd", "rows": 1, "bytes": 1, "sha256": "0" * 64}]}, "train.0.name"),
            ({"train": [{"name": "a.arrow", "rows": 1, "bytes": 1, "sha256": "../x"}]}, "train.0.sha256"),
            ({"train": [{"name": "a" * 201, "rows": 1, "bytes": 1, "sha256": "0" * 64}]}, "train.0.name"),
            ({"train": [{"name": "a.arrow", "rows": 2**63, "bytes": 1, "sha256": "0" * 64}]}, "train.0.rows"),
            ({"input": [2**40]}, "input.0"),
            ({"input": [0]}, "input.0"),
            ({"input": [2**16, 2**16]}, "input"),
            ({"num_classes": 10**30}, "num_classes"),
            ({"scale": float("inf")}, "scale"),
        ],
    )
    def test_manifests_are_not_trusted(self, write, change, where):
        folder, _ = write()
        change_manifest(folder, **change)
        with pytest.raises(DataError, match=f"manifest.json is damaged or of another version: {where}"):
            open_shards(folder)

    def test_an_index_that_leads_out_of_its_files(self, write):
        folder, _ = write()
        change_manifest(folder, train=change_manifest(folder)["test"])  # 100 rows, where the clients need 400
        with pytest.raises(DataError, match="clients.arrow is damaged: it names rows or files that do not exist"):
            open_shards(folder)

    @pytest.mark.parametrize("column, value", [("offset", 2**63 - 1), ("train", 2**63 - 1), ("held_out", 2**63 - 1)])
    def test_an_index_whose_sums_overflow(self, write, column, value):
        folder, _ = write()
        self.rewrite(folder, "clients.arrow", column, lambda old: pa.array([value] * len(old), pa.int64()))
        with pytest.raises(DataError, match="clients.arrow is damaged: it names rows or files that do not exist"):
            open_shards(folder)

    def test_names_that_lie_outside_of_their_file(self, write):
        """They would be read from anywhere in the memory of the process."""
        folder, _ = write()

        def astray(names):
            offsets = np.frombuffer(names.buffers()[1], np.int32).copy()
            offsets[1] = 2**30
            return pa.StringArray.from_buffers(len(names), pa.py_buffer(offsets.tobytes()), names.buffers()[2])

        self.rewrite(folder, "clients.arrow", "name", astray)
        with pytest.raises(DataError, match="clients.arrow is damaged"):
            open_shards(folder)

    def rewrite(self, folder, name, column, change):
        """Replaces a column of an Arrow file, and its size and checksum in the manifest."""
        with pa.OSFile(str(folder / name)) as source:
            batch = pa.ipc.open_file(source).get_batch(0)
        columns = [change(batch[one]) if one == column else batch[one] for one in batch.schema.names]
        with pa.OSFile(str(folder / name), "wb") as sink, pa.ipc.new_file(sink, batch.schema) as writer:
            writer.write_batch(pa.RecordBatch.from_arrays(columns, schema=batch.schema))
        described = {"bytes": (folder / name).stat().st_size, "sha256": sha256(folder / name)}
        change_manifest(folder, index=change_manifest(folder)["index"] | described)

    @pytest.mark.parametrize(
        "shift",
        [
            3,
            {"kind": "rotated", "angles": 3},
            {"kind": "rotated", "angles": []},
            {"kind": "rotated", "angles": [float("nan")]},
        ],
    )
    def test_a_recipe_that_describes_no_group(self, write, shift):
        folder, _ = write()
        change_manifest(folder, recipe={"data": {"shift": shift}})
        with pytest.raises(DataError, match="the shift in its recipe has no group 0"):
            open_shards(folder).group_transform(0)

    def test_other_arrow_files(self, write):
        folder, _ = write()
        change_manifest(folder, input=[1, 4, 5])
        with pytest.raises(DataError, match="has columns .* expected .*; delete the folder"):
            open_shards(folder).train(0)
