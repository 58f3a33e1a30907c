"""A frozen Transformer of 100 million parameters with adapters of half a million, on a Ray of its own."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from cfl_ray.run_directory import RunDirectory

pytestmark = pytest.mark.slow

EXAMPLE = Path(__file__).parents[3] / "examples" / "adapters.py"
RUN = """
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
            except OSError:
                pass

threading.Thread(target=sample, daemon=True).start()
import cfl_ray
experiment, run_dir = json.loads(sys.argv[1])
cfl_ray.run(cfl_ray.Experiment(**experiment), run_dir)
ended.set()
print(json.dumps(peak))
"""


def peaks(folder: Path, **options) -> dict[str, float]:
    """Peak of private memory in MB, of the server and of the hosts."""
    experiment = {
        "methods": [{"ifca": {"num_clusters": 4}}, "ditto"],
        "rounds": 2,
        "data": {"source": f"{EXAMPLE}:sentences", "options": {"clients": 50, "samples": 6}},
        "model": {"name": f"{EXAMPLE}:AdaptedTransformer", "options": options},
        "local": {"epochs": 1, "batch_size": 4},
        "cohort": {"fraction": 0.2},
        "evaluation": {"every": 2, "clients": 4, "local": False},
        "runtime": {"engine": "sequential", "hosts": 2, "checkpoint_every": 1},
        "tracking": {"enabled": False},
        "output": str(folder),
    }
    command = [sys.executable, "-c", RUN, json.dumps([experiment, str(folder / "run")])]
    done = subprocess.run(command, capture_output=True, text=True, timeout=540, cwd=folder)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.timeout(1100)
def test_processes_hold_what_is_trained(tmp_path):
    sizes = {"small": {}, "large": {"width": 1024, "depth": 8, "heads": 16, "rank": 6}}
    found = {}
    for name, options in sizes.items():
        (tmp_path / name).mkdir()
        found[name] = peaks(tmp_path / name, **options)
    assert found["large"]["host"] < found["small"]["host"] + 300, found
    assert found["large"]["server"] < 1000, found
    ditto = RunDirectory(tmp_path / "large" / "run").method("ditto").checkpoints
    newest = json.loads(max(ditto.glob("*.json")).read_text())
    assert 1.9e6 < newest["largest_client_state"] < 2.1e6, "the adapters and the head"
    assert sum(file.stat().st_size for file in ditto.glob("*.safetensors")) < 60e6
    print(found)
