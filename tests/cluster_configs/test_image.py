"""The Dockerfile: what it copies exists, it pins, is not root, and its steps run. No image is built here.

The steps of RUN are executed in order with stand-ins for what changes a system (`apt-get`, `useradd`) and for the
installations of other packages, whose constraints test_constraints.py checks; cfl_ray itself is installed for real.
"""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import venv
from fnmatch import fnmatch
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
JOINED = re.sub(r"\\\n\s*", "", (ROOT / "Dockerfile").read_text())
STEPS = [line.split(" ", 1) for line in JOINED.splitlines() if line and not line.startswith("#")]


def steps(name: str) -> list[str]:
    return [text.strip() for step, text in STEPS if step == name]


def copied() -> list[str]:
    """The files and folders that the image has of this project."""
    words = [[word for word in text.split() if not word.startswith("--")] for text in steps("COPY")]
    return [source for sources in words for source in sources[:-1]]


def commands(device: str = "cuda") -> list[str]:
    """The shell commands of RUN, with the build arguments put in."""
    arguments = dict(text.split("=") for text in steps("ARG")) | {"DEVICE": device}
    return [
        re.sub(r"\$(\w+)", lambda found: arguments.get(found[1], found[0]), re.sub(r"^--mount=\S+ ", "", text))
        for text in steps("RUN")
    ]


def test_what_it_copies_exists_and_is_not_ignored():
    ignored, *exceptions = [
        line for line in (ROOT / ".dockerignore").read_text().splitlines() if line and not line.startswith("#")
    ]
    assert ignored == "*"
    allowed = {line.removeprefix("!") for line in exceptions if line.startswith("!")}
    assert set(copied()) == allowed and all((ROOT / name).exists() for name in allowed)
    assert any(fnmatch("cfl_ray/core/__pycache__", line) for line in exceptions)


def test_its_python_is_that_of_the_constraints():
    assert steps("ARG")[0] == "BASE=python:3.12-slim-trixie" and steps("FROM") == ["${BASE}"]  # or with a digest
    assert "--python-version 3.12" in (ROOT / "cluster_configs" / "constraints.txt").read_text()


def test_the_base_is_compared_with_what_its_tag_is_now(stand_in):
    stand_ins = stand_in("docker", '#!/bin/bash\n[ "$4" = python:gone ] && exit 1; echo sha256:77\n')
    environment = os.environ | {"PATH": f"{stand_ins}:{os.environ['PATH']}"}
    tag = steps("ARG")[0].removeprefix("BASE=").partition("@")[0]
    for base, status, last in (
        (None, 3, f"{tag}@sha256:77"),  # as long as the Dockerfile names no digest
        (f"{tag}@sha256:12", 3, f"{tag}@sha256:77"),
        (f"{tag}@sha256:77", 0, f"{tag}@sha256:77"),
        ("python:gone", 1, ""),
    ):
        command = [ROOT / "cluster_configs" / "check_base.sh", *([base] if base else [])]
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        assert (done.returncode, done.stdout.splitlines()[-1:]) == (status, [last] if last else []), done.stderr
    assert "no digest of python:gone" in done.stderr


def test_every_installation_is_pinned():
    installs = re.findall(r"pip install ([^;&]*)", ";".join(steps("RUN")))
    assert len(installs) == 4
    assert all("-c cluster_configs/constraints.txt" in line for line in installs)
    assert [line for line in installs if "--index-url" in line] == [
        line for line in installs if "https://download.pytorch.org/whl/cpu" in line
    ]


def test_what_changes_often_comes_last():
    order = [text for step, text in STEPS if step in ("RUN", "COPY")]
    places = [
        next(place for place, text in enumerate(order) if part in text) for part in ("apt-get", "torchvision", "[$E")
    ]
    assert places == sorted(places) and places[-1] < order.index("cfl_ray cfl_ray")


def test_it_is_not_root_and_demands_the_token():
    names = [step for step, _ in STEPS]
    assert steps("USER") == ["1000:1000"] and "--uid 1000" in steps("RUN")[0]
    assert names.index("USER") > max(place for place, name in enumerate(names) if name == "RUN")
    assert "RAY_AUTH_MODE=token" in steps("ENV")[-1] and "HOME=/home/ray" in steps("ENV")[-1]
    secrets = re.findall(r"(?i)(?:ENV|ARG) .*(?:token|password|secret)=\S+", JOINED)
    assert all("RAY_AUTH_MODE=token" in line for line in secrets)


def test_the_entry_point_takes_any_command():
    """The cluster launcher runs `bash` in it, KubeRay a command of its own."""
    assert steps("ENTRYPOINT") == ['["tini", "--"]'] and steps("CMD") == ['["cfl-ray", "--help"]']


def test_an_unknown_device_is_refused():
    done = subprocess.run(["bash", "-c", commands("tpu")[1]], capture_output=True, text=True)
    assert done.returncode == 1 and "DEVICE must be cuda or cpu, got tpu" in done.stderr


def test_the_script_of_jobs_runs_and_resumes(tmp_path):
    script = ROOT / "cluster_configs" / "run_or_resume.sh"
    options = ["rounds=1", "methods=[fedavg]", "tracking.enabled=false", "runtime.backend=in_process"]
    environment = os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "HOME": str(tmp_path)}
    for run, in_job, expected in (
        (tmp_path / "RUN", "", "results after the last round"),
        ("RUN", "{}", "is finished"),  # in a submitted job, below the home folder
    ):
        command = [script, run, *options]
        environment["RAY_JOB_CONFIG_JSON_ENV_VAR"] = in_job
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
        assert done.returncode == 0 and expected in done.stdout, done.stdout + done.stderr
    assert subprocess.run([script], capture_output=True).returncode != 0


# Packages of others are those of this environment; cfl_ray is installed, first without its package as in the image.
PIP = """#!/bin/bash
echo "$*" >> "$CALLS"
case "$*" in *.) exec {python} -m pip "$@";; *.[[]*) exec {python} -m pip "$@" --no-deps;; esac
"""


@pytest.mark.slow
def test_the_steps_run(tmp_path, stand_in):
    """In a fresh virtual environment, in a folder with nothing but what the image gets."""
    source, fresh = tmp_path / "opt", tmp_path / "venv"
    for name in copied():
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (shutil.copytree if (ROOT / name).is_dir() else shutil.copy)(ROOT / name, source / name)
    venv.create(fresh, with_pip=True)
    packages = next((fresh / "lib").glob("python*/site-packages"))
    (packages / "others.pth").write_text(sysconfig.get_path("purelib"))
    recorded = '#!/bin/bash\necho "$(basename "$0") $*" >> "$CALLS"\n'
    for name, text in (
        ("pip", PIP.format(python=fresh / "bin" / "python")),
        ("apt-get", recorded),
        ("useradd", recorded),
        ("rm", recorded),
    ):
        stand_ins = stand_in(name, text)
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment |= {"PATH": f"{stand_ins}:{os.environ['PATH']}", "CALLS": str(tmp_path / "calls")}
    for command in commands("cpu"):
        done = subprocess.run(["bash", "-euc", command], cwd=source, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, command + done.stdout + done.stderr
    called = (tmp_path / "calls").read_text().splitlines()
    assert len(called) == 7 and "whl/cpu" in called[4] and called[5].endswith(".[aws,gcp,tensorboard]")

    shown = subprocess.run(
        [fresh / "bin" / "python", "-c", "import cfl_ray; print(cfl_ray.__file__)"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert shown.stdout.startswith(str(fresh)), shown.stderr
    run = [fresh / "bin" / "cfl-ray", "run", "--in-process", "rounds=1", "methods=[fedavg]", "tracking.enabled=false"]
    done = subprocess.run(run, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0 and "results after the last round" in done.stdout, done.stdout + done.stderr
