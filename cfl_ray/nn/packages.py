"""Compiled recordings, each made once per machine and kept in the cache folder.

A package is a file KEY.so with its checksum in KEY.sha256. The key is of the operations, PyTorch, the compiler's
settings and the CPU's instructions, so a package that is found computes what is wanted. It is compiled by a process of
its own, in a folder of its own, and renamed when it is whole; other processes of the machine wait for it.
"""

import errno
import hashlib
import os
import platform
import shutil
import subprocess
import sys
from contextlib import suppress
from functools import cache
from pathlib import Path

import torch
from filelock import FileLock, Timeout

from cfl_ray.errors import DataError
from cfl_ray.nn import torch_compiler
from cfl_ray.nn.recording import RecordedFunction
from cfl_ray.nn.torch_compiler import CompiledProgram
from cfl_ray.system import files
from cfl_ray.system.cpu import cpu_info, instruction_set

_FORM = 3  # of the packages; another number makes them anew
_WORK = ".compiling-"  # and the key: a folder in which a package is compiled
_SECONDS = 1800  # of compiling at most; a Transformer of two layers takes 20 s of CPU
_LOADED: dict[str, CompiledProgram | str] = {}  # by key: the package, or the reason, a line, why there is none


def key_of(recording: RecordedFunction) -> str:
    """The name of its package."""
    return hashlib.sha256(repr((recording.digest, _of_machine())).encode()).hexdigest()


def package_of(recording: RecordedFunction) -> CompiledProgram | str:
    """The package of a recording, compiled if this machine has none; the reason, a line, if that fails."""
    key = key_of(recording)
    if key not in _LOADED:
        try:
            _LOADED[key] = _loaded(key) or _made(recording, key)
        except (OSError, DataError, RuntimeError, subprocess.SubprocessError) as error:
            _LOADED[key] = _reason(error)
    return _LOADED[key]


def why_not(recording: RecordedFunction) -> str | None:
    """Reason why there is no package of it and none can be made here; None if there is, or nothing is known yet."""
    key = key_of(recording)
    found = _LOADED.get(key)
    if found is not None:
        return found if isinstance(found, str) else None
    try:
        if (_folder() / f"{key}.so").is_file():
            return None
        existing = next(path for path in (_folder(), *_folder().parents) if path.exists())
        if not existing.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(existing))
        if not os.access(existing, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(existing))
    except (OSError, RuntimeError) as error:  # RuntimeError: the user has no home
        return _reason(error)
    return torch_compiler.why_not()


@cache
def _of_machine() -> tuple[object, ...]:
    """Everything besides the operations on which the package depends."""
    settings, cpu = torch_compiler.settings(), [platform.machine(), instruction_set()]
    if "cpp.march" not in settings:  # then the program has all instructions of the CPU
        cpu.append(cpu_info("flags") or platform.processor())
    return _FORM, torch.__version__, tuple(sorted(settings.items())), tuple(cpu)


def _folder() -> Path:
    return files.cache_folder() / "compiled"


def _loaded(key: str) -> CompiledProgram | None:
    """The package in the cache; None if there is none or its file is damaged."""
    file, folder = _folder() / f"{key}.so", _folder()
    if not file.is_file():
        return None
    status = folder.stat()
    if status.st_uid != os.getuid() or status.st_mode & 0o022:
        raise DataError(f"{folder} has programs, but others than you can write to it: chmod go-w {folder}")
    content = file.read_bytes()
    with suppress(OSError, ValueError):
        if (folder / f"{key}.sha256").read_text() == hashlib.sha256(content).hexdigest():
            return torch_compiler.load(file)
    return None


def _made(recording: RecordedFunction, key: str) -> CompiledProgram | str:
    """The package, compiled by one process of this machine while others wait."""
    if reason := torch_compiler.why_not():
        return reason
    folder = _folder()
    files.private_folder(folder)
    with FileLock(folder / f"{key}.lock", timeout=2 * _SECONDS, mode=files.PRIVATE):
        if (package := _loaded(key)) is not None:
            return package
        _remove_unfinished(folder)
        work = folder / f"{_WORK}{key}"
        shutil.rmtree(work, ignore_errors=True)
        work.mkdir(mode=0o700)
        try:
            _compile(recording, work)
            content = (work / "program.so").read_bytes()
            (work / "checksum").write_text(hashlib.sha256(content).hexdigest())
            os.replace(work / "checksum", folder / f"{key}.sha256")
            os.replace(work / "program.so", folder / f"{key}.so")
        finally:
            shutil.rmtree(work, ignore_errors=True)
        return _loaded(key) or f"{folder / key}.so cannot be read"


def _compile(recording: RecordedFunction, work: Path) -> None:
    """Compiles into `work`/program.so, in a process that ends. Raises SubprocessError."""
    parent = str(Path(__file__).parents[2])
    own = {"TORCHINDUCTOR_CACHE_DIR": str(work), "TMPDIR": str(work), "TORCHINDUCTOR_COMPILE_THREADS": "1"}
    own |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    own["PYTHONPATH"] = os.pathsep.join(filter(None, (parent, os.environ.get("PYTHONPATH"))))
    subprocess.run(
        [sys.executable, "-m", torch_compiler.__name__, str(work / "program.so"), str(os.getpid())],
        input=recording.text.encode(),
        env=os.environ | own,
        cwd=work,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        timeout=_SECONDS,
        check=True,
    )


def _remove_unfinished(folder: Path) -> None:
    """Removes the folders of processes that were killed while they compiled: those whose lock is free."""
    for path in folder.glob(f"{_WORK}*"):
        with suppress(Timeout), FileLock(folder / f"{path.name.removeprefix(_WORK)}.lock", timeout=0):
            shutil.rmtree(path, ignore_errors=True)


def _reason(error: Exception) -> str:
    if isinstance(error, subprocess.CalledProcessError):
        lines = error.stderr.decode(errors="replace").strip().splitlines()
        return f"PyTorch's compiler failed ({(lines or [f'exit status {error.returncode}'])[-1][:160]})"
    if isinstance(error, subprocess.TimeoutExpired):
        return f"PyTorch's compiler took more than {_SECONDS} s"
    if isinstance(error, OSError) and error.filename:
        where = f"{error.filename}: {error.strerror}"
        return f"its package cannot be kept ({where}); set CFL_RAY_CACHE to a folder of yours"
    return f"its package cannot be used ({' '.join(str(error).split())[:160]})"
