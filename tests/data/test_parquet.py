import io

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from cfl_ray.config import ColumnsConfig
from cfl_ray.config.data import SOURCE_KINDS
from cfl_ray.data import image_files
from cfl_ray.data.sources import locate
from cfl_ray.errors import DataError


def encoded(pixels, format="PNG"):
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, format)
    return file.getvalue()


PIXELS = np.random.default_rng(0).integers(0, 256, (6, 5, 7, 3), dtype=np.uint8)


def write(path, images=None, as_struct=True, **columns):
    """Writes a parquet file of these PNG bytes (None: a null); returns a list with its path."""
    images = [encoded(one) for one in PIXELS] if images is None else images
    image = (
        pa.array([None if one is None else {"bytes": one, "path": "x.png"} for one in images])
        if as_struct
        else pa.array(images, pa.binary())
    )
    columns = {"label": list(range(len(images))), **columns}
    pq.write_table(pa.table({"image": image, **columns}), path)
    return [path]


def read(files, test=(), pixels=True, num_classes=None, **columns):
    return image_files.read_parquet(files, list(test), ColumnsConfig(**columns), num_classes, pixels, None)


@pytest.mark.parametrize("as_struct", [True, False])
def test_pixels_are_channels_first_and_in_order(tmp_path, as_struct):
    images = read(
        write(tmp_path / "a.parquet", as_struct=as_struct) + write(tmp_path / "b.parquet", [encoded(PIXELS[3])])
    )
    assert np.array_equal(images.train_x, PIXELS[[0, 1, 2, 3, 4, 5, 3]].transpose(0, 3, 1, 2))
    assert images.train_y.tolist() == [0, 1, 2, 3, 4, 5, 0] and images.num_classes == 6 and images.test_x is None


def test_a_summary_decodes_only_the_first_image(tmp_path):
    files = write(tmp_path / "a.parquet", [encoded(PIXELS[0]), b"not decoded"])
    images = read(files, pixels=False)
    assert images.train_x.shape == (2, 3, 5, 7) and images.train_x.strides == (0, 0, 0, 0)


def test_a_file_without_a_row_may_come_first(tmp_path):
    files = write(tmp_path / "a.parquet", [], as_struct=False) + write(tmp_path / "b.parquet", as_struct=False)
    assert len(read(files).train_x) == 6


def test_clients_and_groups(tmp_path):
    train = write(tmp_path / "a.parquet", writer=list("aabbcc"), site=list("yyxxyy"))
    test = write(tmp_path / "t.parquet", site=list("xxxxxy"))
    images = read(train, test, client="writer", group="site")
    assert images.client.tolist() == list("aabbcc") and images.group.tolist() == [1, 1, 0, 0, 1, 1]
    assert images.test_group.tolist() == [0] * 5 + [1]


@pytest.mark.parametrize(
    "columns, message",
    [
        ({"label": [0, 1, 2, 3, 4, None]}, "column 'label' is empty .or NA or NaN. in row 5"),
        ({"label": [0.5] * 6}, "label column 'label' must hold integers or words, it holds double"),
        ({"label": [0, 1, 2, 3, 4, -1]}, "must lie in 0..32767, got -1..4"),
        ({"label": [0, 1, 2, 3, 4, 62]}, "column 'label': label 62 does not fit num_classes 62; labels run"),
    ],
)
def test_labels_that_do_not_fit(tmp_path, columns, message):
    with pytest.raises(DataError, match=message) as error:
        read(write(tmp_path / "a.parquet", **columns), num_classes=62)
    assert "a.parquet" in str(error.value)


@pytest.mark.parametrize(
    "bad, message",
    [
        (None, "row 1 has no image bytes"),
        (b"GIF89a", "row 1 is no image that Pillow .* can read, or damaged: "),
        (encoded(PIXELS[0])[:60], "row 1 is no image that Pillow .* can read, or damaged: .*truncated"),
        (encoded(PIXELS[0][:4]), "row 1 is 4x7, the first image is 5x7"),
    ],
)
def test_images_that_do_not_fit(tmp_path, bad, message):
    with pytest.raises(DataError, match=message):
        read(write(tmp_path / "a.parquet", [encoded(PIXELS[0]), bad]))


def test_columns_that_do_not_exist_or_are_of_another_kind(tmp_path):
    files = write(tmp_path / "a.parquet", weight=[0.5] * 6)
    with pytest.raises(DataError, match=r"no column 'labell' \(did you mean 'label'\?\); set data.columns"):
        read(files, label="labell")
    with pytest.raises(DataError, match="image column 'label' must be bytes or a struct"):
        read(files, image="label")
    with pytest.raises(DataError, match="client column 'weight' must hold integers or strings, it holds double"):
        read(files, client="weight")
    with pytest.raises(DataError, match="cannot be read as a parquet file"):
        (tmp_path / "b.parquet").write_text("no")
        read([tmp_path / "b.parquet"])


def test_femnist_as_hugging_face_has_it(data_root):
    images = locate("femnist", SOURCE_KINDS.of(source="femnist", root=str(data_root))).read(False, None)
    assert images.train_x.shape == (60_359, 1, 28, 28) and images.num_classes == 62 and images.train_y.max() == 61
    counts = np.unique(images.client, return_counts=True)[1]
    assert len(counts) == 396 and (counts >= 50).sum() == 376


@pytest.fixture
def slice_of(tmp_path):
    """Writes the first rows of a parquet file to a new file."""

    def write_slice(source, target, rows):
        path = tmp_path / target
        path.parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(pa.Table.from_batches([next(pq.ParquetFile(source).iter_batches(rows))]), path)

    return write_slice


def test_cifar10_as_hugging_face_has_it(data_root, slice_of, tmp_path):
    for part, rows in (("train", 300), ("test", 100)):
        slice_of(
            data_root / f"hf/cifar10/plain_text/{part}-00000-of-00001.parquet",
            f"plain_text/{part}-00000-of-00001.parquet",
            rows,
        )
    data = SOURCE_KINDS.of(
        source="images",
        root=str(tmp_path),
        test_files="plain_text/test-*.parquet",
        columns={"image": "img", "label": "label"},
    )
    images = locate("images", data).read(True, None)
    assert images.train_x.shape == (300, 3, 32, 32) and images.test_x.shape == (100, 3, 32, 32)
    assert images.num_classes == 10
    last = pq.read_table(tmp_path / "plain_text/train-00000-of-00001.parquet")["img"][299].as_py()["bytes"]
    assert np.array_equal(images.train_x[299].transpose(1, 2, 0), np.asarray(Image.open(io.BytesIO(last))))


def test_femnist_pixels_have_a_white_background(data_root, slice_of, tmp_path):
    slice_of(data_root / "hf/femnist/data/train-00000-of-00001.parquet", "data/train.parquet", 200)
    images = locate("femnist", SOURCE_KINDS.of(source="femnist", root=str(tmp_path))).read(True, None)
    assert images.shape == (1, 28, 28) and np.median(images.train_x) == 255


def test_training_and_test_files_are_kept_apart(tmp_path):
    for name in ("train-0.parquet", "test-0.parquet"):
        write(tmp_path / name)

    def find(**files):
        return locate("images", SOURCE_KINDS.of(source="images", root=str(tmp_path), **files))

    source = find(train_files="*.parquet", test_files="test-*.parquet")
    assert [file.name for file in source.files] == ["train-0.parquet", "test-0.parquet"]
    assert len(source.read(True, None).train_y) == 6
    with pytest.raises(DataError, match="name the same files"):
        find(train_files="*.parquet", test_files="*.parquet")
    with pytest.raises(DataError, match="no file matches 'eval-\\*'"):
        find(test_files="eval-*")


def test_a_folder_whose_files_have_other_names_says_which_it_has(tmp_path):
    """As the Hub has them: CONFIG/SPLIT/0000.parquet, or CONFIG/train-00000-of-00001.parquet."""
    (tmp_path / "default" / "train").mkdir(parents=True)
    write(tmp_path / "default" / "train" / "0000.parquet")
    with pytest.raises(DataError, match=rf"in {tmp_path}, which has default/train/0000.parquet; to get it"):
        locate("images", SOURCE_KINDS.of(source="images", root=str(tmp_path)))
