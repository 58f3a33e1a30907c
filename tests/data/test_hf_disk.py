"""Data sets in the layout of `Dataset.save_to_disk`, without the package datasets, and with it if it is here."""

import io
import json
from decimal import Decimal

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from cfl_ray.config.data import SOURCE_KINDS
from cfl_ray.data import build
from cfl_ray.data.sources import locate
from cfl_ray.errors import DataError

CLASSES = {"names": ["plum", "pear", "fig"], "_type": "ClassLabel"}


def stream(file, table):
    with pa.OSFile(str(file), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)


def save(folder, columns, shards=1, label=CLASSES, state=None, features=None):
    """As Dataset.save_to_disk of datasets 2.14 to 5.2, which leaves older files in the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    table = columns if isinstance(columns, pa.Table) else pa.table(columns)
    features = {"label": label} | (features or {})
    table = table.replace_schema_metadata({"huggingface": json.dumps({"info": {"features": features}})})
    names = [f"data-{shard:05d}-of-{shards:05d}.arrow" for shard in range(shards)]
    for name, rows in zip(names, np.array_split(np.arange(len(table)), shards), strict=True):
        stream(folder / name, table.slice(rows[0], len(rows)))
    description = {
        "_data_files": [{"filename": name} for name in names],
        "_fingerprint": "736845a5d50eeca9",
        "_format_columns": None,
        "_format_kwargs": {},
        "_format_type": None,
        "_output_all_columns": False,
        "_split": None,
    }
    (folder / "state.json").write_text(json.dumps(description | (state or {})))
    (folder / "dataset_info.json").write_text(json.dumps({"citation": "", "features": features}))


def section(root, column="x", label="label", **data):
    return SOURCE_KINDS.of(source="hf_disk", root=str(root), columns={"image": column, "label": label}, **data)


def read(root, column="x", targets="class", **data):
    return locate("hf_disk", section(root, column, **data), targets).read(True, None)


ROWS = {"x": [[float(row), 1.0] for row in range(6)], "label": [0, 1, 0, 1, 0, 1]}


class TestFiles:
    def test_those_of_the_state_are_read(self, tmp_path):
        save(tmp_path, {"x": [[9.0, 9.0]] * 6, "label": [0] * 6}, shards=3)  # an earlier data set
        save(tmp_path, ROWS, shards=2)
        stream(tmp_path / "cache-0123456789abcdef.arrow", pa.table(ROWS))  # of map
        stream(
            tmp_path / "cache-fedcba9876543210.arrow", pa.table({"indices": pa.array([1], pa.uint64())})
        )  # of filter
        images = read(tmp_path)
        assert images.train_x.tolist() == ROWS["x"] and images.train_y.tolist() == ROWS["label"]

    def test_their_order_is_that_of_the_state(self, tmp_path):
        save(tmp_path, ROWS, shards=2)
        state = json.loads((tmp_path / "state.json").read_text())
        state["_data_files"].reverse()
        (tmp_path / "state.json").write_text(json.dumps(state))
        assert read(tmp_path).train_x[:, 0].tolist() == [3, 4, 5, 0, 1, 2]

    def test_columns_that_are_not_read_are_named(self, tmp_path):
        def told(**columns):
            section = SOURCE_KINDS.of(source="hf_disk", root=str(tmp_path), columns={"image": "x", **columns})
            return [line for line in locate("hf_disk", section).read(True, None).warnings if "not read" in line]

        save(tmp_path, ROWS)
        assert not told()
        save(tmp_path, ROWS | {"partition_id": [0, 0, 0, 1, 1, 1]})
        (line,) = told()
        assert "the columns partition_id are not read; if one has the client of each sample, name it in" in line
        assert not told(client="partition_id")

    def test_a_format_is_a_view(self, tmp_path):
        save(tmp_path, ROWS, state={"_format_type": "torch", "_format_columns": ["x"]})
        assert read(tmp_path).train_y.tolist() == ROWS["label"]

    def test_without_a_state_only_if_they_are_one_data_set(self, tmp_path):
        save(tmp_path, ROWS, shards=2)
        (tmp_path / "state.json").unlink()
        assert len(read(tmp_path).train_x) == 6
        stream(tmp_path / "cache-0123456789abcdef.arrow", pa.table(ROWS))
        with pytest.raises(DataError, match="3 .arrow files, but no state.json .*: cache-0123456789abcdef.arrow, "):
            read(tmp_path)

    def test_the_features_of_a_file_stand_for_a_missing_description(self, tmp_path):
        save(tmp_path, ROWS)
        (tmp_path / "dataset_info.json").unlink()
        assert read(tmp_path).class_names == ("plum", "pear", "fig")

    @pytest.mark.parametrize(
        "file, content, message",
        [
            ("state.json", "{", "state.json is not readable as JSON"),
            ("state.json", "[]", "state.json holds list, expected a mapping"),
            ("state.json", "{}", "state.json has no list _data_files"),
            ("state.json", '{"_data_files": []}', "holds no row"),
            ("state.json", '{"_data_files": [{"filename": "b.arrow"}]}', "names b.arrow, which is missing"),
            (
                "state.json",
                '{"_data_files": [], "_indices_data_files": [{"filename": "i.arrow"}]}',
                "saved with a file of indices by an early version of datasets",
            ),
            ("data-00000-of-00001.arrow", "damaged", "is not a readable Arrow stream file"),
        ],
    )
    def test_that_are_damaged(self, tmp_path, file, content, message):
        save(tmp_path, ROWS)
        (tmp_path / file).write_text(content)
        with pytest.raises(DataError, match=message):
            read(tmp_path)

    def test_the_parts_of_a_dict_are_named(self, tmp_path):
        for part in ("train", "validation"):
            save(tmp_path / part, ROWS)
        (tmp_path / "dataset_dict.json").write_text('{"splits": ["train", "validation"]}')
        with pytest.raises(DataError, match="a DatasetDict with the parts train, validation; .*train_files: train"):
            read(tmp_path)
        images = read(tmp_path, train_files="train", test_files="validation")
        assert len(images.train_y) == len(images.test_y) == 6

    def test_a_data_set_for_each_client(self, tmp_path):
        for client in range(4):
            save(tmp_path / "one" / f"client_{client}", ROWS)
        save(tmp_path / "parts" / "client_0" / "train", ROWS)
        for folder in ("one", "parts"):
            with pytest.raises(DataError, match=f"{folder} holds .* folders of several; .*concatenate_datasets"):
                read(tmp_path / folder)

    def test_renamed_classes_are_another_data_set(self, tmp_path):
        save(tmp_path / "d", ROWS)
        data = section(tmp_path / "d", partition={"clients": 2})
        build(data, 0, tmp_path / "shards")
        save(tmp_path / "d", ROWS, label={"names": ["apple", "pear", "fig"], "_type": "ClassLabel"})
        with pytest.raises(DataError, match="the raw data have changed"):
            build(data, 0, tmp_path / "shards")
        again = build(data, 0, tmp_path / "shards", converts_changed=True)
        assert again.shape.class_names[0] == "apple"


class TestClasses:
    def test_names_and_codes_are_those_of_the_data_set(self, tmp_path):
        save(tmp_path / "train", ROWS)
        save(tmp_path / "test", ROWS | {"label": [2, 2, 2, 1, 1, 0]})  # a class without a training sample
        images = read(tmp_path, train_files="train", test_files="test")
        assert images.class_names == ("plum", "pear", "fig") and images.num_classes == 3
        assert images.test_y.tolist() == [2, 2, 2, 1, 1, 0]

    def test_parts_with_other_names(self, tmp_path):
        save(tmp_path / "train", ROWS)
        for names, message in ((["pear", "plum", "fig"], "they differ in order"), (["kiwi"], "'kiwi' is new")):
            save(tmp_path / "test", ROWS | {"label": [0] * 6}, label={"names": names, "_type": "ClassLabel"})
            with pytest.raises(DataError, match=f"test: column 'label' has .*{message}.*cast_column"):
                read(tmp_path, train_files="train", test_files="test")

    @pytest.mark.parametrize(
        "labels, message",
        [
            (
                [-1, 1, 0, 1, 0, 1],
                r"got -1..1; leave out the rows of -1, which have no label \(1 of 6\); if it is a class, data.labels",
            ),
            ([0, 1, 0, 1, 0, 3], "label 3 does not fit num_classes 3"),
            ([0, 1, None, 1, 0, 1], "column 'label' is empty .*in row 2"),
        ],
    )
    def test_labels_that_are_none(self, tmp_path, labels, message):
        save(tmp_path, ROWS | {"label": labels})
        with pytest.raises(DataError, match=message):
            read(tmp_path)

    def test_words_are_numbered_as_in_tables(self, tmp_path):
        save(tmp_path, ROWS | {"label": pa.array(["b", "a"] * 3, pa.string_view())}, label={"_type": "Value"})
        assert read(tmp_path).class_names == ("a", "b")


class TestInputs:
    @pytest.mark.parametrize(
        "kind",
        [
            pa.list_(pa.float32()),
            pa.list_(pa.float32(), 2),
            pa.large_list(pa.float64()),
            pa.list_(pa.int16()),
            pa.list_(pa.bool_()),
            pa.list_(pa.float16()),
        ],
    )
    def test_lists(self, tmp_path, kind):
        rows = [[1, 0], [0, 1], [1, 1]]
        save(tmp_path, {"x": pa.array(rows).cast(kind), "label": [0, 1, 0]}, shards=2)
        assert read(tmp_path).train_x.tolist() == rows

    def test_lists_of_decimals(self, tmp_path):
        cells = pa.array([[Decimal("1.5")], [Decimal("2.25")]])
        save(tmp_path, {"x": cells, "label": [0, 1]})
        assert read(tmp_path).train_x.tolist() == [[1.5], [2.25]]

    def test_arrays_of_more_axes(self, tmp_path):
        values = np.arange(24.0).reshape(2, 1, 3, 4)
        features = {"x": {"shape": [1, 3, 4], "dtype": "float32", "_type": "Array3D"}}
        save(tmp_path, {"x": pa.array(values.tolist()), "label": [0, 1]}, features=features)
        assert np.array_equal(read(tmp_path).train_x, values)

    def test_an_extension_type_is_read_as_its_storage(self, tmp_path):
        storage = pa.array([[1.0, 2.0], [3.0, 4.0]], pa.list_(pa.float32(), 2))
        tensor = pa.ExtensionArray.from_storage(pa.fixed_shape_tensor(pa.float32(), [2]), storage)
        save(tmp_path, {"x": tensor, "label": [0, 1]})
        assert read(tmp_path).train_x.tolist() == [[1, 2], [3, 4]]

    @pytest.mark.parametrize(
        "cells, message",
        [
            ([[1.0], [1.0, 2.0]], "has 2 values in row 1, 1 in row 0; fill or cut"),
            ([[[1.0], [2.0]], [[1.0], [2.0, 3.0]]], "has 2 values in row 1, 1 in row 0"),
            ([[1.0, None], [1.0, 2.0]], "has a missing number in row 0"),
            ([[1.0], None], "column 'x' is empty .*in row 1"),
            ([[[1.0], None], [[1.0], [2.0]]], "has a missing list in row 0"),
            ([[], []], "has 0 values in row 0"),
            ([["a"], ["b"]], "must hold lists of numbers, it holds lists of string"),
            ([1.0, 2.0], "must hold images or lists of numbers, it holds double"),
            (["a", "b"], "must hold images or lists of numbers, it holds"),
            ([{"a": 1.0}, {"a": 2.0}], "must hold images or lists of numbers, it holds struct"),
            ([{"bytes": None, "path": "a.png"}] * 2, "the image in row 0 has no image bytes"),
            ([None, None], "column 'x' is empty"),
        ],
    )
    def test_that_are_none(self, tmp_path, cells, message):
        save(tmp_path, {"x": cells, "label": [0, 1]})
        with pytest.raises(DataError, match=message):
            read(tmp_path)

    @pytest.mark.parametrize("kind", ["Audio", "Video", "Translation"])
    def test_other_media_are_named(self, tmp_path, kind):
        cells = [{"bytes": b"RIFF", "path": "a"}] * 2
        save(tmp_path, {"x": cells, "label": [0, 1]}, features={"x": {"_type": kind}})
        with pytest.raises(DataError, match=f"input column 'x' is {kind}, which is not read; set data.columns.image"):
            read(tmp_path)


def test_the_package_itself_reads_the_same_rows(tmp_path):
    datasets = pytest.importorskip("datasets", reason="datasets, which cfl_ray does not need, is not installed")
    features = datasets.Features(
        {"x": datasets.Sequence(datasets.Value("float32")), "label": datasets.ClassLabel(names=CLASSES["names"])}
    )
    whole = datasets.Dataset.from_dict(ROWS, features=features)
    whole.save_to_disk(tmp_path / "d", num_shards=3)
    whole.save_to_disk(tmp_path / "d", num_shards=2)
    loaded = datasets.load_from_disk(tmp_path / "d")
    loaded.filter(lambda row: row["label"] == 1).map(lambda row: {"x": [0.0, 0.0]})  # leaves caches in the folder
    images = read(tmp_path / "d")
    assert images.train_x.tolist() == [row["x"] for row in loaded]
    assert list(images.class_names) == loaded.features["label"].names
    loaded.filter(lambda row: row["label"] == 1).shuffle(seed=0).save_to_disk(tmp_path / "e")
    assert read(tmp_path / "e").train_x.tolist() == [row["x"] for row in datasets.load_from_disk(tmp_path / "e")]


class TestModes:
    """`Image(mode=...)`, to which datasets converts images when it reads them."""

    @staticmethod
    def saved(folder, mode):
        file = io.BytesIO()
        Image.new("RGB", (3, 2), (200, 100, 0)).save(file, "PNG")
        features = {"x": {"_type": "Image"} | ({"mode": mode} if mode else {})}
        save(folder, {"x": [{"bytes": file.getvalue(), "path": None}] * 2, "label": [0, 1]}, features=features)

    def test_images_have_the_mode_of_the_column(self, tmp_path):
        self.saved(tmp_path / "own", None)
        self.saved(tmp_path / "grey", "L")
        assert read(tmp_path / "own").train_x[0, :, 0, 0].tolist() == [200, 100, 0]
        grey = read(tmp_path / "grey").train_x
        assert grey.shape == (2, 1, 2, 3)
        assert grey[0, 0, 0, 0] == (200 * 299 + 100 * 587) // 1000  # luma of ITU-R 601-2

    def test_parts_of_two_modes_are_refused(self, tmp_path):
        self.saved(tmp_path / "train", "L")
        self.saved(tmp_path / "test", None)
        with pytest.raises(DataError, match="test: input column 'x' has images of mode None, .*train of L"):
            read(tmp_path, train_files="train", test_files="test")


class TestNamesOfClassesInParquet:
    """datasets records them in Parquet files as well, of tables and of images."""

    TEXT_ORDER = sorted(map(str, range(12)))  # as class_encode_column numbers the labels 0 to 11: code 2 is "10"
    IN_ORDER = [str(label) for label in range(12)]

    def files(self, folder, kind, **names):
        """A Parquet file of each part. names: of its classes; None: without names; "no record": not of datasets."""
        made = {}
        for part, classes in names.items():
            picture = io.BytesIO()
            Image.new("L", (2, 2)).save(picture, "PNG")
            rows = (
                {"x": np.arange(24.0), "y": np.arange(24) % 7}
                if kind == "csv"
                else {"image": [picture.getvalue()] * 24}
            )
            table = pa.table({**rows, "label": np.arange(24) % 12})
            feature = (
                {"dtype": "int64", "_type": "Value"} if classes is None else {"names": classes, "_type": "ClassLabel"}
            )
            if classes != "no record":
                record = json.dumps({"info": {"features": {"label": feature}}})
                table = table.replace_schema_metadata({"huggingface": record})
            made[part] = f"{part}.parquet"
            pq.write_table(table, folder / made[part])
        return SOURCE_KINDS.of(source=kind, root=str(folder), **{f"{part}_files": name for part, name in made.items()})

    @pytest.mark.parametrize("kind", ["csv", "images"])
    @pytest.mark.parametrize("second", ["test", "validation"])
    @pytest.mark.parametrize(
        ("names", "others", "said"),
        [
            (TEXT_ORDER, None, "code 2 of column 'label' is the class named '10'"),
            (TEXT_ORDER, "no record", "code 2 of column 'label' is the class named '10'"),
            (None, TEXT_ORDER, "code 2 of column 'label' is the class named '10'"),
            (TEXT_ORDER, IN_ORDER, "has 12 names of classes, .* they differ in order"),
            (TEXT_ORDER, TEXT_ORDER, None),
            (IN_ORDER, None, None),
            (list("abcdefghijkl"), "no record", None),
            (list("abcdefghijkl"), list("abcdefghijkm"), "'m' is new"),
        ],
    )
    def test_are_of_the_same_codes_in_all_files(self, tmp_path, kind, second, names, others, said):
        data = self.files(tmp_path, kind, **{"train": names, second: others})
        if said is None:
            assert locate(kind, data).read(True, None).num_classes == 12
        else:
            with pytest.raises(DataError, match=said):
                locate(kind, data).read(True, None)
