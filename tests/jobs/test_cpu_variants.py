"""The numeric tests as other CPUs compute."""

import shutil

import pytest

from cfl_ray.errors import UserError
from jobs import cpu_variants
from jobs.cpu_variants import VARIANTS, Variant, chosen, run

VALUES = {
    "aten": {"default", "avx2", "avx512"},
    "onednn": {"SSE41", "AVX2", "AVX512_CORE"},
    "mkl": {"COMPATIBLE", "AVX2", "AVX512"},
    "openblas": {"Nehalem", "Haswell", "SkylakeX", "Zen"},
    "threads": {1, 2},
}


@pytest.mark.parametrize("field", VALUES)
def test_every_value_is_in_a_variant(field):
    assert VALUES[field] <= {getattr(variant, field) for variant in VARIANTS.values()}


def test_what_the_cpu_does_not_have_is_left_out_and_named(monkeypatch, capsys):
    monkeypatch.setattr(cpu_variants, "cpu_info", lambda name: "fpu sse4_1 avx2")
    assert list(chosen([])) == ["native", "older", "avx2"]
    assert "avx512 is left out: this CPU has no avx512f" in capsys.readouterr().out
    assert chosen(["avx512"]) == {} and list(chosen(["avx2"])) == ["avx2"]
    with pytest.raises(UserError, match="no variant avx3; there are native, older"):
        chosen(["avx3"])


@pytest.mark.slow
def test_tests_run_with_the_values_of_the_variant(tmp_path):
    """PyTorch's instructions, threads of PyTorch and NumPy, and OpenBLAS's kernels."""
    shutil.copy(cpu_variants.ROOT / "tests/conftest.py", tmp_path)
    (tmp_path / "test_it.py").write_text(
        "import numpy, torch\nfrom threadpoolctl import threadpool_info\n"
        "def test_values():\n"
        "    blas = [one for one in threadpool_info() if one['internal_api'] == 'openblas']\n"
        "    assert torch.backends.cpu.get_cpu_capability() == 'DEFAULT'\n"
        "    assert {one['architecture'] for one in blas} == {'Haswell'}\n"
        "    assert {torch.get_num_threads(), *(one['num_threads'] for one in blas)} == {2}\n"
        "def test_fails():\n    assert False\n"
    )
    variant = Variant("default", "SSE41", "COMPATIBLE", "Haswell", threads=2)
    outcome = run(variant, ["-n", "0", "-c", str(cpu_variants.ROOT / "pyproject.toml"), str(tmp_path)])
    assert outcome.status == 1 and outcome.counts == {"passed": 1, "failed": 1}
    assert len(outcome.failed) == 1 and "test_fails" in outcome.failed[0]
