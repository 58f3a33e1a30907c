#!/usr/bin/env bash
# PyTorch's functional_call gives its tensors to a module for ever, if the module occurs twice in the network.
#
# Tried with torch 2.11.0 on Python 3.11.
# Guess: torch.func.functional_call(model, tensors, (x,)) leaves the model as it was; its documentation says that tied weights are supported.
# Seen: true for a weight that two layers share. If one layer, or block, stands at two places (an ALBERT-like encoder), the model has no
# parameters of its own afterwards but the given tensors: it answers otherwise, and its optimiser trains parameters that nothing uses.
# Federated learning evaluates clients' models by functional_call, one after another, on one module: the global model in it silently becomes
# the last client's. Under vmap it holds tensors that have left vmap, and the next forward pass fails with an internal assertion.
# tie_weights=False, with every tied name given by hand, leaves the model alone.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q torch==2.11.0 numpy
"$folder/venv/bin/python" - <<'PY'
import torch
from torch import nn
from torch.func import functional_call


def stays(model, **options):
    """Whether a client's model, all zeros, leaves the global one as it was."""
    x, own = torch.ones(2, 3), dict(model.named_parameters())
    before = model(x)
    functional_call(model, {name: torch.zeros_like(value) for name, value in own.items()}, (x,), **options)
    same = all(value is own[name] for name, value in dict(model.named_parameters()).items())
    return same, torch.equal(model(x), before)


def shared_module():
    layer = nn.Linear(3, 3)
    return nn.Sequential(layer, nn.Tanh(), layer)


def shared_weight():
    first, second = nn.Linear(3, 3), nn.Linear(3, 3, bias=False)
    second.weight = first.weight
    return nn.Sequential(first, nn.Tanh(), second)


results = stays(shared_weight()), stays(shared_module()), stays(shared_module(), tie_weights=False)
print("own parameters, same answers:", dict(zip(("shared weight", "shared module", "without tie_weights"), results)))
assert results == ((True, True), (False, False), (True, True))
PY
echo "as described"
