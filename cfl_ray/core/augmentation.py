"""Augmentation of training samples: random changes of inputs, anew in every local epoch (`local.augment`)."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from cfl_ray.errors import ConfigError, RunError
from cfl_ray.plugins.calling import call_plugin, check_options, described, parse_choice, place_of
from cfl_ray.plugins.registry import Registry

# (x, draw, black, **options) -> changed x. x: (b, *input), samples of a client as its model gets them, not changed in
# place. black: float32 (C, 1, 1), or () if inputs are not images: what 0 became by data.normalize.
AugmentFunction = Callable[..., Tensor]


def crop(x: Tensor, draw: np.random.Generator, black: Tensor, padding: int = 4, padding_mode: str = "black") -> Tensor:
    """A random part of an image's size out of the image with a frame of `padding` pixels.

    padding_mode: black, as torchvision's RandomCrop(size, padding); reflect: the image mirrored at its edges.
    """
    _check_images("crop", x)
    if not isinstance(padding, int) or padding < 1:
        raise ConfigError(f"local.augment: padding of crop is a whole number of at least 1, got {padding!r}")
    if padding_mode not in ("black", "reflect"):
        raise ConfigError(f"local.augment: padding_mode of crop is black or reflect, got {padding_mode!r}")
    count, channels, height, width = x.shape
    if padding_mode == "reflect":
        if padding >= min(height, width):
            raise ConfigError(
                f"local.augment: crop mirrors at most {min(height, width) - 1} pixels of images of {height}x{width}, "
                f"got padding {padding}"
            )
        framed = functional.pad(x, [padding] * 4, "reflect")
    else:
        framed = black.to(x).expand(count, channels, height + 2 * padding, width + 2 * padding).clone()
        framed[:, :, padding:-padding, padding:-padding] = x
    row_n, column_n = torch.from_numpy(draw.integers(0, 2 * padding + 1, (2, count))).to(x.device)
    parts = framed.unfold(2, height, 1).unfold(3, width, 1)  # a view (n, C, rows, columns, H, W) of all parts
    return parts[torch.arange(count, device=x.device), :, row_n, column_n]


def flip(x: Tensor, draw: np.random.Generator, black: Tensor) -> Tensor:
    """Left and right of an image exchanged, with probability 1/2."""
    _check_images("flip", x)
    flipped, at = x.clone(), torch.from_numpy(np.flatnonzero(draw.random(len(x)) < 0.5)).to(x.device)
    flipped[at] = x[at].flip(3)
    return flipped


def _check_images(name: str, x: Tensor) -> None:
    if x.ndim != 4 or not x.is_floating_point():
        kind = "numbers" if x.is_floating_point() else "tokens"
        raise ConfigError(
            f"local.augment: {name} is for images (channels, height, width), the inputs are {kind} of shape "
            f"{tuple(x.shape[1:])}"
        )


AUGMENTATIONS: Registry[AugmentFunction] = Registry(
    "augmentation", {function.__name__: function for function in (crop, flip)}, "cfl_ray.augmentations"
)


@dataclass(frozen=True)
class Augmentation:
    """A random change of the inputs of a client, for one local epoch."""

    function: AugmentFunction
    options: dict[str, Any] = field(default_factory=dict)

    def __call__(self, x: Tensor, draw: np.random.Generator, black: Tensor) -> Tensor:
        """The changed inputs. Raises RunError if they have another shape or type."""
        changed = call_plugin("augmentation", partial(self.function, **self.options), x, draw, black)
        if not isinstance(changed, Tensor) or changed.shape != x.shape or changed.dtype != x.dtype:
            raise RunError(
                f"augmentation {place_of(self.function)} returned {described(changed)}, expected {described(x)}"
            )
        return changed


def resolve_augmentations(values: Sequence[Any]) -> tuple[Augmentation, ...]:
    """The augmentations of names, {name: options}, `file.py:function` or functions. Raises ConfigError."""
    return tuple(_resolved(value) for value in values)


def _resolved(value: Any) -> Augmentation:
    name, options = parse_choice("local.augment", value)
    function: Any = AUGMENTATIONS.resolve(name)
    if not callable(function):
        raise ConfigError(
            f"local.augment {name!r} is {type(function).__name__}, expected a function of (x, draw, black)"
        )
    check_options("local.augment", function, options, ("x", "draw", "black"))
    return Augmentation(function, options)


def try_augmentations(augmentations: Sequence[Augmentation], shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Raises ConfigError for an augmentation that fails on two random samples of this shape and type."""
    draw = np.random.default_rng(0)
    x = torch.from_numpy(draw.random((2, *shape), np.float32))
    x = x if dtype.is_floating_point else (x < 0.5).to(dtype)  # tokens 0 and 1
    black = torch.zeros(len(x[0]), 1, 1) if x.ndim == 4 else torch.zeros(())
    for each in augmentations:
        try:
            each(x, draw, black)
        except RunError as error:
            raise ConfigError(f"local.augment: {error}") from error
