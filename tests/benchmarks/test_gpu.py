"""The measurement of engines runs where torch and NumPy are all there is."""

import json
import subprocess
import sys
from pathlib import Path
from typing import get_args

import pytest

from benchmarks import gpu
from cfl_ray.config.sections import RuntimeConfig

ROOT = Path(__file__).parents[2]
ABSENT = [
    "pydantic",
    "ray",
    "mlflow",
    "pyarrow",
    "sklearn",
    "scipy",
    "rich",
    "typer",
    "yaml",
    "safetensors",
    "matplotlib",
    "PIL",
    "filelock",
    "psutil",
]
ABSENT += ["threadpoolctl", "torchvision"]
WITHOUT_THEM = f"import runpy, sys; sys.modules |= dict.fromkeys({ABSENT}); sys.argv = sys.argv[1:]; "
WITHOUT_THEM += "runpy.run_path(sys.argv[0], run_name='__main__')"


@pytest.mark.parametrize("options", [[], ["--bf16", "--data", "host"]], ids=" ".join)
def test_needs_torch_and_numpy_alone(options, tmp_path):
    command = [sys.executable, "-c", WITHOUT_THEM, ROOT / "benchmarks" / "gpu.py", "W1", "femnist", "--device", "cpu"]
    command += ["--clients", "4", "--rounds", "1", "--pieces", "2", *options]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    *table, last = done.stdout.splitlines()
    found = json.loads(last)
    assert found["bf16"] is bool(options) and found["device"] == "cpu" and len(table) == 2 + len(found["figures"])
    rows = {(row["workload"], row["engine"], row["piece"]): row for row in found["figures"]}
    for workload in ("W1", "femnist"):
        assert rows[workload, "bare loop", None]["seconds"] > 0
        assert rows[workload, "sequential", 4]["seconds"] > 0
    if not options:  # the rounding of bfloat16 is as large as the change of so few steps
        assert rows["W1", "span", 2]["distance"] < 1e-3
        assert all(rows[workload, "vectorised", 2]["distance"] < 1e-3 for workload in ("W1", "femnist"))
    assert rows["femnist", "span", None]["note"] == "does not apply"


def test_the_engines_are_those_of_the_configuration():
    configured = get_args(RuntimeConfig.model_fields["engine"].annotation)
    assert set(gpu.engines()) == set(configured) - {"auto"} and next(iter(gpu.engines())) == "sequential"


def test_out_of_memory_is_reported():
    def rounds():
        try:
            raise gpu.torch.OutOfMemoryError("CUDA: no more")
        except RuntimeError as error:
            raise ValueError("client 0 failed") from error
        yield

    arguments = gpu.argparse.Namespace(device="cpu", clients=2, data="device")
    figure = gpu.measure(gpu.Case("W2", arguments), "vectorised", 2, rounds, 1)
    assert (figure.note, figure.seconds) == ("out of memory", None)
    assert "out of memory" in gpu._row(figure, 1.0)
