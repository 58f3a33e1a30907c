import io
import pickle
import socket
import threading
from contextlib import suppress

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import scipy.io
import sklearn.datasets
from PIL import Image

from cfl_ray.config.data import SOURCE_KINDS
from cfl_ray.data import sources
from cfl_ray.data.sources import locate
from cfl_ray.errors import DataError


def read(name, pixels=True, **data):
    return locate(name, SOURCE_KINDS.of(source=name, **data)).read(pixels, None)


def test_digits_are_those_of_scikit_learn(monkeypatch):
    """Read from its file, since importing it takes a second; from its function where the file is not there."""
    loaded = sklearn.datasets.load_digits()
    for _ in range(2):
        table = sources._digits_table()
        assert np.array_equal(table[:, :-1].reshape(loaded.images.shape), loaded.images)
        assert np.array_equal(table[:, -1], loaded.target)
        monkeypatch.setattr(sources, "find_spec", lambda name: None)


def test_digits():
    images = read("digits")
    assert images.shape == (1, 8, 8) and images.scale == images.train_x.max() == 16 and images.num_classes == 10
    assert len(images.train_y) + len(images.test_y) == 1797
    share = np.bincount(images.test_y) / (np.bincount(images.test_y) + np.bincount(images.train_y))
    assert np.allclose(share, 0.2, atol=0.01)
    assert np.array_equal(images.test_x, read("digits").test_x)


@pytest.mark.parametrize("name, kind", [("mnist", "MNIST"), ("fashion_mnist", "FashionMNIST")])
def test_torchvision_sets_are_what_torchvision_reads(data_root, name, kind):
    from torchvision import datasets  # here, because it takes two seconds

    images = read(name, root=str(data_root))
    expected = getattr(datasets, kind)(data_root / "torchvision", train=False)
    assert images.train_x.shape == (60_000, 1, 28, 28) and images.train_x.dtype == np.uint8
    assert np.array_equal(images.test_x[:, 0], expected.data) and np.array_equal(images.test_y, expected.targets)


def test_the_environment_names_the_root(data_root, monkeypatch):
    monkeypatch.setenv("CFL_RAY_DATA", str(data_root))
    assert locate("mnist", SOURCE_KINDS.of()).files[0].is_relative_to(data_root)


def test_every_image_has_its_writer(data_root):
    images = read("mnist_by_writer", root=str(data_root))
    table = pq.read_table(data_root / "mnist_writers.parquet").filter(pa.compute.field("split") == "train").to_pylist()
    assert len(np.unique(images.client)) == 539 and np.bincount(images.group).tolist() == [30950, 29050]
    assert all(
        images.client[one["row"]] == one["writer"] and images.group[one["row"]] == (one["hsf"] == 4)
        for one in table[::977]
    )
    assert np.bincount(images.test_group).tolist() == [4999, 5001]


@pytest.mark.parametrize(
    "name, advice",
    [
        ("mnist", ["data.download"]),
        ("mnist_by_writer", ["data.download"]),
        ("femnist", ["flwrlabs/femnist"]),
        ("femnist_leaf", ["preprocess.sh"]),
        ("images", ["data.train_files"]),
        ("medmnist", ["pathmnist.npz"]),
        ("cifar10", ["torchvision", "hf/cifar10", "data.download: true", "uoft-cs/cifar10"]),
        ("cifar100", ["torchvision", "hf/cifar100", "data.download: true", "uoft-cs/cifar100"]),
        ("svhn", ["torchvision", "hf/svhn", "data.download: true", "ufldl-stanford/svhn"]),
    ],
)
def test_missing_data_name_the_places_and_how_to_get_them(tmp_path, name, advice):
    with pytest.raises(DataError, match="not found") as error:
        locate(name, SOURCE_KINDS.of(source=name, root=str(tmp_path)))
    text = str(error.value)
    assert all(part in text for part in (str(tmp_path), *advice)) and "\n" not in text


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
        locate("images", SOURCE_KINDS.of(source="images", root=str(tmp_path), train_files="/etc/*.parquet"))


def test_a_file_in_place_of_a_folder(tmp_path):
    for source, name, advice in (
        ("image_folder", "clients.tar", "unpack it, and name the folder with its content"),
        ("image_folder", "train.tar.gz", "unpack it, and name the folder with its content"),
        ("hf_disk", "data-00000-of-00001.arrow", f"write root: {tmp_path}"),
        ("medmnist", "pathmnist.npz", f"write root: {tmp_path} and train_files: pathmnist.npz"),
    ):
        (tmp_path / name).touch()
        with pytest.raises(DataError) as error:
            locate(source, SOURCE_KINDS.of(source=source, root=str(tmp_path / name)))
        assert str(error.value).endswith(f"is a file, expected a folder; {advice}")


@pytest.mark.parametrize(
    "name, folder, train, test, classes, kind",
    [
        ("cifar10", "torchvision/cifar-10-batches-py", [f"data_batch_{n}" for n in range(1, 6)], "test_batch", 10, ""),
        ("cifar100", "cifar-100-python", ["train"], "test", 100, "fine_"),
    ],
)
def test_cifar_in_torchvisions_layout(tmp_path, monkeypatch, name, folder, train, test, classes, kind):
    pixels = np.random.default_rng(0).integers(0, 256, (6, 3072), dtype=np.uint8)
    (tmp_path / folder).mkdir(parents=True)
    for file, rows in zip([*train, test], [*np.split(np.arange(5), len(train)), np.array([5])]):
        content = {"data": pixels[rows], f"{kind}labels": (classes - 1 - rows).tolist(), "coarse_labels": [0]}
        (tmp_path / folder / file).write_bytes(pickle.dumps(content))
    meta = tmp_path / folder / ("meta" if kind else "batches.meta")
    meta.write_bytes(pickle.dumps({f"{kind}label_names": [str(label) for label in range(classes)]}))
    # torchvision expects the checksums of the real files
    monkeypatch.setattr("torchvision.datasets.cifar.check_integrity", lambda path, md5: True)
    images = read(name, root=str(tmp_path))
    assert np.array_equal(images.train_x, pixels[:5].reshape(5, 3, 32, 32)) and images.num_classes == classes
    assert np.array_equal(images.test_x, pixels[5:].reshape(1, 3, 32, 32))
    assert [*images.train_y, *images.test_y] == [classes - 1 - row for row in range(6)]


def test_svhn_in_torchvisions_layout(tmp_path, monkeypatch):
    """Its files hold pixels as (height, width, channel, n), and label 10 for the digit 0."""
    x = np.random.default_rng(0).integers(0, 256, (32, 32, 3, 5), dtype=np.uint8)
    for name, rows in (("train", [0, 1, 2]), ("test", [3, 4])):
        labels = np.array([10, 1, 9, 2, 10], np.uint8)[rows, None]
        scipy.io.savemat(tmp_path / f"{name}_32x32.mat", {"X": x[..., rows], "y": labels})
    monkeypatch.setattr("torchvision.datasets.svhn.check_integrity", lambda path, md5: True)
    images = read("svhn", root=str(tmp_path))
    assert np.array_equal(images.train_x, x[..., :3].transpose(3, 2, 0, 1)) and images.num_classes == 10
    assert images.train_y.tolist() == [0, 1, 9] and images.test_y.tolist() == [2, 0]


def png(pixels):
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return {"bytes": file.getvalue(), "path": None}


@pytest.mark.parametrize(
    "name, folder, image, label, classes",
    [
        ("cifar10", "plain_text", "img", "label", 10),
        ("cifar100", "cifar100", "img", "fine_label", 100),
        ("svhn", "cropped_digits", "image", "label", 10),
    ],
)
@pytest.mark.parametrize("place", ["", "hf"])
def test_sets_in_the_layout_of_hugging_face(tmp_path, name, folder, image, label, classes, place):
    """Below the root, or the root itself."""
    x = np.random.default_rng(0).integers(0, 256, (5, 32, 32, 3), dtype=np.uint8)
    files = tmp_path / (f"hf/{name}" if place else "") / folder
    files.mkdir(parents=True)
    for part, rows in (
        ("train-00000-of-00002", [0, 1]),
        ("train-00001-of-00002", [2]),
        ("test-00000-of-00001", [3, 4]),
    ):
        table = {image: [png(x[row]) for row in rows], label: rows, "coarse_label": [0] * len(rows)}
        pq.write_table(pa.table(table), files / f"{part}.parquet")
    images = read(name, root=str(tmp_path))
    assert np.array_equal(images.train_x, x[:3].transpose(0, 3, 1, 2)) and images.num_classes == classes
    assert np.array_equal(images.test_x, x[3:].transpose(0, 3, 1, 2))
    assert images.train_y.tolist() == [0, 1, 2] and images.test_y.tolist() == [3, 4]
    (files / "test-00000-of-00001.parquet").unlink()
    with pytest.raises(DataError, match=r"has train-00000-of-00002.parquet, but no test-\*.parquet"):
        locate(name, SOURCE_KINDS.of(source=name, root=str(tmp_path)))


def test_torchvisions_files_go_before_those_of_hugging_face(tmp_path):
    for file in ("torchvision/cifar-10-batches-py/test_batch", "hf/cifar10/plain_text/train-00000-of-00001.parquet"):
        (tmp_path / file).parent.mkdir(parents=True)
        (tmp_path / file).touch()
    (found,) = locate("cifar10", SOURCE_KINDS.of(root=str(tmp_path))).files
    assert found.name == "test_batch"


def test_the_real_cifar10(data_root):
    images = read("cifar10", pixels=False, root=str(data_root))
    assert images.shape == (3, 32, 32) and np.bincount(images.train_y).tolist() == [5000] * 10
    assert np.bincount(images.test_y).tolist() == [1000] * 10


class TestMedmnist:
    def write(self, folder, name="pathmnist", shape=(28, 28, 3), labels=1, **changed):
        draw = np.random.default_rng(0)
        arrays = {}
        for part, n in (("train", 6), ("val", 2), ("test", 3)):
            arrays[f"{part}_images"] = draw.integers(0, 256, (n, *shape), dtype=np.uint8)
            arrays[f"{part}_labels"] = np.arange(n * labels).reshape(n, labels)
        arrays = {key: value for key, value in (arrays | changed).items() if value is not None}
        np.savez(folder / f"{name}.npz", **arrays)
        return arrays

    def test_colour_and_grey(self, tmp_path):
        colour = self.write(tmp_path)
        images = read("medmnist", root=str(tmp_path))
        assert np.array_equal(images.train_x, colour["train_images"].transpose(0, 3, 1, 2))
        assert images.train_y.tolist() == [0, 1, 2, 3, 4, 5] and images.test_y.tolist() == [0, 1, 2]
        assert images.num_classes == 6 and len(images.train_y) == 6  # the validation part goes unused
        grey = self.write(tmp_path, "breastmnist", shape=(28, 28))
        images = read("medmnist", root=str(tmp_path), train_files="breastmnist.npz")
        assert np.array_equal(images.test_x[:, 0], grey["test_images"]) and images.shape == (1, 28, 28)

    def test_several_files_need_a_name(self, tmp_path):
        self.write(tmp_path), self.write(tmp_path, "bloodmnist")
        with pytest.raises(DataError, match="holds 2 data sets, name one of: bloodmnist.npz, pathmnist.npz"):
            locate("medmnist", SOURCE_KINDS.of(source="medmnist", root=str(tmp_path)))

    @pytest.mark.parametrize(
        "changed, message",
        [
            ({"labels": 14}, "14 labels per image, expected 1"),
            ({"shape": (28, 28, 28)}, "3-D data sets of medmnist are not supported"),
            ({"test_labels": None}, "has no array 'test_labels'"),
            ({"test_labels": np.zeros((4, 1), int)}, "has 3 test_images and 4 test_labels"),
        ],
    )
    def test_what_is_not_one_label_for_each_image_is_named(self, tmp_path, changed, message):
        self.write(tmp_path, **changed)
        with pytest.raises(DataError, match=message):
            read("medmnist", root=str(tmp_path))


@pytest.mark.parametrize("sent", [b"", b"HTTP/1.0 200 OK\r\nContent-Length: 1000\r\n\r\nbegun"])
def test_a_download_from_a_server_that_hangs_ends(tmp_path, monkeypatch, sent):
    """A server of this machine that accepts a connection, sends nothing or a beginning, and then hangs."""
    monkeypatch.setattr(sources, "_SILENCE_SECONDS", 0.3)
    monkeypatch.setenv("no_proxy", "*")
    with socket.create_server(("127.0.0.1", 0)) as server:
        monkeypatch.setattr("torchvision.datasets.MNIST.mirrors", [f"http://127.0.0.1:{server.getsockname()[1]}/"])
        connections = []

        def accept():
            with suppress(OSError):  # at the end
                while True:
                    connections.append(server.accept()[0])
                    connections[-1].sendall(sent)

        threading.Thread(target=accept, daemon=True).start()
        with pytest.raises(
            DataError, match=f"'mnist' could not be downloaded to {tmp_path}: .*nothing for 0.3 s.*MNIST"
        ):
            locate("mnist", SOURCE_KINDS.of(root=str(tmp_path), download=True))
    assert connections and socket.getdefaulttimeout() is None


def test_download_happens_only_where_it_is_wanted_and_needed(tmp_path, monkeypatch):
    asked = []

    def fetch(root, train, download):
        asked.append((root, download))
        raise OSError("no route to host")

    monkeypatch.setattr("torchvision.datasets.MNIST", fetch)
    with pytest.raises(DataError, match="not found"):
        locate("mnist", SOURCE_KINDS.of(root=str(tmp_path)))
    assert asked == []
    with pytest.raises(DataError, match=f"'mnist' could not be downloaded to {tmp_path}: no route to host"):
        locate("mnist", SOURCE_KINDS.of(root=str(tmp_path), download=True))
    assert asked == [(str(tmp_path), True)]
