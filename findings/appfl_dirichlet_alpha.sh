#!/usr/bin/env bash
# APPFL's Dirichlet partition divides alpha by the number of classes, and by default leaves most of 100 clients without samples.
#
# Tried with appfl 1.12.0 and torch 2.15.0 on Python 3.11.
# Guess: alpha2=0.5, the default, is the label skew that papers and other libraries call Dir(0.5), and every client has samples.
# Seen: alpha2 is the sum of the concentrations of all classes. With ten classes 0.5 is Dir(0.05): clients have 1.8 classes (inverse
# Simpson index), where Dir(0.5) gives 4.4; alpha2=5 does. alpha1=8, of the clients' sizes, is a sum as well: with 10 clients
# each has samples, with 100 the concentration is 0.08, and 63 of the 100 data sets are empty. Nothing is raised and nothing
# warns. An alpha from another paper is a much harder division here, whose largest client has a fifth of all samples.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q appfl==1.12.0 torch==2.15.0 torchvision numpy
"$folder/venv/bin/python" -W ignore - <<'PY'
import numpy as np
import torch
from appfl.misc.data import dirichlet_noniid_partition

DATA = [(torch.zeros(1), label % 10) for label in range(10_000)]


def classes(share_NC):
    """Mean inverse Simpson index of the clients' shares of classes."""
    return float((1 / (share_NC**2).sum(1)).mean())


def divided(clients, **options):
    """(clients without samples, samples of the largest, classes of the others)."""
    parts = dirichlet_noniid_partition(DATA, clients, **options)
    counts_NC = np.stack([np.bincount([int(part[i][1]) for i in range(len(part))], minlength=10) for part in parts])
    size_N = counts_NC.sum(1)
    assert size_N.sum() == len(DATA)
    used_NC = counts_NC[size_N > 0]
    return int((size_N == 0).sum()), int(size_N.max()), classes(used_NC / used_NC.sum(1, keepdims=True))


draw = np.random.default_rng(0)
of_05, of_005 = (classes(draw.dirichlet([alpha] * 10, 5000)) for alpha in (0.5, 0.05))
few, many, scaled = divided(10), divided(100), divided(100, alpha1=800, alpha2=5)
print(f"classes of a client: Dir(0.5) {of_05:.1f}, Dir(0.05) {of_005:.1f}; alpha2=0.5 {many[2]:.1f}, alpha2=5 {scaled[2]:.1f}")
print(f"of 100 clients {many[0]} are empty, the largest has {many[1]} of {len(DATA)} samples; of 10 clients {few[0]} are empty")
assert abs(many[2] - of_005) < 0.4 and abs(scaled[2] - of_05) < 0.4 and of_05 > 4
assert few[0] == 0 and scaled[0] == 0 and many[0] > 50
PY
echo "as described"
