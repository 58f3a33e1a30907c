"""What the README shows is what happens: its Python runs, its YAML loads, its commands work."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from cfl_ray import config
from cfl_ray.cli import main

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, re.S)


def command(arguments: list[str], capsys) -> str:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    said = capsys.readouterr()
    assert ended.value.code == 0, said.err
    return said.out


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)


@pytest.mark.parametrize("number", range(len(blocks("python"))))
def test_python_blocks_run_and_are_short(number):
    source = blocks("python")[number]
    assert len([line for line in source.splitlines() if line.strip() and not line.startswith("#")]) < 15
    space = {"__name__": f"readme_{number}"}
    exec(compile(source, f"README block {number}", "exec"), space)
    if "results" in space:
        assert all(0 <= method.final["accuracy"] <= 1 for method in space["results"].methods.values())


def test_the_example_of_own_arrays_shows_what_it_is_about():
    space = {"__name__": "readme_arrays"}
    exec(next(block for block in blocks("python") if "federation_from_arrays" in block), space)
    accuracy = {name: method.final["accuracy"] for name, method in space["results"].methods.items()}
    assert accuracy["ifca"] > accuracy["fedavg"] + 0.2


def test_own_method_from_the_command_line(capsys):
    Path("my_method.py").write_text(next(block for block in blocks("python") if "my_method.py" in block))
    shown = re.search(r'cfl-ray run ("methods=[^"]*my_method[^"]*")', README).group(1).strip('"')
    said = command(["run", "--in-process", shown, "rounds=2"], capsys)
    assert "damped" in said and "fedavg" in said


def test_yaml_block_loads():
    (block,) = blocks("yaml")
    Path("mine.yaml").write_text(block)
    experiment = config.load("mine.yaml", ["rounds=10", "local.lr=0.1"])
    assert (experiment.rounds, experiment.local.lr, experiment.data.source) == (10, 0.1, "mnist")


def test_every_command_of_the_table_exists(capsys):
    shown = {found.split()[1] for found in re.findall(r"`(cfl-ray [a-z][^`]*)`", README) + re.findall(r"^(cfl-ray [a-z].*)$", README, re.M)}
    assert shown == {"check", "run", "resume", "prepare", "methods", "status", "join", "leave", "stop"}
    help_text = command(["--help"], capsys)
    assert all(name in help_text for name in shown)


def test_commands_to_a_live_run_are_understood(tmp_path, capsys):
    """Word for word, on a run that has ended: each gets as far as saying so."""
    command(["run", "--in-process", "methods=[fedavg]", "rounds=1", "tracking.enabled=false", "--run-dir", "RUN"], capsys)
    lines = next(block for block in blocks("bash") if "cfl-ray status" in block).splitlines()
    assert len(lines) == 5
    for line in lines:
        arguments = line.partition("#")[0].split()[1:]
        with pytest.raises(SystemExit) as ended:
            main(arguments)
        said = capsys.readouterr()
        if arguments[0] == "status":
            assert ended.value.code == 0 and "finished" in said.out
        else:
            assert ended.value.code == 1 and f"RUN is not at work, so nobody can {arguments[0]}" in said.err
    replay = re.search(r"`cfl-ray (run RUN/config.yaml --replay RUN)`", README).group(1).split()
    assert "results after the last round" in command([*replay, "--in-process"], capsys)


def test_ci_runs_the_readmes_test_command():
    test_command = next(line for line in "\n".join(blocks("bash")).splitlines() if "pytest" in line)
    script = (ROOT / ".ci" / "run").read_text()
    for part in test_command.split("&&")[1:]:
        if "activate" not in part:
            assert part.strip() in script, part


def test_links_lead_somewhere():
    for target in re.findall(r"\]\(((?!http)[^)#]+)\)", README):
        assert (ROOT / target).exists(), target


def test_every_library_is_explained_and_every_explanation_is_a_dependency():
    declared = re.findall(r'^    "([a-z-]+)', (ROOT / "pyproject.toml").read_text().split("dependencies = [")[1].split("]\n\n")[0], re.M)
    table = README.split("## What it is built from")[1]
    explained = {name.strip() for row in re.findall(r"^\| ([a-z, -]+) \|", table, re.M) for name in row.split(",")} - {"library"}
    assert {name.removesuffix("[default]") for name in declared} == explained


def test_the_main_job(tmp_path):
    """`cfl-ray run` with nothing, as a newcomer types it: on Ray, with MLflow."""
    environment = {name: value for name, value in os.environ.items() if name not in ("RAY_ADDRESS", "MLFLOW_TRACKING_URI")}
    done = subprocess.run([Path(sys.executable).with_name("cfl-ray"), "run"], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    rows = {cells[0]: cells for line in done.stdout.splitlines() if len(cells := [cell.strip() for cell in line.split("│")[1:-1]]) == 7}
    assert list(rows) == ["fedavg", "ifca", "stocfl"]
    accuracy, ari, clusters = float(rows["stocfl"][1]), rows["stocfl"][3], rows["stocfl"][4]
    assert (ari, clusters) == ("1.000", "4")
    assert accuracy > float(rows["fedavg"][1]) + 0.08
    assert "joined: clients 38, 39" in done.stdout and "left: clients 0" in done.stdout
    (run_dir,) = (tmp_path / "runs").glob("rotated-digits-*")
    assert (run_dir / "artifacts" / "accuracy_by_round.png").exists() and (run_dir / "stocfl" / "artifacts" / "assignments.parquet").exists()
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
