import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from torchvision.datasets import MNIST

from cfl_ray.config import Data
from cfl_ray.core.errors import DataError
from cfl_ray.data import build, describe
from cfl_ray.data.synthetic import SyntheticFederation


def stamps(folder):
    return {path: path.stat().st_mtime_ns for path in folder.rglob("*")}


def test_shards_are_reused_and_every_change_makes_others(tmp_path):
    data = Data(source="digits")
    first = build(data, 0, tmp_path)
    before = stamps(tmp_path)
    assert build(data, 0, tmp_path).uri == first.uri and stamps(tmp_path) == before
    changed = [build(data, 1, tmp_path), build(Data(source="digits", shift={"kind": "shifted"}), 0, tmp_path),
               build(Data(source="digits", normalize=[[0.5], [0.5]]), 0, tmp_path)]
    assert len({federation.uri for federation in (first, *changed)}) == 4


def test_shards_can_be_named_directly_and_need_no_raw_data(tmp_path, data_root):
    options = {"source": "mnist", "partition": {"clients": 20, "samples": 10}, "test": {"max_images": 10}}
    made = build(Data(root=str(data_root), **options), 0, tmp_path)
    again = build(Data(root="/nowhere", shards=made.uri, **options), 0, "unused")
    assert torch.equal(again.train(19)[0], made.train(19)[0])
    with pytest.raises(DataError, match="holds another federation: its seed is 0, wanted is 1; name another folder in data.shards"):
        build(Data(root="/nowhere", shards=made.uri, **options), 1, "unused")


def test_raw_data_that_changed_are_noticed(tmp_path, data_root):
    def write(rows):
        batch = next(pq.ParquetFile(data_root / "hf/femnist/data/train-00000-of-00001.parquet").iter_batches(rows))
        pq.write_table(pa.Table.from_batches([batch]), tmp_path / "train.parquet")
    data = Data(source="femnist", root=str(tmp_path), partition={"kind": "writer", "clients": None, "min_samples": 2}, test={"view": "holdout"})
    write(300)
    build(data, 0, tmp_path / "shards")
    write(400)
    with pytest.raises(DataError, match="holds another federation: its files .* the raw data changed: delete the folder"):
        build(data, 0, tmp_path / "shards")


def test_damaged_shards_are_found_before_the_run(tmp_path):
    federation = build(Data(source="digits"), 0, tmp_path)
    path = next(tmp_path.rglob("test-00000.arrow"))
    path.write_bytes(path.read_bytes()[:-8] + b"12345678")
    with pytest.raises(DataError, match="test-00000.arrow is damaged: expected sha256"):
        build(Data(source="digits"), 0, tmp_path)
    assert federation.num_clients == 40


@pytest.mark.parametrize("options", [
    {"source": "digits"},
    {"source": "digits", "shift": {"kind": "pathological"}, "test": {"view": "label"}},
    {"source": "digits", "shift": {"kind": "rotated"}, "partition": {"kind": "dirichlet", "clients": 12, "alpha": 1.0}},
    {"source": "digits", "test": {"view": "holdout"}, "partition": {"clients": 7, "samples": 20}},
    {"source": "digits", "test": {"view": "holdout", "pool": True}, "partition": {"clients": 9, "sizes": list(range(20, 29)), "cut": [{"keep": 0.5, "clients": 2}]}},
    {"source": "digits", "partition": {"kind": "dirichlet", "clients": 12, "groups": 3, "alpha": 10}},
    {"source": "synthetic", "partition": {"clients": 1000}},
])
def test_the_summary_agrees_with_what_is_built(tmp_path, options):
    data = Data(**options)
    summary, federation = describe(data, 0), build(data, 0, tmp_path)
    sizes = federation.size_N
    assert summary.clients == federation.num_clients and summary.samples == (sizes.min(), np.median(sizes), sizes.max())
    assert summary.groups == (0 if federation.group_N is None else federation.group_N.max() + 1)
    assert (summary.input, summary.num_classes, summary.test_sets) == (*vars(federation.shape).values(), federation.num_test_sets())


def test_rotated_mnist_of_the_stocfl_paper(tmp_path, data_root):
    data = Data(source="mnist", root=str(data_root), shift={"kind": "rotated"}, partition={"clients": 4800})
    assert describe(data, 0).samples == (50, 50.0, 50) and describe(data, 0).bytes == 280_000 * 786
    federation = build(data, 0, tmp_path)
    assert np.bincount(federation.group_N).tolist() == [1200] * 4 and federation.size_N.sum() == 240_000
    upright, turned = federation.test_set(0), federation.test_set(1)
    assert torch.equal(torch.rot90(upright[0], 1, (2, 3)), turned[0]) and torch.equal(upright[1], turned[1])


def test_hybrid_of_mnist_and_fashion_mnist(tmp_path, data_root):
    data = Data(source="mnist", root=str(data_root), shift={"kind": "hybrid"}, partition={"clients": 4, "samples": 50}, test={"max_images": 200})
    federation = build(data, 0, tmp_path)
    assert federation.group_N.tolist() == [0, 0, 1, 1]
    assert federation.test_set(1)[0].mean() > 1.5 * federation.test_set(0)[0].mean()  # clothes cover more of the image than digits


def test_femnist_by_writer(tmp_path, data_root):
    data = Data(source="femnist", root=str(data_root), partition={"kind": "writer", "clients": 20, "min_samples": 50}, test={"view": "holdout"})
    summary, federation = describe(data, 0), build(data, 0, tmp_path)
    assert summary.clients == federation.num_clients == 20 and federation.shape.input == (1, 28, 28) and federation.shape.num_classes == 62
    rows = pq.read_table(data_root / "hf/femnist/data/train-00000-of-00001.parquet", columns=["writer_id", "character"])
    writer = federation.client_name(3)
    expected = rows.filter(pa.compute.equal(rows["writer_id"], writer))["character"].to_pylist()
    assert sorted(torch.cat([federation.train(3)[1], federation.holdout(3)[1]]).tolist()) == sorted(expected)


def test_pooled_images_are_the_official_ones(tmp_path, data_root):
    """Each of 7 clients gets 10,000 of the 70,000 images; together they are both parts of the data set."""
    data = Data(source="mnist", root=str(data_root), partition={"clients": 7}, test={"view": "holdout", "pool": True})
    federation = build(data, 0, tmp_path)
    assert federation.size_N.tolist() == [8000] * 7 and federation.num_test_sets() == 0
    parts = [part for client in range(7) for part in (federation.train(client), federation.holdout(client))]
    official = [MNIST(str(data_root / "torchvision"), train=train) for train in (True, False)]
    assert torch.equal(torch.cat([y for _, y in parts]).bincount(), torch.cat([part.targets for part in official]).bincount())
    ink = sum(part.data.sum(dtype=torch.float64) for part in official) / 255
    assert float(sum(x.sum(dtype=torch.float64) for x, _ in parts)) == pytest.approx(float(ink), rel=1e-6)
    assert describe(data, 0).bytes == 70_000 * 786


def test_pooling_reads_no_pixels_where_only_sizes_are_wanted(real):
    pooled = real("images").pooled()
    assert pooled.train_x.shape == (60_000, 3, 32, 32) and not any(pooled.train_x.strides) and len(pooled.train_y) == 60_000


def test_synthetic_is_never_written(tmp_path):
    federation = build(Data(source="synthetic", partition={"clients": 12}, synthetic_shape=[3, 4, 4]), 5, tmp_path)
    assert isinstance(federation, SyntheticFederation) and federation.shape.input == (3, 4, 4) and list(tmp_path.iterdir()) == []
    with pytest.raises(DataError, match="so the view is cluster, not label"):
        build(Data(source="synthetic", test={"view": "label"}), 0, tmp_path)


def test_a_second_data_set_must_have_images():
    with pytest.raises(DataError, match="data set 'synthetic' has no images to divide"):
        describe(Data(source="digits", shift={"kind": "hybrid", "other": "synthetic"}), 0)


class TestArrays:
    X, Y, CLIENTS = np.arange(240, dtype=np.float32).reshape(40, 6), np.arange(40) % 4, np.arange(40) % 5

    def build(self, tmp_path, view="holdout", shift="none", **arrays):
        np.savez(tmp_path / "mine.npz", **arrays)
        return build(Data(source="arrays", root=str(tmp_path / "mine.npz"), test={"view": view}, shift={"kind": shift}), 0, tmp_path)

    def test_from_a_file(self, tmp_path):
        arrays = {"x": self.X, "y": self.Y, "clients": self.CLIENTS, "groups": self.CLIENTS % 2}
        federation = self.build(tmp_path, **arrays)
        assert federation.size_N.tolist() == [6] * 5 and federation.group_N.tolist() == [0, 1, 0, 1, 0]
        shared = self.build(tmp_path, "label", **arrays, x_test=self.X[:9], y_test=self.Y[:9])
        assert shared.view == "label" and shared.num_test_sets() == 1
        assert self.build(tmp_path, "holdout", **arrays, x_test=self.X[:9], y_test=self.Y[:9]).num_test_sets() == 0

    @pytest.mark.parametrize("change, message", [
        ({"view": "cluster"}, "the test view cluster does not fit these arrays"),
        ({"shift": "rotated"}, "source arrays is taken as it is, so none, not rotated"),
        ({"clients": np.array([object()] * 40)}, "cannot be read as an .npz file of plain arrays"),
    ])
    def test_what_does_not_fit(self, tmp_path, change, message):
        with pytest.raises(DataError, match=message):
            self.build(tmp_path, **{"x": self.X, "y": self.Y, "clients": self.CLIENTS, **change})

    def test_files_that_are_not_there_or_not_whole(self, tmp_path):
        with pytest.raises(DataError, match="has no array 'clients'; it needs x, y and clients"):
            self.build(tmp_path, x=self.X, y=self.Y)
        with pytest.raises(DataError, match="source arrays needs data.root: an .npz file"):
            build(Data(source="arrays", root=str(tmp_path / "none.npz")), 0, tmp_path)
        (tmp_path / "bad.npz").write_text("no archive")
        with pytest.raises(DataError, match="cannot be read as an .npz file"):
            build(Data(source="arrays", root=str(tmp_path / "bad.npz")), 0, tmp_path)
