"""Runs the numeric tests as other CPUs compute: with the instructions, BLAS kernels and threads that these have.

    python -m jobs.cpu_variants                              every variant that this CPU has, one after another
    python -m jobs.cpu_variants avx2 mixed_1 -- -n 2 -x      some of them, with options of pytest
    python -m jobs.cpu_variants -- tests/engine              other tests than SUITES

Libraries choose their kernels by the CPU when they are loaded, and kernels add in different orders. A variant sets what
they would choose: PyTorch's instructions, those of its oneDNN and MKL, NumPy's and SciPy's OpenBLAS kernels, and the
number of threads. `older`, `avx2` and `avx512` are those of `runtime.cpu_capability`; the mixed ones together have
every value at least once, most different values together. A test that fails in a variant has a bound without the scale
of what it compares (`tests/closeness.py`), or found a fault. Printed: what the libraries report, and a row for each
variant with the counts of its tests. Exit status 1 if a test failed.
"""

import argparse
import os
import re
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from cfl_ray.errors import UserError
from cfl_ray.system.cpu import cpu_info, instructions_environment, model

ROOT = Path(__file__).parents[1]
SUITES = ["clustering", "core", "engine", "methods", "models", "nn", "privacy", "report", "results"]
REPORT = """
import torch, scipy.linalg
from threadpoolctl import threadpool_info
print("PyTorch", torch.backends.cpu.get_cpu_capability(), *sorted({
    f"{one['internal_api']} {one.get('architecture') or one['version']}" for one in threadpool_info()}), sep=", ")
"""


@dataclass(frozen=True)
class Variant:
    """One CPU that the libraries take this one for."""

    aten: str | None = None  # None: as the CPU has it
    onednn: str | None = None
    mkl: str | None = None
    openblas: str | None = None
    threads: int = 1
    needs: str = "sse4_1"  # instructions of the CPU

    @classmethod
    def of(cls, capability: str, **fields) -> "Variant":
        """As `runtime.cpu_capability` sets it."""
        return cls(*instructions_environment(capability).values(), **fields)

    @property
    def environment(self) -> dict[str, str]:
        values = (self.aten, self.onednn, self.mkl, self.openblas)
        return {name: value for name, value in zip(instructions_environment("default"), values) if value}

    def options(self) -> list[str]:
        """Of pytest (`tests/conftest.py`)."""
        return [f"--threads={self.threads}"]


VARIANTS = {
    "native": Variant(),
    "older": Variant.of("default"),
    "avx2": Variant.of("avx2", needs="avx2"),
    "avx512": Variant.of("avx512", needs="avx512f"),
    "mixed_1": Variant("default", "AVX512_CORE", "AVX2", "Zen", 2, needs="avx512f"),
    "mixed_2": Variant("avx2", "SSE41", "AVX512", "SkylakeX", 1, needs="avx512f"),
    "mixed_3": Variant("avx512", "AVX2", "COMPATIBLE", "Haswell", 2, needs="avx512f"),
    "mixed_4": Variant("avx2", "AVX512_CORE", "COMPATIBLE", "Zen", 1, needs="avx512f"),
}


@dataclass(frozen=True)
class Outcome:
    """The tests of one variant."""

    status: int
    counts: dict[str, int]  # "passed" -> 2100, "failed" -> 1 ...
    failed: list[str]
    seconds: float


def run(variant: Variant, options: list[str]) -> Outcome:
    """The outcome of pytest in a process with the variant's variables; prints what its libraries report."""
    # OpenMP's threads are limited to `--threads` by conftest.py; on a busy machine they should not wait in a loop
    threads = {"OMP_NUM_THREADS": str(variant.threads), "OMP_WAIT_POLICY": "PASSIVE"}
    environment = os.environ | variant.environment | threads
    print(subprocess.run([sys.executable, "-c", REPORT], env=environment, check=True, text=True, stdout=-1).stdout)
    start, output = time.monotonic(), ""
    command = [sys.executable, "-m", "pytest", *variant.options(), *options]
    with subprocess.Popen(command, env=environment, cwd=ROOT, text=True, stdout=subprocess.PIPE) as process:
        for line in process.stdout or ():
            print(line, end="", flush=True)
            output += line
    counts = {kind: int(count) for count, kind in re.findall(r"(\d+) (passed|failed|skipped|errors?)", output)}
    failed = re.findall(r"^(?:FAILED|ERROR) (.+?)(?: - |$)", output, re.MULTILINE)
    return Outcome(process.returncode, counts, failed, time.monotonic() - start)


def chosen(names: list[str]) -> dict[str, Variant]:
    """The variants of these names, all if there are none, that this CPU has; the others are named."""
    if unknown := set(names) - VARIANTS.keys():
        raise UserError(f"no variant {', '.join(sorted(unknown))}; there are {', '.join(VARIANTS)}")
    flags = (cpu_info("flags") or "").split()
    variants = {name: VARIANTS[name] for name in names or VARIANTS}
    for name, variant in variants.items():
        if variant.needs not in flags:
            print(f"{name} is left out: this CPU has no {variant.needs} ({model()})")
    return {name: variant for name, variant in variants.items() if variant.needs in flags}


def main(arguments: list[str]) -> int:
    own, options = arguments, []
    if "--" in arguments:
        at = arguments.index("--")
        own, options = arguments[:at], arguments[at + 1 :]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("variants", nargs="*", metavar="VARIANT", help=f"default: all of {', '.join(VARIANTS)}")
    try:
        variants = chosen(parser.parse_args(own).variants)
    except UserError as error:
        parser.error(str(error))
    if not any(option.startswith("tests") for option in options):
        options = options + [f"tests/{suite}" for suite in SUITES]
    table = Table("variant", *Variant.__dataclass_fields__, "passed", "failed", "seconds", title=model())
    failed = {}
    for name, variant in variants.items():
        outcome = run(variant, options)
        errors = outcome.counts.get("failed", 0) + outcome.counts.get("errors", outcome.counts.get("error", 0))
        settings = [str(value or "") for value in vars(variant).values()]
        table.add_row(name, *settings, str(outcome.counts.get("passed", 0)), str(errors), f"{outcome.seconds:.0f}")
        if outcome.status:
            failed[name] = outcome.failed or [f"pytest ended with status {outcome.status}"]
    Console(width=140).print(table)
    for name, tests in failed.items():
        print(f"{name}:", *tests, sep="\n  ")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
