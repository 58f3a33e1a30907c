from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from cfl_ray.core.aggregation.rules import RULES
from cfl_ray.errors import ConfigError, DataError, RunError
from cfl_ray.plugins.calling import (
    as_number,
    call_plugin,
    described,
    explained,
    is_user_file,
    parse_choice,
    place_of,
    raised_at,
    reference_of,
    with_options,
)


def halve(x, draw, factor=0.5):
    return x * factor


class Scale:
    def __init__(self, factor=2.0):
        if factor < 0:
            raise ValueError(f"factor {factor} is negative")
        self.factor = factor

    def __call__(self, x, draw):
        return x * self.factor


def line(source) -> int:
    return source.__code__.co_firstlineno


def test_places_name_file_and_line():
    assert place_of(halve) == f"halve ({__file__}, line {line(halve)})"
    assert place_of(partial(halve, factor=1)) == place_of(halve)
    assert place_of(Scale().__call__) == f"Scale.__call__ ({__file__}, line {line(Scale.__call__)})"
    assert place_of(Scale()).startswith("Scale (") and place_of(len) == "len"


def test_a_place_is_named_while_another_thread_parses(monkeypatch):
    """Python 3.11 cannot parse in two threads, and the line of a class is found by parsing."""

    def busy(part):
        raise SystemError("AST constructor recursion depth mismatch (before=33, after=26)")

    monkeypatch.setattr("inspect.getsourcelines", busy)
    with pytest.raises(ValueError) as error:
        Scale(-1)
    assert place_of(Scale()) == f"Scale ({__file__})"
    assert raised_at(Scale(), error.value)[0] == Path(__file__)


def test_parts_of_packages_are_named_without_a_file():
    assert place_of(torch.optim.Adam) == "Adam" and place_of(place_of) == "place_of"
    assert [place_of(rule) for rule in RULES.values()] == [rule.__name__ for rule in RULES.values()]
    with pytest.raises(ValueError) as error:
        torch.optim.Adam([torch.zeros(1)], lr=-1.0)
    file, _ = raised_at(torch.optim.Adam, error.value)
    assert file.parts[-2:] == ("optim", "adam.py") and str(file) in explained(torch.optim.Adam, error.value)
    assert (
        raised_at(RULES["median"], error.value) is None and explained(len, error.value) == f"ValueError: {error.value}"
    )


def test_a_choice_is_a_name_with_options():
    assert parse_choice("key", "name") == ("name", {}) and parse_choice("key", halve) == (halve, {})
    assert parse_choice("key", {"name": {"tau": "1e-3", "text": "1e"}}) == ("name", {"tau": 1 / 1000, "text": "1e"})
    assert parse_choice("key", {"name": None}) == ("name", {}) and as_number("2E+3") == 2000 and as_number(True) is True
    for wrong in ({"a": {}, "b": {}}, {"a": 3}, {}):
        with pytest.raises(ConfigError, match="key must be a name, or one name with its options"):
            parse_choice("key", wrong)


def test_references_are_names():
    assert reference_of("my.py:f") == "my.py:f"
    assert reference_of(halve) == f"{__name__}.halve" and reference_of(Scale(3.0)) == f"{__name__}.Scale"


def test_options_are_bound_to_functions_and_make_objects():
    assert with_options(halve, {"factor": 0.25}, "part", ("x", "draw"))(8, None) == 2
    assert with_options(Scale, {"factor": 3.0}, "part", ("x", "draw"))(8, None) == 24
    assert with_options(lambda *given, factor=1: given[0] * factor, {"factor": 3}, "part", ("x", "draw"))(8, None) == 24
    assert (
        with_options(lambda *given, **more: given[0] * more["factor"], {"factor": 3}, "part", ("x", "draw"))(8, 0) == 24
    )
    made = Scale(5.0)
    assert with_options(made, {}, "part") is made and with_options(halve, {}, "part", ("x", "draw")) is halve


@pytest.mark.parametrize(
    "part, options, message",
    [
        (halve, {"fator": 1}, r"part halve \(.*\) has no option 'fator' \(did you mean 'factor'\?\)"),
        (lambda x: x, {}, r"<lambda> \(.*\) is called with x, draw: too many positional arguments; it takes \(x\)$"),
        (
            lambda x, draw, factor: x,
            {},
            r"is called with x, draw: missing a required argument: 'factor'; it takes \(x, draw, factor\)$",
        ),
        (Scale, {"fator": 1}, r"part Scale \(.*\) has no option 'fator' \(did you mean 'factor'\?\)"),
        (
            Scale,
            {"factor": -1},
            r"part Scale \(.*\) failed: ValueError: factor -1 is negative \(line \d+\)",
        ),
        (Scale(), {"factor": 1}, "is an object, which takes no options; got {'factor': 1}"),
    ],
)
def test_what_a_part_does_not_take_is_an_error_before_the_run(part, options, message):
    with pytest.raises(ConfigError, match=message):
        with_options(part, options, "part", ("x", "draw"))


def test_an_exception_names_the_line_that_raised_it():
    def broken(x):
        return x / 0

    with pytest.raises(DataError) as error:
        call_plugin("part", broken, 1, error=DataError, where=" of the test")
    expected = f"part broken ({__file__}, line {line(broken)}) of the test failed: ZeroDivisionError: division by zero"
    assert str(error.value) == f"{expected} (line {line(broken) + 1})"

    def refusing(x):
        raise RunError("as it is")

    with pytest.raises(RunError, match="^as it is$"):
        call_plugin("part", refusing, 1, error=DataError)


def test_values_are_described_by_type_and_shape():
    assert described(np.zeros((2, 3))) == "ndarray of float64 and shape (2, 3)"
    assert described(torch.zeros(4)) == "Tensor of float32 and shape (4,)"
    assert described(np.float32(0.5)) == "one number, 0.5"
    assert [described(value) for value in ([1, 2], None, 7)] == ["list of 2", "None", "int 7"]


def test_packages_installed_into_a_folder_are_not_the_users(tmp_path):
    """As by `pip install --target`, on machines without internet; also into the folder of the user's own files."""
    (tmp_path / "library-1.0.dist-info").mkdir()
    (tmp_path / "library-1.0.dist-info" / "RECORD").write_text("library/core.py,sha256=abc,10\n")
    assert not is_user_file(tmp_path / "library" / "core.py")
    assert is_user_file(tmp_path / "mine.py") and is_user_file(tmp_path / "library" / "mine.py")
    assert not is_user_file(Path(torch.__file__)) and not is_user_file(None)
