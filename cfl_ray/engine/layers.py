"""Layers that the engine puts in place of PyTorch's: dropout with addressed draws, and pooling that does not dawdle."""

import torch
from torch import Tensor, nn


class AddressedDropout(nn.Module):
    """Dropout whose mask is drawn by the engine, so that every client's draws have an address."""

    def __init__(self, p: float, whole_channels: bool = False):
        super().__init__()
        self.p, self.whole_channels = p, whole_channels
        self.sample_shape: tuple[int, ...] = ()  # activations of one sample, found by a trial forward pass
        self.register_buffer("mask", torch.ones((), dtype=torch.float32), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            self.sample_shape = tuple(x.shape[1:])
            return x
        return x * self.mask

    def draw(self, batch: int, generator: torch.Generator) -> Tensor:
        shape = (self.sample_shape[0], *[1] * (len(self.sample_shape) - 1)) if self.whole_channels else self.sample_shape
        keep = torch.rand(batch, *shape, generator=generator) >= self.p
        return keep.float().div_(1 - self.p)


class HalvingMaxPool(nn.MaxPool2d):
    """Max pooling of 2 x 2 that is done by two elementwise maxima when a model is tested on a CPU.

    The same values bit for bit. PyTorch's own kernel looks at one element after another there: testing a LeNet-5, it took more time
    than the convolutions, and 6 to 9 times as long as this.
    """

    def __init__(self):
        super().__init__(2)

    def forward(self, x: Tensor) -> Tensor:
        if self.training or x.requires_grad or x.device.type != "cpu":
            return super().forward(x)
        rows, columns = (size // 2 * 2 for size in x.shape[-2:])
        x = torch.maximum(x[..., 0:rows:2, :], x[..., 1:rows:2, :])
        return torch.maximum(x[..., 0:columns:2], x[..., 1:columns:2])


def replace_layers(module: nn.Module) -> None:
    """Puts the engine's layers in place of PyTorch's, in the whole tree under `module`."""
    for name, child in module.named_children():
        if isinstance(child, (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d)):
            setattr(module, name, AddressedDropout(child.p, whole_channels=not isinstance(child, nn.Dropout)))
        elif type(child) is nn.MaxPool2d and _halves(child):
            setattr(module, name, HalvingMaxPool())
        else:
            replace_layers(child)


def _halves(pool: nn.MaxPool2d) -> bool:
    pairs = ((pool.kernel_size, 2), (pool.stride, 2), (pool.padding, 0), (pool.dilation, 1))
    return all(value in (want, (want, want)) for value, want in pairs) and not (pool.ceil_mode or pool.return_indices)
