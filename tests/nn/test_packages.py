"""Packages of compiled functions in the cache, with a compiler that only writes the operations."""

import hashlib
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from filelock import FileLock
from torch import nn
from torch.torch_version import TorchVersion

from cfl_ray.nn import packages, torch_compiler
from cfl_ray.nn.packages import key_of, package_of, why_not
from cfl_ray.nn.recording import NotRecordable, RecordedFunction, record


def _recording(factor=2.0):
    return record(lambda x: [x.mm(x) * factor], [torch.ones(2, 2)])[0]


@pytest.fixture
def compiled(tmp_path, monkeypatch):
    """The recordings that were compiled. A package is the text of its recording."""
    made = []

    def compile_into(recording, work):
        made.append(recording)
        (work / "program.so").write_text(recording.text)

    monkeypatch.setenv("CFL_RAY_CACHE", str(tmp_path))
    monkeypatch.setattr(packages, "_LOADED", {})
    monkeypatch.setattr(packages, "_compile", compile_into)
    monkeypatch.setattr(torch_compiler, "why_not", lambda: None)
    monkeypatch.setattr(torch_compiler, "load", lambda file: RecordedFunction.of(file.read_text()))
    return made


def _next_process(monkeypatch):
    monkeypatch.setattr(packages, "_LOADED", {})


def test_a_package_is_made_once(compiled, monkeypatch):
    assert torch.equal(package_of(_recording()).run([torch.ones(2, 2)])[0], torch.full((2, 2), 4.0))
    _next_process(monkeypatch)
    package_of(_recording())
    assert len(compiled) == 1
    package_of(_recording(3.0))
    assert len(compiled) == 2, "another number is another function"


def test_the_key_is_of_the_operations_and_of_the_machine(compiled, monkeypatch):
    keys = {key_of(_recording()), key_of(_recording(3.0))}
    for instructions in ("avx2", "avx512"):
        monkeypatch.setattr(packages, "_of_machine", lambda: instructions)
        keys.add(key_of(_recording()))
    assert len(keys) == 4 and key_of(_recording()) in keys


@pytest.mark.parametrize("content", [b"", b"[]", b"half of the fi"])
def test_a_damaged_package_is_made_again(compiled, monkeypatch, tmp_path, content):
    package_of(_recording())
    _next_process(monkeypatch)
    (file,) = (tmp_path / "compiled").glob("*.so")
    file.write_bytes(content)
    assert package_of(_recording()).text == _recording().text and len(compiled) == 2
    assert file.read_text() == _recording().text


def test_an_interrupted_compiler_leaves_no_package(compiled, monkeypatch, tmp_path):
    def killed(recording, work):
        (work / "program.so").write_text("half")
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(packages, "_compile", killed)
        package_of(_recording())
    assert [path.suffix for path in (tmp_path / "compiled").iterdir()] == [".lock"]
    assert package_of(_recording()).text == _recording().text


@pytest.mark.parametrize(
    "error, reason",
    [
        (
            subprocess.CalledProcessError(1, "", stderr=b"Traceback\nTypeError: no such\n"),
            "failed (TypeError: no such)",
        ),
        (subprocess.CalledProcessError(-9, "", stderr=b""), "failed (exit status -9)"),
        (subprocess.TimeoutExpired("", 9), "took more than 1800 s"),
        (OSError(28, "No space left on device"), "No space left on device"),
    ],
)
def test_the_reason_of_a_failure_is_a_line_and_kept(compiled, monkeypatch, error, reason):
    def fails(recording, work):
        raise error

    monkeypatch.setattr(packages, "_compile", fails)
    assert reason in package_of(_recording()) and "\n" not in package_of(_recording())
    assert why_not(_recording()) == package_of(_recording())


def test_a_folder_to_which_others_can_write_is_refused(compiled, monkeypatch, tmp_path):
    package_of(_recording())
    _next_process(monkeypatch)
    (tmp_path / "compiled").chmod(0o777)
    assert "others than you can write to it: chmod go-w" in package_of(_recording())


def test_a_cache_folder_that_cannot_be_made_is_known_before_compiling(compiled, monkeypatch, tmp_path):
    (tmp_path / "file").touch()
    monkeypatch.setenv("CFL_RAY_CACHE", str(tmp_path / "file" / "cache"))
    expected = f"its package cannot be kept ({tmp_path}/file: Not a directory); set CFL_RAY_CACHE to a folder of yours"
    assert why_not(_recording()) == expected
    assert package_of(_recording()).startswith(f"its package cannot be kept ({tmp_path}/file")
    monkeypatch.setattr(packages.os, "access", lambda path, mode: path != tmp_path)
    monkeypatch.setenv("CFL_RAY_CACHE", str(tmp_path / "of another user"))
    _next_process(monkeypatch)
    assert f"({tmp_path}: Permission denied)" in why_not(_recording())


def test_a_user_without_a_home_has_no_package(compiled, monkeypatch):
    def missing():
        raise RuntimeError("Could not determine home directory.")

    for name in ("CFL_RAY_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(Path, "home", missing)
    assert "home" in why_not(_recording())


def test_without_a_cpp_compiler_only_packages_that_are_there_are_used(compiled, monkeypatch):
    monkeypatch.setattr(torch_compiler, "why_not", lambda: "this machine has no C++ compiler")
    assert why_not(_recording()) == package_of(_recording()) == "this machine has no C++ compiler"
    _next_process(monkeypatch)
    monkeypatch.setattr(torch_compiler, "why_not", lambda: None)
    package_of(_recording())
    _next_process(monkeypatch)
    monkeypatch.setattr(torch_compiler, "why_not", lambda: "this machine has no C++ compiler")
    assert why_not(_recording()) is None and package_of(_recording()).text == _recording().text


def test_the_cpp_compiler_is_looked_for_where_pytorch_does(monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    reason = torch_compiler.why_not.__wrapped__()
    assert reason == "this machine has no C++ compiler (CXX=no-such-compiler), with which PyTorch compiles"


def test_what_killed_compilers_left_is_removed_unless_one_still_compiles(compiled, tmp_path):
    folder = tmp_path / "compiled"
    for name in ("dead", "alive", key_of(_recording())):
        (folder / f".compiling-{name}").mkdir(parents=True)
        (folder / f".compiling-{name}" / "half").touch()
    with FileLock(folder / "alive.lock"):
        assert package_of(_recording()).text == _recording().text
    assert [path.name for path in folder.glob(".compiling-*")] == [".compiling-alive"]


def test_programs_have_the_instructions_that_pytorch_uses(monkeypatch):
    monkeypatch.setattr(torch_compiler.platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(torch, "__version__", TorchVersion("2.11.0+cu130"))
    assert "cpp.march" not in torch_compiler.settings(), "it has no such setting: all of the CPU is in the key"
    monkeypatch.setattr(torch, "__version__", TorchVersion("2.13.0+cpu"))
    found = []
    for instructions in ("AVX512", "AVX2", "DEFAULT"):
        monkeypatch.setattr(torch_compiler, "instruction_set", lambda name=instructions: name)
        found.append(torch_compiler.settings()["cpp.march"])
    assert found == ["x86-64-v4", "x86-64-v3", "x86-64-v2"]
    own = SimpleNamespace(threads=1, simdlen=None)
    with pytest.raises(RuntimeError, match=r"PyTorch .* lacks the setting cpp\.march"):
        torch_compiler.check_settings(SimpleNamespace(cpp=own, fallback_random=False))


# ---- recordings


def _norms(x):
    """Views, a result of two tensors, constants, numbers and a write to an own tensor."""
    least, most = torch.aminmax(x, dim=1)
    y = torch.zeros(3) + torch.tensor([1.0, 2.0, 3.0])
    y[1:] += x.T[0] * float("inf")
    return [(x - least[:, None]) / most[:, None], y]


def test_a_recording_computes_the_same_for_other_inputs_also_from_its_text():
    recording, further = record(_norms, [torch.rand(2, 4)])
    x = torch.rand(2, 4)
    for one in (recording, RecordedFunction.of(recording.text)):
        for found, expected in zip(one.run([x, *further]), _norms(x), strict=True):
            assert torch.equal(found, expected)
    assert [tensor.tolist() for tensor in further] == [[1.0, 2.0, 3.0]], "a constant is an input"


def test_values_of_constants_may_be_read():
    mask = nn.Transformer.generate_square_subsequent_mask(2)
    layer = nn.TransformerEncoderLayer(2, 1, 2, 0.0, batch_first=True)
    encoder = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)  # which looks whether its mask is causal
    recording, further = record(lambda x: [encoder(x, mask=mask)], [torch.rand(1, 2, 2)])
    x = torch.rand(1, 2, 2)
    torch.testing.assert_close(recording.run([x, *further])[0], encoder(x, mask=mask))


@pytest.mark.slow
def test_the_text_is_equal_in_another_process():
    code = (
        "import sys; sys.path.insert(0, sys.argv[1]); from test_packages import _recording; print(_recording().digest)"
    )
    here = str(Path(__file__).parent)
    done = subprocess.run([sys.executable, "-c", code, here], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == _recording().digest == hashlib.sha256(_recording().text.encode()).hexdigest()


@pytest.mark.parametrize(
    "function, reason",
    [
        (lambda x: [x * x.sum().item()], "read values"),
        (lambda x: [x[x > 0]], "read values"),
        (lambda x: [x * float(torch.zeros(2).copy_(x)[0])], "read values"),
        (lambda x: [x.add_(1)], "change tensors that they are given"),
        (lambda x: [x + torch.rand(2, generator=torch.Generator())], "argument of Generator"),
    ],
)
def test_functions_that_do_other_things_for_other_values_are_refused(function, reason):
    with pytest.raises(NotRecordable, match=reason):
        record(function, [torch.ones(2)])
