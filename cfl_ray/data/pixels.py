"""Transformations of pixel values, for shifts and drifts: functions (x, y, group, draw, *, amount, scale) -> (x, y)."""

from typing import Any, Protocol

import numpy as np
import torch

from cfl_ray.data.federation import DataShape

Samples = tuple[np.ndarray, np.ndarray]


class Normals(Protocol):
    """A `numpy.random.Generator`, or another source of standard normals."""

    def standard_normal(self, size: tuple[int, ...], /) -> np.ndarray: ...


def with_noise(x: np.ndarray, y: np.ndarray, group: int, draw: Normals, *, amount: float, scale: float) -> Samples:
    """Adds Gaussian noise with standard deviation `amount` times the pixel range."""
    return (_stored(x + amount * scale * draw.standard_normal(x.shape), x, scale), y) if amount else (x, y)


def blurred(x: np.ndarray, y: np.ndarray, group: int, draw: Normals, *, amount: float, scale: float) -> Samples:
    """Blurs images (n, C, H, W) by a Gaussian of `amount` pixels. Outside an image, its edge's values are repeated."""
    from scipy.ndimage import gaussian_filter  # imported here: it takes a second, and other shifts do not need it

    if not amount:
        return x, y
    return _stored(gaussian_filter(x.astype(np.float64), (0, 0, amount, amount), mode="nearest"), x, scale), y


def brightened(x: np.ndarray, y: np.ndarray, group: int, draw: Normals, *, amount: float, scale: float) -> Samples:
    """Multiplies values by `amount`."""
    return _stored(x.astype(np.float64) * amount, x, scale), y


DOMAINS = {"noise": with_noise, "blur": blurred, "brightness": brightened}


def needed(kind: str, shape: DataShape) -> str | None:
    """Which samples a domain of this kind needs, and which these are; None if it applies to them."""
    if shape.vocabulary is not None:
        return f"{'images' if kind == 'blur' else 'real numbers'}, these samples are token ids"
    if kind == "blur" and len(shape.input) != 3:
        return f"images, these samples are of shape {shape.input}"
    return None


def rotated(x: np.ndarray, y: np.ndarray, group: int, draw: Any, *, amount: float, scale: float) -> Samples:
    """Rotates images (n, C, H, W) by `amount` degrees counter-clockwise about their centre.

    The size stays the same, values are interpolated bilinearly, and corners without image are 0.
    """
    from torchvision.transforms import InterpolationMode, functional

    values = torch.from_numpy(np.ascontiguousarray(x)).float()
    turned = functional.rotate(values, amount, InterpolationMode.BILINEAR)
    return _stored(turned.double().numpy(), x, scale), y


def _stored(values: np.ndarray, x: np.ndarray, scale: float) -> np.ndarray:
    """The values in the type of x. For integer types they are rounded and clipped to 0..scale."""
    if x.dtype.kind == "f":
        return values.astype(x.dtype)
    return np.clip(np.rint(values), 0, scale).astype(x.dtype)
