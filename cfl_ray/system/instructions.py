"""Environment variables that fix a process's CPU instructions, so that results are equal on newer and older CPUs.

Kernels for AVX2 and AVX-512 sum in different orders. Libraries choose their kernels when they are imported, so the
variables must be set before the process starts.
"""

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
