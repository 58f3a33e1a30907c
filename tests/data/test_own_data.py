"""Data that users bring: functions, tables, folders of images, saved data sets and torch Datasets."""

import os

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet
import pytest
import torch
from PIL import Image
from runtime.logged import LoggedFederation
from small_runs import merged
from torch.utils.data import TensorDataset

from cfl_ray.config import Experiment
from cfl_ray.config.data import SOURCE_KINDS
from cfl_ray.config.unused import warnings_of
from cfl_ray.data import build, describe, federation_from_arrays, federation_from_dataset, open_shards
from cfl_ray.data.federation import FederationView
from cfl_ray.data.sources import locate
from cfl_ray.data.split import with_validation
from cfl_ray.engine.validation import invalid_data_reason
from cfl_ray.errors import ConfigError, DataError
from cfl_ray.setup.prepare import setup_on

LOADER = """
import numpy as np
from cfl_ray import federation_from_arrays

X, Y, C = np.arange(24.0).reshape(12, 2), np.arange(12) % 3, np.arange(12) % 4

def divided(scale=1.0): return {"x": X * scale, "y": Y, "x_test": X, "y_test": Y}
def pair(): return X, Y
def owned(): return {"x": X, "y": Y, "clients": C}
def made(): return federation_from_arrays(X, Y, C)
def tokens(top=9): return {"x": np.full((12, 5), top), "y": Y, "vocabulary": 10}
def wrong(): return 5
def misspelt(): return {"x": X, "y": Y, "client": C}
def without_y(): return {"x": X}
def labelled_badly(): return {"x": X, "y": Y, "num_classes": 2}
def failing():
    return 1 / 0
"""


@pytest.fixture
def my(tmp_path):
    (tmp_path / "my.py").write_text(LOADER)
    return lambda name, **data: SOURCE_KINDS.of(
        **{"source": f"{tmp_path}/my.py:{name}", "partition": {"clients": 3}} | data
    )


class TestFunction:
    def test_samples_without_clients_are_divided(self, my, tmp_path):
        federation = build(my("divided"), 0, tmp_path / "shards")
        assert federation.num_samples_N.tolist() == [4, 4, 4] and federation.view == "cluster"
        x = torch.cat([federation.train(client)[0] for client in range(3)])
        assert x.dtype == torch.float32 and sorted(x.flatten().tolist()) == list(range(24))
        assert torch.equal(federation.test_set(0)[0].flatten(), torch.arange(24.0))
        assert describe(my("divided"), 0).samples == (4, 4, 4)

    def test_options_reach_it_and_other_data_are_another_federation(self, my, tmp_path):
        shards = str(tmp_path / "one")
        first = build(my("divided"), 0, shards)
        second = build(my("divided", options={"scale": 2.0}), 0, shards)
        assert second.uri != first.uri and torch.equal(second.train(0)[0], 2 * first.train(0)[0])

    def test_changed_data_are_not_mixed_with_earlier_shards(self, tmp_path):
        (tmp_path / "stored.py").write_text(
            "import numpy as np\nfrom pathlib import Path\n\n"
            "def load(): return np.load(Path(__file__).with_name('x.npy')), np.arange(12) % 3\n"
        )
        data = SOURCE_KINDS.of(source=f"{tmp_path}/stored.py:load", partition={"clients": 3})
        np.save(tmp_path / "x.npy", np.ones((12, 2)))
        assert (build(data, 0, tmp_path / "shards").train(0)[0] == 1).all()
        np.save(tmp_path / "x.npy", np.zeros((12, 2)))
        with pytest.raises(
            DataError, match="the raw data have changed since .*: runs on the new data cannot be compared"
        ):
            build(data, 0, tmp_path / "shards")
        assert (build(data, 0, tmp_path / "shards", converts_changed=True).train(0)[0] == 0).all()
        assert (build(data, 0, tmp_path / "shards").train(0)[0] == 0).all()  # from now on

    def test_draws_of_the_function_have_the_seed_of_the_run(self, tmp_path):
        (tmp_path / "drawn.py").write_text(
            "import random\nimport numpy as np\nimport torch\n\n"
            "def load():\n"
            "    x = np.random.normal(size=(12, 2)) + torch.randn(12, 2).numpy() + random.random()\n"
            "    return x, np.arange(12) % 3\n"
        )
        data = SOURCE_KINDS.of(source=f"{tmp_path}/drawn.py:load", partition={"clients": 3})
        before = np.random.get_state()[1].copy()
        first, again = (build(data, 0, tmp_path / folder).train(0)[0] for folder in ("a", "b"))
        assert torch.equal(first, again) and (np.random.get_state()[1] == before).all()
        assert not torch.equal(first, build(data, 1, tmp_path / "c").train(0)[0])

    def test_an_edited_table_of_the_same_size_is_not_mixed_with_earlier_shards(self, tmp_path):
        data = SOURCE_KINDS.of(source="csv", root=str(tmp_path), partition={"clients": 2})
        (tmp_path / "t.csv").write_text("a,label\n" + "1.5,0\n2.5,1\n" * 10)
        x, y = build(data, 0, tmp_path / "shards").train(0)
        assert ((x[:, 0] > 2) == (y == 1)).all()
        (tmp_path / "t.csv").write_text("a,label\n" + "1.5,1\n2.5,0\n" * 10)
        with pytest.raises(
            DataError, match="the raw data have changed since .*: runs on the new data cannot be compared"
        ):
            build(data, 0, tmp_path / "shards")
        x, y = build(data, 0, tmp_path / "shards", converts_changed=True).train(0)
        assert ((x[:, 0] > 2) == (y == 0)).all()

    def test_two_tables_have_shards_of_their_own(self, tmp_path):
        uris = []
        for name in ("a.csv", "b.csv", "a.csv"):
            (tmp_path / name).write_text("a,label\n" + "1.5,0\n2.5,1\n" * (10 if name == "a.csv" else 20))
            data = SOURCE_KINDS.of(source="csv", root=str(tmp_path / name), partition={"clients": 2})
            uris.append(build(data, 0, tmp_path / "shards").uri)
        assert uris[0] == uris[2] != uris[1]

    def test_another_number_of_classes_is_not_mixed_with_earlier_shards(self, tmp_path):
        (tmp_path / "sized.py").write_text(
            "import numpy as np\nfrom pathlib import Path\n\n"
            "def load():\n"
            "    classes = int(Path(__file__).with_name('classes').read_text())\n"
            "    return {'x': np.ones((12, 2)), 'y': np.arange(12) % 3, 'num_classes': classes}\n"
        )
        data = SOURCE_KINDS.of(source=f"{tmp_path}/sized.py:load", partition={"clients": 3})
        (tmp_path / "classes").write_text("3")
        assert build(data, 0, tmp_path / "shards").shape.num_classes == 3
        (tmp_path / "classes").write_text("5")
        with pytest.raises(DataError, match="num_classes=3.* returns .*num_classes=5.*; delete the folder"):
            build(data, 0, tmp_path / "shards")

    def test_samples_with_clients_and_federations_are_taken_as_they_are(self, my, tmp_path):
        for name in ("owned", "made"):
            federation = build(my(name), 0, tmp_path)
            assert federation.num_clients == 4 and federation.view == "holdout"

    @pytest.mark.parametrize(
        "name, options, message",
        [
            ("wrong", {}, r"data.source wrong \(.*my.py, line \d+\): it returns int, expected a Federation"),
            ("misspelt", {}, r"unknown key 'client' \(did you mean 'clients'\?\)"),
            ("without_y", {}, "returns no 'y'"),
            ("labelled_badly", {}, "label 2 does not fit num_classes 2"),
            ("failing", {}, r"failing \(.*my.py, line 16\) failed: ZeroDivisionError: division by zero \(line 17\)"),
            ("pair", {"scale": 2}, r"data.source pair \(.*my.py, line \d+\) has no option 'scale'; it has none"),
            ("tokens", {"top": 10}, "x has tokens 10 .. 10, expected 0 .. 9"),
            ("X", {}, "is ndarray, expected a function"),
            ("par", {}, r"has no 'par' \(did you mean 'pair'\?\)"),
        ],
    )
    def test_errors_name_the_function(self, my, tmp_path, name, options, message):
        with pytest.raises(ConfigError, match=message):
            build(my(name, options=options), 0, tmp_path)


class TestTokens:
    def test_go_through_shards(self, my, tmp_path):
        federation = build(my("tokens"), 0, tmp_path)
        again = open_shards(federation.uri, verify=True)
        for one in (federation, again):
            x, y = one.train(0)
            assert x.dtype == torch.int64 and (x == 9).all() and one.shape.vocabulary == 10
            assert invalid_data_reason(x, y, one.shape) is None
        assert describe(my("tokens"), 0).shape.dtype == torch.int64

    def test_outside_the_vocabulary_are_named(self):
        shape = federation_from_arrays([[1, 2], [3, 4]], [0, 1], [0, 0], vocabulary=5).shape
        x, y = torch.tensor([[0, 5]]), torch.tensor([0])
        assert invalid_data_reason(x, y, shape) == "tokens 0 .. 5, expected 0 .. 4"
        assert "inputs of torch.float32" in invalid_data_reason(x.float(), y, shape)

    def test_are_not_normalised(self):
        with pytest.raises(DataError, match="token ids are not numbers to normalise"):
            federation_from_arrays([[1], [2]], [0, 1], [0, 0], vocabulary=5, normalize=[[0.5], [0.5]])

    def test_integers_need_a_vocabulary(self):
        with pytest.raises(DataError, match="got int64; convert it, .* or give `vocabulary` for token ids"):
            federation_from_arrays([[1], [2]], [0, 1], [0, 0])


class TestCsv:
    TEXT = "a,b,kind,shop\n1,2.5,pear,x\n2,0,apple,x\n3,1,pear,y\n4,7,apple,y\n"

    def read(self, folder, text=None, **data):
        (folder / "t.csv").write_text(self.TEXT if text is None else text)
        columns = {"label": "kind", "client": "shop"} | data.pop("columns", {})
        return locate("csv", SOURCE_KINDS.of(source="csv", root=str(folder), columns=columns, **data)).read(True, None)

    def test_numbers_words_and_clients(self, tmp_path):
        images = self.read(tmp_path)
        assert images.train_x.dtype == np.float32 and images.train_x.tolist() == [[1, 2.5], [2, 0], [3, 1], [4, 7]]
        assert images.train_y.tolist() == [1, 0, 1, 0] and images.client.tolist() == ["x", "x", "y", "y"]
        assert images.class_names == ("apple", "pear")
        assert self.read(tmp_path, columns={"features": ["b"]}).shape == (1,)
        assert self.read(tmp_path, "a,kind,shop\n1,true,x\n2,false,y\n").train_y.tolist() == [1, 0]

    def test_a_parquet_file(self, tmp_path):
        images = self.read(tmp_path)
        table = pa.csv.read_csv(tmp_path / "t.csv")
        table = table.set_column(2, "kind", table["kind"].dictionary_encode())  # as categories of pandas
        pa.parquet.write_table(table, tmp_path / "t.parquet")
        again = self.read(tmp_path, train_files="*.parquet")
        assert (again.train_x == images.train_x).all() and (again.train_y == images.train_y).all()
        assert (again.client == images.client).all() and again.class_names == images.class_names

    def test_labels_of_two_types(self, tmp_path):
        (tmp_path / "tests.csv").write_text("a,b,kind,shop\n1,2,3,x\n")
        with pytest.raises(DataError, match="tests.csv: label column 'kind' holds int64, but string in .*t.csv; they"):
            self.read(tmp_path, train_files="t.csv", test_files="tests.csv")
        (tmp_path / "tests.csv").write_text("a,b,kind,shop\n1,2,3.5,x\n")
        with pytest.raises(DataError, match="tests.csv: label column 'kind' must hold integers or words, it holds d"):
            self.read(tmp_path, train_files="t.csv", test_files="tests.csv")

    def test_floats_that_are_whole_numbers_are_labels(self, tmp_path):
        """As pandas writes a column that had an empty cell."""
        (tmp_path / "tests.csv").write_text("a,b,kind,shop\n1,2,1,x\n")
        text = "a,b,kind,shop\n1,2,1.0,x\n1,2,0.0,x\n1,2,3.0,y\n"
        images = self.read(tmp_path, text, train_files="t.csv", test_files="tests.csv")
        assert images.with_test_part.train_y.tolist() == [1, 0, 3] and images.num_classes == 4
        assert images.with_test_part.test_y.tolist() == [1]

    def test_more_words_than_labels(self, tmp_path):
        rows = "".join(f"1,word {number},x\n" for number in range(32769))
        with pytest.raises(DataError, match="'kind' holds 32769 different words, at most 32768 can be classes"):
            self.read(tmp_path, f"a,kind,shop\n{rows}")

    def test_becomes_a_federation(self, tmp_path):
        self.read(tmp_path)
        data = SOURCE_KINDS.of(
            source="csv",
            root=str(tmp_path),
            columns={"label": "kind", "client": "shop"},
            normalize=[[1, 2], [2, 2]],
        )
        federation = build(data, 0, tmp_path / "shards")
        assert [federation.client_name(client) for client in range(2)] == ["x", "y"]
        assert federation.shape.class_names == ("apple", "pear")

    @pytest.mark.parametrize(
        "text, columns, message",
        [
            ("a,kind,kind\n1,x,y\n", {}, "t.csv has two columns of the same name, rename one: a, kind, kind"),
            ("a,kind,shop\n1,-1,x\n", {}, r"column 'kind': labels must lie in 0..32767, got -1..-1"),
            (
                "a,kind,shop\n1,0.5,x\n",
                {},
                r"label column 'kind' must hold integers or words, it holds double, e.g. 0.5 in row 0 \(the first is "
                r"row 0\); set task: regression .*, write classes as whole numbers from 0 or as words, or set data.col",
            ),
            (
                "a,kind,shop\n1,0,x\ntwo,0,x\n",
                {},
                r"feature column 'a' must hold numbers, it holds string, e.g. 'two' in row 1 \(the first is row 0\)",
            ),
            ("a,kind,shop\n1,pear,x\n", {"label": "kidn"}, r"has no column 'kidn' \(did you mean 'kind'\?\)"),
            ("a,kind,shop\n1,pear,x\n", {"client": "shp"}, r"has no column 'shp' \(did you mean 'shop'\?\)"),
            (
                "a,kind,shop\nNA,0,x\n2,1,x\n,1,x\n,1,x\n",
                {},
                r"column 'a' is empty \(or NA or NaN\) in row 0 \(the first is row 0\) and 2 more",
            ),
            ("a,kind,shop\n1,pear,x\n2,,x\n", {}, r"column 'kind' is empty in row 1 \(the first is row 0\); fill it"),
            ("a,kind,shop\n1,0,x\n2,1,\n", {}, "column 'shop' is empty in row 1"),
            ("a,kind,shop\n1e300,0,x\n", {}, "column 'a' has NaN or infinity as float32 in 1 of 1 rows"),
            ("a,kind,shop\n", {}, "t.csv holds no row"),
            ("a,kind,shop\n1,0\n", {}, "t.csv cannot be read as a CSV file"),
        ],
    )
    def test_errors_name_the_column(self, tmp_path, text, columns, message):
        with pytest.raises(DataError, match=message):
            self.read(tmp_path, text, columns=columns)

    def test_the_root_may_be_the_file(self, tmp_path):
        self.read(tmp_path)
        (tmp_path / "other.csv").write_text("c\n1\n")
        data = SOURCE_KINDS.of(source="csv", root=str(tmp_path / "t.csv"), columns={"label": "kind", "client": "shop"})
        assert locate("csv", data).files == (tmp_path / "t.csv",)
        wrong = data.model_copy(update={"train_files": "o*.csv"})
        for one, name in ((wrong, "csv"), (data.model_copy(update={"source": "femnist_leaf"}), "femnist_leaf")):
            with pytest.raises(DataError, match=f"data.root: .*t.csv is a file, .* write root: {tmp_path}"):
                locate(name, one)
        with pytest.raises(DataError, match="data.root: there is no file or folder .*u.csv; to get it: set data.root"):
            locate("csv", data.model_copy(update={"root": str(tmp_path / "u.csv")}))

    def test_without_a_root_named_files_are_also_looked_for_here(self, tmp_path, monkeypatch):
        self.read(tmp_path)
        monkeypatch.chdir(tmp_path)
        found = locate("csv", SOURCE_KINDS.of(source="csv", train_files="t.csv")).files
        assert [file.absolute() for file in found] == [tmp_path / "t.csv"]
        with pytest.raises(DataError, match="data set 'csv' not found"):
            locate("csv", SOURCE_KINDS.of(source="csv"))

    def test_a_column_of_clients_without_effect_is_told(self):
        columns = {"label": "kind", "client": "shop"}
        (text,) = SOURCE_KINDS.of(source="csv", columns=columns, partition={"kind": "iid"}).warnings
        assert text.startswith("data.columns.client 'shop' does not decide the clients: partition.kind iid divides")
        for partition, clients in (({}, None), ({"kind": "writer"}, None), ({"clients": 3, "min_samples": 2}, 3)):
            data = SOURCE_KINDS.of(source="csv", columns=columns, partition=partition)
            assert (data.partition.kind, data.partition.clients, data.warnings) == ("writer", clients, [])

    def test_inputs_with_large_values_are_told(self, tmp_path):
        (tmp_path / "t.csv").write_text("age,dose,kind\n" + "60,1,a\n80,2,b\n" * 4)
        data = {"source": "csv", "root": str(tmp_path), "columns": {"label": "kind"}, "partition": {"clients": 2}}
        columns, text = describe(SOURCE_KINDS.of(**data), 0).warnings
        assert "the inputs are the columns age, dose: all others" in columns
        assert text.startswith("inputs have large values (number 0 of 2: mean ") and "data.normalize" in text
        data["columns"] = {"label": "kind", "features": ["age", "dose"]}
        assert not describe(SOURCE_KINDS.of(**data, normalize=[[70, 1.5], [10, 1]]), 0).warnings
        x = np.array([[60.0, 1], [80, 2]], np.float32).repeat(4, 0)
        federation = federation_from_arrays(x, np.arange(8) % 2, np.zeros(8, int))
        assert federation.warnings == FederationView(federation).warnings
        assert federation.warnings[0].startswith("inputs have large values (number 0 of 2: mean ")

    def test_data_of_an_own_federation_are_not_read_for_warnings(self, tmp_path):
        assert LoggedFederation(3, str(tmp_path / "log")).warnings == [] and not (tmp_path / "log").exists()

    def test_a_file_of_clients_without_effect_is_told(self, tmp_path):
        (tmp_path / "clients.csv").write_text("file,client\n")
        folder = {"source": "image_folder", "root": str(tmp_path)}
        (text,) = SOURCE_KINDS.of(**folder).warnings
        assert text.startswith(f"{tmp_path}/clients.csv does not decide the clients: partition.kind iid divides")
        assert not SOURCE_KINDS.of(**folder, partition={"kind": "writer", "clients": None}).warnings


class TestImageFolder:
    @pytest.fixture
    def folder(self, tmp_path):
        for part, count in (("train", 3), ("test", 1)):
            for value, name in enumerate(("cat", "dog")):
                (tmp_path / part / name).mkdir(parents=True)
                for number in range(count):
                    Image.new("RGB", (5, 4), (value, number, 7)).save(tmp_path / part / name / f"{number}.png")
        return tmp_path

    def read(self, folder, **data):
        return locate("image_folder", SOURCE_KINDS.of(source="image_folder", root=str(folder), **data)).read(True, None)

    def test_classes_are_folders(self, folder):
        images = self.read(folder, train_files="train", test_files="test")
        assert images.shape == (3, 4, 5) and images.train_y.tolist() == [0, 0, 0, 1, 1, 1] and len(images.test_y) == 2
        assert images.train_x[4, :, 0, 0].tolist() == [1, 1, 7] and images.client is None
        assert images.class_names == ("cat", "dog")

    def test_a_file_names_clients(self, folder):
        lines = [f"{name}/{number}.png,{number % 2}" for name in ("cat", "dog") for number in range(3)]
        (folder / "train" / "clients.csv").write_text("\n".join(["file,client", *lines]))
        assert self.read(folder, train_files="train").client.tolist() == ["0", "1", "0"] * 2
        (folder / "train" / "clients.csv").write_text("\n".join(["file,client", *lines[1:]]))
        with pytest.raises(DataError, match=r"names no client for cat/0.png \(1 of 6 images\)"):
            self.read(folder, train_files="train")

    def test_images_of_any_size(self, folder):
        """Of training and test images; the size of the shards is in `describe`, which reads a few of them."""
        Image.new("RGB", (9, 30), (50, 60, 70)).save(folder / "train" / "dog" / "9.png")
        Image.new("L", (40, 30), 90).save(folder / "test" / "cat" / "1.jpg")
        data = {"train_files": "train", "test_files": "test", "image_size": [8, 6], "image_fit": "crop"}
        images = self.read(folder, **data)
        assert images.shape == (3, 8, 6) and len(images.test_y) == 3
        assert (images.train_x[6, :, 0, 0].tolist(), images.test_x[1, :, 7, 5].tolist()) == ([50, 60, 70], [90] * 3)
        assert "10 of 3 sizes, 4x5 to 30x40, resized to 8x6 from their centre" in " ".join(images.warnings)
        section = SOURCE_KINDS.of(source="image_folder", root=str(folder), partition={"clients": 2}, **data)
        assert describe(section, 0).shape.input == (3, 8, 6)

    def test_errors_name_the_file(self, folder):
        with pytest.raises(DataError, match="there is no folder .*/absent"):
            self.read(folder, train_files="absent")
        Image.new("RGB", (9, 9)).save(folder / "train" / "dog" / "9.png")
        with pytest.raises(DataError, match="9.png is 9x9, the first image is 4x5; set data.image_size"):
            self.read(folder, train_files="train")
        (folder / "train" / "dog" / "9.png").write_text("no image")
        with pytest.raises(DataError, match="9.png is no image that Pillow .* can read, or damaged: its content"):
            self.read(folder, train_files="train")

    def test_a_folder_that_may_not_be_read_is_no_empty_one(self, folder, monkeypatch):
        scandir = os.scandir

        def refused(path):
            if os.path.basename(path) == "dog":
                raise PermissionError(13, "Permission denied")
            return scandir(path)

        with (
            monkeypatch.context() as patch,
            pytest.raises(DataError, match="/train/dog cannot be read: Permission denied"),
        ):
            patch.setattr("os.scandir", refused)
            self.read(folder, train_files="train")

    def test_grey_images_among_colours_and_colours_among_grey_images(self, folder):
        last = folder / "train" / "dog" / "9.png"
        Image.new("L", (5, 4), 200).save(last)
        assert (self.read(folder, train_files="train").train_x[-1] == 200).all()
        for file in sorted((folder / "train").rglob("*.png")):
            Image.new("L", (5, 4), 3).save(file)
        Image.new("RGB", (5, 4), (8, 8, 8)).save(last)  # without colours
        assert self.read(folder, train_files="train").train_x[:, 0, 0, 0].tolist() == [3] * 6 + [8]
        Image.new("RGB", (5, 4), (8, 8, 9)).save(last)
        images = self.read(folder, train_files="train")  # the others get three equal channels
        assert images.train_x[:, :, 0, 0].tolist() == [[3, 3, 3]] * 6 + [[8, 8, 9]]
        assert "red, green and blue (8 bits, divided by 255): 6 .png (L), 1 .png (RGB)" in images.warnings[0]
        last.rename(folder / "test" / "dog" / "9.png")
        with pytest.raises(DataError, match="0.png is red, green and blue .*, the training images are grey"):
            self.read(folder, train_files="train", test_files="test")

    def test_every_image_is_read_or_named(self, folder):
        """Suffixes of several formats; files and folders of other programs; files at the wrong place."""
        train, pixels = folder / "train", Image.new("RGB", (5, 4), (9, 9, 9))
        for name in ("cat/a.BMP", "cat/b.tiff", "cat/inner/c.webp", "dog/d.ppm", ".ipynb_checkpoints/1.png"):
            (train / name).parent.mkdir(exist_ok=True)
            pixels.save(train / name, lossless=True)
        for name in ("cat/._0.png", "cat/Thumbs.db", "__MACOSX/1.png", "cat/notes.txt", "dog/1.heic", "readme.md"):
            (train / name).parent.mkdir(exist_ok=True)
            (train / name).touch()
        (train / "empty").mkdir()
        pixels.save(train / "at_the_top.png")
        images = self.read(folder, train_files="train")
        assert images.class_names == ("cat", "dog") and images.train_y.tolist() == [0] * 6 + [1] * 4
        lines = "\n".join(images.warnings)
        for line in (
            "it is hidden or made by the system: 4 (1 .db, 1 .png), .ipynb_checkpoints, __MACOSX, cat/._0.png, ...",
            "decodes): 3 (1 .heic, 1 .md, 1 .txt), cat/notes.txt, dog/1.heic, readme.md",
            "since a folder without an image is no class: 1, empty",
            "since it is in no class folder: 1 (1 .png), at_the_top.png",
        ):
            assert line in lines
        assert images.notes == (
            f"{train}: read 10 images, red, green and blue (8 bits, divided by 255): "
            "1 .bmp (RGB), 6 .png (RGB), 1 .ppm (RGB), 1 .tiff (RGB), 1 .webp (RGB)",
        )

    def test_notes_and_warnings_reach_every_run(self, folder, tmp_path):
        """Also a run that reuses the shards."""
        (folder / "train" / "cat" / "notes.txt").touch()
        data = SOURCE_KINDS.of(source="image_folder", root=str(folder), train_files="train", partition={"clients": 2})
        (of_summary,) = describe(data, 0).warnings
        for _ in range(2):
            federation = build(data, 0, tmp_path / "shards")
            assert federation.warnings == [of_summary] and "1 .txt), cat/notes.txt" in of_summary
            assert FederationView(federation).notes == federation.notes
            assert "read 6 images" in federation.notes[0]

    def test_a_summary_knows_the_channels_of_mixed_folders(self, folder, tmp_path):
        """It looks at an image of each class and suffix."""
        Image.new("L", (5, 4), 3).save(folder / "train" / "cat" / "0.png")
        Image.new("I;16", (5, 4), 3).save(folder / "train" / "dog" / "9.tif")
        data = SOURCE_KINDS.of(source="image_folder", root=str(folder), train_files="train", partition={"clients": 2})
        federation = build(data, 0, tmp_path / "shards")
        assert describe(data, 0).shape == federation.shape and federation.shape.input == (3, 4, 5)
        assert federation.train(0)[0].max() <= 1

    def test_links_are_followed(self, folder):
        train = folder / "train"
        (train / "dog" / "0.png").rename(folder / "0.png")
        (train / "dog" / "0.png").symlink_to(folder / "0.png")
        (train / "cat").rename(folder / "elsewhere")
        (train / "cat").symlink_to(folder / "elsewhere")
        (train / "cat" / "again").symlink_to(train)
        images = self.read(folder, train_files="train")
        assert len(images.train_y) == 6 and images.class_names == ("cat", "dog")
        assert "since it is a link to a folder that contains it: 1, cat/again" in images.warnings[0]
        (folder / "0.png").unlink()
        with pytest.raises(DataError, match="dog/0.png cannot be read: No such file"):
            self.read(folder, train_files="train")

    def test_parts_that_are_the_same_folder(self, folder):
        with pytest.raises(DataError, match="data.train_files and data.test_files name the same folder"):
            self.read(folder, train_files="train", test_files="./train")

    def test_no_image(self, tmp_path):
        (tmp_path / "cat").mkdir()
        (tmp_path / "cat" / "1.heic").touch()
        with pytest.raises(DataError, match=r"has no image in a folder per class.*left out, since .*\(1 .heic\)"):
            self.read(tmp_path)

    def test_numbers_as_names_of_classes(self, tmp_path):
        for name in range(11):
            (tmp_path / str(name)).mkdir()
            Image.new("L", (2, 2)).save(tmp_path / str(name) / "1.png")
        images = self.read(tmp_path)
        assert images.class_names[2] == "10" and "label 2 is the class 10" in images.warnings[0]

    def test_alpha(self, folder):
        """Transparent everywhere: white, ignored, or a channel."""
        for file in (folder / "train").rglob("*.png"):
            Image.new("RGBA", (5, 4), (1, 2, 3, 0)).save(file)
        for alpha, expected in {"white": [255] * 3, "drop": [1, 2, 3], "keep": [1, 2, 3, 0]}.items():
            images = self.read(folder, train_files="train", transparency=alpha)
            assert images.train_x[0, :, 0, 0].tolist() == expected
            assert bool(images.warnings) == (alpha != "keep")

    @pytest.mark.parametrize(
        "text, message",
        [
            ("file,client\ncat/0.png,a\ncat/0.png,b\n", "names two clients for cat/0.png: a and b"),
            ("file,client\ncat/0.png,\n", r"the client in row 0 \(the first is row 0\) is empty"),
            ("file;client\ncat/0.png;a\n", "cannot be read as a CSV file with columns file and client"),
            ("file,client\ncat/0.png,\xe9\n", "cannot be read as a CSV file with columns file and client"),
        ],
    )
    def test_files_of_clients_that_are_refused(self, folder, text, message):
        (folder / "train" / "clients.csv").write_bytes(text.encode("latin-1"))
        with pytest.raises(DataError, match=message):
            self.read(folder, train_files="train")

    def test_ids_of_clients_are_texts(self, folder):
        names = [f"{name}/{number}.png" for name in ("cat", "dog") for number in range(3)]
        lines = [f"{name},{client}" for name, client in zip(names, ("007", "7", "1e3", "1000", "true", "True"))]
        (folder / "train" / "clients.csv").write_text("\n".join(["file,client", *lines, "cat/9.png,x"]))
        images = self.read(folder, train_files="train")
        assert images.client.tolist() == ["007", "7", "1e3", "1000", "true", "True"]
        assert "clients.csv names 1 file that is not read, e.g. cat/9.png" in images.warnings[0]


class TestDenseLabels:
    """Labels 10, 20 and 30 of every source: 31 classes and a warning, or three named 10, 20 and 30."""

    LABELS = [10, 20, 30, 10, 20, 30]

    def of(self, tmp_path, source):
        y = np.array(self.LABELS)
        x = np.arange(12, dtype=np.float32).reshape(6, 2)
        if source == "csv":
            rows = "".join(f"{label / 10},1,{label}\n" for label in self.LABELS)
            (tmp_path / "t.csv").write_text(f"a,b,label\n{rows}")
            return {"source": "csv", "root": str(tmp_path / "t.csv")}
        if source == "arrays":
            np.savez(tmp_path / "a.npz", x=x, y=y, clients=[0, 0, 0, 1, 1, 1])
            return {"source": "arrays", "root": str(tmp_path / "a.npz")}
        if source == "medmnist":
            images = np.zeros((6, 2, 2), np.uint8)
            np.savez(tmp_path / "m.npz", train_images=images, train_labels=y, test_images=images, test_labels=y)
            return {"source": "medmnist", "root": str(tmp_path), "train_files": "m.npz"}
        if source == "images":
            Image.new("L", (2, 2)).save(tmp_path / "i.png")
            image = {"bytes": (tmp_path / "i.png").read_bytes(), "path": ""}
            pa.parquet.write_table(pa.table({"image": [image] * 6, "label": y}), tmp_path / "i.parquet")
            return {"source": "images", "root": str(tmp_path / "i.parquet")}
        (tmp_path / "mine.py").write_text(
            f"import numpy as np\ndef load(): return np.arange(12.0).reshape(6, 2), np.array({self.LABELS})\n"
        )
        return {"source": f"{tmp_path}/mine.py:load"}

    @pytest.mark.parametrize("source", ["csv", "arrays", "medmnist", "images", "function"])
    def test_every_source(self, tmp_path, source):
        data = self.of(tmp_path, source) | {"partition": {"clients": 2}, "test": {"view": "holdout"}}
        federation = build(SOURCE_KINDS.of(**data), 0, tmp_path / "shards")
        (line,) = [line for line in federation.warnings if "have training samples" in line]
        assert "3 of 31 classes have training samples (labels 10, 20, 30)" in line and "data.labels: dense" in line
        assert federation.shape.num_classes == 31 and line in describe(SOURCE_KINDS.of(**data), 0).warnings
        dense = build(SOURCE_KINDS.of(**data, labels="dense"), 0, tmp_path / "shards")
        assert dense.shape.num_classes == 3 and dense.shape.class_names == ("10", "20", "30")
        assert not any("have training samples" in line for line in dense.warnings)
        for client in range(2):
            assert torch.equal(10 * (dense.train(client)[1] + 1), federation.train(client)[1])

    def test_labels_beyond_the_limit_of_shards(self, tmp_path):
        (tmp_path / "t.csv").write_text("a,label\n" + "1,100000\n2,-1\n" * 3)
        data = {"source": "csv", "root": str(tmp_path / "t.csv"), "partition": {"clients": 2}}
        with pytest.raises(DataError, match="must lie in 0..32767, got -1..100000; .*data.labels: dense numbers"):
            build(SOURCE_KINDS.of(**data), 0, tmp_path / "shards")
        federation = build(SOURCE_KINDS.of(**data, labels="dense"), 0, tmp_path / "shards")
        assert federation.shape.class_names == ("-1", "100000")

    def test_a_label_of_test_samples_only(self):
        x = np.zeros((2, 2), np.float32)
        with pytest.raises(DataError, match="y_test: label 9 has no training sample"):
            federation_from_arrays(x, [1, 3], [0, 1], x_test=x, y_test=[3, 9], labels="dense")

    def test_recipes_of_earlier_versions_stay(self, tmp_path):
        """The new keys are in a recipe only if they are set, so that shards are found again."""
        data = SOURCE_KINDS.of(source="images", root=str(tmp_path))
        later = {"labels": "dense", "transparency": "keep", "image_size": [8, 9], "image_fit": "crop"}
        assert not later.keys() & data.to_recipe().keys()
        assert data.model_copy(update=later).to_recipe() == data.to_recipe() | later


class TestHfDisk:
    def save(self, folder, **columns):
        """As Dataset.save_to_disk does: one Arrow stream file, beside its description."""
        folder.mkdir(exist_ok=True)
        table = pa.table(columns)
        with (
            pa.OSFile(str(folder / "data-00000-of-00001.arrow"), "wb") as file,
            pa.ipc.new_stream(file, table.schema) as writer,
        ):
            writer.write_table(table)
        (folder / "dataset_info.json").write_text("{}")

    def read(self, root, column="image", **data):
        data = {"columns": {"image": column}} | data
        return locate("hf_disk", SOURCE_KINDS.of(source="hf_disk", root=str(root), **data)).read(True, None)

    def test_token_ids(self, tmp_path):
        self.save(tmp_path / "train", input_ids=[[1, 2, 3], [4, 0, 0]], label=[0, 1])
        images = self.read(tmp_path, "input_ids", train_files="train", vocabulary=5)
        assert images.train_x.dtype == np.int32 and images.train_x.tolist() == [[1, 2, 3], [4, 0, 0]]
        with pytest.raises(DataError, match=r"'input_ids' has tokens 0 .. 4, expected 0 .. 3 \(vocabulary 4\)"):
            self.read(tmp_path, "input_ids", train_files="train", vocabulary=4)

    def test_numbers_and_images(self, tmp_path):
        self.save(tmp_path / "a", x=[[1.5, 2.0], [0.0, 1.0]], label=[0, 1])
        assert self.read(tmp_path / "a", "x").train_x.dtype == np.float32
        Image.new("L", (3, 2), 9).save(tmp_path / "i.png")
        image = {"bytes": (tmp_path / "i.png").read_bytes(), "path": None}
        self.save(tmp_path / "b", image=[image, image], label=["no", "yes"])
        images = self.read(tmp_path / "b")
        assert images.shape == (1, 2, 3) and (images.train_x == 9).all() and images.train_y.tolist() == [0, 1]
        images = self.read(tmp_path / "b", image_size=[4, 4])
        assert images.shape == (1, 4, 4) and (images.train_x == 9).all()
        with pytest.raises(DataError, match=r"data.image_size \[4, 4\], but input column 'x' holds numbers"):
            self.read(tmp_path / "a", "x", image_size=[4, 4])

    def test_errors(self, tmp_path):
        self.save(tmp_path / "a", x=[[1.5, 2.0], [0.0]], label=[0, 1])
        with pytest.raises(DataError, match="column 'x' has 1 values in row 1, 2 in row 0"):
            self.read(tmp_path / "a", "x")
        with pytest.raises(DataError, match="holds no .*arrow file .* name its part"):
            self.read(tmp_path)
        with pytest.raises(DataError, match="data.test_files: there is no folder .*/absent"):
            self.read(tmp_path / "a", "x", test_files="absent")


class TestDataset:
    def test_is_the_federation_of_its_arrays(self):
        x, y, clients = torch.randn(8, 2, 3), torch.arange(8) % 2, torch.arange(8) // 4
        made = federation_from_dataset(TensorDataset(x, y), clients, test=TensorDataset(x[:4], y[:4]))
        expected = federation_from_arrays(x, y, clients, x_test=x[:4], y_test=y[:4])
        assert made.recipe == expected.recipe and torch.equal(made.train(1)[0], expected.train(1)[0])

    def test_images_are_read_channels_first(self):
        made = federation_from_dataset(
            [(Image.new("RGB", (5, 4), (255, 0, 0)), 0), (Image.new("RGB", (5, 4)), 1)], [0, 0]
        )
        assert made.shape.input == (3, 4, 5)

    @pytest.mark.parametrize(
        "samples, message",
        [
            ([], "dataset has 0 samples"),
            (
                [(torch.zeros(2), 0), (torch.zeros(3), 1)],
                r"dataset\[1\] is float32 \(3,\), dataset\[0\] is float32 \(2,\)",
            ),
            ([torch.zeros(2)], r"dataset\[0\] is Tensor, expected a pair"),
            ([{"image": 0, "label": 1}], r"dataset\[0\] is dict, expected a pair .*, e.g. \[\(row\['image'\], row"),
            ([(torch.zeros(2), 0.5)], r"label of dataset\[0\] is float64 of shape \(\), expected one integer"),
            ([(object(), 0)], r"input of dataset\[0\] is object, expected a tensor"),
        ],
    )
    def test_errors_name_the_sample(self, samples, message):
        with pytest.raises(DataError, match=message):
            federation_from_dataset(samples, [0] * len(samples))


def test_a_function_of_an_installed_package_is_named_without_a_file(monkeypatch):
    def theirs(samples=20):
        x = np.random.default_rng(0).normal(size=(samples, 3)).astype(np.float32)
        return x, (x[:, 0] > 0).astype(int)

    points = {"theirs": lambda kind: theirs}
    for module in ("cfl_ray.plugins.registry", "cfl_ray.config.part"):
        monkeypatch.setattr(f"{module}.entry_points_of", lambda group: points if group == "cfl_ray.datasets" else {})
    data = SOURCE_KINDS.of(source="theirs", options={"samples": 24}, partition={"clients": 3, "min_samples": 2})
    assert describe(data, 0).clients == 3
    with pytest.raises(ValueError, match=r"unknown data set 'their' \(did you mean 'theirs'\?\)"):
        SOURCE_KINDS.of(source="their")


@pytest.mark.parametrize("label", [1_000_000, 4_000_000_000])
def test_labels_whose_counts_do_not_fit_into_memory(label):
    """C x C counts of 8 bytes: 8 TB for a million classes."""
    y = np.array([0, 1, label, 1])
    federation = federation_from_arrays(np.zeros((4, 2), np.float32), y, [0, 0, 1, 1])
    with pytest.raises(ConfigError, match=f"the largest label is {label}: .* GB are free; number the labels"):
        setup_on(Experiment(data=federation, methods=["fedavg"]), federation)
    dense = federation_from_arrays(np.zeros((4, 2), np.float32), y, [0, 0, 1, 1], labels="dense")
    assert dense.shape.class_names == ("0", "1", str(label)) and not dense.warnings


CLIENTS = """
import numpy as np
from cfl_ray import federation_from_arrays
from cfl_ray.data.synthetic import ConceptFederation

def divide(*given):
    raise AssertionError("called")

def arrays():
    x = np.arange(40, dtype=np.float32).reshape(20, 2) / 40
    return {"x": x, "y": np.arange(20) % 2, "clients": np.arange(20) // 10}

def federation():
    return federation_from_arrays(**arrays())

def generated():
    return ConceptFederation(2, name="sea", samples=9, seed=0)
"""


@pytest.fixture
def with_clients(tmp_path, monkeypatch):
    (tmp_path / "with_clients.py").write_text(CLIENTS)
    monkeypatch.chdir(tmp_path)
    draw = np.random.default_rng(0)
    np.savez("a.npz", x=draw.normal(size=(20, 2)), y=np.arange(20) % 2, clients=np.arange(20) // 10)


OF_CLIENTS = {
    "arrays": {"source": "arrays", "root": "a.npz"},
    "sine": {"source": "sine", "partition": {"clients": 2}},
    "arrays of a function": {"source": "with_clients.py:arrays"},
    **{name: {"source": f"with_clients.py:{name}"} for name in ("federation", "generated")},
}


@pytest.mark.parametrize("source", OF_CLIENTS)
@pytest.mark.parametrize("key", ["shift", "partition"])
def test_a_users_division_that_would_not_be_called_is_refused(with_clients, tmp_path, source, key):
    groups = {"groups": 2} if key == "shift" else {"clients": 2}
    data = merged(OF_CLIENTS[source], {key: {"kind": "with_clients.py:divide", **groups}})
    message = rf"data\.{key}\.kind.* would not be called, .*|data\.shift\.kind: samples that have clients"
    for of_data in (lambda config: build(config, 0, tmp_path / "shards"), lambda config: describe(config, 0)):
        with pytest.raises(DataError, match=message):
            of_data(SOURCE_KINDS.of(**data))


@pytest.mark.parametrize("source", OF_CLIENTS)
def test_keys_of_a_division_that_are_not_used_are_said(with_clients, tmp_path, source):
    """Of the experiment, where the source tells; otherwise of the federation."""
    changes = {"partition": {"kind": "classes", "clients": 2, "samples": 3}, "test": {"max_samples": 5}}
    lines = []
    for given in ({}, changes):
        experiment = Experiment(data=merged(OF_CLIENTS[source], given))
        lines.append(warnings_of(experiment) + build(experiment.data, 0, tmp_path / "shards").warnings)
        if "with_clients" in OF_CLIENTS[source]["source"]:
            assert set(lines[-1]) <= set(describe(experiment.data, 0).warnings)
    added = "\n".join(line for line in lines[1] if line not in lines[0])
    assert "data.partition.kind (classes) has no effect: the samples of source" in added
    assert "data.partition.samples (3) has no effect" in added
    assert "data.test.max_samples (5) has no effect" in added
    assert ("data.partition.clients (2) has no effect" in added) == (source != "sine")
    assert not any("has no effect" in line for line in lines[0])
    data = Experiment(protocol="pfllib", data=OF_CLIENTS[source]).data  # keys that the protocol has filled in
    of_protocol = build(data, 0, tmp_path / "shards", protocol="pfllib").warnings
    assert not any("has no effect" in line for line in (*of_protocol, *describe(data, 0, protocol="pfllib").warnings))


@pytest.mark.parametrize(
    ("test", "protocol", "is_used"),
    [
        ({}, None, False),
        ({}, "fl_bench", False),
        ({"pool": True}, "fl_bench", True),
        ({"view": "all"}, None, True),
    ],
)
def test_test_samples_of_a_function_that_are_not_used_are_said(tmp_path, monkeypatch, test, protocol, is_used):
    text = "import numpy as np\ndef f():\n    x = np.eye(12, dtype=np.float32)\n    y = np.arange(12) % 2\n"
    (tmp_path / "own.py").write_text(f"{text}    return {{'x': x, 'y': y, 'x_test': x, 'y_test': y}}\n")
    monkeypatch.chdir(tmp_path)
    partition = {"kind": "dirichlet", "clients": 2, "min_samples": 2, "alpha": 9.0}
    experiment = Experiment(protocol=protocol, data={"source": "own.py:f", "partition": partition, "test": test})
    for found in (build(experiment.data, 0, tmp_path / "shards"), describe(experiment.data, 0)):
        lines = [line for line in found.warnings if line.startswith("x_test and y_test of source own.py:f have no")]
        assert bool(lines) != is_used


class TestTime:
    @pytest.fixture
    def rows(self, tmp_path):
        """A table of 20 rows of one client, whose times are a permutation of 0..19: returns the times by input."""
        times = np.random.default_rng(0).permutation(20)
        days = np.datetime64("2026-01-01") + times
        lines = [f"{row / 2},{row % 2},a,{day}" for row, day in enumerate(days)]
        (tmp_path / "t.csv").write_text("\n".join(["a,label,client,day", *lines]) + "\n")
        return lambda samples: times[(samples[0][:, 0] * 2).long().numpy()].tolist()

    def federation(self, tmp_path, **changes):
        columns = {"client": "client", "time": "day"} | changes.pop("columns", {})
        return build(SOURCE_KINDS.of(source="csv", root=str(tmp_path), columns=columns, **changes), 0, tmp_path / "s")

    def test_the_last_samples_are_held_out_for_tests_and_those_before_them_for_validation(self, tmp_path, rows):
        federation = with_validation(self.federation(tmp_path, test={"order": "last"}), 0.25, "last", 0)
        assert rows(federation.train(0)) == list(range(12))
        assert rows(federation.validation.test(0)) == [12, 13, 14, 15]  # 0.25 * 16
        assert rows(federation.test(0)) == [16, 17, 18, 19]  # 0.2 * 20

    def test_without_a_column_the_order_is_that_of_the_file(self, tmp_path, rows):
        federation = self.federation(tmp_path, test={"order": "last"}, columns={"time": None, "features": ["a"]})
        assert federation.test(0)[0].flatten().tolist() == [8.0, 8.5, 9.0, 9.5]

    def test_random_test_samples_leave_training_samples_in_time(self, tmp_path, rows):
        federation = self.federation(tmp_path)
        trained, tested = rows(federation.train(0)), rows(federation.test(0))
        assert trained == sorted(trained) and sorted(trained + tested) == list(range(20)) and tested != [16, 17, 18, 19]

    def test_words_have_no_order(self, tmp_path, rows):
        with pytest.raises(DataError, match="time column 'client' must hold numbers, dates or times, it holds string"):
            self.federation(tmp_path, columns={"client": None, "time": "client"}, partition={"clients": 1})
