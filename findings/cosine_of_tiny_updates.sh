#!/usr/bin/env bash
# The cosine distance of two equal vectors is 0, 0.97, 1 or not a number, by library, where the vectors are tiny or zero.
#
# Tried with torch 2.11.0, SciPy 1.17.1 and scikit-learn 1.9.1 on Python 3.11.
# Guess: a vector is at distance 0 from an equal one in all three; of zero vectors the distance is not a number in all three.
# Seen: two equal vectors of norm 1.7e-9 have distance 0.97 in PyTorch, whose cosine_similarity clamps each norm at 1e-8, and 0 in the
# others. Two zero vectors have distance 1 in PyTorch, nan in SciPy, and 1 in scikit-learn, which calls a zero vector 0 from itself.
# Federated learning compares clients by the cosine of their updates: late in training, or with a small learning rate, a method
# written with PyTorch sees equal clients as orthogonal, and a client that did no step (no data, a skipped batch) is alike to nobody,
# unknown, or splits off, by the library.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q torch==2.11.0 scipy==1.17.1 scikit-learn==1.9.1
"$folder/venv/bin/python" -W ignore - <<'PY'
import math

import numpy as np
import torch
from scipy.spatial.distance import pdist
from sklearn.metrics.pairwise import cosine_distances


def distances(one, other):
    by_torch = 1 - float(torch.cosine_similarity(torch.tensor(one), torch.tensor(other), dim=0))
    return by_torch, float(pdist([one, other], "cosine")[0]), float(cosine_distances([one, other])[0, 1])


tiny, zero = np.full(3, 1e-9), np.zeros(3)
for name, vector in (("norm 1.7e-9", tiny), ("zero", zero)):
    print(name, dict(zip(("torch", "SciPy", "scikit-learn"), distances(vector, vector))))
by_torch, by_scipy, by_sklearn = distances(tiny, tiny)
assert abs(by_torch - 0.97) < 1e-6 and abs(by_scipy) < 1e-12 and abs(by_sklearn) < 1e-12
by_torch, by_scipy, by_sklearn = distances(zero, zero)
assert by_torch == 1 and math.isnan(by_scipy) and by_sklearn == 1 and cosine_distances([zero, zero])[0, 0] == 0
PY
echo "as described"
