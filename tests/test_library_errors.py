"""Errors of libraries on a user's input, of any class, reach the user as errors that name the input and a remedy."""

import json

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image

from cfl_ray import Experiment, federation_from_arrays, federation_from_dataset
from cfl_ray.data import build
from cfl_ray.engine.failure import naming_client
from cfl_ray.errors import ConfigError, DataError, RunError
from cfl_ray.models import read_weights

ERRORS = [
    TypeError("of a library"),
    RuntimeError("of a library"),
    MemoryError(),
    pa.ArrowTypeError("of a library"),
    UnicodeDecodeError("utf-8", b"\xff", 0, 1, "of a library"),
    OSError("of a library"),
]
errors = pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)


def raising(error):
    """A function that raises this error with any arguments."""

    def function(*arguments, **options):
        raise error

    return function


def encoded(tmp_path):
    """An image file's content."""
    Image.fromarray(np.arange(64, dtype=np.uint8).reshape(8, 8)).save(tmp_path / "image.png")
    return (tmp_path / "image.png").read_bytes()


def image_folder(root):
    content = encoded(root)
    rows = ["file,client"]
    for name in (f"{kind}/{i}.png" for kind in ("cat", "dog") for i in range(4)):
        (root / "raw" / name).parent.mkdir(parents=True, exist_ok=True)
        (root / "raw" / name).write_bytes(content)
        rows.append(f"{name},ann")
    (root / "raw/clients.csv").write_text("\n".join(rows))
    return {"source": "image_folder", "root": str(root / "raw")}


def parquet(root):
    table = pa.table({"image": [encoded(root)] * 8, "label": [0, 1] * 4})
    pq.write_table(table, root / "train.parquet")
    return {"source": "images", "root": str(root / "train.parquet"), "columns": {"image": "image", "label": "label"}}


def leaf(root):
    (root / "train").mkdir()
    user = {"x": [[0.0] * 784] * 4, "y": [0, 1, 2, 3]}
    content = {"users": ["ann"], "num_samples": [4], "user_data": {"ann": user}}
    (root / "train/a.json").write_text(json.dumps(content))
    return {"source": "femnist_leaf", "root": str(root)}


def arrays(root):
    np.savez(root / "a.npz", x=np.zeros((8, 3), np.float32), y=np.arange(8) % 2, clients=np.arange(8) // 4)
    return {"source": "arrays", "root": str(root / "a.npz")}


def medmnist(root):
    part = {"images": np.zeros((8, 28, 28), np.uint8), "labels": np.arange(8)[:, None] % 2}
    np.savez(root / "pathmnist.npz", **{f"{p}_{kind}": x for p in ("train", "test") for kind, x in part.items()})
    return {"source": "medmnist", "root": str(root)}


def torchvision(root):
    (root / "MNIST/raw").mkdir(parents=True)
    (root / "MNIST/raw/train-images-idx3-ubyte").write_bytes(b"")
    return {"source": "mnist", "root": str(root)}


@errors
@pytest.mark.parametrize(
    ("source", "library", "names"),
    [
        (image_folder, "PIL.Image.open", "0.png"),
        (image_folder, "PIL.Image.Image.convert", "0.png"),
        (image_folder, "pyarrow.csv.read_csv", "clients.csv"),
        (parquet, "pyarrow.parquet.ParquetFile", "train.parquet"),
        (parquet, "pyarrow.parquet.ParquetFile.read", "train.parquet"),
        (parquet, "pyarrow.parquet.ParquetFile.iter_batches", "train.parquet"),
        (parquet, "PIL.Image.open", "train.parquet: the image in row 0"),
        (arrays, "numpy.load", "a.npz"),
        (medmnist, "numpy.load", "pathmnist.npz"),
        (torchvision, "torchvision.datasets.MNIST", "'mnist'"),
    ],
)
def test_reading(tmp_path, monkeypatch, source, library, names, error):
    data = Experiment(data=source(tmp_path) | {"partition": {"kind": "iid", "clients": 1}}).data
    monkeypatch.setattr(library, raising(error))
    with pytest.raises(DataError, match=names):
        build(data, 0, tmp_path / "shards")


@errors
def test_samples_of_a_dataset(error):
    class Dataset:
        __getitem__ = raising(error)

        def __len__(self):
            return 4

    with pytest.raises(DataError, match=r"dataset\[0\] cannot be read as a sample: .*; correct the dataset"):
        federation_from_dataset(Dataset(), [0, 0, 1, 1])


@errors
def test_weights(tmp_path, monkeypatch, error):
    (tmp_path / "w.safetensors").write_bytes(b"")
    monkeypatch.setattr("safetensors.torch.load_file", raising(error))
    with pytest.raises(ConfigError, match=r"w.safetensors cannot be read .*save_file"):
        read_weights(tmp_path / "w.safetensors")


@errors
def test_work_on_a_client(error):
    with pytest.raises(RunError, match="client 3 failed while training: .+") as found, naming_client(3, "training"):
        raise error
    assert (str(error) or type(error).__name__) in str(found.value)


@pytest.mark.parametrize(
    ("x", "message"),
    [
        (torch.zeros(8, 3).bfloat16(), "BFloat16; convert it"),
        (torch.zeros(8, 3).to_sparse(), "Sparse.*; convert it"),
        (np.ma.masked_array(np.zeros((8, 3)), np.eye(8, 3)), "3 masked values; fill them"),
    ],
)
def test_arrays_that_numpy_cannot_take_over(x, message):
    with pytest.raises(DataError, match=f"x .*{message}"):
        federation_from_arrays(x, np.arange(8) % 2, np.arange(8) // 4)
