"""The layout of run directories has one place, which the documentation repeats."""

import ast
import functools
import re
from pathlib import Path

import pytest

import cfl_ray
from cfl_ray import Experiment, load_run, resume, simulate
from cfl_ray.errors import ConfigError, RunError
from cfl_ray.run_directory import RunDirectory
from cfl_ray.run_directory.directory import FORMAT

PACKAGE = Path(cfl_ray.__file__).parent
NAMES = {file.name for file in RunDirectory.layout().values()}
COMMON = {"models"}  # words that mean other things, too
OTHERS = {"report/page.py", "cli/result_commands.py"}  # report.html: the template of the page, and the default of -o


@pytest.fixture
def experiment(tmp_path):
    """A run of two rounds with clusters."""
    return Experiment(
        name="small",
        rounds=2,
        methods=["ifca"],
        model={"options": {"hidden": 4}},
        output=str(tmp_path),
        data={"source": "synthetic", "synthetic_shape": [8], "synthetic_samples": 20, "partition": {"clients": 4}},
        runtime={"engine": "manual", "checkpoint_every": 1},
        tracking={"enabled": False},
    )


@functools.cache
def nodes_of(source: str) -> list[ast.AST]:
    return list(ast.walk(ast.parse(source)))


def named_in(source: str) -> set[str]:
    """The names of the layout, and of its folders, that are whole texts of a module."""
    names = {part for name in NAMES if name for part in (name.rstrip("/"), name.rpartition("/")[2])} - {"", *COMMON}
    nodes = nodes_of(source)
    return names & {node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)}


def joins_a_label(source: str) -> bool:
    joins = (node for node in nodes_of(source) if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div))
    return any(isinstance(node.right, ast.Name) and node.right.id == "label" for node in joins)


def test_no_other_module_names_a_file_of_a_run():
    assert named_in('(run / "metrics.jsonl", f"{run}/x", "events.jsonl")') == {"metrics.jsonl", "events.jsonl"}
    assert joins_a_label("run_dir / label")
    others = {path: path.read_text() for path in PACKAGE.rglob("*.py") if path.parent != PACKAGE / "run_directory"}
    assert {
        path.relative_to(PACKAGE).as_posix(): found for path, text in others.items() if (found := named_in(text))
    } == (dict.fromkeys(OTHERS, {"report.html"}))
    jobs = (path for path in (PACKAGE.parent / "jobs").rglob("*.py") if path.parent.name != "official")  # others' files
    others |= {path: path.read_text() for path in jobs}
    assert set().union(*map(named_in, others.values())) <= {"report.html", "artifacts"}  # artifacts: also MLflow's
    assert [path for path, text in others.items() if joins_a_label(text) or '"seed-' in text] == []


def test_the_documentation_repeats_the_layout():
    page = (PACKAGE.parent / "docs/architecture.md").read_text()
    table = re.search(r"^\| file \| of \| contents \| written by \|\n\|[-|]+\n((?:\|.*\n)+)", page, re.M)
    rows = [tuple(cell.strip() for cell in line.strip("|").split("|")) for line in table[1].splitlines()]
    files = RunDirectory.layout().values()
    assert rows == [(f"`{file.name}`", ", ".join(file.of), file.contents, file.writer) for file in files]


def test_a_run_writes_the_files_of_its_layout_and_no_others(tmp_path, experiment):
    simulate(experiment, tmp_path / "run")
    run = RunDirectory(tmp_path / "run")
    for directory, owner in ((run, "run"), (run.method("ifca"), "method")):
        names = {path.name for path in directory.path.iterdir()} - {"ifca"}
        assert names <= set(RunDirectory.names_in(owner)), owner
    assert {"config.yaml", "environment.json", "run.json"} <= {path.name for path in run.path.iterdir()}


@pytest.mark.parametrize("number", [2, 99])
def test_a_run_of_another_format_is_refused(tmp_path, number):
    (tmp_path / "config.yaml").write_text(f"# config hash 1\n# format {number}\nname: small\n")
    with pytest.raises(ConfigError, match=f"has format {number}, and this cfl_ray reads format {FORMAT}"):
        resume(tmp_path)


def test_a_config_whose_comments_were_removed_is_read(tmp_path, experiment):
    simulate(experiment, tmp_path / "run")
    config = RunDirectory(tmp_path / "run").config
    config.write_text(re.sub("^#.*\n", "", config.read_text(), flags=re.M))
    assert load_run(tmp_path / "run")["ifca"].records[-1].round == 2


def test_of_two_drivers_that_start_in_one_folder_one_starts(tmp_path):
    """The second one before the first has written its config, or after."""
    run = RunDirectory(tmp_path / "run")
    with run.starting():
        message = "another process starts a run in .*run; choose another folder"
        with pytest.raises(RunError, match=message), RunDirectory(tmp_path / "run").starting():
            raise AssertionError
        with pytest.raises(ConfigError, match="a run is starting in .*run; ask again in a moment"):
            run.require_run()
        run.config.write_text("x: 1")
    with pytest.raises(RunError, match="another process has started a run in"), run.starting():
        raise AssertionError


def test_a_run_that_does_not_begin_leaves_no_folder(tmp_path):
    with pytest.raises(KeyError), RunDirectory(tmp_path / "run").starting():
        raise KeyError
    assert not (tmp_path / "run").exists()
    (tmp_path / "own").mkdir()
    (tmp_path / "own/notes").write_text("mine")
    with pytest.raises(KeyError), RunDirectory(tmp_path / "own").starting():
        raise KeyError
    assert (tmp_path / "own/notes").exists()


def test_the_folder_is_taken_before_ray_starts(experiment, tmp_path, monkeypatch):
    def start(launched, setup):
        run = RunDirectory(tmp_path / "run")
        with pytest.raises(RunError, match="another process starts a run"), run.starting():
            raise AssertionError
        raise RunError("seen")

    monkeypatch.setattr("cfl_ray.lifecycle.launch._Launch._session", start)
    with pytest.raises(RunError, match="seen"):
        simulate(experiment, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_lock_that_is_a_link_is_not_followed(tmp_path):
    """Versions of filelock before the one that pyproject.toml asks for empty the target."""
    run, target = RunDirectory(tmp_path / "run"), tmp_path / "target"
    run.path.mkdir()
    target.write_text("mine")
    run.start_lock.symlink_to(target)
    with pytest.raises((OSError, RunError)), run.starting():
        raise AssertionError
    assert target.read_text() == "mine"
