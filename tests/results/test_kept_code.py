"""A run keeps the user's code, and the copy takes the place of files that were edited or are gone."""

import json
import linecache
import logging
import re
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from commands import status_of
from small_runs import PLANTED, Notes, merged, metrics_of, simulate_until

from cfl_ray import Experiment, compare_runs, load_run, resume, run, simulate
from cfl_ray.errors import ConfigError, DataError, NotReproduced
from cfl_ray.plugins.imported import imported_beside
from cfl_ray.plugins.loading import load_plugin, sent_by_value
from cfl_ray.results.kept_code import INDEX, kept_code, shown_difference
from cfl_ray.results.trust import UntrustedError
from cfl_ray.results.user_code import files_of, typed_sources

NET = "from torch import nn\nfrom parts import act\n\ndef make(shape, classes):\n    {lazy}return nn.Sequential("
NET += "nn.Linear(shape[0], 16), act.ACT(), nn.Linear(16, classes))\n"


def write_code(folder, act="ReLU", lazy=""):
    (folder / "parts").mkdir(parents=True, exist_ok=True)
    (folder / "net.py").write_text(NET.format(lazy=lazy))
    (folder / "parts/act.py").write_text(f"from torch import nn\nACT = nn.{act}\n")


@pytest.fixture
def files(tmp_path, monkeypatch, caplog):
    """A folder with code and data, which is the working directory."""
    monkeypatch.setenv("CFL_RAY_HOME", str(tmp_path / "home"))
    caplog.set_level(logging.WARNING)
    write_code(tmp_path / "mine")
    draw = np.random.default_rng(0)
    x = draw.normal(size=(40, 6)).astype("float32")
    np.savez(tmp_path / "data.npz", x=x, y=(x[:, 0] * x[:, 1] > 0).astype(int), clients=np.arange(40) // 10)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def small(rounds=2, **sections):
    data = {"source": "arrays", "root": "data.npz"}
    own = {"tracking": {"enabled": False}, "local": {"lr": 0.3}, "methods": ["fedavg"]} | sections
    return Experiment(data=data, rounds=rounds, model={"name": "mine/net.py:make"}, **own)


def outputs(results):
    return results["fedavg"].model(cluster=0)(torch.linspace(-1, 1, 12).reshape(2, 6)).detach().numpy()


def test_files_that_a_file_imports_from_beside_it(tmp_path):
    texts = {
        "a.py": "import b, json\nfrom pack import inner\ndef f():\n    import late\n    import_module('named')",
        "b.py": "import a\nfrom other.deep import leaf",
        "late.py": "",
        "named.py": "",
        "unused.py": "",
        "pack/__init__.py": "from . import near",
        "pack/inner.py": "from .near import x",
        "pack/near.py": "",
        "other/deep.py": "",
    }
    for name, text in texts.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    found = {file.relative_to(tmp_path).as_posix() for file in imported_beside(tmp_path / "a.py")}
    assert found == {*texts} - {"a.py", "unused.py"}


@pytest.mark.parametrize("change", ["edited", "deleted"])
def test_a_loaded_run_has_its_own_numbers_whatever_became_of_the_files(files, caplog, change):
    expected = outputs(simulate(small(), "run"))
    write_code(files / "mine", "Tanh") if change == "edited" else shutil.rmtree(files / "mine")
    assert np.array_equal(outputs(load_run("run")), expected)
    said = f"{files}/mine/parts/act.py " + ("was edited:\n  @@ -2 +2 @@\n" if change == "edited" else "is not here")
    assert said in caplog.text
    with pytest.raises(NotReproduced if change == "edited" else ConfigError):
        load_run("run", code="now")["fedavg"].model(cluster=0)
    with pytest.raises(ConfigError, match="code must be 'run' .* got 'old'"):
        load_run("run", code="old")


def test_two_versions_of_a_file_in_one_process(files):
    """Also with an import inside a function, which is called when the other version has been loaded."""
    write_code(files / "mine", lazy="from parts import act as again; assert again is act\n    ")
    first = outputs(simulate(small(), "first"))
    write_code(files / "mine", "Tanh")
    second = outputs(simulate(small(), "second"))
    write_code(files / "mine", "Sigmoid")
    assert load_plugin("mine/net.py:act", "module").ACT.__name__ == "Sigmoid"
    loaded = [load_run(name) for name in ("first", "second")]
    assert not np.allclose(first, second)
    for _ in range(2):
        assert np.array_equal(outputs(loaded[0]), first) and np.array_equal(outputs(loaded[1]), second)
    assert load_plugin("mine/net.py:act", "module").ACT.__name__ == "Sigmoid"
    kept = [module.__name__ for module in sent_by_value() if module.__name__.startswith("cfl_ray_kept_")]
    assert len({name.partition(".")[0] for name in kept}) >= 2  # on Ray, hosts get both by value


@pytest.mark.parametrize("code", [None, "now"])
def test_a_resumed_run_goes_on_with_one_version(files, code):
    whole = metrics_of(simulate(small(3))["fedavg"])
    simulate_until(2, small(3), Path("run"))
    write_code(files / "mine", "ReLU" if code == "now" else "Tanh")
    with (files / "mine/net.py").open("a") as file:
        file.write("# a comment\n")
    notes = Notes()
    resumed = resume("run", notes, on_ray=False, code=code)
    assert metrics_of(resumed["fedavg"]) == whole  # with "now", the edit changes no result
    used = "the present files are used" if code == "now" else f"its copy in {files}/run/user_code is used"
    assert any(used in line and "+# a comment" in line for line in notes.warnings)
    kept = (files / "run/user_code/mine/net.py").read_text()
    assert ("# a comment" in kept) == (code == "now")  # the copy is of the code of the present models
    assert (files / "run/user_code/former~1/mine/net.py").is_file() == (code == "now")
    caught = Notes()
    resume("run", caught, on_ray=False)
    assert bool(caught.warnings) == (code != "now")


def test_a_copied_run_works_by_its_copy_once_it_is_trusted(files, tmp_path):
    expected = outputs(simulate(small(), "here/run"))
    elsewhere = tmp_path / "elsewhere"
    shutil.copytree("here/run", elsewhere)
    shutil.rmtree("mine")
    with pytest.raises(UntrustedError, match=r"the code in user_code/mine/net\.py"):
        load_run(elsewhere)
    assert np.array_equal(outputs(load_run(elsewhere, trust=True)), expected)
    shutil.copytree(files / "here", files / "again")
    (files / "again/run/user_code/mine/net.py").write_text("raise SystemExit('not mine')\n")
    with pytest.raises(DataError, match=r"the run's copy of .*mine/net\.py, has sha256 .* expected"):
        load_run(files / "again/run", trust=True)


def test_a_copy_that_another_has_changed_is_not_the_users(files):
    simulate(small(), "run")
    (files / "run/user_code/mine/net.py").write_text("raise SystemExit\n")
    with pytest.raises(UntrustedError, match=r"the code in user_code/mine/net\.py"):
        load_run("run")


@pytest.mark.parametrize(
    "text", ['{"files": {"../x.py": {"file": "/x.py", "sha256": "0"}}, "run_directory": ""}', "[]"]
)
def test_an_index_that_is_not_valid_is_refused(tmp_path, text):
    (tmp_path / "user_code").mkdir()
    (tmp_path / "user_code" / INDEX).write_text(text)
    with pytest.raises(DataError, match="which is not in|is damaged"):
        kept_code(tmp_path)


def test_commands_take_the_choice(files, capsys):
    (files / "e.yaml").write_text(json.dumps(small().to_dict()))
    assert status_of("run", "--in-process", "--run-dir", "run", "e.yaml") == 0
    write_code(files / "mine", "Tanh")
    for command in (("export", "run", "-o", "m.pt"), ("table", "run"), ("report", "run"), ("resume", "run")):
        assert status_of(*command) == 0
    assert status_of("export", "run", "-o", "m.pt", "--code", "now") == 1
    assert "edited since the run began: parts/act.py" in capsys.readouterr().err
    longer = ["run", "--in-process", "--extend", "run", "e.yaml", "rounds=3"]
    assert status_of(*longer, "--run-dir", "longer") == 0
    assert status_of(*longer, "--run-dir", "other", "--code", "now") == 1
    assert metrics_of(load_run("longer")["fedavg"])[:2] == metrics_of(load_run("run")["fedavg"])


def test_a_copied_run_needs_no_files_of_its_author(files, capsys):
    """It is extended, and its record run again, where the author's code and folders are gone."""
    (files / "e.yaml").write_text(json.dumps(small().to_dict() | {"output": "out"}))
    assert status_of("run", "--in-process", "--run-dir", "out/run", "e.yaml") == 0
    shutil.copytree("out/run", "colleague/copy")
    shutil.rmtree("mine")
    shutil.rmtree("out")
    capsys.readouterr()
    begin = ("run", "--in-process", "--trust", "--run-dir")
    assert status_of(*begin, "longer", "--extend", "colleague/copy", "colleague/copy/config.yaml", "rounds=3") == 0
    assert status_of(*begin, "again", "colleague/copy/config.yaml") == 0
    assert f"its copy in {files}/colleague/copy/user_code is used" in capsys.readouterr().err.replace("\n", " ")
    first = metrics_of(load_run("again")["fedavg"])
    assert (
        metrics_of(load_run("longer")["fedavg"])[:2]
        == first
        == metrics_of(load_run("colleague/copy", trust=True)["fedavg"])
    )
    assert not (files / "out").exists(), "nothing is written where the author had it"
    write_code(files / "mine", "Tanh")
    assert status_of(*begin, "edited", "colleague/copy/config.yaml") == 0
    assert "this run uses the present files, and with --code run" in capsys.readouterr().err.replace("\n", " ")
    assert metrics_of(load_run("edited")["fedavg"]) != first
    assert status_of(*begin, "kept", "colleague/copy/config.yaml", "--code", "run") == 0
    assert metrics_of(load_run("kept")["fedavg"]) == first


def test_runs_of_two_versions_in_a_table_are_named(files, caplog):
    simulate(small(), "first")
    write_code(files / "mine", "Tanh")
    simulate(small(seed=1), "second")
    compare_runs(["first", "second"])
    assert re.search(
        r"these runs have run 2 versions of parts/act.py: \w{12} in .*first; \w{12} in .*second; see", caplog.text
    )


def test_functions_without_a_file_are_kept_as_text(tmp_path):
    cell = "def halve(x):\n    return x / 2\n\ndef spread(outputs, targets):\n    return halve(outputs).std()\n"
    name, scope = "<cell 1>", {"__name__": "__main__"}
    linecache.cache[name] = (len(cell), None, cell.splitlines(True), name)
    exec(compile(cell, name, "exec"), scope)
    experiment = Experiment(
        **merged(PLANTED, {"evaluation": {"metrics": [scope["spread"]]}, "rounds": 1, "methods": ["fedavg"]})
    )
    assert typed_sources(experiment) == {"spread": cell, "halve": cell} and not files_of(experiment)
    simulate(experiment, tmp_path / "run")
    assert (tmp_path / "run/user_code/notebook/spread.py").read_text() == cell


def test_a_file_beside_the_code_is_not_copied_and_the_run_says_so(files):
    (files / "mine/parts/act.py").write_text(
        "from pathlib import Path\nfrom torch import nn\n"
        "ACT = getattr(nn, (Path(__file__).parent / 'name.txt').read_text())\n"
    )
    (files / "mine/parts/name.txt").write_text("ReLU")
    notes = Notes()
    simulate(small(), "run", notes)
    assert any("cannot be used, so this run needs the original files" in line for line in notes.warnings)


def test_a_difference_is_short():
    before = "\n".join(f"line {number}" for number in range(30))
    shown = shown_difference(before, before.replace("line", "row")).splitlines()
    assert len(shown) == 9 and shown[0] == "  @@ -1,30 +1,30 @@" and shown[-1] == "  ... 53 more lines"
    assert shown_difference("a\n", "a") == "  (white space at the ends of lines)"


@pytest.mark.slow
def test_hosts_on_ray_run_the_copy(files):
    """Driver, server and hosts have the modules of the copy, beside those of the edited files."""
    simulate_until(2, small(3), Path("here"))
    shutil.copytree("here", "there")
    expected = metrics_of(resume("here", on_ray=False)["fedavg"])
    write_code(files / "mine", "Tanh")
    other = run(small(1), "other")
    resumed = resume("there", trust=True)
    assert metrics_of(resumed["fedavg"]) == expected and other["fedavg"].records
    assert "cfl_ray_plugin_net" in sys.modules
