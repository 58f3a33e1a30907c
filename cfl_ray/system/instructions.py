"""The environment of processes whose results do not depend on how new their CPU is.

Kernels for AVX2 and AVX-512 add up in different orders. Libraries choose them when they are imported, so the variables
must be set before.
"""

# of PyTorch, its oneDNN and MKL, and the OpenBLAS of NumPy
_VARIABLES = {
    "default": ("default", "SSE41", "COMPATIBLE", "Nehalem"),
    "avx2": ("avx2", "AVX2", "AVX2", "Haswell"),
    "avx512": ("avx512", "AVX512_CORE", "AVX512", "SkylakeX"),
}
_NAMES = ("ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA", "MKL_CBWR", "OPENBLAS_CORETYPE")


def instructions_environment(name: str | None) -> dict[str, str]:
    """Variables for these instructions (default, avx2, avx512); none for None: each library chooses by the CPU."""
    if name is None:
        return {}
    return dict(zip(_NAMES, _VARIABLES[name], strict=True))
