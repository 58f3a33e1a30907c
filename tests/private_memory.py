"""Peaks of private memory of a run's server and hosts, on a Ray of its own."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

_RUN = """
import json, os, sys, threading
from pathlib import Path

os.environ["CFL_RAY_MEMORY_TEST"] = str(os.getpid())  # inherited by the processes of this cluster
mark = f"CFL_RAY_MEMORY_TEST={os.getpid()}".encode()
peak, ended = {"server": 0, "host": 0}, threading.Event()

def sample():
    while not ended.wait(0.05):
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                title = (folder / "cmdline").read_text()
                kind = "server" if "ServerActor" in title else "host" if "ClientHost" in title else ""
                if kind and mark in (folder / "environ").read_bytes():
                    status = dict(line.split(":", 1) for line in (folder / "status").read_text().splitlines())
                    peak[kind] = max(peak[kind], int(status["RssAnon"].split()[0]) / 1000)
            except (OSError, KeyError):  # the process has ended
                pass

threading.Thread(target=sample, daemon=True).start()
import cfl_ray
experiment, run_dir = json.loads(sys.argv[1])
cfl_ray.run(cfl_ray.Experiment(**experiment), run_dir)
ended.set()
print(json.dumps(peak))
"""


def peaks(experiment: dict[str, Any], folder: Path) -> dict[str, float]:
    """Peak of private memory in MB, of the server and of a host. The run directory is `folder`/run."""
    folder.mkdir()
    values = experiment | {"tracking": {"enabled": False}, "output": str(folder)}
    command = [sys.executable, "-c", _RUN, json.dumps([values, str(folder / "run")])]
    done = subprocess.run(command, capture_output=True, text=True, timeout=540, cwd=folder)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])
