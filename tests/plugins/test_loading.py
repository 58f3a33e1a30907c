import os
import sys

import pytest

from cfl_ray.errors import ConfigError, did_you_mean
from cfl_ray.plugins.loading import load_plugin, sent_by_value


def test_loads_an_object_of_the_file(tmp_path):
    (tmp_path / "mine.py").write_text("def Net():\n    return 42\n")
    assert load_plugin(f"{tmp_path}/mine.py:Net", "model")() == 42


def test_the_same_file_is_one_module(tmp_path):
    (tmp_path / "once.py").write_text("class Net: ...\n")
    assert load_plugin(f"{tmp_path}/once.py:Net", "model") is load_plugin(f"{tmp_path}/once.py:Net", "model")


def test_an_edited_file_is_imported_anew_with_its_neighbours(tmp_path):
    """So that a run in the same process has the code that its record names."""
    (tmp_path / "common.py").write_text("FACTOR = 2\nclass Shared: ...\n")
    for name in ("first", "second"):
        source = f"import common\nVALUE, Shared = ('{name}', common.FACTOR), common.Shared\n"
        (tmp_path / f"{name}.py").write_text(source)
    first, second = (f"{tmp_path}/{name}.py" for name in ("first", "second"))
    assert load_plugin(f"{first}:VALUE", "model") == ("first", 2)
    (tmp_path / "common.py").write_text("FACTOR = 30\nclass Shared: ...\n")
    assert load_plugin(f"{first}:VALUE", "model") == ("first", 30)
    assert load_plugin(f"{second}:Shared", "model") is load_plugin(f"{first}:Shared", "model")
    (tmp_path / "second.py").write_text("VALUE = 'edited'\n")
    assert load_plugin(f"{second}:VALUE", "model") == "edited"


@pytest.mark.parametrize("edited", ["model.py", "near.py", "pack/inner.py"])
def test_an_edit_within_the_same_second_and_of_the_same_size_counts(tmp_path, monkeypatch, edited):
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    (tmp_path / "pack").mkdir()
    texts = {
        "model.py": "import near\nfrom pack import inner\nown = 1\n",
        "near.py": "own = 1\n",
        "pack/inner.py": "own = 1\n",
    }
    read = "total = own, near.own, inner.own\n"
    for text, milliseconds in (("own = 1", 100), ("own = 2", 200)):
        for name, content in texts.items():
            file = tmp_path / name
            file.write_text(
                content.replace("own = 1", text if name == edited else "own = 1") + read * (name == "model.py")
            )
            os.utime(file, ns=(1_700_000_000_000_000_000 + milliseconds * 1_000_000,) * 2)
        total = load_plugin(f"{tmp_path / 'model.py'}:total", "the model")
    assert total == tuple(2 if name == edited else 1 for name in texts)


def test_files_of_one_name_in_two_folders_are_two_modules(tmp_path):
    for value in (1, 2):
        (tmp_path / str(value)).mkdir()
        (tmp_path / str(value) / "same.py").write_text(f"VALUE = {value}\n")
    assert [load_plugin(f"{tmp_path}/{value}/same.py:VALUE", "model") for value in (1, 2)] == [1, 2]


def test_a_missing_file_is_named_in_full():
    with pytest.raises(ConfigError, match="method 'no.py:Mine': there is no file /.*/no.py"):
        load_plugin("no.py:Mine", "method")


def test_a_file_that_is_not_python_is_rejected(tmp_path):
    (tmp_path / "mine.txt").write_text("Net = 1\n")
    with pytest.raises(
        ConfigError, match="mine.txt cannot be imported: it is no Python file; its name must end in .py"
    ):
        load_plugin(f"{tmp_path}/mine.txt:Net", "model")


def test_a_missing_name_suggests_one(tmp_path):
    (tmp_path / "mine2.py").write_text("from math import pi\nclass MyMethod: ...\n")
    with pytest.raises(ConfigError, match=r"mine2.py has no 'MyMethd' \(did you mean 'MyMethod'\?\)"):
        load_plugin(f"{tmp_path}/mine2.py:MyMethd", "method")


def test_a_failing_file_is_reported_and_can_be_corrected(tmp_path):
    file = tmp_path / "broken.py"
    file.write_text("1 / 0\n")
    with pytest.raises(ConfigError, match="broken.py cannot be imported: ZeroDivisionError: division by zero"):
        load_plugin(f"{file}:Net", "model")
    file.write_text("Net = 'corrected'\n")
    assert load_plugin(f"{file}:Net", "model") == "corrected"


class TestNeighbours:
    def write(self, folder, value):
        folder.mkdir(exist_ok=True)
        (folder / "floor_of_mine.py").write_text(f"FLOOR = {value}\ndef floor(): return FLOOR\n")
        (folder / f"part{value}.py").write_text("from floor_of_mine import FLOOR, floor\nimport json, wave\n")
        return folder / f"part{value}.py"

    def test_a_file_imports_the_files_of_its_folder(self, tmp_path):
        """And those of its own folder, where another folder has one of the same name."""
        path = list(sys.path)
        files = [self.write(tmp_path / str(value), value) for value in (1, 2)]
        assert [load_plugin(f"{file}:FLOOR", "model") for file in files] == [1, 2]
        assert [load_plugin(f"{file}:floor", "model")() for file in files] == [1, 2]
        assert sys.path == path

    def test_neighbours_are_sent_and_installed_modules_are_not(self, tmp_path):
        load_plugin(f"{self.write(tmp_path, 3)}:floor", "model")
        names = {module.__name__ for module in sent_by_value()}
        assert {"cfl_ray_plugin_part3", "floor_of_mine"} <= names and not {"json", "wave"} & names

    def test_a_neighbour_that_fails_can_be_corrected(self, tmp_path):
        file = self.write(tmp_path, 4)
        (tmp_path / "floor_of_mine.py").write_text("FLOOR = 4\n1 / 0\n")
        with pytest.raises(ConfigError, match=r"part4.py cannot be imported: ZeroDivisionError: .* \(line 1\)"):
            load_plugin(f"{file}:FLOOR", "model")
        self.write(tmp_path, 4)
        assert load_plugin(f"{file}:FLOOR", "model") == 4


def test_did_you_mean_names_one_word_or_lists_all():
    assert did_you_mean("stocf", ["ifca", "stocfl"]) == " (did you mean 'stocfl'?)"
    assert did_you_mean("adma", ["adam", "adamax", "adamw"]) == " (did you mean 'adam'?)"
    assert did_you_mean("fedadm", ["fedadam", "fedavg"]) == " (did you mean 'fedadam'?)"
    assert did_you_mean("zzz", ["b", "a"]) == "; valid: a, b"
    assert (
        did_you_mean("leaf", ["femnist_leaf", "sea", "sent140_leaf"])
        == " (did you mean 'femnist_leaf' or 'sent140_leaf'?)"
    )
