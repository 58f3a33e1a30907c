"""Machines whose CPUs have different instructions compute the same bits where `runtime.cpu_capability` is set."""

import json
import os
import subprocess
import sys

import pytest

from cfl_ray import ConfigError, run, simulate
from cfl_ray.system import cpu
from cfl_ray.system.cpu import instructions_environment

RUN = """
import json, sys
from cfl_ray import config, simulate
experiment = config.load(sys.argv[1], sys.argv[2:])
print(json.dumps([record.metrics["train_loss"] for record in simulate(experiment)["ditto"].records]))
"""
several = pytest.mark.skipif(
    cpu.instruction_set() not in ("AVX2", "AVX512"), reason=f"this CPU has only {cpu.instruction_set()}"
)


@pytest.fixture
def losses(tmp_path, experiment):
    """Returns a function: instructions of a machine, overrides -> training losses of a run in one process there."""
    (tmp_path / "mine.yaml").write_text(experiment(rounds=2).to_yaml())

    def of(machine: str | None, *overrides: str) -> list[float]:
        environment = os.environ | instructions_environment(machine) | {"OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-c", RUN, str(tmp_path / "mine.yaml"), *overrides]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout.splitlines()[-1])

    return of


@several
@pytest.mark.slow
def test_an_old_and_a_new_machine_agree_where_the_instructions_are_set(losses, experiment):
    """The old machine is this one with the variables that make libraries use no AVX."""
    old = losses("default")
    assert old != losses(None), "the bits of old and new machine differ"
    new = experiment(rounds=2, runtime={"cpu_capability": "default"})
    results = run(new)
    assert [record.metrics["train_loss"] for record in results["ditto"].records] == old
    assert results.run_info["cpu"] == f"{cpu.model()}, DEFAULT"


@several
def test_a_process_with_other_instructions_is_an_error_that_says_what_to_set(experiment):
    with pytest.raises(
        ConfigError,
        match="runtime.cpu_capability: default, but PyTorch uses AVX.* in this process; .*ATEN_CPU_CAPABILITY=default",
    ):
        simulate(experiment(runtime={"cpu_capability": "default"}))


def test_null_takes_what_the_cpu_has():
    assert instructions_environment(None) == {}
    assert instructions_environment("avx2")["ATEN_CPU_CAPABILITY"] == "avx2"
