"""The documentation shows what happens: its Python runs, its YAML loads, its commands work, its links resolve."""

import ast
import inspect
import os
import re
import runpy
import shlex
import subprocess
import sys
import textwrap
import threading
import tomllib
import venv
from functools import cache, partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from importlib.metadata import distributions, version
from math import isfinite
from pathlib import Path

import numpy as np
import pytest
from commands import call
from packaging.requirements import Requirement
from studies import InlinePool
from wheels import make_project, make_wheel

from cfl_ray import config, simulate
from cfl_ray.config import keys
from cfl_ray.study import run
from cfl_ray.tracking.record import primary_of

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text()
EXTEND = sorted({*ROOT.glob("docs/extend/*.md")} - {ROOT / "docs/extend/method_steps.md"})  # run by test_tutorial.py
PAGES = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("cluster_configs/*.md")]


def blocks(language: str, page: str = README) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", page, re.S)


def command(arguments: list[str], capsys) -> str:
    status, printed, error = call(capsys, *arguments)
    assert status == 0, error
    return printed


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def inline(monkeypatch):
    """Studies run in this process."""
    monkeypatch.setattr(run, "WorkerPool", InlinePool)


def test_python_blocks_run_and_are_short():
    for number, source in enumerate(blocks("python")):
        assert len([line for line in source.splitlines() if line.strip() and not line.startswith("#")]) < 15
        space = {"__name__": f"readme_{number}"}
        exec(compile(source, f"README block {number}", "exec"), space)
        if "results" in space:
            results = space["results"]
            assert all(0 <= method.final["accuracy"] <= 1 for method in results.methods.values())


def test_own_method_from_the_command_line(capsys):
    Path("my_method.py").write_text(next(block for block in blocks("python") if "my_method.py" in block))
    shown = re.search(r'cfl-ray run ("methods=[^"]*my_method[^"]*")', README).group(1).strip('"')
    printed = command(["run", "--in-process", shown, "rounds=2", "tracking.enabled=false"], capsys)
    assert "damped" in printed and "fedavg" in printed


def test_the_method_of_the_contributors_page(capsys):
    (source,) = blocks("python", CONTRIBUTING)
    Path("round_robin.py").write_text(source)
    printed = command(
        ["run", "--in-process", "methods=[round_robin.py:RoundRobin]", "rounds=2", "tracking.enabled=false"], capsys
    )
    assert "round_robin" in printed
    body = source[source.index("@dataclass") :]
    assert len([line for line in body.splitlines() if line.strip()]) <= 20


@pytest.mark.parametrize("page", EXTEND, ids=lambda page: page.stem)
def test_pages_on_extending_show_what_runs(page):
    """A block that begins with a file's name is that file; each experiment runs for a round, each script as it is.

    Examples are run by test_examples.py.
    """
    files = re.findall(r"```(\w+)\n# ([\w/]+\.\w+)\n(.*?)```", page.read_text(), re.S)
    for _, name, content in files:
        Path(name).write_text(content)
    for number, source in enumerate(blocks("python", page.read_text())):
        if not source.startswith("# "):
            exec(compile(source, f"{page.name} block {number}", "exec"), {"__name__": f"{page.stem}_{number}"})
    experiments = [name for language, name, _ in files if language == "yaml"]
    assert experiments
    for name in experiments:
        if (example := ROOT / "examples" / name).exists() and example.read_text() == Path(name).read_text():
            continue
        result = simulate(config.load(name, ["rounds=1", "tracking.enabled=false"]))
        assert all(isfinite(method.final[primary_of(method.final)]) for method in result.methods.values())


@pytest.mark.slow  # many runs
def test_the_page_on_studies_shows_what_runs(capsys, inline):
    page = (ROOT / "docs" / "studies.md").read_text()
    for name, content in re.findall(r"```yaml\n# (\w+\.yaml)\n(.*?)```", page, re.S):
        Path(name).write_text(content)
    printed = ""
    for line in filter(None, "\n".join(blocks("bash", page)).splitlines()):
        printed += command(shlex.split(line, comments=True)[1:], capsys)
    assert "12 runs; folder" in printed and "best for stocfl: accuracy" in printed and "12 of 12 finished" in printed
    assert len(list(Path("runs/search").glob("*/stocfl/seed-0/end.json"))) == 3


def test_the_example_of_run_study(capsys, inline):
    """That of docs/studies.md as a script, and the one in the docstring as far as it makes a study."""
    (source,) = blocks("python", (ROOT / "docs" / "studies.md").read_text())
    Path("script.py").write_text(source)
    runpy.run_path("script.py")
    assert not Path("runs").exists(), "a process of the study imports it too"
    runpy.run_path("script.py", run_name="__main__")
    assert capsys.readouterr().out.count("fedavg") == 2
    from cfl_ray import Study, run_study
    from cfl_ray.study.run import plan_study

    example = inspect.getdoc(run_study).partition("    study = ")[2]
    space = {"Study": Study}
    exec("study = " + textwrap.dedent("    " + example).partition("results = ")[0].strip(), space)
    assert len(plan_study(space["study"])[0]) == 2 * 2 * 2


def test_yaml_block_loads():
    (block,) = blocks("yaml")
    Path("mine.yaml").write_text(block)
    experiment = config.load("mine.yaml", ["rounds=10", "local.lr=0.1"])
    assert (experiment.rounds, experiment.local.lr, experiment.data.source) == (10, 0.1, "mnist")


def files_of(page: str) -> dict[str, str]:
    """The blocks of a page that begin with the name of a file, by this name."""
    return dict(re.findall(r"```\w+\n# (\w+\.(?:yaml|py))\n(.*?)```", page, re.S))


def test_the_examples_of_the_page_on_other_libraries_run(capsys):
    """On digits of three clients, for one round; the keys of the protocol that it leaves alone are in use."""
    page = (ROOT / "docs" / "coming_from.md").read_text()
    name = "pfllib.yaml"
    Path(name).write_text(files_of(page)[name])
    whole = config.load(name)
    assert (whole.data.test.pool, whole.local.batch_size, whole.model.name) == (True, 10, "leaf_cnn")
    small = ["rounds=1", "data.source=digits", "data.normalize=null", "data.partition.clients=3", "model=digits_cnn"]
    printed = command(["check", name, *small], capsys)
    assert "data.partition.clients 3 (20)" in " ".join(printed.split())
    result = simulate(config.load(name, [*small, "tracking.enabled=false"]))
    metrics = {label: method.final for label, method in result.methods.items()}
    assert len(metrics) == 6 and metrics["apfl"]["reported"] == metrics["apfl"]["accuracy_local"]
    assert all(of["reported"] == of["accuracy"] for label, of in metrics.items() if label != "apfl")
    mapped = set(re.findall(r"`((?:local|data|cohort|evaluation)\.[a-z_.]+)`", page))
    for key in mapped:
        keys.find(config.Experiment, key)  # raises ConfigError for a key that does not exist
    assert len(mapped) > 20


def test_the_app_of_the_page_on_flower_runs():
    page = (ROOT / "docs" / "coming_from_flower.md").read_text()
    for name, content in files_of(page).items():
        Path(name).write_text(content)
    result = simulate(config.load("app.yaml", ["rounds=1", "tracking.enabled=false"]))
    assert list(result.methods) == ["fedavg", "fedprox", "fedadam", "krum", "ifca"]
    mapped = set(re.findall(r"`((?:local|data|cohort|evaluation|runtime)\.[a-z_.]+)`", page))
    for key in mapped:
        keys.find(config.Experiment, key)  # raises ConfigError for a key that does not exist
    assert len(mapped) > 7


def test_areas_under_the_curve_are_those_of_the_page_on_other_libraries():
    page = (ROOT / "docs" / "coming_from.md").read_text()
    for name, content in files_of(page).items():
        Path(name).write_text(content)
    result = simulate(config.load("auc.yaml", ["tracking.enabled=false"]))
    for label, name in (("fedavg", "FedAvg"), ("local", "Local")):
        cells = [f"{result[label].final[metric]:.3f}" for metric in ("accuracy", "roc_auc", "pfllib_auc")]
        assert f"| {name} | {' | '.join(cells)} |" in page


def test_clients_of_pfllib_are_those_of_its_files():
    """Client 10 follows client 9; each has the first part of its training and of its test samples."""
    for name, content in files_of((ROOT / "docs" / "coming_from.md").read_text()).items():
        Path(name).write_text(content)
    for part, each in (("train", 20), ("test", 4)):
        folder = Path("PFLlib/dataset/MNIST", part)
        folder.mkdir(parents=True)
        for client in range(11):
            samples = {"x": np.full((each, 1, 4, 4), client, np.float32), "y": np.arange(each) % 2}
            np.savez_compressed(folder / f"{client}.npz", data=samples)
    experiment = config.load("shipped.yaml", ["data.options.share=0.5", "rounds=1", "tracking.enabled=false"])
    assert (experiment.local.drop_last, experiment.evaluation.weights) == (True, "samples")
    result = simulate(experiment)["local"]
    for client in (0, 9, 10):
        (x, y), (x_test, y_test) = result.train(client), result.test(client)
        assert (len(y), len(y_test)) == (10, 2) and bool((x == client).all() and (x_test == client).all())


def test_published_tables_of_the_report_page_load():
    from cfl_ray.results.published import load_published

    (text,) = blocks("yaml", (ROOT / "docs" / "report.md").read_text())
    Path("paper.yaml").write_text(text)
    table = load_published("paper.yaml").table("table1")
    assert table.number("fedavg", "svhn").misprint and table.number("ifca", "cifar10").std == 0.9


def test_every_command_in_the_documentation_exists():
    import typer

    from cfl_ray.cli.commands import app

    known = typer.main.get_command(app).commands.keys()
    for page in PAGES:
        code = "\n".join(re.findall(r"```.*?```|`[^`]+`", page.read_text(), re.S))
        unknown = {name for name in re.findall(r"\bcfl-ray ([a-z]+)\b", code) if name not in known}
        assert not unknown, f"{page.name}: {unknown}"


def test_the_examples_of_all_commands_run_in_order(capsys, monkeypatch, inline):
    """Those of docs/cli.md: each has the exit status that its comment names, otherwise 0."""
    import typer

    from cfl_ray.cli.commands import app

    monkeypatch.setattr("shellingham.detect_shell", lambda *_: ("bash", "/bin/bash"))
    page = (ROOT / "docs" / "cli.md").read_text()
    for name, content in re.findall(r"```yaml\n# (\w+\.yaml)\n(.*?)```", page, re.S):
        Path(name).write_text(content)
    lines = "\n".join(blocks("bash", page)).splitlines()
    shown = set()
    for line in filter(None, lines):
        words = shlex.split(line, comments=True)
        target = words[words.index(">") + 1] if ">" in words else None
        arguments = words[1 : words.index(">")] if target else words[1:]
        status, printed, error = call(capsys, *arguments)
        assert status == (1 if line.endswith("# exit status 1") else 0), (line, error)
        if target:
            Path(target).write_text(printed)
        shown.add(arguments[0])
    assert shown >= typer.main.get_command(app).commands.keys()


def test_installations_without_a_gpu_use_the_index_of_the_image():
    index = "https://download.pytorch.org/whl/cpu"
    for page in ("README.md", "docs/faq.md"):
        assert f"pip install --extra-index-url {index} ." in (ROOT / page).read_text()
    assert f"--index-url {index} torch" in (ROOT / "Dockerfile").read_text()


@pytest.mark.slow
def test_the_readmes_installation_without_a_gpu_gets_and_keeps_the_builds_for_cpus(tmp_path):
    """Of an index without and one with builds for CPUs, served here, with empty packages of this project's needs."""
    (command,) = re.findall(r"`pip install (--extra-index-url \S+ \.)`", README)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    needs = [Requirement(need) for need in project["dependencies"]]
    version_of = {need.name: version(need.name).partition("+")[0] for need in needs}
    torch, vision = version_of["torch"], version_of["torchvision"]
    for need in needs:
        make_wheel(tmp_path / "pypi" / need.name, need.name, version_of[need.name], *need.extras)
    make_wheel(tmp_path / "pypi/torch", "torch", torch, requires=["nvidia-cudnn"])
    make_wheel(tmp_path / "pypi/nvidia-cudnn", "nvidia-cudnn", "9")
    make_wheel(tmp_path / "whl/cpu/torch", "torch", f"{torch}+cpu")
    for folder, label in (("pypi", ""), ("whl/cpu", "+cpu")):
        make_wheel(tmp_path / folder / "torchvision", "torchvision", vision + label, requires=[f"torch=={torch}"])
    folder = tmp_path / "clone"
    make_project(folder, project["version"], project["dependencies"])
    venv.create(tmp_path / "venv")
    asked = []

    class Index(SimpleHTTPRequestHandler):
        def log_message(self, format, *arguments):
            asked.append(self.path)

    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Index, directory=tmp_path)) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        here = f"http://127.0.0.1:{server.server_address[1]}"
        clean = {name: value for name, value in os.environ.items() if not name.startswith(("PIP_", "PYTHONPATH"))}
        clean |= {"PIP_CONFIG_FILE": os.devnull, "PIP_INDEX_URL": f"{here}/pypi", "PIP_NO_CACHE_DIR": "1"}

        def pip(arguments: str) -> None:
            pip = [sys.executable, "-m", "pip", "--python", tmp_path / "venv/bin/python"]
            done = subprocess.run(
                [*pip, *shlex.split(arguments)], cwd=folder, env=clean, capture_output=True, text=True
            )
            assert done.returncode == 0, done.stderr

        for arguments in (command.replace("https://download.pytorch.org", here), "."):
            pip(f"install {arguments}")
            (site,) = (tmp_path / "venv/lib").glob("*/site-packages")
            assert {found.name: found.version for found in distributions(path=[str(site)])} == version_of | {
                "cfl-ray": project["version"],
                "torch": f"{torch}+cpu",
                "torchvision": f"{vision}+cpu",
            }
        assert not any("nvidia" in path for path in asked)
        pip("install --dry-run --ignore-installed .")
        assert any("nvidia" in path for path in asked), "without the index, CUDA's libraries are downloaded"
        server.shutdown()


def test_ci_runs_the_readmes_test_command():
    test_command = next(line for line in "\n".join(blocks("bash")).splitlines() if "pytest" in line)
    script = (ROOT / ".ci" / "run").read_text()
    for part in test_command.split("&&")[1:]:
        if "activate" not in part:
            assert part.strip() in script, part


def test_ci_and_pre_commit_run_the_same_checks():
    script, hooks = (ROOT / ".ci" / "run").read_text(), (ROOT / ".pre-commit-config.yaml").read_text()
    for check in ("ruff check", "ruff format", "mypy"):
        assert check in script and f"entry: {check}" in hooks


def test_links_lead_somewhere():
    for page in PAGES:
        for target in re.findall(r"\]\(((?!http)[^)#]+)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name}: {target}"


def test_modules_named_in_the_documentation_exist():
    packages = {path.name for path in (ROOT / "cfl_ray").iterdir() if path.is_dir()}
    for page in PAGES:
        for named in re.findall(r"`(?:cfl_ray/)?([a-z_]+(?:/[a-z_]+)*/[a-z_]+\.py)`", page.read_text()):
            if named.split("/")[0] in packages:
                assert (ROOT / "cfl_ray" / named).exists(), f"{page.name}: {named}"


def test_classes_functions_and_fields_named_in_the_documentation_exist():
    """The module of `module.py` `Name` has the name, the class of `Class.name` too, or one that it inherits from."""
    sources = {path: ast.parse(path.read_text()) for path in (ROOT / "cfl_ray").rglob("*.py")}
    classes: dict[str, list[ast.ClassDef]] = {}
    names: dict[Path, set[str]] = {}
    for path, tree in sources.items():
        names[path] = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.ClassDef)}
        names[path] |= {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                classes.setdefault(node.name, []).append(node)

    @cache
    def words_of(owner: str) -> set[str]:
        return {word for node in classes.get(owner, []) for word in re.findall(r"\w+", ast.unparse(node))}

    def has(owner: str, name: str) -> bool:
        bases = [re.split(r"[\[.]", ast.unparse(base))[0] for node in classes.get(owner, []) for base in node.bases]
        return name in words_of(owner) or any(has(base, name) for base in bases)

    checked = 0
    for page in PAGES:
        for module, name in re.findall(r"`([\w/]+\.py)` `([A-Za-z_]\w*)", page.read_text()):
            paths = [path for path in sources if path.as_posix().endswith(f"/{module}")]
            assert not paths or any(name in names[path] for path in paths), f"{page.name}: {name} in {module}"
            checked += len(paths)
        for owner, name in re.findall(r"`([A-Z]\w+)\.([a-z_]\w*)[`(]", page.read_text()):
            assert owner not in classes or has(owner, name) or page.name == "CHANGELOG.md", (
                f"{page.name}: {owner}.{name}"
            )
            checked += owner in classes
    assert checked > 100


def test_tests_named_in_the_documentation_exist():
    tests = "\n".join(path.read_text() for path in (ROOT / "tests").rglob("*.py"))
    for page in PAGES:
        for named in re.findall(r"`(tests/[a-z_/]+\.py)`", page.read_text()):
            assert (ROOT / named).exists() or "test_round_robin" in named, f"{page.name}: {named}"  # of the example
        for named in re.findall(r"`(test(?:_[a-z]+){3,})`", page.read_text()):
            assert re.search(rf"def {named}\b", tests), f"{page.name}: {named}"


def test_every_library_is_explained_and_every_explanation_is_a_dependency():
    listed = (ROOT / "pyproject.toml").read_text().split("dependencies = [")[1].split("]\n\n")[0]
    declared = {name.removesuffix("[default]") for name in re.findall(r'^    "([a-z0-9-]+)', listed, re.M)}
    table = (ROOT / "docs" / "design.md").read_text().split("## Libraries")[1]
    rows = re.findall(r"^\| ([a-z0-9, -]+) \|", table, re.M)
    explained = {name.strip() for row in rows for name in row.split(",")} - {"library"}
    assert declared == explained


@pytest.mark.slow
def test_the_main_job(tmp_path):
    """`cfl-ray run` with nothing, as a newcomer types it: on Ray, with MLflow."""
    command = [Path(sys.executable).with_name("cfl-ray"), "run"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    rows = {
        cells[0]: cells
        for line in done.stdout.splitlines()
        if len(cells := [cell.strip() for cell in line.split("│")[1:-1]]) == 8
    }
    assert list(rows) == ["fedavg", "ifca", "stocfl"]
    accuracy, ari, clusters = float(rows["stocfl"][1]), rows["stocfl"][3], rows["stocfl"][4]
    assert (ari, clusters) == ("1.000", "4")
    assert accuracy > float(rows["fedavg"][1]) + 0.08
    assert "joined: clients 38-39" in done.stdout and "left: client 0" in done.stdout
    (run_dir,) = (tmp_path / "runs").glob("rotated-digits-*")
    assert (run_dir / "artifacts" / "accuracy_by_round.png").exists() and (
        run_dir / "stocfl" / "artifacts" / "assignments.parquet"
    ).exists()
    assert str(run_dir) in done.stdout and "mlflow ui" in done.stdout
    _check_mlflow(tmp_path / "runs" / "mlflow.db")


def _check_mlflow(store: Path) -> None:
    from mlflow import MlflowClient

    client = MlflowClient(f"sqlite:///{store}")
    runs = client.search_runs([client.get_experiment_by_name("cfl_ray").experiment_id])
    by_method = {run.data.tags.get("method"): run for run in runs}
    assert set(by_method) == {None, "fedavg", "ifca", "stocfl"}
    for method in ("fedavg", "ifca", "stocfl"):
        run = by_method[method]
        assert run.data.tags["mlflow.parentRunId"] == by_method[None].info.run_id and run.info.status == "FINISHED"
        assert [point.step for point in client.get_metric_history(run.info.run_id, "accuracy")] == list(range(1, 21))
