"""The layer in which an error was raised, from the frames of its traceback."""

from types import TracebackType
from typing import Any


def layer_of(error: BaseException) -> str:
    """The text ", in layer PATH (TYPE), which got SHAPES" for an error inside the layer of a module; empty without one.

    Inside the constructor of a layer, which has no path yet: ", in TYPE.__init__".
    """
    frames = [frame for frame in _frames(error.__traceback__) if _is_module(frame.get("self"))]
    if not frames:
        return ""
    root, innermost = frames[0]["self"], frames[-1]["self"]
    if "_modules" not in vars(innermost) or not _was_called(frames[-1]["self"], frames):
        return f", in {type(innermost).__name__}.__init__"
    names = {id(part): name for name, part in root.named_modules()}
    name = names.get(id(innermost))
    inputs = next((f["args"] for f in reversed(frames) if f["self"] is innermost and f.get("args")), ())
    shapes = [f"{tuple(part.shape)}" for part in inputs if hasattr(part, "shape")]
    got = f", which got an input of shape {' and '.join(shapes)}" if shapes else ""
    return f", in layer {name} ({_described(innermost)}){got}" if name else got.replace("which", "where forward")


def _was_called(module: Any, frames: list[dict[str, Any]]) -> bool:
    """Whether one of these frames belongs to a call of the module, which has `args`; else to its constructor."""
    return any(frame["self"] is module and "args" in frame for frame in frames)


def _frames(trace: TracebackType | None) -> list[dict[str, Any]]:
    found = []
    while trace is not None:
        found.append(trace.tb_frame.f_locals)
        trace = trace.tb_next
    return found


def _is_module(value: Any) -> bool:
    """Whether a value is a module of PyTorch, which is not imported here, for it takes a second."""
    return any(
        base.__module__ == "torch.nn.modules.module" and base.__name__ == "Module" for base in type(value).__mro__
    )


def _described(module: Any) -> str:
    """Type and settings of a layer, in one line."""
    return f"{type(module).__name__}({module.extra_repr()})".replace("\n", " ")[:120]
