"""The Wasserstein-adjusted score: by hand, its invariances, and the distance that it is named after."""

import numpy as np
import pytest
import scipy

from cfl_ray.clustering.label_skew import wasserstein_adjusted_score

COUNTS = np.array([[4, 0, 0], [0, 9, 1], [1, 1, 1], [5, 3, 4]])  # two clients with one main label, two with all labels
SORTED = np.array([[1, 0, 0], [0.9, 0.1, 0], [1 / 3] * 3, [5 / 12, 4 / 12, 3 / 12]])
CLUSTERS = np.array([0, 0, 1, 1])


def distance(i, j):
    return np.sqrt(((SORTED[i] - SORTED[j]) ** 2).sum())


def test_silhouette_by_hand():
    """(b - a) / max(a, b): a to the other client of the cluster, b the mean to those of the other cluster."""
    of_clients = []
    for i, (mate, others) in enumerate([(1, (2, 3)), (0, (2, 3)), (3, (0, 1)), (2, (0, 1))]):
        a, b = distance(i, mate), np.mean([distance(i, other) for other in others])
        of_clients.append((b - a) / max(a, b))
    found = wasserstein_adjusted_score(COUNTS, CLUSTERS)
    assert found == pytest.approx(np.mean(of_clients), rel=1e-12) and 0.7 < found < 1


def test_davies_bouldin_by_hand():
    """(s_0 + s_1) / d: mean distances to the centres, and the distance of the centres."""
    centres = SORTED[:2].mean(0), SORTED[2:].mean(0)
    s = [np.linalg.norm(SORTED[2 * k : 2 * k + 2] - centres[k], axis=1).mean() for k in (0, 1)]
    expected = sum(s) / np.linalg.norm(centres[0] - centres[1])
    assert wasserstein_adjusted_score(COUNTS, CLUSTERS, "davies_bouldin") == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("score", ["silhouette", "davies_bouldin"])
def test_labels_sizes_numbers_of_clusters_and_the_order_of_clients_do_not_matter(score):
    draw = np.random.default_rng(0)
    counts, clusters = draw.integers(0, 50, (20, 7)), np.arange(20) % 3
    expected = pytest.approx(wasserstein_adjusted_score(counts, clusters, score), rel=1e-9)
    permuted = np.stack([draw.permutation(row) for row in counts])
    assert wasserstein_adjusted_score(permuted, clusters, score) == expected
    assert wasserstein_adjusted_score(counts * draw.integers(1, 9, (20, 1)), clusters, score) == expected
    assert wasserstein_adjusted_score(counts, np.array([7, 0, 4])[clusters], score) == expected
    order = draw.permutation(20)
    assert wasserstein_adjusted_score(counts[order], clusters[order], score) == expected
    assert wasserstein_adjusted_score(np.pad(counts, ((0, 1), (0, 0))), np.append(clusters, 5), score) == expected


def test_the_distance_is_that_of_the_best_transport_between_the_frequencies():
    """Of all matchings of two clients' frequencies, the sorted one has the least sum of squares."""
    counts = np.random.default_rng(1).dirichlet(np.ones(6), 2)
    cost = (counts[0][:, None] - counts[1]) ** 2
    rows, columns = scipy.optimize.linear_sum_assignment(cost)
    assert cost[rows, columns].sum() == pytest.approx(((np.sort(counts[0]) - np.sort(counts[1])) ** 2).sum(), rel=1e-9)


def test_no_score_and_invalid_arguments():
    assert np.isnan(wasserstein_adjusted_score(COUNTS, np.zeros(4, int)))
    assert np.isnan(wasserstein_adjusted_score(COUNTS, np.arange(4)))
    with pytest.raises(ValueError, match="silhouette or davies_bouldin, got 'ari'"):
        wasserstein_adjusted_score(COUNTS, CLUSTERS, "ari")
    with pytest.raises(ValueError, match=r"\(4, 3\) and \(3,\)"):
        wasserstein_adjusted_score(COUNTS, CLUSTERS[:3])
