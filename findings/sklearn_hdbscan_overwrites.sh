#!/usr/bin/env bash
# scikit-learn's HDBSCAN(metric="precomputed") overwrites the distance matrix that it is given; its other estimators do not.
#
# Tried with scikit-learn 1.9.1 on Python 3.11.
# Guess: fit() reads its input. DBSCAN, OPTICS and AgglomerativeClustering with a precomputed matrix, and KMeans, leave it as it is.
# Seen: after HDBSCAN's fit the matrix holds mutual reachability distances (an eighth of the entries here), and a second fit of the
# same estimator to the same array starts from those; the four others change nothing. Only a FutureWarning about the default of
# `copy`, which ends in 1.10, hints at it.
# Federated learning computes the distances of clients once and compares clusterings on them: whatever comes after HDBSCAN sees
# other distances.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q scikit-learn==1.9.1
"$folder/venv/bin/python" -W ignore - <<'PY'
import numpy as np
from sklearn.cluster import DBSCAN, HDBSCAN, OPTICS, AgglomerativeClustering
from sklearn.metrics import pairwise_distances

rng = np.random.default_rng(0)
points = np.concatenate([rng.normal(0, 0.1, (20, 3)), rng.normal(2, 0.1, (20, 3))])
distances = pairwise_distances(points)
changed = {}
for estimator in (
    HDBSCAN(metric="precomputed"),
    DBSCAN(metric="precomputed", eps=0.3),
    OPTICS(metric="precomputed"),
    AgglomerativeClustering(2, metric="precomputed", linkage="average"),
):
    given = distances.copy()
    estimator.fit(given)
    changed[type(estimator).__name__] = float((given != distances).mean())
print({name: f"{share:.1%} of the entries changed" for name, share in changed.items()})
assert changed.pop("HDBSCAN") > 0.05 and not any(changed.values())
given = distances.copy()
HDBSCAN(metric="precomputed", copy=True).fit(given)
assert (given == distances).all()
PY
echo "as described"
