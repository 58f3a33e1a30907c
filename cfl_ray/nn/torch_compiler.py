"""The only module that uses PyTorch's compiler and the loader of what it made: `torch._inductor` and `torch._C._aoti`.

PyTorch documents the compiler (AOTInductor) under its private name, as a prototype; no public loader leaves
the compiler out. Tried with 2.15; with a release that lacks a name that is used here, `why_not` says so, and other
engines train.

As a program, `python -m cfl_ray.nn.torch_compiler PATH`, it compiles the recording in its standard input: the memory
of the compiler, 0.9 GB, is gone when the program ends.
"""

import operator
import os
import shutil
import sys
from collections.abc import Sequence
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from cfl_ray.nn.recording import RecordedFunction, Ref

_COMPILERS = ("g++", "clang++", "c++")  # in which PyTorch looks, after CXX
# One thread, as hosts have; draws from PyTorch's generator, as without the compiler.
SETTINGS = {"cpp.threads": 1, "fallback_random": True}


class CompiledProgram(Protocol):
    """A compiled recording."""

    def run(self, inputs: list[Tensor]) -> list[Tensor]:
        """The outputs."""


@cache
def why_not() -> str | None:
    """Reason why nothing can be compiled here; None if it can."""
    loader = getattr(getattr(torch._C, "_aoti", None), "AOTIModelPackageLoader", None)
    if not hasattr(loader, "run") or find_spec("torch._inductor") is None:
        return f"PyTorch {torch.__version__} has no ahead-of-time compiler with a loader for Python"
    named = os.environ.get("CXX")
    if not any(shutil.which(name) for name in ([named] if named else _COMPILERS)):
        looked = f"CXX={named}" if named else ", ".join(_COMPILERS)
        return f"this machine has no C++ compiler ({looked}), with which PyTorch compiles"
    return None


def load(path: Path) -> CompiledProgram:
    """The package in a file. It does not import the compiler. Raises RuntimeError for a file that is none."""
    loaded: Any = torch._C._aoti.AOTIModelPackageLoader(str(path), "model", True, 1, -1)
    return loaded


def compiled(recording: RecordedFunction, path: Path) -> None:
    """Compiles a recording into a file, which must end in .pt2."""
    torch.set_num_threads(1)
    example = tuple(layout.empty() for layout in recording.inputs)
    exported = torch.export.export(_module_of(recording), example, strict=False)
    torch._inductor.aoti_compile_and_package(exported, package_path=str(path), inductor_configs=dict(SETTINGS))


def _module_of(recording: RecordedFunction) -> torch.fx.GraphModule:
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


def _unpack(graph: torch.fx.Graph, values: dict[int, Any], results: Any, node: Any) -> None:
    """Keeps the node of a result, or of each part of it."""
    if isinstance(results, Ref):
        values[results.number] = node
    elif isinstance(results, Sequence) and not isinstance(results, str):
        for place, part in enumerate(results):
            if part is not None:
                _unpack(graph, values, part, graph.call_function(operator.getitem, (node, place)))


if __name__ == "__main__":
    compiled(RecordedFunction.of(sys.stdin.read()), Path(sys.argv[1]))
