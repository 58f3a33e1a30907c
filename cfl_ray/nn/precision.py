"""Precision of local training: float32, TF32 products on a GPU, or bfloat16 passes."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch


@contextmanager
def products_in(precision: str) -> Iterator[None]:
    """Context in which float32 products and convolutions on a GPU use TF32 if `precision` is "tf32", else float32.

    PyTorch itself allows TF32 in convolutions by default. The setting has no effect on a CPU.
    """
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    before = matmul.allow_tf32, cudnn.allow_tf32
    matmul.allow_tf32 = cudnn.allow_tf32 = precision == "tf32"
    try:
        yield
    finally:
        matmul.allow_tf32, cudnn.allow_tf32 = before


def autocast(precision: str, device: torch.device) -> AbstractContextManager[object]:
    """Context for a forward pass in training: for "bf16", PyTorch's autocast, which the backward pass follows.

    Each weight is used once in a pass, so autocast keeps no copies of them in bfloat16.
    """
    if precision != "bf16":
        return nullcontext()
    return torch.autocast(device.type, torch.bfloat16, cache_enabled=False)
