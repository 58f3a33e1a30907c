"""Few methods that together make every kind of request to their clients that any method makes."""

import ast
import functools
import inspect

from cfl_ray.core.clients import Clients
from cfl_ray.core.method import Method
from cfl_ray.methods import REGISTRY

# calls whose arguments say what hosts do; `clients.train(average=)` and `LocalTraining(proximal=)` are two kinds
_CALLS = {"LocalTraining", "Proximal", "ClientState", "Serving", "UpdateFeatures", "Mixture"}
_HOOKS = {"begin", "step", "loss", "finish"}  # of client programs
_FREE = {"record", "select", "weights", "count_upload", "count_download", "require_readable", "first_row", "event"}


def _module_kinds(tree: ast.Module) -> set[str]:
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            function = node.func
            name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
            if name in _CALLS or (hasattr(Clients, name) and name not in _FREE):
                found |= {name, *(f"{name}({keyword.arg}=)" for keyword in node.keywords if keyword.arg)}
        if isinstance(node, ast.ClassDef) and "ClientProgram" in {ast.unparse(base) for base in node.bases}:
            found |= {f"program.{part.name}" for part in node.body if isinstance(part, ast.FunctionDef)} & {
                f"program.{hook}" for hook in _HOOKS
            }
    return found


def kinds_of(cls: type[Method]) -> set[str]:
    """Kinds of requests in the files of a method and of the methods that it extends."""
    files = {inspect.getsourcefile(base) for base in cls.__mro__ if issubclass(base, Method) and base is not Method}
    return set().union(*(_parsed(file) for file in files))


@functools.cache
def _parsed(file: str) -> set[str]:
    with open(file) as source:
        return _module_kinds(ast.parse(source.read()))


@functools.cache
def covering() -> tuple[str, ...]:
    """Names of the methods, in the order in which each adds the most kinds to those before it."""
    kinds = {name: kinds_of(cls) for name, cls in REGISTRY.items()}
    left, chosen = set().union(*kinds.values()), []
    while left:
        best = max(sorted(kinds), key=lambda name: len(kinds[name] & left))
        chosen.append(best)
        left -= kinds[best]
    return tuple(chosen)
