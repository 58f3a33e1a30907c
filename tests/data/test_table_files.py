"""Files of tables as other programs write them: ids and labels as text, encodings, delimiters, indices, categories."""

import bz2
import datetime
import decimal
import gzip
import io
import json
import pickle
import subprocess
import sys
import uuid
import zipfile

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from cfl_ray.config.data import SOURCE_KINDS
from cfl_ray.data import build, describe
from cfl_ray.data.sources import locate
from cfl_ray.errors import DataError

COLUMNS = {"label": "kind", "client": "shop"}


def archive(*names):
    """The bytes of a zip archive with empty files of these names."""
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as files:
        for name in names:
            files.writestr(name, b"")
    return packed.getvalue()


def section(file, columns=None, **data):
    """The section of a table; as features all columns that begin with a, by default."""
    columns = COLUMNS if columns is None else columns
    return SOURCE_KINDS.of(source="csv", root=str(file), columns=columns, **data)


def read(file, columns=None, **data):
    return locate("csv", section(file, columns, **data)).read(True, None)


def written(folder, content, name="t.csv"):
    file = folder / name
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    return file


def parquet(folder, columns, name="t.parquet", metadata=None):
    file = folder / name
    file.parent.mkdir(parents=True, exist_ok=True)
    table = columns if isinstance(columns, pa.Table) else pa.table(columns)
    pq.write_table(table.replace_schema_metadata(metadata) if metadata else table, file)
    return file


class TestIds:
    @pytest.mark.parametrize(
        "cells, ids",
        [
            (["7", "10", "9"], [7, 10, 9]),
            ([" 7", "10 ", "9"], [7, 10, 9]),
            (["-1", "0", "5"], [-1, 0, 5]),
            (["007", "7", "8"], ["007", "7", "8"]),
            (["1.0", "2.0", "3.0"], ["1.0", "2.0", "3.0"]),
            (["1", "2", "x"], ["1", "2", "x"]),
            (["0x10", "16", "1"], ["0x10", "16", "1"]),
            (["1e3", "1000", "2"], ["1e3", "1000", "2"]),
            (["true", "false", "true"], ["true", "false", "true"]),
            (["2020-01-02", "2020-01-03", "2020-01-02"], ["2020-01-02", "2020-01-03", "2020-01-02"]),
            (["99999999999999999999", "1", "2"], ["99999999999999999999", "1", "2"]),
            (["+1", "1", "2"], ["+1", "1", "2"]),
        ],
    )
    def test_of_csv_are_as_written(self, tmp_path, cells, ids):
        file = written(tmp_path, "a,kind,shop\n" + "".join(f"{row},0,{cell}\n" for row, cell in enumerate(cells)))
        assert read(file).client.tolist() == ids

    @pytest.mark.parametrize(
        "cells, ids",
        [
            (pa.array([7, 10, 9], pa.uint8()), [7, 10, 9]),
            (pa.array([7.0, 10.0, 9.0]), [7, 10, 9]),  # of pandas, after rows without an id were dropped
            (pa.array(["x", "y", "x"], pa.string_view()), ["x", "y", "x"]),
            (pa.array(["x", "y", "x"], pa.large_string()), ["x", "y", "x"]),
            (pa.array(["x", "y", "x"]).dictionary_encode(), ["x", "y", "x"]),
            (pa.array([b"x", b"\xff", b"x"]), ["x", "ff", "x"]),
            (pa.array([True, False, True]), ["true", "false", "true"]),
            (
                pa.array([decimal.Decimal("1.50"), decimal.Decimal("2.00"), decimal.Decimal("1.50")]),
                ["1.50", "2.00", "1.50"],
            ),
            (pa.array([datetime.date(2020, 1, day) for day in (1, 2, 1)]), ["2020-01-01", "2020-01-02", "2020-01-01"]),
            (
                pa.array([uuid.UUID(int=number).bytes for number in (1, 2, 1)], pa.uuid()),
                [str(uuid.UUID(int=number)) for number in (1, 2, 1)],
            ),
        ],
    )
    def test_of_parquet(self, tmp_path, cells, ids):
        file = parquet(tmp_path, {"a": [1.0, 2, 3], "kind": [0, 1, 0], "shop": cells})
        assert read(file).client.tolist() == ids

    def test_of_parquet_that_are_no_ids(self, tmp_path):
        for cells in ([0.5, 1, 2], [[1], [2], [3]], [float("nan"), 1, 2]):
            file = parquet(tmp_path, {"a": [1.0, 2, 3], "kind": [0, 1, 0], "shop": cells})
            with pytest.raises(DataError, match="client column 'shop' must hold integers or strings, it holds"):
                read(file)

    def test_of_two_files_are_text_if_one_has_text(self, tmp_path):
        written(tmp_path, "a,kind,shop\n1,0,7\n2,1,8\n", "1.csv")
        written(tmp_path, "a,kind,shop\n3,0,x\n4,1,007\n", "2.csv")
        assert read(tmp_path).client.tolist() == ["7", "8", "x", "007"]
        parquet(tmp_path / "p", {"a": [1.0], "kind": [0], "shop": [7]}, "1.parquet")
        parquet(tmp_path / "p", {"a": [1.0], "kind": [1], "shop": ["x"]}, "2.parquet")
        assert read(tmp_path / "p", train_files="*.parquet").client.tolist() == ["7", "x"]

    def test_that_differ_in_spelling_are_told(self, tmp_path):
        for cells, shown in (
            ("007 7 8", "'007' and '7'"),
            ("1.0 1 x", "'1' and '1.0'"),
            ("NA x y", "'NA' is taken as a word"),
        ):
            rows = "".join(f"{row},0,{cell}\n" for row, cell in enumerate(cells.split()))
            (text,) = [line for line in read(written(tmp_path, f"a,kind,shop\n{rows}")).warnings if "'shop'" in line]
            assert shown in text
        file = parquet(tmp_path, {"a": [1.0, 2], "kind": [0, 1], "shop": ["x", " x"]})
        assert any("' x' and 'x' are different: a client each" in line for line in read(file).warnings)

    @pytest.mark.parametrize("cells", ["x  y", "1  2", "1 NA 2"])
    def test_that_are_missing(self, tmp_path, cells):
        rows = "".join(f"{row},0,{cell}\n" for row, cell in enumerate(cells.split(" ")))
        with pytest.raises(DataError, match="column 'shop' is empty .*in row 1"):
            read(written(tmp_path, f"a,kind,shop\n{rows}"))

    def test_in_names_of_folders(self, tmp_path):
        for folder, value in (("shop=3", 1), ("shop=10", 2), ("shop=4", 3)):
            parquet(tmp_path / folder, {"a": [float(value)] * 2, "kind": [0, 1]}, "part-0.parquet")
        images = read(tmp_path, train_files="**/*.parquet")
        assert images.client.tolist() == [10, 10, 3, 3, 4, 4] and images.shape == (1,)
        parquet(tmp_path / "shop=a%20b", {"a": [1.0], "kind": [0]}, "part-0.parquet")
        assert read(tmp_path, train_files="**/*.parquet").client.tolist()[-1] == "a b"
        parquet(tmp_path / "shop=__HIVE_DEFAULT_PARTITION__", {"a": [1.0], "kind": [0]}, "part-0.parquet")
        with pytest.raises(DataError, match="column 'shop' is empty"):
            read(tmp_path, train_files="**/*.parquet")

    def test_that_are_names_of_files(self, tmp_path):
        columns = {"label": "kind", "client": "filename"}
        for folder, name, rows in (
            ("train", "10.csv", "1,0\n2,1\n"),
            ("train", "9.csv.gz", "3,0\n"),
            ("test", "9.csv", "4,1\n"),
        ):
            text = f"a,kind\n{rows}".encode()
            written(tmp_path / folder, gzip.compress(text) if name.endswith(".gz") else text, name)
        files = {"train_files": "train/*", "test_files": "test/*"}
        images = read(tmp_path, columns, **files)
        assert images.client.tolist() == [10, 10, 9] and images.shape == (1,) and not images.notes
        (note,) = read(tmp_path, {"label": "kind"}, **files).notes
        assert "train (2 files): read as one table; data.columns.client: filename makes each" in note
        written(tmp_path / "train", "a,kind\n5,1\n", "9.csv")  # then suffixes tell them apart
        assert read(tmp_path, columns, **files).client.tolist() == ["10.csv", "10.csv", "9.csv", "9.csv.gz"]
        for site in "xy":
            written(tmp_path / "sites" / site, f"a,kind\n{ord(site)},1\n", "data.csv")
        assert read(tmp_path / "sites", columns, train_files="*/data.csv").client.tolist() == ["x/data", "y/data"]


class TestLabels:
    @pytest.mark.parametrize(
        "cells, y, names",
        [
            ("0 1 2", [0, 1, 2], ()),
            ("01 02 01", [0, 1, 0], ("01", "02")),
            ("true false true", [1, 0, 1], ()),
            ("NA x None", [0, 2, 1], ("NA", "None", "x")),
        ],
    )
    def test_of_csv(self, tmp_path, cells, y, names):
        rows = "".join(f"{row},{cell}\n" for row, cell in enumerate(cells.split()))
        images = read(written(tmp_path, f"a,kind\n{rows}"), {"label": "kind"})
        assert images.train_y.tolist() == y and images.class_names == names
        assert any("is taken as a word" in line for line in images.warnings) == ("NA" in names)

    @pytest.mark.parametrize(
        "cells, message",
        [
            ([datetime.date(2020, 1, 1)] * 2, "must hold integers or words, it holds date32"),
            ([datetime.datetime(2020, 1, 1)] * 2, "must hold integers or words, it holds timestamp"),
            ([decimal.Decimal("1.5")] * 2, "must hold integers or words, it holds decimal128"),
            ([0.0, 1.5], r"it holds double, e.g. 1.5 in row 1 .* set task: regression"),
            ([-1, 1], r"must lie in 0..32767, got -1..1; leave out the rows of -1, which have no label \(1 of 2\)"),
            ([{"a": 1}] * 2, "must hold integers or words, it holds struct"),
            ([None, None], "column 'kind' is empty"),
        ],
    )
    def test_that_are_no_classes(self, tmp_path, cells, message):
        with pytest.raises(DataError, match=message):
            read(parquet(tmp_path, {"a": [1.0, 2.0], "kind": cells}), {"label": "kind"})

    def test_that_are_numbers_in_one_file_and_words_in_another(self, tmp_path):
        parquet(tmp_path, {"a": [1.0], "kind": [2]}, "1.parquet")
        parquet(tmp_path, {"a": [1.0], "kind": ["x"]}, "2.parquet")
        assert read(tmp_path, {"label": "kind"}, train_files="*.parquet").class_names == ("2", "x")


class TestInputs:
    @pytest.mark.parametrize(
        "header, index",
        [(",a,kind", 0), ("a,kind,", 2), ("Unnamed: 0,a,kind", 0), ("__index_level_0__,a,kind", 0), ("...1,a,kind", 0)],
    )
    def test_an_index_is_none(self, tmp_path, header, index):
        cells = [["x", str(row / 4), "0"] for row in range(4)]
        for row, line in enumerate(cells):
            line.remove("x")
            line.insert(index, str(row * 3))
        file = written(tmp_path, "\n".join([header, *map(",".join, cells)]))
        images = read(file, {"label": "kind"})
        assert images.train_x.tolist() == [[row / 4] for row in range(4)]
        assert any("left out as an index of the rows" in line for line in images.warnings)

    def test_two_unnamed_columns(self, tmp_path):
        assert read(written(tmp_path, ",a,kind,\n0,1,0,\n1,2,1,\n"), {"label": "kind"}).shape == (1,)

    def test_a_named_index_of_pandas_is_none(self, tmp_path):
        metadata = {"pandas": json.dumps({"index_columns": ["patient", {"kind": "range"}]})}
        file = parquet(tmp_path, {"a": [1.0, 2], "kind": [0, 1], "patient": [5, 9]}, metadata=metadata)
        assert read(file, {"label": "kind"}).shape == (1,)
        named = read(file, {"label": "kind", "features": ["a", "patient"]})
        assert named.train_x.tolist() == [[1, 5], [2, 9]] and not named.warnings
        assert read(file, {"label": "kind", "client": "patient"}).client.tolist() == [5, 9]
        damaged = parquet(tmp_path, {"a": [1.0, 2], "kind": [0, 1]}, metadata={"pandas": "[1]"})
        assert read(damaged, {"label": "kind"}).shape == (1,)

    def test_columns_that_number_the_rows(self, tmp_path):
        order = np.random.default_rng(0).permutation(20)
        file = parquet(tmp_path, {"index": range(20), "a": [0.5] * 20, "sample": order, "kind": [0, 1] * 10})
        images = read(file, {"label": "kind"})
        assert images.shape == (2,)  # a and sample
        chosen, index, counting = images.warnings
        assert "the inputs are the columns a, sample: all others" in chosen
        assert index.endswith("left out as an index of the rows: 'index'; data.columns.features can name it")
        assert "the input 'sample' numbers the rows" in counting

    def test_chosen_for_the_user_are_told_by_every_door(self, tmp_path):
        file = written(tmp_path, "a,b,kind\n" + "1,2,0\n0,1,1\n" * 5)
        data = section(file, {"label": "kind"}, partition={"clients": 2})
        told = [f"{file}: the inputs are the columns a, b: all others; if one of them would not be known of a new "
                "sample, name the inputs in data.columns.features"]  # fmt: skip
        for _ in range(2):  # the second time from shards
            assert build(data, 0, tmp_path / "shards").warnings == told
        assert list(describe(data, 0).warnings) == told
        data = section(file, {"label": "kind", "features": ["a", "b"]}, partition={"clients": 2})
        assert build(data, 0, tmp_path / "shards").warnings == []

    def test_the_label_is_none(self, tmp_path):
        with pytest.raises(
            DataError, match="features names 'kind', which is the label, the client, the group or the time"
        ):
            read(written(tmp_path, "a,kind\n1,0\n2,1\n"), {"label": "kind", "features": ["a", "kind"]})

    @pytest.mark.parametrize(
        "cells, message",
        [
            ('"1,5"', "e.g. '1,5' in row 0 .*, which has a decimal comma: set data.decimal: \",\""),
            ('"1,234,567"', "which has separators of thousands: remove them"),
            ("2020-01-01", "it holds date32.*; write a number instead"),
            ("10:00:00", "it holds time32.*; write a number instead"),
            ("inf", "has NaN or infinity"),
        ],
    )
    def test_that_are_no_numbers(self, tmp_path, cells, message):
        with pytest.raises(DataError, match=message):
            read(written(tmp_path, f"a,kind\n{cells},0\n{cells},1\n"), {"label": "kind"})

    def test_decimals_are_numbers(self, tmp_path):
        file = parquet(tmp_path, {"a": [decimal.Decimal("1.50"), decimal.Decimal("2.25")], "kind": [0, 1]})
        assert read(file, {"label": "kind"}).train_x.tolist() == [[1.5], [2.25]]

    def test_that_lose_their_digits_are_told(self, tmp_path):
        for values, lost in (([1_700_000_000 + row for row in range(4)], "up to 1e+02|up to 6"), ([0, 1, 2, 3], None)):
            images = read(parquet(tmp_path, {"a": values, "kind": [0, 1, 0, 1]}), {"label": "kind"})
            assert any("stored as float32" in line for line in images.warnings) == (lost is not None)

    def test_of_two_types_in_two_files(self, tmp_path):
        for number, values in enumerate(([1.0], ["x"])):
            parquet(tmp_path, {"a": values, "kind": [0]}, f"{number}.parquet")
        with pytest.raises(DataError, match="1.parquet: column 'a' holds string, but double in .*0.parquet; they must"):
            read(tmp_path, {"label": "kind"}, train_files="*.parquet")


class TestFiles:
    TEXT = "a,kind\n1.5,süß\n2,herb\n"

    @pytest.mark.parametrize("encoding", ["cp1252", "latin-1", "utf-16", "utf-8-sig", "utf-8"])
    @pytest.mark.parametrize("text", [TEXT, "größe,kind\n1,süß\n2,herb\n"])
    def test_encodings(self, tmp_path, encoding, text):
        file = written(tmp_path, text.encode(encoding))
        assert read(file, {"label": "kind"}, encoding=encoding).class_names == ("herb", "süß")
        if not encoding.startswith("utf-8"):
            advice = "set data.encoding: utf-16" if encoding == "utf-16" else "set data.encoding: cp1252"
            with pytest.raises(DataError, match=f"t.csv is .*; .*{advice}"):
                read(file, {"label": "kind"})

    def test_a_wrong_encoding(self, tmp_path):
        file = written(tmp_path, self.TEXT)
        with pytest.raises(DataError, match="unknown encoding 'utf-9'; e.g. utf-8, cp1252"):
            read(file, {"label": "kind"}, encoding="utf-9")
        with pytest.raises(DataError, match="t.csv is not text in ascii .*; set data.encoding to that of the file"):
            read(file, {"label": "kind"}, encoding="ascii")

    @pytest.mark.parametrize("delimiter, shown", [(";", '";"'), ("\t", '"\\\\t"'), ("|", '"|"'), (" ", '" "')])
    def test_delimiters(self, tmp_path, delimiter, shown):
        file = written(tmp_path, self.TEXT.replace(",", delimiter))
        assert read(file, {"label": "kind"}, delimiter=delimiter).train_x.tolist() == [[1.5], [2]]
        with pytest.raises(DataError) as error:
            read(file, {"label": "kind"})
        assert str(error.value).endswith(f"set data.delimiter: {shown}".replace("\\\\", "\\"))

    def test_decimal_commas(self, tmp_path):
        file = written(tmp_path, "a;kind\n1,5;0\n2;1\n")
        assert read(file, {"label": "kind"}, delimiter=";", decimal=",").train_x.tolist() == [[1.5], [2]]
        with pytest.raises(ValueError, match="decimal and delimiter must differ"):
            read(file, {"label": "kind"}, decimal=",")

    @pytest.mark.parametrize(
        "content, message",
        [
            ("5.1,3.5,0\n4.9,3.0,1\n", "has no header: its first line holds numbers, 5.1, 3.5, 0"),
            ("# of the lab\na,kind\n1,0\n", "its first line is a comment, '# of the lab'|cannot be read as a CSV file"),
            ('{"a": 1, "kind": 0}\n', "it is JSON; pandas.read_json"),
            (b"PK\x03\x04\x14", "a zip archive; unpack it"),
            (archive("x/data.pkl", "x/data/0"), "it is a file of torch.save; return its tensors from a function"),
            (archive("x.npy"), "it is an .npz file of NumPy; use source arrays"),
            (archive("[Content_Types].xml", "xl/workbook.xml"), "it is an Excel file .*read_excel"),
            (pickle.dumps({"data_indices": []}), "it is a pickle of Python; return its arrays from a function"),
            (b"ARROW1\x00\x00", "an Arrow IPC .Feather. file; pandas.read_feather"),
            (b"ORC\x03", "an ORC file"),
            (b"\x93NUMPY\x01", "use source arrays"),
            (b"", "t.csv cannot be read as a CSV file"),
            (b"a,kind\n1,\x00\xff\n", "t.csv is not text in utf-8"),
            (b"PAR1 damaged", "t.csv cannot be read as a Parquet file"),
        ],
    )
    def test_that_are_no_tables(self, tmp_path, content, message):
        with pytest.raises(DataError, match=message):
            read(written(tmp_path, content), {"label": "kind"})

    def test_numbered_columns_are_a_header(self, tmp_path):
        for header in ("0,1,2", ",0,1,2"):  # of pandas, without and with its index
            rows = "1.5,2,0\n2,1,1\n" if header[0] == "0" else "0,1.5,2,0\n1,2,1,1\n"
            assert read(written(tmp_path, f"{header}\n{rows}"), {"label": "2"}).train_x.tolist() == [[1.5, 2], [2, 1]]

    def test_compressed(self, tmp_path):
        content = self.TEXT.encode()
        for name, packed in (("t.csv.gz", gzip.compress(content)), ("t.csv.bz2", bz2.compress(content))):
            assert read(written(tmp_path, packed, name), {"label": "kind"}).class_names == ("herb", "süß")
            with pytest.raises(DataError, match=r"t.csv is compressed; rename it to t.csv\.(gz|bz2)"):
                read(written(tmp_path, packed), {"label": "kind"})

    def test_lines_in_quotes_beyond_a_block(self, tmp_path, monkeypatch):
        monkeypatch.setattr("cfl_ray.data.table_files._BLOCK", 1000)
        rows = "".join(f'{row},"x\n{row % 2}"\n' for row in range(1000))
        images = read(written(tmp_path, f"a,kind\n{rows}"), {"label": "kind"})
        assert len(images.train_y) == 1000 and images.class_names == ("x\n0", "x\n1")

    def test_a_row_longer_than_a_block(self, tmp_path, monkeypatch):
        monkeypatch.setattr("cfl_ray.data.table_files._BLOCK", 1000)
        names = ",".join(f"a{number}" for number in range(1000))
        rows = "".join(",".join(["1.25"] * 1000) + f",{label}\n" for label in (0, 1))
        assert read(written(tmp_path, f"{names},kind\n{rows}"), {"label": "kind"}).shape == (1000,)

    def test_types_that_change_beyond_a_block(self, tmp_path, monkeypatch):
        monkeypatch.setattr("cfl_ray.data.table_files._BLOCK", 1000)
        rows = "1,0,3\n" * 1000 + "1.5,1,x\n"
        images = read(written(tmp_path, f"a,kind,shop\n{rows}"))
        assert images.train_x[-1] == 1.5 and images.client[[0, -1]].tolist() == ["3", "x"]

    def test_a_byte_order_mark_blank_lines_and_line_ends(self, tmp_path):
        images = read(written(tmp_path, b"\xef\xbb\xbfa,kind\r\n\r\n1.5,0\r\n2,1\r\n\r\n"), {"label": "kind"})
        assert images.train_x.tolist() == [[1.5], [2]]

    def test_recipes_have_new_keys_only_if_they_are_set(self, tmp_path):
        assert not {"delimiter", "encoding", "decimal"} & section(tmp_path).to_recipe().keys()
        assert section(tmp_path, delimiter=";").to_recipe()["delimiter"] == ";"


class TestAlarms:
    def test_large_integers_are_not_alike(self, tmp_path):  # float64 has 53 bits: 2**64 and 2**64 + 1 are equal there
        file = written(tmp_path, "a,kind,shop\n" + f"1,0,{2**64}\n2,1,{2**64 + 1}\n")
        images = read(file, {"label": "kind", "features": ["a"], "client": "shop"})
        assert images.client.tolist() == [str(2**64), str(2**64 + 1)] and not images.warnings
        file = written(tmp_path, "a,kind,shop\n" + f"1,0,{2**64}\n2,1,0{2**64}\n")
        (alike,) = read(file, {"label": "kind", "features": ["a"], "client": "shop"}).warnings
        assert f"'0{2**64}' and '{2**64}' are different" in alike

    def test_columns_may_have_another_order_in_each_file(self, tmp_path):
        written(tmp_path, "a,b,kind\n1,2,0\n", "p0.csv")
        written(tmp_path, "kind,b,a\n1,4,3\n", "p1.csv")
        images = read(tmp_path, {"label": "kind"})
        assert images.train_x.tolist() == [[1, 2], [3, 4]] and images.train_y.tolist() == [0, 1]

    @pytest.mark.parametrize("other, is_told", [("test.csv", True), ("fold_VAL.csv", True), ("latest.csv", False)])
    def test_test_files_that_are_training_files(self, other, is_told, tmp_path):
        for name in ("p0.csv", other):
            written(tmp_path, f"a,kind\n{len(name)},0\n2,1\n", name)
        told = read(tmp_path, {"label": "kind", "features": ["a"]}).warnings
        assert len(told) == is_told and all(f"{other} is a training file by data.train_files" in line for line in told)
        assert not read(tmp_path / other, {"label": "kind", "features": ["a"]}).warnings  # named alone

    @pytest.mark.parametrize(
        "cell, decimal, about",
        [
            ("1.000,50", ".", "separators of thousands: remove them; for the decimal comma set data.decimal"),
            ("1.000,50", ",", "'1.000,50' in row 1 .*separators of thousands: remove them; set data.columns"),
            ("1.000", ",", "'1.000' in row 1 .*separators of thousands: remove them; set data.columns"),
            ("1.5", ",", "'1.5' in row 1 .*has a decimal point, but data.decimal is"),
        ],
    )
    def test_marks_of_decimals_and_thousands(self, cell, decimal, about, tmp_path):
        file = written(tmp_path, f"a;kind\n{'12,5' if decimal == ',' else '12.5'};0\n{cell};1\n")
        with pytest.raises(DataError, match=about):
            read(file, {"label": "kind"}, delimiter=";", decimal=decimal)

    def test_a_copy_of_the_label(self, tmp_path):
        rows = "".join(f"{row % 3},{row % 2},{'pq'[row % 2]}\n" for row in range(12))
        file = written(tmp_path, "a,target,kind\n" + rows)
        _, copy = read(file, {"label": "kind"}).warnings
        assert "the input 'target' equals the label in every row" in copy
        assert not read(file, {"label": "kind", "features": ["a", "target"]}).warnings

    def test_files_of_the_same_content(self, tmp_path):
        for name, value in (("p0.csv", 1), ("p1.csv", 3), ("p2.csv", 1)):
            written(tmp_path, f"a,kind\n{value},0\n2,1\n", name)
        (told,) = read(tmp_path, {"label": "kind", "features": ["a"]}).warnings
        assert told.startswith(f"{tmp_path / 'p2.csv'} has the same content as {tmp_path / 'p0.csv'}")
        parts = {"train_files": "p0.csv", "test_files": "p2.csv"}
        assert "has the same content" in read(tmp_path, {"label": "kind", "features": ["a"]}, **parts).warnings[0]
        (row,) = read(tmp_path, {"label": "kind", "features": ["a"]}, **parts | {"test_files": "p1.csv"}).warnings
        assert "p1.csv: 1 of its 2 rows equal a training row" in row

    def test_equal_rows_of_two_clients_in_folders(self, tmp_path):
        for shop in (1, 2):
            (tmp_path / f"shop={shop}").mkdir()
            written(tmp_path / f"shop={shop}", "a,kind\n1,0\n2,1\n")
        columns = {"label": "kind", "features": ["a"], "client": "shop"}
        images = read(tmp_path, columns, train_files="**/*.csv")
        assert images.client.tolist() == [1, 1, 2, 2] and not images.warnings


class TestWordsThatDifferInCase:
    def test_of_classes_and_groups(self, tmp_path):
        rows = "a,kind,site\n" + "1,Yes,North\n2,yes,north\n3,no,South\n"
        said = read(written(tmp_path, rows), {"label": "kind", "features": ["a"], "group": "site"}).warnings
        assert any("'Yes' and 'yes' are different: a class each" in line for line in said)
        assert any("'North' and 'north' are different: a group each" in line for line in said)

    def test_letters_may_be_meant_and_ids_are_codes(self, tmp_path):
        rows = "a,kind,shop\n" + "1,a,xY\n2,A,xy\n3,b,xx\n"
        assert not read(written(tmp_path, rows), {"label": "kind", "features": ["a"], "client": "shop"}).warnings


class TestRowsOfTrainingAmongTheTestRows:
    def warnings(self, folder, train, test):
        for name, rows in (("train.csv", train), ("test.csv", test)):
            written(folder, "a,b,kind\n" + "".join(f"{a},{b},{kind}\n" for a, b, kind in rows), name)
        columns = {"label": "kind", "features": ["a", "b"]}
        return read(folder, columns, train_files="train.csv", test_files="test.csv").warnings

    def test_they_are_counted(self, tmp_path):
        train, test = [(i, -i, i % 2) for i in range(50)], [(i, 1, i % 2) for i in range(20)]
        assert not self.warnings(tmp_path, train, test)
        (line,) = self.warnings(tmp_path, train, test + train[3:6])
        assert "test.csv: 3 of its 23 rows equal a training row of" in line

    def test_another_target_or_order_of_inputs_is_another_row(self, tmp_path):
        train = [(i, -i, i % 2) for i in range(50)]
        assert not self.warnings(tmp_path, train, [(i, -i, 1 - i % 2) for i in range(50)])
        assert not self.warnings(tmp_path, train, [(-i, i, i % 2) for i in range(1, 50)])

    def test_rows_of_few_values_are_equal_by_chance(self, tmp_path):
        rows = [(i % 2, i % 3, i % 2) for i in range(60)]
        assert not self.warnings(tmp_path, rows, rows[:20])


class TestPeriodsOfPandas:
    """They are stored as numbers of months or days since 1970."""

    def file(self, folder):
        months = pd.period_range("2024-01", periods=4, freq="M")
        frame = pd.DataFrame({"month": months, "a": [1.0, 2.0, 3.0, 4.0], "kind": [0, 1, 0, 1]})
        frame.to_parquet(folder / "t.parquet", index=False)
        return folder / "t.parquet"

    def test_an_input_is_refused(self, tmp_path):
        with pytest.raises(DataError, match="'month'.*string"):
            read(self.file(tmp_path), {"label": "kind", "features": ["month", "a"]})

    def test_ids_are_words_also_without_pandas(self, tmp_path):
        columns = {"label": "kind", "features": ["a"], "client": "month"}
        expected = ["2024-01", "2024-02", "2024-03", "2024-04"]
        assert read(self.file(tmp_path), columns).client.tolist() == expected
        code = (
            "from pathlib import Path; from cfl_ray.data.table_files import plain_table; import pyarrow.parquet as pq;"
            "print(plain_table(pq.read_table('t.parquet'))['month'].to_pylist())"
        )
        printed = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
        assert printed.stdout.strip() == str(expected)
