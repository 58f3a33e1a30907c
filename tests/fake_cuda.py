"""A simulated CUDA device on the CPU, for tests that find operations between devices.

Tensors "on" it are tensors of the CPU whose storage is marked. As on a GPU, an operation on tensors of both devices and
`numpy()` of a tensor there raise; indices and numbers (tensors without axes) of the CPU are allowed. Recorded steps are
taken as they are. Nothing is computed in another way, so figures are those of the CPU.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from cfl_ray.engine import step_graphs

CUDA, functorch = torch.device("cuda", 0), torch._C._functorch
# operations that take tensors of both devices
_COPIES = {"aten::set_", "aten::copy", "aten::copy_", "aten::_to_copy"}
_INDEXED = {"aten::index", "aten::index_put_", "aten::index_put", "aten::_index_put_impl_", "aten::_unsafe_index"}


class _Storages:
    """The storages on the device, by address."""

    def __init__(self) -> None:
        self._there: dict[int, StorageWeakRef] = {}

    def __contains__(self, tensor: Tensor) -> bool:
        return tensor.untyped_storage()._cdata in self._there

    def add(self, tensor: Tensor) -> Tensor:
        storage = _plain(tensor).untyped_storage()
        self._there.setdefault(storage._cdata, StorageWeakRef(storage))  # keeps the address from being used again
        return tensor

    def discard(self, tensor: Tensor) -> Tensor:
        self._there.pop(_plain(tensor).untyped_storage()._cdata, None)
        return tensor


def _plain(tensor: Tensor) -> Tensor:
    """The tensor within the wrappers of vmap and grad."""
    while functorch.is_functorch_wrapped_tensor(tensor):
        tensor = functorch.get_unwrapped(tensor)
    return tensor


def _is_cuda(device: object) -> bool:
    return device is not None and torch.device(device).type == "cuda"


class _Operations(TorchDispatchMode):
    """Results are on the device of their inputs, which is the same for all."""

    def __init__(self, there: _Storages) -> None:
        super().__init__()
        self.there = there

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        on_device = any(tensor in self.there for tensor in inputs)
        name = func._schema.name
        if on_device and name not in _COPIES:
            checked = inputs
            if name in _INDEXED and inputs[0] in self.there:  # indices may be here
                checked = [inputs[0], *(leaf for leaf in tree_leaves(args[2:]) if isinstance(leaf, Tensor))]
            here = [tensor for tensor in checked if tensor.dim() and tensor not in self.there and not tensor.is_meta]
            if here:
                raise RuntimeError(f"Expected all tensors to be on the same device, but found cuda:0 and cpu! ({func})")
        before = {tensor.untyped_storage()._cdata for tensor in inputs}
        found = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(found) if on_device else ():
            if isinstance(tensor, Tensor) and tensor.untyped_storage()._cdata not in before:
                self.there.add(tensor)
        return found


class _Functions(TorchFunctionMode):
    """What names a device: attributes, copies between devices, and functions with the argument `device`."""

    def __init__(self, there: _Storages) -> None:
        super().__init__()
        self.there = there

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs, tensor = kwargs or {}, args[0] if args else None
        if func in (Tensor.numpy, Tensor.__array__) and self._has(tensor):
            raise TypeError("can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu() first.")
        if func == Tensor.device.__get__:
            return CUDA if self._has(tensor) else func(*args)
        if func in (Tensor.is_cuda.__get__, Tensor.is_cpu.__get__):
            return self._has(tensor) == (func == Tensor.is_cuda.__get__)
        if func is Tensor.pin_memory:
            return tensor
        if func is Tensor.cpu:
            return self._to(tensor, "cpu")
        if func is Tensor.to:
            return self._converted(tensor, list(args[1:]), dict(kwargs))
        if kwargs.get("device") is None:
            return func(*args, **kwargs)
        made = func(*args, **kwargs | {"device": "cpu" if _is_cuda(kwargs["device"]) else kwargs["device"]})
        return self.there.add(made) if _is_cuda(kwargs["device"]) else made

    def _has(self, tensor: Tensor) -> bool:
        try:
            return _plain(tensor) in self.there
        except (NotImplementedError, RuntimeError):  # a tensor without storage
            return False

    def _converted(self, tensor: Tensor, given: list, options: dict) -> Tensor:
        """`tensor.to(other)`, `.to(device, ...)` or `.to(dtype, ...)`."""
        device, first = options.pop("device", None), given[0] if given else None
        if isinstance(first, Tensor):
            device, given[0] = CUDA if self._has(first) else "cpu", first.dtype
        elif isinstance(first, str | torch.device):
            device, given = first, given[1:]
        copy, _ = options.pop("copy", False), options.pop("non_blocking", None)
        given = [value for value in given if isinstance(value, torch.dtype)]
        converted = tensor.to(*given, **options) if given or options else tensor
        moved = converted if device is None else self._to(converted, device)
        return moved.clone() if copy and moved is tensor else moved

    def _to(self, tensor: Tensor, device: object) -> Tensor:
        if torch.device(device).type == "meta":
            return tensor.to("meta")
        if _is_cuda(device) == self._has(tensor):
            return tensor
        copied = tensor.clone()
        return self.there.add(copied) if _is_cuda(device) else self.there.discard(copied)


@contextmanager
def fake_cuda() -> Iterator[None]:
    """Context in which there is a CUDA device, with free memory for everything."""
    there = _Storages()
    nothing = {"reset_peak_memory_stats": None, "empty_cache": None, "synchronize": None, "manual_seed_all": None}
    values = {
        "current_device": 0,
        "is_available": True,
        "device_count": 1,
        "get_device_name": "fake",
        "set_rng_state": None,
    }
    sizes = {
        "mem_get_info": (70 << 30, 80 << 30),
        "memory_allocated": 0,
        "memory_reserved": 0,
        "max_memory_allocated": 1,
    }
    with pytest.MonkeyPatch.context() as patch:
        for name, value in (nothing | values | sizes).items():
            patch.setattr(torch.cuda, name, lambda *_, value=value: value)
        patch.setattr(torch.cuda, "get_rng_state", lambda *_: torch.zeros(1, dtype=torch.uint8))
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
        patch.setattr(
            torch.optim.Optimizer, "_accelerator_graph_capture_health_check", lambda self: None, raising=False
        )
        patch.setattr(step_graphs, "record", lambda step, memory: (step(), (step, 0))[1])
        with _Functions(there), _Operations(there):
            yield
