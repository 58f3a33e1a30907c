"""The measurement of engines runs where torch and NumPy are all there is."""

import json
import subprocess
import sys
from pathlib import Path
from typing import get_args

import pytest
from closeness import close

from benchmarks import gpu
from cfl_ray.config import RuntimeConfig

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


def rows_of(printed: str, workloads: list[str], ways: list[str], precision: str) -> dict:
    """The rows of a quick measurement by workload, way and most clients of a vmap batch, which have these ways."""
    *table, last = printed.splitlines()
    found = json.loads(last)
    assert found["quick"] and found["device"] == "cpu" and len(table) == 2 + len(found["figures"])
    rows = {(row["workload"], row["way"], row["most"]): row for row in found["figures"]}
    for workload in workloads:
        for way in ("bare loop", "sequential", *ways):
            row = rows[workload, way, None]
            assert row["seconds"] > 0 and row["memory_mb"] > 10 and row["precision"] == precision
        assert rows[workload, "vectorised", 2]["stack"] == 2 and rows[workload, "vectorised", 4]["stack"] == 4
    return rows


@pytest.mark.slow
def test_needs_torch_and_numpy_alone(tmp_path):
    command = [sys.executable, "-c", WITHOUT_THEM, ROOT / "benchmarks" / "gpu.py", "W1", "--device", "cpu", "--quick"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    rows = rows_of(done.stdout, ["W1"], ["2 processes"], "float32")
    assert all(rows["W1", "span", most]["distance"] < 1e-3 for most in (None, 2, 4))
    assert rows["W1", "vectorised", 2]["distance"] < 1e-3


@pytest.mark.slow
def test_other_precisions_data_on_the_host_and_no_processes(monkeypatch, capsys):
    options = ["--device", "cpu", "--quick", "--precision", "bf16", "--data", "host", "--processes"]
    monkeypatch.setattr(sys, "argv", ["gpu.py", "femnist", *options])
    gpu.main()
    rows = rows_of(capsys.readouterr().out, ["femnist"], [], "bf16")
    assert not any("processes" in way for _, way, _ in rows)
    assert rows["femnist", "span", None]["note"].startswith("in bf16")


def test_all_workloads_precisions_and_ways_are_measured_by_default(monkeypatch, capsys):
    arguments = gpu.arguments_of(["--device", "cpu"])
    assert arguments.workloads == ["W1", "W2", "W3", "femnist", "flute", "pfl"] and arguments.processes == (2, 4)
    assert (arguments.precision, arguments.rounds, arguments.vmap_batches) == (("float32",), 3, (16, 64, 256))
    old = gpu.arguments_of(["--device", "cpu", "--stacks", "3", "5"])
    assert old.vmap_batches == [3, 5] and "--stacks is now --vmap-batches" in capsys.readouterr().err
    monkeypatch.setattr(gpu.torch.cuda, "is_available", lambda: True)
    arguments = gpu.arguments_of([])
    assert (arguments.device, arguments.precision) == ("cuda", ("float32", "tf32", "bf16"))
    configured = RuntimeConfig.model_fields["precision"].annotation
    assert set(arguments.precision) == set(get_args(configured))


@pytest.mark.parametrize("name, input", [("flute", (1, 28, 28)), ("pfl", (3, 32, 32))])
def test_published_set_ups_train(name, input):
    case = gpu.Case(name, gpu.arguments_of([name, "--device", "cpu", "--quick", "--clients", "2"]))
    assert case.federation.train(1)[0].shape[1:] == input
    model_P = next(case.rounds("sequential", "float32", None))
    assert model_P.isfinite().all() and not gpu.torch.equal(model_P, case.start())
    assert gpu.SET_UPS[name].cohort < gpu.SET_UPS[name].work.clients


def test_processes_and_one_process_compute_the_same_sums():
    """Without shuffling: the shares of the clients are all clients."""
    arguments = gpu.arguments_of(["W1", "--device", "cpu", "--quick"])
    whole = gpu.Case("W1", arguments)
    start = gpu.bare_start(whole.work)
    expected = gpu.Bare(whole, "float32").sum_of(range(4), start)
    shares = [gpu.Bare(gpu.Case("W1", arguments, (number, 2)), "float32") for number in range(2)]
    parts = [bare.sum_of([number, number + 2], start) for number, bare in enumerate(shares)]
    assert all(close(sum(part), total, 1e-4) for part, total in zip(zip(*parts), expected))


def test_the_engines_are_those_of_the_configuration():
    configured = get_args(RuntimeConfig.model_fields["engine"].annotation)
    assert set(gpu.ENGINES) == set(configured) - {"auto"} and next(iter(gpu.ENGINES)) == "sequential"


def test_out_of_memory_is_reported():
    def rounds():
        try:
            raise gpu.torch.OutOfMemoryError("CUDA: no more")
        except RuntimeError as error:
            raise ValueError("client 0 failed") from error
        yield

    case = gpu.Case("W2", gpu.arguments_of(["W2", "--device", "cpu", "--quick"]))
    figure = gpu.measure(case, gpu.Figure("W2", "float32", "vectorised"), rounds, 1)
    assert (figure.note, figure.seconds) == ("out of memory", None)
    assert "out of memory" in gpu._row(figure, 1.0)
