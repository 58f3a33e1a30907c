import subprocess
import sys
import threading
from functools import partial
from pathlib import Path

import numpy as np

import cfl_ray
from cfl_ray.plugins.content import content_of_files, content_of_object
from cfl_ray.system.files import sha256

SCALE = 2


def scaled(x):
    return x * SCALE


def times(factor):
    return lambda x: x * factor


class Times:
    def __init__(self, factor):
        self.factor = factor

    def __call__(self, x):
        return x * self.factor


def typed(text):
    """The function f of a cell of a notebook."""
    names = {"__name__": "__main__", "np": np}
    exec(text, names)
    return names["f"]


def test_objects_with_one_name_differ_by_what_they_do():
    first, second = (lambda x: x), (lambda x: -x)
    lock = threading.Lock()
    parts = [first, second, times(2), times(3), partial(scaled, 1), partial(scaled, 2), Times(2), Times(3), scaled]
    parts += [typed(f"def f(x):\n    return x {sign} 1") for sign in "+-"]
    parts += [typed(f"A = {a}\ndef f(x):\n    return np.sqrt(x + A)") for a in (1, 2)]
    parts += [lambda x: lock]  # cannot be pickled
    assert len({content_of_object(part) for part in parts}) == len(parts)
    for part in parts[:-1]:
        assert content_of_object(part) == content_of_object(part)
    assert content_of_object(times(2)) == content_of_object(times(2))
    same = [typed(text) for text in ("def f(x):\n    return x", "# another line\ndef f(x):\n    return x")]
    assert content_of_object(same[0]) == content_of_object(same[1])


def test_a_function_is_the_same_in_other_processes():
    code = "from cfl_ray.plugins.content import content_of_object as digest\nWORDS = {'a': 1}\n"
    code += "def f(x):\n    return WORDS if x in {'a', 'b', 'c', 'd', 'e'} else 2\nprint(digest(f))"
    found = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={"PYTHONHASHSEED": str(seed), "PYTHONPATH": str(Path(cfl_ray.__file__).parents[1])},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in (1, 2)
    }
    assert len(found) == 1


def test_the_content_of_a_file_includes_what_it_imports_from_beside(tmp_path):
    (tmp_path / "own.py").write_text("import beside\n\ndef f(x):\n    return beside.g(x)\n")
    (tmp_path / "alone.py").write_text("def f(x):\n    return x\n")
    function = type("Function", (), {})  # stands for a function of the file
    found = []
    for text in ("def g(x): return x", "def g(x): return -x"):
        (tmp_path / "beside.py").write_text(text)
        compiled = compile((tmp_path / "own.py").read_text(), str(tmp_path / "own.py"), "exec")
        names = {"__name__": "own"}
        sys.modules["beside"] = function
        exec(compiled, names)
        del sys.modules["beside"]
        found.append(content_of_files(names["f"]))
    assert found[0] != found[1]
    names = {"__name__": "alone"}
    exec(compile((tmp_path / "alone.py").read_text(), str(tmp_path / "alone.py"), "exec"), names)
    assert content_of_files(names["f"]) == sha256(tmp_path / "alone.py")  # as in the shards of earlier versions
    assert content_of_files(typed("def f(x):\n    return x")) == ""
