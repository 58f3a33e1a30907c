"""The table of functions that lose digits channels-last, in docs/performance.md.

    python docs/generate/layouts.py            # prints it

Each function takes images of 32 channels with standard deviation 1 and mean 0, 100 and 10,000, in both layouts, with
its backward pass. Errors are relative to the root mean square of the result in float64; of output and gradients, the
largest.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from cfl_ray.nn.layout import RATIO, ROUNDING, FunctionCall, Stand

CHANNELS, SIDE = 32, 8
OFFSETS = (0.0, 1e2, 1e4)
PER_CHANNEL = Stand((CHANNELS,)), Stand((CHANNELS,))
Case = tuple[Callable[..., Any], tuple[Any, ...]]


def cases() -> dict[str, Case]:
    """Functions by name, each with its arguments after the images."""
    grid = torch.rand(2, 6, 6, 2, generator=torch.Generator().manual_seed(0)) * 2 - 1
    flat = Stand((CHANNELS, SIDE, SIDE))
    found: dict[str, Case] = {
        "batch_norm, training": (lambda x, w, b: F.batch_norm(x, None, None, w, b, True), PER_CHANNEL),
        "batch_norm, evaluation": (
            lambda x, w, b: F.batch_norm(x, x.new_zeros(CHANNELS), x.new_ones(CHANNELS), w, b),
            PER_CHANNEL,
        ),
        "instance_norm": (lambda x, w, b: F.instance_norm(x, weight=w, bias=b), PER_CHANNEL),
        "layer_norm": (lambda x, w, b: F.layer_norm(x, (CHANNELS, SIDE, SIDE), w, b), (flat, flat)),
        "rms_norm": (lambda x: F.rms_norm(x, (CHANNELS, SIDE, SIDE)), ()),
        "local_response_norm": (partial(F.local_response_norm, size=5), ()),
        "normalize": (F.normalize, ()),
        "avg_pool2d": (partial(F.avg_pool2d, kernel_size=2), ()),
        "max_pool2d": (partial(F.max_pool2d, kernel_size=2), ()),
        "lp_pool2d": (partial(F.lp_pool2d, norm_type=2, kernel_size=2), ()),
        "grid_sample": (lambda x: F.grid_sample(x, grid.to(x.dtype), align_corners=False), ()),
        "prelu": (F.prelu, PER_CHANNEL[:1]),
        "pixel_shuffle": (partial(F.pixel_shuffle, upscale_factor=2), ()),
        "channel_shuffle": (partial(torch.channel_shuffle, groups=4), ()),
        "cosine_similarity": (lambda x: F.cosine_similarity(x, x.flip(0)), ()),
        "cdist": (lambda x: torch.cdist(x, x.flip(0)), ()),
        "unfold": (partial(F.unfold, kernel_size=3), ()),
        "glu": (partial(F.glu, dim=1), ()),
        "own normalisation, mean and var": (_own_norm, ()),
    }
    for groups in (1, 2, 8, CHANNELS):
        found[f"group_norm, {groups} groups"] = (lambda x, w, b, g=groups: F.group_norm(x, g, w, b), PER_CHANNEL)
    for size in (1, 3):
        found[f"adaptive_avg_pool2d, {size}"] = (partial(F.adaptive_avg_pool2d, output_size=size), ())
        found[f"adaptive_max_pool2d, {size}"] = (partial(F.adaptive_max_pool2d, output_size=size), ())
    for mode in ("nearest", "nearest-exact", "bilinear", "bicubic", "area"):
        for factor in (2, 0.5, 1.3):
            found[f"interpolate, {mode}, {factor}"] = (partial(F.interpolate, scale_factor=factor, mode=mode), ())
    for mode in ("bilinear", "bicubic"):
        corners = partial(F.interpolate, scale_factor=1.3, mode=mode, align_corners=True)
        found[f"interpolate, {mode}, corners"] = (corners, ())
        antialias = partial(F.interpolate, scale_factor=0.5, mode=mode, antialias=True)
        found[f"interpolate, {mode}, antialias"] = (antialias, ())
    found |= _random()
    for mode in ("reflect", "replicate", "circular"):
        found[f"pad, {mode}"] = (partial(F.pad, pad=(1, 1, 1, 1), mode=mode), ())
    for axes in (1, (2, 3), (1, 2, 3), (0, 2, 3)):
        for name in ("mean", "sum", "var", "std", "logsumexp"):
            found[f"{name}, axes {axes}"] = (partial(getattr(torch, name), dim=axes), ())
        found[f"vector_norm, axes {axes}"] = (partial(torch.linalg.vector_norm, dim=axes), ())
    for axis in (1, 3):
        for name in ("softmax", "log_softmax", "cumsum", "logcumsumexp"):
            found[f"{name}, axis {axis}"] = (partial(getattr(torch, name), dim=axis), ())
    return found | _convolutions()


def _random() -> dict[str, Case]:
    """Functions that draw numbers, with the same draws in each call."""

    def drawing(function: Callable[..., Any], **options: Any) -> Case:
        def call(x: Tensor) -> Tensor:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(0)
                return function(x, **options)

        return call, ()

    samples = torch.rand(512, CHANNELS, 2, generator=torch.Generator().manual_seed(0))

    def fractional(x: Tensor) -> Tensor:
        drawn = samples[: len(x)].to(x.dtype)
        return F.fractional_max_pool2d(x, 2, output_ratio=(0.6, 0.6), _random_samples=drawn)

    return {
        "fractional_max_pool2d": (fractional, ()),
        "dropout2d": drawing(F.dropout2d, p=0.3),
        "feature_alpha_dropout": drawing(F.feature_alpha_dropout, p=0.3, training=True),
        "rrelu": drawing(F.rrelu, training=True),
    }


def _convolutions() -> dict[str, Case]:
    found: dict[str, Case] = {}
    for groups, outputs, dilation in ((1, 32, 1), (2, 32, 1), (CHANNELS, 32, 1), (1, 32, 2)):
        text = f"{groups} groups, dilation {dilation}"
        options = {"groups": groups, "dilation": dilation}
        weight, transposed = Stand((outputs, CHANNELS // groups, 3, 3)), Stand((CHANNELS, outputs // groups, 3, 3))
        found[f"conv2d, {text}"] = (partial(F.conv2d, **options), (weight,))
        found[f"conv_transpose2d, {text}"] = (partial(F.conv_transpose2d, **options), (transposed,))
    return found


def _own_norm(x: Tensor) -> Tensor:
    return (x - x.mean((2, 3), keepdim=True)) / (x.var((2, 3), keepdim=True) + 1e-5).sqrt()


def errors_of(case: Case) -> list[tuple[float, float]]:
    """The largest relative errors in the contiguous and in the channels-last layout, for each offset."""
    function, arguments = case
    call = FunctionCall(function, ((Stand((2, CHANNELS, SIDE, SIDE), image=True), *arguments), {}))
    try:
        found = [call.errors(offset, call.batch) for offset in OFFSETS]
    except RuntimeError:  # arguments of another batch
        found = [call.errors(offset, 0) for offset in OFFSETS]
    return [(max(plain for plain, _ in errors), max(last for _, last in errors)) for errors in found]


def loses(errors: list[tuple[float, float]]) -> bool:
    """Whether channels-last loses digits, by the bounds of `nn.layout`."""
    return any(last > ROUNDING and last > RATIO * plain for plain, last in errors)


def table() -> str:
    """The table in Markdown."""
    torch.set_num_threads(1)
    found = {name: errors_of(case) for name, case in cases().items()}
    lines = [
        f"PyTorch {torch.__version__}, {len(found)} functions, among them all modes of interpolation and functions "
        "that draw numbers; the others have equal errors up to rounding:",
        "",
        "| function | mean 0: contiguous, channels-last | mean 100 | mean 10,000 |",
        "|---|---|---|---|",
    ]
    for name, errors in found.items():
        if loses(errors):
            lines.append(f"| {name} | " + " | ".join(f"{plain:.0e}, {last:.0e}" for plain, last in errors) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())
