"""Replacements for layers of PyTorch: dropout with random draws by key."""

from collections.abc import Collection
from math import prod

import numpy as np
import torch
from torch import Tensor, nn

from cfl_ray.errors import RunError
from cfl_ray.nn.splitmix import Keys, words


class AddressedDropout(nn.Module):
    """Dropout whose mask is drawn by the engine, so that every draw has a random key (`core.rng`).

    whole_channels: drop whole channels, as Dropout1d, Dropout2d and Dropout3d do.
    A mask has a row per sample, and a layer has one mask in a forward pass, so it suits layers that are called once, on
    inputs whose first axis is the batch: see `regular`.
    """

    mask: Tensor

    def __init__(self, p: float, whole_channels: bool = False):
        super().__init__()
        self.p, self.whole_channels = p, whole_channels
        self.sample_shape: tuple[int, ...] | None = None  # of one sample's activations, from a trial; None: no call
        self.trial: list[tuple[int, ...]] | None = None  # shapes of the inputs since the trial began; None: no trial
        self.register_buffer("mask", torch.ones((), dtype=torch.float32), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.trial is not None:
            self.trial.append(tuple(x.shape))
            return x
        return self.masked(x, self.mask) if self.training else x

    def masked(self, x: Tensor, mask: Tensor) -> Tensor:
        """The product of activations with a mask. Raises RunError for activations of another shape."""
        if x.shape[1:] != self.sample_shape or (mask.ndim and mask.shape[0] != x.shape[0]):
            expected = "no call" if self.sample_shape is None else f"one call with shape (batch, *{self.sample_shape})"
            raise RunError(
                f"dropout is called with activations of shape {tuple(x.shape)}, in the first passes it has {expected}; "
                "calls must not depend on values or on the size of the batch"
            )
        return x * mask.to(x.dtype)

    def regular(self, batches: list[int]) -> bool:
        """Whether each trial, with these batch sizes, calls the layer once, on the same samples; or none calls it."""
        shapes = self.trial or []
        once = [shape[:1] for shape in shapes] == [(batch,) for batch in batches]
        return not shapes or (once and len({shape[1:] for shape in shapes}) == 1)

    def end_trial(self) -> None:
        """Ends the trial, which gives the shape of a sample."""
        self.sample_shape, self.trial = self.trial[0][1:] if self.trial else None, None

    def draw(self, keys: Keys, batch: int) -> Tensor:
        """Masks (m, batch, *sample shape) of 0 and 1 / (1 - p), on the device of the keys.

        If whole channels drop: (m, batch, channels, 1, ...). A smaller batch has the first rows of a larger one.
        """
        shape = self.sample_shape
        assert shape is not None
        if self.whole_channels:
            shape = (shape[0], *[1] * (len(shape) - 1))
        count = batch * prod(shape)
        bits = words(keys, -(-count // 2)).view(torch.int32)[:, :count]  # 32 bits a value; a word has two
        least, kept = min(round(self.p * 2**32), 2**32 - 1) - 2**31, 0.0 if self.p == 1 else 1 / (1 - self.p)
        if bits.device.type == "cpu":  # in a quarter of PyTorch's time
            mask = torch.from_numpy(np.multiply(bits.numpy() >= least, np.float32(kept)))
        else:
            mask = (bits >= least) * kept
        return mask.view(len(keys), batch, *shape)


def replace_layers(module: nn.Module, keep: Collection[str] = (), path: str = "") -> None:
    """Replaces dropout in the whole tree under `module`, in place.

    keep: full names of layers that stay as they are. path: full name of `module`, with a dot at its end.
    """
    if isinstance(module, torch.jit.ScriptModule):  # its layers cannot be replaced
        return
    for name, child in module.named_children():
        if path + name in keep:
            continue
        if isinstance(child, (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d)):
            dropout = AddressedDropout(child.p, whole_channels=not isinstance(child, nn.Dropout))
            setattr(module, name, dropout if child.p else nn.Identity())
        else:
            replace_layers(child, keep, f"{path}{name}.")
