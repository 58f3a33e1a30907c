import pytest

from cfl_ray.core.errors import ConfigError, did_you_mean
from cfl_ray.core.plugins import load_plugin


def test_loads_an_object_of_the_file(tmp_path):
    (tmp_path / "mine.py").write_text("def Net():\n    return 42\n")
    assert load_plugin(f"{tmp_path}/mine.py:Net", "model")() == 42


def test_the_same_file_is_one_module(tmp_path):
    (tmp_path / "once.py").write_text("class Net: ...\n")
    assert load_plugin(f"{tmp_path}/once.py:Net", "model") is load_plugin(f"{tmp_path}/once.py:Net", "model")


def test_files_of_one_name_in_two_folders_are_two_modules(tmp_path):
    for value in (1, 2):
        (tmp_path / str(value)).mkdir()
        (tmp_path / str(value) / "same.py").write_text(f"VALUE = {value}\n")
    assert [load_plugin(f"{tmp_path}/{value}/same.py:VALUE", "model") for value in (1, 2)] == [1, 2]


def test_a_missing_file_is_named_in_full(tmp_path):
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


def test_did_you_mean_names_one_word_or_lists_all():
    assert did_you_mean("stocf", ["ifca", "stocfl"]) == " (did you mean 'stocfl'?)"
    assert did_you_mean("adma", ["adam", "adamax", "adamw"]) == " (did you mean 'adam'?)"
    assert did_you_mean("fedadm", ["fedadam", "fedavg"]) == " (did you mean 'fedadam'?)"
    assert did_you_mean("zzz", ["b", "a"]) == "; valid: a, b"
