"""The only module that uses PyTorch's compiler and the loader of what it made: `torch._inductor` and `torch._C._aoti`.

PyTorch documents the compiler (AOTInductor) under its private name, as a prototype; no public loader leaves
the compiler out. Tried with 2.11, 2.13 and 2.15; with a release that lacks a name that is used here, `why_not` or the
compiling process says so, and other engines train.

As a program, `python -m cfl_ray.nn.torch_compiler PATH PARENT`, it compiles the recording in its standard input: the
memory of the compiler, 0.9 GB, is gone when the program ends. It ends with its parent process, too.
"""

import operator
import os
import platform
import shutil
import sys
import threading
import time
from collections.abc import Sequence
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol
from zipfile import ZipFile

import torch
from torch import Tensor

from cfl_ray.nn.recording import RecordedFunction, Ref
from cfl_ray.system.cpu import instruction_set

_ATEN = torch.ops.aten
_COMPILERS = ("g++", "clang++", "c++")  # in which PyTorch looks, after CXX
_WITH_TARGET = "2.13"  # a release of PyTorch whose compiler can be told a target
# Instructions of an x86 CPU as PyTorch reports them: the target of the C++ compiler, and the bits of a vector.
_TARGETS = {"AVX512": ("x86-64-v4", 512), "AVX2": ("x86-64-v3", 256), "DEFAULT": ("x86-64-v2", 1)}


class CompiledProgram(Protocol):
    """A compiled recording."""

    def run(self, inputs: list[Tensor]) -> list[Tensor]:
        """The outputs."""


@cache
def why_not() -> str | None:
    """Reason why nothing can be compiled here; None if it can."""
    runner = getattr(getattr(torch._C, "_aoti", None), "AOTIModelContainerRunnerCpu", None)
    if not hasattr(runner, "run") or find_spec("torch._inductor") is None:
        return f"PyTorch {torch.__version__} has no ahead-of-time compiler with a loader for Python"
    named = os.environ.get("CXX")
    if not any(shutil.which(name) for name in ([named] if named else _COMPILERS)):
        looked = f"CXX={named}" if named else ", ".join(_COMPILERS)
        return f"this machine has no C++ compiler ({looked}), with which PyTorch compiles"
    return None


def settings() -> dict[str, object]:
    """Settings of PyTorch's compiler: one thread, as hosts have, and draws from PyTorch's generator, as without it.

    On an x86 CPU the program has the instructions that PyTorch uses, not all of the CPU, so that machines whose
    PyTorch computes the same have the same program. Releases that cannot be told a target take all of the CPU.
    """
    given: dict[str, object] = {"cpp.threads": 1, "fallback_random": True}
    if platform.machine() in ("x86_64", "AMD64") and (target := _TARGETS.get(instruction_set())):
        given["cpp.simdlen"] = target[1]
        if torch.__version__ >= _WITH_TARGET:
            given["cpp.march"] = target[0]
    return given


def check_settings(config: Any) -> None:
    """Raises RuntimeError if a release of PyTorch lacks a setting of its compiler."""
    for name in settings():
        try:
            operator.attrgetter(name)(config)
        except AttributeError:
            raise RuntimeError(f"PyTorch {torch.__version__} lacks the setting {name}, a later one has it") from None


def load(path: Path) -> CompiledProgram:
    """The program in a file. It does not import the compiler. Raises RuntimeError for a file that is none.

    PyTorch's loader of whole packages would unpack them into the folder for temporary files, where they stay if the
    process is killed, as hosts are.
    """
    loaded: Any = torch._C._aoti.AOTIModelContainerRunnerCpu(str(path), 1)
    return loaded


def compiled(recording: RecordedFunction, path: Path) -> None:
    """Compiles a recording into a file, a shared library; other files are beside it."""
    import torch._inductor.config

    torch.set_num_threads(1)
    check_settings(torch._inductor.config)
    example = tuple(layout.empty() for layout in recording.inputs)
    exported = torch.export.export(module_of(recording), example, strict=False)
    update_in_products(exported.graph)
    exported.graph_module.recompile()
    package = str(path.with_suffix(".pt2"))
    torch._inductor.aoti_compile_and_package(exported, package_path=package, inductor_configs=settings())
    with ZipFile(package) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".so"))
        path.write_bytes(archive.read(name))


def module_of(recording: RecordedFunction) -> torch.fx.GraphModule:
    """The operations as a module of PyTorch's graphs."""
    graph = torch.fx.Graph()
    values: dict[int, Any] = {n: graph.placeholder(f"input_{n}") for n in range(len(recording.inputs))}

    def filled(value: Any) -> Any:
        if isinstance(value, Ref):
            return values[value.number]
        return type(value)(filled(part) for part in value) if isinstance(value, list | tuple) else value

    for operation in recording.operations:
        kwargs = {name: filled(value) for name, value in operation.kwargs}
        node = graph.call_function(operation.function, tuple(filled(operation.args)), kwargs)
        _unpack(graph, values, operation.results, node)
    graph.output(tuple(values[ref.number] for ref in recording.outputs))
    return torch.fx.GraphModule(torch.nn.Module(), graph)


def update_in_products(graph: torch.fx.Graph) -> None:
    """Computes w - rate * (a @ b) as the sum of w and a product, if `a` has fewer numbers than the product.

    So neither a gradient of many weights, which a batch of few samples has, nor its multiple is written. Nodes have
    their value, or one like it, as `meta["val"]`.
    """
    for node in graph.nodes:
        if not (_calls(node, _ATEN.sub.Tensor) and _calls(node.args[1], _ATEN.mul.Tensor)) or node.kwargs:
            continue
        weights, (rate, gradient) = node.args[0], node.args[1].args
        product, is_transposed = _untransposed(gradient)
        if is_transposed or not _calls(product, _ATEN.mm.default):
            continue
        left, right = product.args
        if _shape(rate) or _shape(weights) != _shape(product) or _shape(left).numel() >= _shape(product).numel():
            continue
        with graph.inserting_before(node):
            scaled = graph.call_function(_ATEN.mul.Tensor, (graph.call_function(_ATEN.neg.default, (rate,)), left))
            node.replace_all_uses_with(graph.call_function(_ATEN.addmm.default, (weights, scaled, right)))


def _untransposed(value: Any) -> tuple[Any, bool]:
    """The value of which this is a view, and whether the view is transposed."""
    is_transposed = False
    while _calls(value, _ATEN.t.default) or _calls(value, _ATEN.detach.default):
        is_transposed ^= _calls(value, _ATEN.t.default)
        value = value.args[0]
    return value, is_transposed


def _calls(value: Any, function: Any) -> bool:
    return isinstance(value, torch.fx.Node) and value.target is function


def _shape(node: Any) -> torch.Size:
    shape: torch.Size = node.meta["val"].shape
    return shape


def _unpack(graph: torch.fx.Graph, values: dict[int, Any], results: Any, node: Any) -> None:
    """Keeps the node of a result, or of each part of it."""
    if isinstance(results, Ref):
        values[results.number] = node
    elif isinstance(results, Sequence) and not isinstance(results, str):
        for place, part in enumerate(results):
            if part is not None:
                _unpack(graph, values, part, graph.call_function(operator.getitem, (node, place)))


def _end_with(parent: int) -> None:
    """Ends this process once its parent has ended."""
    while os.getppid() == parent:
        time.sleep(1)
    os._exit(1)


if __name__ == "__main__":
    threading.Thread(target=_end_with, args=(int(sys.argv[2]),), daemon=True).start()
    compiled(RecordedFunction.of(sys.stdin.read()), Path(sys.argv[1]))
