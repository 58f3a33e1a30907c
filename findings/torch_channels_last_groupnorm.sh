#!/usr/bin/env bash
# PyTorch's GroupNorm, and BatchNorm in training, lose digits far from zero if images are channels-last on a CPU.
#
# Tried with PyTorch 2.13.0, Python 3.11, x86-64.
# Guess: the memory layout of images changes results by rounding alone: errors in both layouts are of one size.
# Seen, relative to float64, standard deviation 1, forward and backward pass:
#   GroupNorm, 8 groups: mean 100: 4e-6 contiguous, 3e-3 channels-last; mean 10,000: 6e-4 and 4e5, no digit is right.
#   BatchNorm, training: mean 100: 3e-6 and 5e-5; mean 10,000: 4e-4 and 5e-3.
# At mean 0 both layouts are right. GroupNorm computes the variance as a difference of squares; BatchNorm adds up one by one.
# Federated learning replaces BatchNorm by GroupNorm, and trains on CPUs of clients, for which channels-last is recommended.
# Clients differ in the scale and offset of their sensors: their models, not others', then become wrong without an error.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --no-cache-dir torch==2.13.0 numpy
"$folder/venv/bin/python" - <<'PY'
import torch
from torch import nn

def results(module, offset, dtype, layout):
    """Output and gradient of equal values in a type and a memory layout."""
    draw = torch.Generator().manual_seed(0)
    values = torch.randn(4, 32, 32, 32, generator=draw) + offset
    upstream = torch.randn(values.shape, generator=draw)
    x = values.to(dtype).contiguous(memory_format=layout).requires_grad_()
    y = module.to(dtype)(x)
    (gradient,) = torch.autograd.grad(y, x, upstream.to(dtype))
    return y.detach().double(), gradient.double()

def error(make, offset, layout):
    """The larger relative error (root mean square) of output and gradient."""
    exact = results(make(), offset, torch.float64, torch.contiguous_format)
    found = results(make(), offset, torch.float32, layout)
    return max(((a - b).norm() / b.norm()).item() for a, b in zip(found, exact))

print("PyTorch", torch.__version__)
errors = {}
for name, make in (("GroupNorm", lambda: nn.GroupNorm(8, 32)), ("BatchNorm", lambda: nn.BatchNorm2d(32))):
    for offset in (0, 100, 10_000):
        pair = [error(make, offset, layout) for layout in (torch.contiguous_format, torch.channels_last)]
        errors[name, offset] = pair
        print(f"{name}, mean {offset}: {pair[0]:.0e} contiguous, {pair[1]:.0e} channels-last")
assert max(max(errors[name, 0]) for name in ("GroupNorm", "BatchNorm")) < 1e-5
assert errors["GroupNorm", 100][1] > 8 * errors["GroupNorm", 100][0]
assert errors["GroupNorm", 10_000][0] < 0.1 and errors["GroupNorm", 10_000][1] > 10
assert errors["BatchNorm", 100][1] > 8 * errors["BatchNorm", 100][0]
assert errors["BatchNorm", 10_000][1] > 8 * errors["BatchNorm", 10_000][0]
PY
echo "as described"
