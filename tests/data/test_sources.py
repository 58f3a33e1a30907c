import pickle

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from torchvision import datasets

from cfl_ray.config import DataConfig
from cfl_ray.core.errors import DataError
from cfl_ray.data.sources import locate


def read(name, pixels=True, **data):
    return locate(name, DataConfig(source=name, **data)).read(pixels, None)


def test_digits():
    images = read("digits")
    assert images.shape == (1, 8, 8) and images.scale == images.train_x.max() == 16 and images.num_classes == 10
    assert len(images.train_y) + len(images.test_y) == 1797
    share = np.bincount(images.test_y) / (np.bincount(images.test_y) + np.bincount(images.train_y))
    assert np.allclose(share, 0.2, atol=0.01)
    assert np.array_equal(images.test_x, read("digits").test_x)


@pytest.mark.parametrize("name, kind", [("mnist", "MNIST"), ("fashion_mnist", "FashionMNIST")])
def test_torchvision_sets_are_what_torchvision_reads(data_root, name, kind):
    images = read(name, root=str(data_root))
    expected = getattr(datasets, kind)(data_root / "torchvision", train=False)
    assert images.train_x.shape == (60_000, 1, 28, 28) and images.train_x.dtype == np.uint8
    assert np.array_equal(images.test_x[:, 0], expected.data) and np.array_equal(images.test_y, expected.targets)


def test_the_environment_names_the_root(data_root, monkeypatch):
    monkeypatch.setenv("CFL_RAY_DATA", str(data_root))
    assert locate("mnist", DataConfig()).files[0].is_relative_to(data_root)


def test_every_image_has_its_writer(data_root):
    images = read("mnist_by_writer", root=str(data_root))
    table = pq.read_table(data_root / "mnist_writers.parquet").filter(pa.compute.field("split") == "train").to_pylist()
    assert len(np.unique(images.client)) == 539 and np.bincount(images.group).tolist() == [30950, 29050]
    assert all(
        images.client[one["row"]] == one["writer"] and images.group[one["row"]] == (one["hsf"] == 4)
        for one in table[::977]
    )
    assert np.bincount(images.test_group).tolist() == [4999, 5001]


def test_missing_cifar10_names_all_ways_to_get_it(data_root):
    with pytest.raises(DataError) as error:
        read("cifar10", root=str(data_root))
    for part in (str(data_root), str(data_root / "torchvision"), "data.download: true", "data.source: images"):
        assert part in str(error.value)


@pytest.mark.parametrize(
    "name, advice",
    [
        ("mnist", "data.download"),
        ("mnist_by_writer", "data.download"),
        ("femnist", "flwrlabs/femnist"),
        ("femnist_leaf", "preprocess.sh"),
        ("images", "data.train_files"),
    ],
)
def test_missing_data_name_the_places_and_how_to_get_them(tmp_path, name, advice):
    with pytest.raises(DataError, match="not found") as error:
        locate(name, DataConfig(source=name, root=str(tmp_path)))
    assert str(tmp_path) in str(error.value) and advice in str(error.value)


def test_damaged_files_are_named(tmp_path):
    raw = tmp_path / "MNIST" / "raw"
    raw.mkdir(parents=True)
    for part in ("train", "t10k"):
        for kind in ("images-idx3", "labels-idx1"):
            (raw / f"{part}-{kind}-ubyte").write_bytes(b"\0\0\x08\x03\0\0")
    with pytest.raises(DataError, match=f"'mnist' could not be read from {tmp_path}"):
        read("mnist", root=str(tmp_path))


def test_globs_stay_below_the_root(tmp_path):
    with pytest.raises(DataError, match="must be a pattern below data.root"):
        locate("images", DataConfig(source="images", root=str(tmp_path), train_files="/etc/*.parquet"))


def test_cifar10_in_torchvisions_layout(tmp_path, monkeypatch):
    pixels = np.random.default_rng(0).integers(0, 256, (6, 3072), dtype=np.uint8)
    folder = tmp_path / "torchvision/cifar-10-batches-py"
    folder.mkdir(parents=True)
    for row, name in enumerate([*(f"data_batch_{part}" for part in range(1, 6)), "test_batch"]):
        (folder / name).write_bytes(pickle.dumps({"data": pixels[row : row + 1], "labels": [row]}))
    (folder / "batches.meta").write_bytes(pickle.dumps({"label_names": list("abcdefghij")}))
    # Torchvision expects the checksums of the real files.
    monkeypatch.setattr("torchvision.datasets.cifar.check_integrity", lambda path, md5: True)
    images = read("cifar10", root=str(tmp_path))
    assert np.array_equal(images.train_x, pixels[:5].reshape(5, 3, 32, 32))
    assert images.train_y.tolist() == [0, 1, 2, 3, 4]
    assert np.array_equal(images.test_x, pixels[5:].reshape(1, 3, 32, 32)) and images.test_y.tolist() == [5]


def test_download_happens_only_where_it_is_wanted_and_needed(tmp_path, monkeypatch):
    asked = []

    def fetch(root, train, download):
        asked.append((root, download))
        raise OSError("no route to host")

    monkeypatch.setattr(datasets, "MNIST", fetch)
    with pytest.raises(DataError, match="not found"):
        locate("mnist", DataConfig(root=str(tmp_path)))
    assert asked == []
    with pytest.raises(DataError, match=f"'mnist' could not be downloaded to {tmp_path}: no route to host"):
        locate("mnist", DataConfig(root=str(tmp_path), download=True))
    assert asked == [(str(tmp_path), True)]
