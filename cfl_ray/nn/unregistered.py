"""Values that a module holds outside its parameters and buffers: in attributes, lists, closures, globals of its code.

PyTorch neither saves nor moves nor trains such values, so a model that is rebuilt has them only if they are the same in
every module of the factory.
"""

import inspect
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from types import FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

_MOST = 200_000  # values of a walk, which ends there
_MOST_NUMBERS = 64  # a longer list of numbers is one value
_OF_TORCH = frozenset(vars(nn.Module())) - {"_forward_hooks", "_forward_pre_hooks"}  # attributes of every module
_HOOKS = {"_forward_hooks": "forward hook", "_forward_pre_hooks": "forward pre-hook"}
_SKIPPED = (type, ModuleType, torch.Generator, np.random.Generator, np.random.RandomState, torch.dtype, torch.device)
_CONTAINERS = (list, tuple, set, frozenset)


@dataclass
class Unregistered:
    """Values by path, such as `blocks.0.mask`, `self.tables['a'][1]` or `forward's global MASK`."""

    tensors: dict[str, Tensor] = field(default_factory=dict)  # arrays too
    numbers: dict[str, int | float | complex] = field(default_factory=dict)
    others: dict[str, str] = field(default_factory=dict)  # texts, truth values, types and names of functions
    parameters: dict[str, int] = field(default_factory=dict)  # numbers of those that ask for a gradient
    modules: dict[str, nn.Module] = field(default_factory=dict)  # outside the tree of registered modules


def unregistered_in(module: nn.Module) -> Unregistered:
    """The values that a module holds without registering them. Parts of parameters and buffers are left out."""
    registered = [*module.parameters(), *module.buffers()]
    return _Walk(module, {_memory(tensor) for tensor in registered} - {None}).found


def _memory(tensor: Tensor) -> int | None:
    try:
        return tensor.untyped_storage().data_ptr() or None
    except (RuntimeError, NotImplementedError):  # sparse tensors have no such memory
        return None


class _Walk:
    def __init__(self, module: nn.Module, registered: set[int | None]):
        self.found, self.registered = Unregistered(), registered
        self.tree = {id(part) for part in module.modules()}
        self.seen: set[int] = set()
        self.alive: list[Any] = []  # what the walk made, so that ids stay unique
        left: list[tuple[str, Any]] = [("", module)]
        while left and len(self.seen) < _MOST:
            path, value = left.pop()
            left += reversed(list(self._inside(path, value)))

    def _inside(self, path: str, value: Any) -> Iterator[tuple[str, Any]]:
        """Notes a value and returns those inside it, with their paths."""
        if isinstance(value, bool | str | bytes) or value is None:
            self.found.others[path] = repr(value)[:200]
            return
        if isinstance(value, int | float | complex | np.number):
            self.found.numbers[path] = value.item() if isinstance(value, np.number) else value
            return
        if id(value) in self.seen or isinstance(value, _SKIPPED):
            return
        self.seen.add(id(value))
        if isinstance(value, Tensor | np.ndarray):
            self._note_tensor(path, value)
        elif isinstance(value, nn.Module):
            yield from self._of_module(path, value)
        elif isinstance(value, Mapping):
            yield from ((f"{path}[{key!r}]", part) for key, part in list(value.items()))
        elif isinstance(value, _CONTAINERS):
            yield from self._of_list(path, value)
        elif isinstance(value, FunctionType):
            self.found.others[path] = f"function {value.__qualname__}"
            yield from self._of_function(path, value)
        elif isinstance(value, MethodType):
            yield from ((f"{path}.__self__", value.__self__), (path, value.__func__))
        elif isinstance(value, partial):
            yield from ((path, value.func), (f"{path}.args", value.args), (f"{path}.keywords", value.keywords))
        else:
            self.found.others[path] = f"{type(value).__module__}.{type(value).__qualname__}"
            yield from ((f"{path}.{name}", part) for name, part in _attributes(value))

    def _note_tensor(self, path: str, value: Tensor | np.ndarray) -> None:
        if isinstance(value, np.ndarray):
            if value.dtype.kind not in "biufc":
                return
            value = torch.from_numpy(np.array(value, value.dtype.newbyteorder("=")))
            self.alive.append(value)
        if _memory(value) not in self.registered:
            if isinstance(value, nn.Parameter) and value.requires_grad:
                self.found.parameters[path] = value.numel()
            self.found.tensors[path] = value.detach()

    def _of_module(self, path: str, module: nn.Module) -> Iterator[tuple[str, Any]]:
        prefix = f"{path}." if path else ""
        is_registered = id(module) in self.tree
        if not is_registered:
            self.found.modules[path] = module
        self.found.others[path or "the model"] = f"{type(module).__module__}.{type(module).__qualname__}"
        if isinstance(module, torch.jit.ScriptModule):
            return
        for name, value in list(vars(module).items()):
            if name in _HOOKS:
                yield from ((f"{prefix}{_HOOKS[name]}", hook) for hook in list(value.values()))
            elif name not in _OF_TORCH:
                yield f"{prefix}{name}", value
        if not is_registered:
            yield from ((f"{prefix}{name}", value) for name, value in module._parameters.items())
            yield from ((f"{prefix}{name}", value) for name, value in module._buffers.items())
        yield from ((f"{prefix}{name}", child) for name, child in module._modules.items())
        for kind in type(module).__mro__:
            if _is_users(kind):
                for name, value in list(vars(kind).items()):
                    if name == "__init__":  # what it has made is in the attributes
                        continue
                    if isinstance(value, FunctionType | Tensor | np.ndarray | list | tuple | dict):
                        yield f"{prefix}{name}", value

    def _of_list(self, path: str, value: Any) -> Iterator[tuple[str, Any]]:
        parts = list(value)
        if len(parts) > _MOST_NUMBERS and all(isinstance(part, int | float | complex) for part in parts):
            yield path, np.array(parts)
        elif isinstance(value, set | frozenset):  # in an order that does not depend on hashes of texts
            yield from ((f"{path}{{...}}", part) for part in sorted(parts, key=repr))
        else:
            yield from ((f"{path}[{number}]", part) for number, part in enumerate(parts))

    def _of_function(self, path: str, function: FunctionType) -> Iterator[tuple[str, Any]]:
        if not _is_users(function):
            return
        for name, value in (function.__kwdefaults__ or {}).items():
            yield f"default {name} of {path}", value
        yield from ((f"defaults of {path}[{i}]", value) for i, value in enumerate(function.__defaults__ or ()))
        try:
            variables = inspect.getclosurevars(inspect.unwrap(function))
        except (TypeError, ValueError):  # it wraps what is no function, or has a variable without a value
            return
        for name, value in variables.nonlocals.items():
            yield f"variable {name} of {path}", value
        for name, value in variables.globals.items():
            if isinstance(value, FunctionType | Tensor | np.ndarray | list | tuple | dict | nn.Module):
                yield f"global {name} of {path}", value


def _is_users(part: Any) -> bool:
    """Whether a class or function is neither PyTorch's nor NumPy's nor of this package."""
    top = (getattr(part, "__module__", None) or "").partition(".")[0]
    return top not in ("torch", "numpy", "builtins", "functools", "cfl_ray")


def _attributes(value: Any) -> list[tuple[str, Any]]:
    """The attributes that an object stores itself."""
    found = dict(getattr(value, "__dict__", {}))
    for kind in type(value).__mro__:
        slots = vars(kind).get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if not name.startswith("__") and hasattr(value, name):
                found.setdefault(name, getattr(value, name))
    return list(found.items())
