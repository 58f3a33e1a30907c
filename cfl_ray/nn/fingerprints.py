"""Fingerprints of tensors that are no part of a row, which are compared when a run is opened again."""

import numpy as np
import torch
from torch import Tensor

from cfl_ray.nn.shared import digest_of

_CLOSE = 1e-5  # of the norm
_FACTORS = (0x9E3779B1, 0x85EBCA6B)  # odd: bit 31 of the products of the places is a sign for each


def fingerprint_of(tensor: Tensor) -> list[str | float]:
    """Type and shape of a tensor, with a digest of whole numbers or, of other numbers, a norm and two projections.

    CPUs compute sines and the like with other last bits, so these numbers are equal up to rounding.
    """
    tensor = (tensor.to_dense() if tensor.layout != torch.strided else tensor).detach().cpu()
    kind = f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}"
    if tensor.is_quantized or not (tensor.is_floating_point() or tensor.is_complex()):
        tensor = tensor.int_repr() if tensor.is_quantized else tensor
        return [f"{kind} {digest_of({'': tensor.contiguous()})}"]
    numbers = (torch.view_as_real(tensor) if tensor.is_complex() else tensor).double().reshape(-1).nan_to_num(-1.0)
    place = torch.arange(len(numbers))
    signs = (1 - 2 * (place * factor >> 31 & 1) for factor in _FACTORS)
    return [kind, float(numbers.norm()), *(float((numbers * sign).sum()) for sign in signs)]


def is_same(fingerprint: list[str | float], other: list[str | float]) -> bool:
    """Whether two fingerprints are of equal values."""
    if fingerprint[:1] != other[:1] or len(fingerprint) != len(other):
        return False
    numbers, others = np.array(fingerprint[1:], float), np.array(other[1:], float)
    return bool(np.all(np.abs(numbers - others) <= _CLOSE * max([*np.abs(numbers[:1]), 1e-30])))


def in_words(fingerprint: list[str | float] | None) -> str:
    """A fingerprint for messages."""
    if not fingerprint:
        return "absent"
    return " ".join([str(fingerprint[0]), *(f"{number:.6g}" for number in fingerprint[1:])])
