"""The CPU of this process: its model, and the instructions that PyTorch uses on it."""

import platform

import torch

from cfl_ray.errors import ConfigError
from cfl_ray.system.cpu_info import cpu_info
from cfl_ray.system.instructions import instructions_environment


def instruction_set() -> str:
    """The instructions that PyTorch's kernels use: "DEFAULT", "AVX2", "AVX512" ..."""
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
