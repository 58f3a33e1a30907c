"""Tensors over memory that the processes of a machine share."""

import hashlib
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn


class _Writable:
    """An array as NumPy would see it if it were not read-only, since PyTorch warns of others."""

    def __init__(self, array: np.ndarray):
        self.array = array  # keeps its memory
        interface = array.__array_interface__
        self.__array_interface__ = interface | {"data": (interface["data"][0], False)}


def shared_tensor(array: np.ndarray) -> Tensor:
    """A tensor over shared memory, without a copy. Read-only by agreement: engines copy before they write."""
    return torch.from_numpy(np.asarray(_Writable(array)))


class FrozenParameter(nn.Parameter):
    """A parameter that is not trained. Copies share its memory, as do processes that get it from Ray's object store.

    Its pickle passes its bytes to the store unchanged.
    """

    @classmethod
    def replace_in(cls, module: nn.Module) -> None:
        """Converts the frozen parameters of a module to this class, in place; parameters of other classes are kept."""
        for parameter in module.parameters():
            if not parameter.requires_grad and type(parameter) is nn.Parameter:
                if not parameter.is_contiguous() and not (
                    parameter.ndim == 4 and parameter.is_contiguous(memory_format=torch.channels_last)
                ):
                    parameter.data = parameter.data.contiguous()
                parameter.__class__ = cls

    def __deepcopy__(self, memo: dict[int, Any]) -> "FrozenParameter":
        return FrozenParameter(self.data, requires_grad=False)

    def __reduce_ex__(self, protocol: object) -> tuple[Callable[..., "FrozenParameter"], tuple[Any, ...]]:
        return _frozen_parameter, (_bytes_of(self), self.dtype, tuple(self.shape), self.stride())


def _frozen_parameter(
    content: np.ndarray, dtype: torch.dtype, shape: tuple[int, ...], stride: tuple[int, ...]
) -> FrozenParameter:
    return FrozenParameter(shared_tensor(content).view(dtype).as_strided(shape, stride), requires_grad=False)


def digest_of(tensors: Mapping[str, Tensor]) -> str:
    """Digest of these tensors, with their names and types, whatever their layout in memory."""
    digest = hashlib.blake2b(digest_size=16)
    for name, tensor in tensors.items():
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(_bytes_of(tensor.detach().cpu().contiguous()).data)
    return digest.hexdigest()


def _bytes_of(tensor: Tensor) -> np.ndarray:
    """The bytes of a dense tensor, in the order of its memory; no copy."""
    flat = tensor.data.as_strided((tensor.numel(),), (1,), tensor.storage_offset())
    return flat.view(torch.uint8).numpy()
