import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from sklearn.datasets import load_digits

from cfl_ray.config.data import SOURCE_KINDS
from cfl_ray.data import build, describe
from cfl_ray.data.synthetic import SyntheticFederation
from cfl_ray.errors import DataError


def stamps(folder):
    """Returns the time of the last change of every file."""
    return {path: path.stat().st_mtime_ns for path in folder.rglob("*")}


def test_shards_are_reused_and_every_change_makes_new_ones(tmp_path):
    data = SOURCE_KINDS.of(source="digits")
    first = build(data, 0, tmp_path)
    before = stamps(tmp_path)
    assert build(data, 0, tmp_path).uri == first.uri and stamps(tmp_path) == before
    changed = [
        build(data, 1, tmp_path),
        build(SOURCE_KINDS.of(source="digits", shift={"kind": "shifted"}), 0, tmp_path),
        build(SOURCE_KINDS.of(source="digits", normalize=[[0.5], [0.5]]), 0, tmp_path),
    ]
    assert len({federation.uri for federation in (first, *changed)}) == 4


def test_shards_can_be_named_directly_and_need_no_raw_data(tmp_path, data_root):
    options = {"source": "mnist", "partition": {"clients": 20, "samples": 10}, "test": {"max_samples": 10}}
    made = build(SOURCE_KINDS.of(root=str(data_root), **options), 0, tmp_path)
    again = build(SOURCE_KINDS.of(root="/nowhere", shards=made.uri, **options), 0, "unused")
    assert torch.equal(again.train(19)[0], made.train(19)[0])
    with pytest.raises(
        DataError, match="holds another federation: its seed is 0, wanted is 1; name another folder in data.shards"
    ):
        build(SOURCE_KINDS.of(root="/nowhere", shards=made.uri, **options), 1, "unused")


def test_raw_data_of_another_size_make_new_shards(tmp_path, data_root):
    data = SOURCE_KINDS.of(
        source="femnist",
        root=str(tmp_path),
        partition={"kind": "writer", "clients": None, "min_samples": 2},
        test={"view": "holdout"},
    )
    write_femnist(data_root, tmp_path / "train.parquet", 300)
    first = build(data, 0, tmp_path / "shards")
    write_femnist(data_root, tmp_path / "train.parquet", 400)
    with pytest.raises(DataError, match="the raw data have changed since .* was written.*run `cfl-ray prepare`"):
        build(data, 0, tmp_path / "shards")
    second = build(data, 0, tmp_path / "shards", converts_changed=True)
    assert "the raw data have changed since" in second.warnings[0] and second.uri != first.uri
    assert first.num_samples_N.sum() < second.num_samples_N.sum()


def test_damaged_shards_are_found_before_the_run(tmp_path):
    federation = build(SOURCE_KINDS.of(source="digits"), 0, tmp_path)
    path = next(tmp_path.rglob("test-00000.arrow"))
    path.write_bytes(path.read_bytes()[:-8] + b"12345678")
    with pytest.raises(DataError, match="test-00000.arrow is damaged: expected sha256"):
        build(SOURCE_KINDS.of(source="digits"), 0, tmp_path)
    assert federation.num_clients == 40


@pytest.mark.parametrize(
    "options",
    [
        {"source": "digits"},
        {"source": "digits", "shift": {"kind": "pathological"}, "test": {"view": "label"}},
        {"source": "digits", "shift": {"kind": "pathological"}, "test": {"view": "all"}},
        {
            "source": "digits",
            "shift": {"kind": "rotated"},
            "partition": {"kind": "dirichlet", "clients": 12, "alpha": 1.0},
        },
        {"source": "digits", "test": {"view": "holdout"}, "partition": {"clients": 7, "samples": 20}},
        {
            "source": "digits",
            "test": {"view": "holdout", "pool": True},
            "partition": {"clients": 9, "sizes": list(range(20, 29)), "cut": [{"keep": 0.5, "clients": 2}]},
        },
        {"source": "digits", "partition": {"kind": "dirichlet", "clients": 12, "groups": 3, "alpha": 10}},
        {"source": "synthetic", "partition": {"clients": 1000}},
    ],
)
def test_the_summary_agrees_with_what_is_built(tmp_path, options):
    data = SOURCE_KINDS.of(**options)
    summary, federation = describe(data, 0), build(data, 0, tmp_path)
    sizes = federation.num_samples_N
    assert summary.clients == federation.num_clients and summary.samples == (sizes.min(), np.median(sizes), sizes.max())
    assert summary.groups == (0 if federation.group_N is None else federation.group_N.max() + 1)
    assert summary.shape == federation.shape
    assert summary.test_sets == federation.num_test_sets()


def test_rotated_mnist_of_the_stocfl_paper(tmp_path, data_root):
    """4,800 clients with 50 of the 60,000 images each, four times; built with a tenth of the clients and 5 images."""

    def config(**partition):
        return SOURCE_KINDS.of(source="mnist", root=str(data_root), shift={"kind": "rotated"}, partition=partition)

    summary = describe(config(clients=4800), 0)
    assert summary.samples == (50, 50.0, 50) and summary.bytes == 280_000 * 786 and summary.groups == 4
    federation = build(config(clients=480, samples=5), 0, tmp_path)
    assert np.bincount(federation.group_N).tolist() == [120] * 4 and federation.num_samples_N.sum() == 2400
    upright, turned = federation.test_set(0), federation.test_set(1)
    assert torch.equal(torch.rot90(upright[0], 1, (2, 3)), turned[0]) and torch.equal(upright[1], turned[1])


def test_hybrid_of_mnist_and_fashion_mnist(tmp_path, data_root):
    data = SOURCE_KINDS.of(
        source="mnist",
        root=str(data_root),
        shift={"kind": "hybrid"},
        partition={"clients": 4, "samples": 50},
        test={"max_samples": 200},
    )
    federation = build(data, 0, tmp_path)
    assert federation.group_N.tolist() == [0, 0, 1, 1]
    # Clothes cover more of the image than digits.
    assert federation.test_set(1)[0].mean() > 1.5 * federation.test_set(0)[0].mean()


def write_femnist(data_root, path, rows):
    """Writes the first rows of FEMNIST; returns them."""
    batch = next(pq.ParquetFile(data_root / "hf/femnist/data/train-00000-of-00001.parquet").iter_batches(rows))
    pq.write_table(pa.Table.from_batches([batch]), path)
    return pa.Table.from_batches([batch])


def test_femnist_by_writer(tmp_path, data_root):
    rows = write_femnist(data_root, tmp_path / "train.parquet", 2000)
    partition = {"kind": "writer", "clients": 5, "min_samples": 50}
    data = SOURCE_KINDS.of(source="femnist", root=str(tmp_path), partition=partition, test={"view": "holdout"})
    summary, federation = describe(data, 0), build(data, 0, tmp_path / "shards")
    assert summary.clients == federation.num_clients == 5
    assert federation.shape.input == (1, 28, 28) and federation.shape.num_classes == 62
    writer = federation.client_name(3)
    expected = rows.filter(pa.compute.equal(rows["writer_id"], writer))["character"].to_pylist()
    assert sorted(torch.cat([federation.train(3)[1], federation.holdout(3)[1]]).tolist()) == sorted(expected)


def test_pooled_images_are_those_of_both_parts(tmp_path):
    """Each of 3 clients gets a third of the 1,797 images; together they are all of scikit-learn's."""
    data = SOURCE_KINDS.of(source="digits", partition={"clients": 3}, test={"view": "holdout", "pool": True})
    federation = build(data, 0, tmp_path)
    assert federation.num_samples_N.tolist() == [479] * 3 and federation.num_test_sets() == 0
    parts = [part for client in range(3) for part in (federation.train(client), federation.holdout(client))]
    x, y = (torch.cat(tensors) for tensors in zip(*parts))
    images = load_digits()
    assert y.bincount().tolist() == np.bincount(images.target).tolist()
    expected = images.images.reshape(1797, -1) / 16
    assert np.array_equal(np.unique(x.flatten(1).numpy(), axis=0), np.unique(expected.astype(np.float32), axis=0))
    assert describe(data, 0).bytes == 1797 * (64 + 2)


def test_pooling_reads_no_pixels_where_only_sizes_are_wanted(real):
    pooled = real("images").pooled("images")
    assert pooled.train_x.shape == (60_000, 3, 32, 32) and not any(pooled.train_x.strides)
    assert len(pooled.train_y) == 60_000


def test_synthetic_is_never_written(tmp_path):
    data = SOURCE_KINDS.of(source="synthetic", partition={"clients": 12}, synthetic_shape=[3, 4, 4])
    federation = build(data, 5, tmp_path)
    assert isinstance(federation, SyntheticFederation) and federation.shape.input == (3, 4, 4)
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(DataError, match="so the view is cluster, not label"):
        build(SOURCE_KINDS.of(source="synthetic", test={"view": "label"}), 0, tmp_path)


def test_a_second_data_set_must_have_images():
    with pytest.raises(DataError, match="data set 'synthetic' has no samples to divide"):
        describe(SOURCE_KINDS.of(source="digits", shift={"kind": "hybrid", "other": "synthetic"}), 0)


class TestArrays:
    X, Y, CLIENTS = np.arange(240, dtype=np.float32).reshape(40, 6), np.arange(40) % 4, np.arange(40) % 5

    def build(self, tmp_path, view="holdout", shift="none", **arrays):
        np.savez(tmp_path / "mine.npz", **arrays)
        return build(
            SOURCE_KINDS.of(
                source="arrays", root=str(tmp_path / "mine.npz"), test={"view": view}, shift={"kind": shift}
            ),
            0,
            tmp_path,
        )

    def test_from_a_file(self, tmp_path):
        arrays = {"x": self.X, "y": self.Y, "clients": self.CLIENTS, "groups": self.CLIENTS % 2}
        federation = self.build(tmp_path, **arrays)
        assert federation.num_samples_N.tolist() == [6] * 5 and federation.group_N.tolist() == [0, 1, 0, 1, 0]
        shared = self.build(tmp_path, "label", **arrays, x_test=self.X[:9], y_test=self.Y[:9])
        assert shared.view == "label" and shared.num_test_sets() == 1
        assert self.build(tmp_path, "holdout", **arrays, x_test=self.X[:9], y_test=self.Y[:9]).num_test_sets() == 0

    @pytest.mark.parametrize(
        "change, message",
        [
            ({"view": "cluster"}, "the test view cluster does not fit these arrays"),
            ({"shift": "rotated"}, "source arrays is taken as it is, so none, not rotated"),
            ({"clients": np.array([object()] * 40)}, "cannot be read as an .npz file of plain arrays"),
            ({"y": np.arange(39)}, "mine.npz: y has 39 entries, x has 40"),
            ({"group": np.zeros(40)}, r"mine.npz has an unknown array 'group' \(did you mean 'groups'\?\)"),
            ({"num_classes": 3}, "mine.npz: y: label 3 does not fit num_classes 3"),
            ({"vocabulary": "many"}, "mine.npz: vocabulary must be a whole number of at least 1, got 'many'"),
        ],
    )
    def test_wrong_arrays(self, tmp_path, change, message):
        with pytest.raises(DataError, match=message):
            self.build(tmp_path, **{"x": self.X, "y": self.Y, "clients": self.CLIENTS, **change})

    def test_numbers_in_the_file(self, tmp_path):
        arrays = {"x": self.X, "y": self.Y, "clients": self.CLIENTS}
        assert self.build(tmp_path, **arrays, num_classes=9).shape.num_classes == 9

    def test_missing_and_damaged_files(self, tmp_path):
        with pytest.raises(DataError, match="has no array 'clients'; it needs x, y and clients"):
            self.build(tmp_path, x=self.X, y=self.Y)
        with pytest.raises(DataError, match="source arrays needs data.root: an .npz file"):
            build(SOURCE_KINDS.of(source="arrays"), 0, tmp_path)
        np.save(tmp_path / "one.npy", self.X)
        np.savez(tmp_path / "client.npz", data=self.X)
        (tmp_path / "bad.npz").write_text("no archive")
        (tmp_path / "femnist.h5").write_bytes(b"\x89HDF\r\n\x1a\n")
        torch.save({"x": torch.ones(2)}, tmp_path / "0.pt")
        (tmp_path / "cut.npz").write_bytes((tmp_path / "mine.npz").read_bytes()[:500])
        for name, message in {
            "none.npz": "data.root: there is no file /.*none.npz; source arrays reads an .npz file",
            "one.npy": "one.npy holds a single array without a name, .* it needs x, y and clients",
            "client.npz": "client.npz has no array 'x'; it needs x, y and clients; it has data",
            "femnist.h5": "femnist.h5 is an HDF5 file; return its arrays from a function my.py:load",
            "0.pt": "0.pt is a file of torch.save; return its tensors from a function my.py:load",
            "bad.npz": "bad.npz cannot be read as an .npz file",
            "cut.npz": "cut.npz cannot be read as an .npz file",
        }.items():
            with pytest.raises(DataError, match=message):
                build(SOURCE_KINDS.of(source="arrays", root=str(tmp_path / name)), 0, tmp_path)
