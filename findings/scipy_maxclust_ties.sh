#!/usr/bin/env bash
# SciPy's fcluster(..., "maxclust") gives one cluster for t of 2, 3 or 4 where distances are tied; scikit-learn gives t clusters.
#
# Tried with SciPy 1.17.1 and scikit-learn 1.9.1 on Python 3.11.
# Guess: both cut the same tree into t clusters, SciPy perhaps into a few less than t where merges are tied.
# Seen: of six points at equal distances SciPy makes one cluster for every t below 6, and scikit-learn t clusters, which depend on the
# order of the points alone. With a single tie, two pairs that merge at the same height, t = 3 of four points gives 2 clusters.
# Federated learning clusters clients by label sets or by histograms of few labels, where ties are the rule: the published
# code of a paper that was written with the one finds other numbers of clusters with the other.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q scipy==1.17.1 scikit-learn==1.9.1
"$folder/venv/bin/python" - <<'PY'
import numpy as np
from scipy.cluster.hierarchy import fcluster, linkage
from scipy.spatial.distance import pdist, squareform
from sklearn.cluster import AgglomerativeClustering


def clusters(points, t):
    distances = pdist(points)
    ours = fcluster(linkage(distances, "average"), t, "maxclust")
    theirs = AgglomerativeClustering(t, metric="precomputed", linkage="average").fit_predict(squareform(distances))
    return len(set(ours)), len(set(theirs))


one_label_each = np.eye(6)
two_pairs = np.array([[0.0], [1.0], [10.0], [11.0]])
for name, points, ts in (("six clients of one label each", one_label_each, (2, 3, 4, 5, 6)), ("two pairs", two_pairs, (2, 3))):
    for t in ts:
        print(f"{name}, t = {t}: SciPy {clusters(points, t)[0]}, scikit-learn {clusters(points, t)[1]}")
assert [clusters(one_label_each, t) for t in (2, 3, 4, 5, 6)] == [(1, 2), (1, 3), (1, 4), (1, 5), (6, 6)]
assert [clusters(two_pairs, t) for t in (2, 3)] == [(2, 2), (2, 3)]
PY
echo "as described"
