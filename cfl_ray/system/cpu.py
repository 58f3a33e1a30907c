"""The CPU of this process: its model, the instructions that PyTorch uses on it, and the variables that fix these.

Kernels for AVX2 and AVX-512 sum in different orders. Libraries choose their kernels when they are imported, so the
variables must be set before the process starts; then results are equal on newer and older CPUs.
"""

import platform
from contextlib import suppress
from pathlib import Path

from cfl_ray.errors import ConfigError

# values of _NAMES: PyTorch, its oneDNN and MKL, and NumPy's OpenBLAS
_VARIABLES = {
    "default": ("default", "SSE41", "COMPATIBLE", "Nehalem"),
    "avx2": ("avx2", "AVX2", "AVX2", "Haswell"),
    "avx512": ("avx512", "AVX512_CORE", "AVX512", "SkylakeX"),
}
_NAMES = ("ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA", "MKL_CBWR", "OPENBLAS_CORETYPE")


def instructions_environment(name: str | None) -> dict[str, str]:
    """Environment variables for the instructions "default", "avx2" or "avx512".

    None: no variables, so each library chooses by the CPU.
    """
    if name is None:
        return {}
    return dict(zip(_NAMES, _VARIABLES[name], strict=True))


def instruction_set() -> str:
    """The instructions that PyTorch's kernels use: "DEFAULT", "AVX2", "AVX512" ..."""
    import torch  # the server starts its hosts before it imports torch

    return torch.backends.cpu.get_cpu_capability()


def check_instructions(wanted: str | None, where: str) -> None:
    """Raises ConfigError if this process does not use the instructions of runtime.cpu_capability."""
    if wanted is None or instruction_set().lower() == wanted:
        return
    variables = " ".join(f"{name}={value}" for name, value in instructions_environment(wanted).items())
    raise ConfigError(
        f"runtime.cpu_capability: {wanted}, but PyTorch uses {instruction_set()} {where}; start the process with "
        f"{variables}, or choose instructions that the CPU has ({model()})"
    )


def model() -> str:
    """The name of the CPU, e.g. "AMD EPYC"; the name of its architecture if the system reports none."""
    return cpu_info("model name") or platform.machine()


def cpu_info(name: str) -> str | None:
    """A value of the first CPU, e.g. of "vendor_id" or "model name"; None if the system does not report it."""
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            key, _, value = line.partition(":")
            if key.strip() == name:
                return value.strip()
    return None
