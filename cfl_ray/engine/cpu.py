"""The CPU of this process: its model, and the instructions that PyTorch uses on it."""

import platform
from contextlib import suppress
from pathlib import Path

import torch


def instruction_set() -> str:
    """The instructions that PyTorch's kernels use: "DEFAULT", "AVX2", "AVX512" ..."""
    return torch.backends.cpu.get_cpu_capability()


def model() -> str:
    """The name of the CPU, e.g. "AMD EPYC"; of its architecture where the system does not say."""
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            name, _, value = line.partition(":")
            if name.strip() == "model name":
                return value.strip()
    return platform.machine()
