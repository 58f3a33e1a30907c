#!/usr/bin/env bash
# NumPy's Dirichlet draws of extreme concentrations are no distribution, or not a symmetric one, without an error.
#
# Tried with NumPy 2.4.6 on Python 3.11.
# Guess: very large concentrations give equal shares, very small ones a share of 1 that each component has equally often, or
# a ValueError.
# Seen: of five concentrations 1e308 all shares are 0 (their sum is 0, not 1); of five concentrations 5e-324, the smallest
# number, the last component gets everything in about half of the draws, the first in a tenth. 1e300 and 1e-300 are right.
# Federated learning divides data by Dirichlet draws, and "as even as possible" is often written as a huge concentration: with
# cumulated shares, one client then gets all samples.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q numpy==2.4.6
"$folder/venv/bin/python" - <<'PY'
import numpy as np

def mean(alpha):
    share = np.random.default_rng(0).dirichlet(np.full(5, alpha), 20_000)
    print(f"{alpha:g}: sums {share.sum(1).min():.3g}..{share.sum(1).max():.3g}, means {share.mean(0).round(3)}")
    return share.mean(0)

assert np.allclose(mean(1e300), 0.2) and np.allclose(mean(1e-300), 0.2, atol=0.02)
assert (mean(1e308) == 0).all()
tiny = mean(5e-324)
assert tiny[-1] > 0.45 and tiny[0] < 0.15
PY
echo "as described"
