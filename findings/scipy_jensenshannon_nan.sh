#!/usr/bin/env bash
# SciPy's jensenshannon is not a number for four in ten pairs of distributions that are equal but for rounding.
#
# Tried with SciPy 1.17.1 and NumPy 2.4.2 on Python 3.11.
# Guess: 0, or about 1e-8, the square root of a rounding error; the function normalises both of its arguments itself.
# Seen: the divergence of two such distributions is as often a little below zero as above, and its square root is NaN, with a
# RuntimeWarning. So for shares of ten classes and the same shares after a weighted mean of two equal clients, for
# shares times a number of samples, and in pdist(..., "jensenshannon"). Exactly equal shares, also integer counts in proportion, give 0.
# Federated learning measures label skew by this distance: clients with the same labels, the ones that belong together, are
# those whose distance is missing, and a mean over pairs is NaN, or leaves out the smallest distances.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q scipy==1.17.1 numpy==2.4.2
"$folder/venv/bin/python" -W ignore - <<'PY'
import numpy as np
from scipy.spatial.distance import jensenshannon, pdist

rng = np.random.default_rng(0)
shares = rng.dirichlet(np.ones(10), 3000)
averaged = 0.3 * shares + 0.7 * shares
assert np.allclose(shares, averaged, rtol=1e-14, atol=0)
found = {
    "a mean of equal shares": [jensenshannon(p, q) for p, q in zip(shares, averaged)],
    "shares times 251 samples": [jensenshannon(p, 251 * p) for p in shares],
    "pdist": [pdist([p, q], "jensenshannon")[0] for p, q in zip(shares, averaged)],
    "equal shares": [jensenshannon(p, p) for p in shares],
    "counts in proportion": [jensenshannon(c, 3 * c) for c in rng.integers(1, 100, (3000, 10))],
}
nan = {name: np.isnan(distances).sum() for name, distances in found.items()}
for name, count in nan.items():
    print(f"{name}: {count} of 3000 distances are NaN, the largest other {np.nanmax(found[name]):.1e}")
assert all(nan[name] > 500 for name in list(nan)[:3])
assert nan["equal shares"] == nan["counts in proportion"] == 0
PY
echo "as described"
