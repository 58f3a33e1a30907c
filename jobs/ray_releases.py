"""Tries releases of Ray with the internals that a run's own cluster uses (`cfl_ray/runtime/on_ray/ray_internals.py`).

    python -m jobs.ray_releases                # all that the package index offers, from the lower bound on
    python -m jobs.ray_releases 2.60.0 2.61.0  # these

Each release is installed in an environment of its own, which has the other packages of this one (0.3 GB, removed
afterwards). There a run on digits has its workers forked; a host is killed after a round, the server after another.
Metrics, models and client states must equal those of a run in one process. Exit status 1 if a release fails.
"""

import argparse
import os
import re
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
import venv
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

os.environ.setdefault("RAY_AUTH_MODE", "token")  # read when ray is imported

import psutil
from packaging.version import Version
from rich.console import Console
from rich.table import Table

from cfl_ray import Experiment, run, simulate
from cfl_ray.lifecycle.driver import Watcher
from cfl_ray.runtime.on_ray import fork_server, ray_internals
from cfl_ray.tracking.record import RoundRecord
from jobs.chaos.same_outcome import outcome

ROOT = Path(__file__).parents[1]
METHODS = ["ditto", "ifca"]  # client states; comparisons
KILLED_AFTER = {2: "ClientHost", 4: "ServerActor"}  # round of the first method: actor
RELEASE_SECONDS = 300  # limit for a release: a run that gets no workers waits for longer
NAMED = "--in-this-environment"


class ReleaseTrial(NamedTuple):
    """A release, and whether it can be named as tried."""

    release: str
    seconds: float
    failure: str  # empty: it passed


class Killer(Watcher):
    """Checks that all workers are forks, and kills some."""

    def __init__(self) -> None:
        self.killed: list[str] = []

    def round(self, label: str, report: RoundRecord) -> None:
        actor = KILLED_AFTER.get(report.round, "")
        if label != METHODS[0] or not actor or actor in self.killed:  # a server that starts again repeats its report
            return
        workers = [one for one in psutil.Process().children(recursive=True) if _title(one).startswith(f"ray::{actor}")]
        forked = [one for one in workers if _is_fork_server(one.parent())]
        if not workers or forked != workers:
            raise SystemExit(f"{len(forked)} of {len(workers)} processes of {actor} are forks")
        os.kill(workers[0].pid, signal.SIGKILL)
        self.killed.append(actor)


def _title(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


def _is_fork_server(process: psutil.Process | None) -> bool:
    return process is not None and fork_server.__file__ in _title(process)


def offered() -> list[str]:
    """The releases that the package index offers for this Python, from the lower bound of this project on."""
    command = [sys.executable, "-m", "pip", "index", "versions", "ray", "--disable-pip-version-check"]
    return from_lower_bound(subprocess.check_output(command, text=True), (ROOT / "pyproject.toml").read_text())


def from_lower_bound(index: str, project: str) -> list[str]:
    """The releases in the output of `pip index versions`, from the lower bound in a pyproject.toml on, oldest first."""
    lower = re.search(r'"ray\[default\]>=([\d.]+)', project)
    listed = re.search(r"Available versions: (.*)", index)
    assert lower and listed
    releases = sorted(map(Version, listed[1].split(", ")))
    return [str(release) for release in releases if release >= Version(lower[1])]


def try_release(release: str) -> ReleaseTrial:
    """Installs a release in an environment of its own and runs this module there."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="cfl-ray-release-") as folder:
        venv.create(folder, symlinks=True)
        python = Path(folder, "bin", "python")
        pip = [sys.executable, "-m", "pip", "--python", str(python), "--disable-pip-version-check", "--quiet"]
        done = subprocess.run([*pip, "install", "--no-deps", f"ray=={release}"], capture_output=True, text=True)
        if done.returncode == 0:
            own = sysconfig.get_path("purelib", vars={"base": folder})
            others = [sysconfig.get_path(name) for name in ("purelib", "platlib")]
            lines = [f"import site; site.addsitedir({path!r})" for path in dict.fromkeys(others)]
            Path(own, "others.pth").write_text("\n".join(lines))
            path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
            variables = os.environ | {"PYTHONPATH": path}
            done = _ended([str(python), "-m", "jobs.ray_releases", NAMED, release], variables)
    last = (done.stdout + done.stderr).strip().splitlines()[-1:] or ["no output"]
    return ReleaseTrial(release, time.monotonic() - began, "" if done.returncode == 0 else last[0])


def _ended(command: list[str], variables: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """The process of a command, when it has ended; its group is killed if it takes longer than RELEASE_SECONDS."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, env=variables, text=True, start_new_session=True, cwd=ROOT, **pipes) as process:
        try:
            out, error = process.communicate(timeout=RELEASE_SECONDS)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)  # Ray's processes end with the driver
            out, error = process.communicate()
            return subprocess.CompletedProcess(command, 1, out, f"not done within {RELEASE_SECONDS} s")
    return subprocess.CompletedProcess(command, process.returncode, out, error)


def try_here(release: str) -> int:
    """Tries the Ray of this environment. Returns the exit status."""
    import ray

    if ray.__version__ != release:
        raise SystemExit(f"Ray {ray.__version__} is imported")
    ray_internals.TRIED = (release,)
    if why := ray_internals.why_not():
        raise SystemExit(why)
    with tempfile.TemporaryDirectory() as folder:
        experiment = Experiment(
            name="ray_release",
            rounds=6,
            methods=METHODS,
            data={"shift": {"kind": "rotated"}, "partition": {"clients": 12}, "shards": f"{folder}/shards"},
            runtime={"engine": "sequential", "hosts": 2},
            tracking={"enabled": False, "report": False},
            output=folder,
        )
        killer, one, other = Killer(), Path(folder, "in-process"), Path(folder, "on-ray")
        simulate(experiment, one)
        run(experiment, other, killer)
        different = [
            f"{method}: {name}"
            for method in METHODS
            for name, value in outcome(one, method, experiment).items()
            if outcome(other, method, experiment)[name] != value
        ]
    if killer.killed != list(KILLED_AFTER.values()):
        different.append(f"killed: {killer.killed}")
    print("different: " + ", ".join(different) if different else "metrics, models and client states are identical")
    return 1 if different else 0


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("releases", nargs="*", help="default: all that the index offers, from the lower bound on")
    parser.add_argument(NAMED, action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.in_this_environment:
        return try_here(*options.releases)
    console = Console(highlight=False)
    trials = []
    for release in options.releases or offered():
        trials.append(try_release(release))
        console.print(f"Ray {release}: {trials[-1].failure or 'as expected'} ({trials[-1].seconds:.0f} s)")
    table = Table("Ray", "seconds", "workers forked, host and server killed, same results", "named as tried")
    for trial in trials:
        named = "yes" if trial.release in ray_internals.TRIED else "no"
        table.add_row(trial.release, f"{trial.seconds:.0f}", trial.failure or "yes", named)
    console.print(table)
    return 1 if any(trial.failure for trial in trials) else 0


if __name__ == "__main__":
    sys.exit(main())
