#!/usr/bin/env bash
# PyTorch's vector_to_parameters makes parameters views of the vector: models that are filled from one vector train each other.
#
# Tried with torch 2.11.0 on Python 3.11.
# Guess: vector_to_parameters(vector, parameters) copies values, as load_state_dict does; the vector stays as it is.
# Seen: the parameters share the memory of the vector. A step of one model changes the vector, and every other model filled from it.
# Federated learning fills each client's model from the global vector: after the first client has trained, the second starts from
# the first one's model, and the server's "global" vector is the last client's. Nothing fails, and the accuracy is plausible.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q torch==2.11.0 numpy
"$folder/venv/bin/python" - <<'PY'
import torch
from torch import nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters


def after_a_step_of_the_first(fill):
    torch.manual_seed(0)
    first, second, received = nn.Linear(3, 2), nn.Linear(3, 2), torch.zeros(8)
    fill(received, first)
    fill(received, second)
    first(torch.ones(1, 3)).sum().backward()
    torch.optim.SGD(first.parameters(), lr=1.0).step()
    return float(received.abs().max()), float(parameters_to_vector(second.parameters()).detach().abs().max())


def copied(vector, model):
    vector_to_parameters(vector.clone(), model.parameters())


shared = after_a_step_of_the_first(lambda vector, model: vector_to_parameters(vector, model.parameters()))
print(f"after a step of the first client's model: global vector {shared[0]}, second client's model {shared[1]}; both were 0")
assert shared == (1.0, 1.0) and after_a_step_of_the_first(copied) == (0.0, 0.0)
PY
echo "as described"
