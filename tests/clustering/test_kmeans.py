import warnings

import numpy as np
import pytest
import torch
from closeness import close
from sklearn.cluster import KMeans
from threadpoolctl import threadpool_limits

from cfl_ray.clustering.agglomerative import by_lowest_member
from cfl_ray.clustering.kmeans import kmeans


def column(*values: float) -> torch.Tensor:
    return torch.tensor(values)[:, None]


def noise(rows: int, columns: int, seed: int = 0) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).standard_normal((rows, columns))).float()


def planted(clusters: int = 5, members: int = 20) -> tuple[torch.Tensor, np.ndarray]:
    """Signatures (S, 12) around the corners of a simplex, and their clusters (S,)."""
    truth_S = np.random.default_rng(1).permutation(np.repeat(np.arange(clusters), members))
    feature_SF = 10 * torch.eye(clusters, 12)[torch.from_numpy(truth_S)] + 0.1 * noise(clusters * members, 12)
    return feature_SF, by_lowest_member(truth_S)


class TestPlusPlus:
    @pytest.mark.parametrize("seed", [0, 1, 2**40, -1])
    @pytest.mark.parametrize("cosine", [False, True])
    def test_planted_clusters_are_found_with_any_seed(self, seed, cosine):
        feature_SF, truth_S = planted()
        label_S, centre_KF = kmeans(feature_SF, 5, seed, cosine=cosine)
        assert label_S.tolist() == truth_S.tolist() and label_S.dtype == np.int64
        rows = torch.nn.functional.normalize(feature_SF, dim=1) if cosine else feature_SF
        for k in range(5):
            assert close(centre_KF[k], rows[truth_S == k].mean(0), 1e-6)
        assert centre_KF.dtype == torch.float32

    def test_depends_on_the_seed_and_not_on_threads(self):
        """On rows without clusters, where rounding makes a difference."""
        feature_SF, found = noise(1500, 16), []
        for threads in (1, 1, 2, 3):
            with threadpool_limits(threads):
                found.append(kmeans(feature_SF, 7, 3))
        for label_S, centre_KF in found[1:]:
            assert np.array_equal(label_S, found[0][0]) and torch.equal(centre_KF, found[0][1])

    def test_a_centre_is_the_weighted_mean(self):
        """(1 * 0 + 3 * 1) / 4 = 0.75."""
        label_S, centre_KF = kmeans(column(0, 1, 100), 2, 0, weight_S=np.array([1, 3, 1]))
        assert label_S.tolist() == [0, 0, 1] and centre_KF.tolist() == [[0.75], [100]]

    def test_cosine_ignores_lengths(self):
        """By l2 the two short rows would be a cluster."""
        feature_SF = torch.tensor([[1.0, 0], [0, 1], [100, 1], [1, 100]])
        assert kmeans(feature_SF, 2, 0, cosine=True)[0].tolist() == [0, 1, 0, 1]

    @pytest.mark.parametrize(
        ("rows", "expected"), [((3,), [0]), ((3, 1), [0, 1]), ((3, 1, 3, 3), [0, 1, 0, 0]), ((0.0, -0.0, 2), [0, 0, 1])]
    )
    def test_no_more_clusters_than_distinct_rows(self, rows, expected):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            label_S, centre_KF = kmeans(column(*rows), 4, 0)
        assert label_S.tolist() == expected and centre_KF[label_S, 0].tolist() == list(rows)

    def test_rows_that_differ_by_rounding_are_one_cluster_without_a_warning(self):
        """Neighbours in float32: their distance vanishes in the square of 1000."""
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            label_S, centre_KF = kmeans(column(0, 1000, 1000.00006), 3, 0)
        assert label_S.tolist() == [0, 1, 1] and len(centre_KF) == 2

    def test_no_rows(self):
        label_S, centre_KF = kmeans(torch.zeros(0, 3), 4, 0)
        assert label_S.tolist() == [] and label_S.dtype == np.int64 and centre_KF.shape == (0, 3)


class TestFromCentres:
    def test_one_step_by_hand(self):
        """From 4 and 0 the rows 0, 1, 3, 5 form pairs with means 4 and 0.5, which do not change any more.

        The given centres keep their numbers.
        """
        label_S, centre_KF = kmeans(column(0, 1, 3, 5), 2, 0, centres_KF=column(4, 0))
        assert label_S.tolist() == [1, 1, 0, 0] and centre_KF.tolist() == [[4], [0.5]]

    def test_iterates_until_no_cluster_changes(self):
        """From 0 and 1: {0}, {1, 2, 10} with means 0, 13/3; {0, 1, 2}, {10} with means 1, 10."""
        label_S, centre_KF = kmeans(column(0, 1, 2, 10), 2, 0, centres_KF=column(0, 1))
        assert label_S.tolist() == [0, 0, 0, 1] and centre_KF.tolist() == [[1], [10]]

    def test_an_empty_cluster_keeps_its_centre(self):
        """scikit-learn would move centre 1 to a far row."""
        label_S, centre_KF = kmeans(column(0, 1, 9, 11), 3, 0, centres_KF=column(0, 500, 10))
        assert label_S.tolist() == [0, 0, 2, 2] and centre_KF.tolist() == [[0.5], [500], [10]]

    def test_a_cluster_that_loses_its_members_keeps_its_last_centre(self):
        """First {-3}, {-2, 2.2}, {3} with means -3, 0.1, 3; then -2 and 2.2 are nearer to the outer centres."""
        label_S, centre_KF = kmeans(column(-3, -2, 2.2, 3), 3, 0, centres_KF=column(-4.5, 0, 4.5))
        assert label_S.tolist() == [0, 0, 2, 2]
        assert close(centre_KF, column(-2.5, 0.1, 2.6), 1e-5)

    def test_no_rows_and_equal_centres(self):
        label_S, centre_KF = kmeans(torch.zeros(0, 1), 2, 0, centres_KF=column(3, 4))
        assert label_S.tolist() == [] and centre_KF.tolist() == [[3], [4]]
        label_S, centre_KF = kmeans(column(1, 3), 2, 0, centres_KF=column(7, 7))
        assert label_S.tolist() == [0, 0] and centre_KF.tolist() == [[2], [7]], "the lowest number on ties"

    def test_weights(self):
        """Row 7 has weight 0: it is assigned, but moves no centre. The other centre is (1 * 0 + 3 * 2) / 4."""
        label_S, centre_KF = kmeans(column(0, 2, 7), 2, 0, weight_S=np.array([1, 3, 0]), centres_KF=column(1, 8))
        assert label_S.tolist() == [0, 0, 1] and centre_KF.tolist() == [[1.5], [8]]

    def test_cosine_scales_rows_and_centres(self):
        """By l2 the row (3, 3.1) is nearer to (4, 0) than to (0, 30).

        A centre is the mean of unit rows, and that of an empty cluster is the given one at norm 1.
        """
        centre_KF = torch.tensor([[4.0, 0], [0, 30], [-2, 0]])
        label_S, found_KF = kmeans(torch.tensor([[5.0, 0], [3, 3.1]]), 3, 0, centres_KF=centre_KF, cosine=True)
        length = (3**2 + 3.1**2) ** 0.5
        assert label_S.tolist() == [0, 1]
        assert close(found_KF, torch.tensor([[1, 0], [3 / length, 3.1 / length], [-1, 0]]), 1e-5)

    def test_agrees_with_scikit_learn_if_no_cluster_is_empty(self):
        feature_SF = noise(400, 6)
        label_S, centre_KF = kmeans(feature_SF, 5, 0, centres_KF=feature_SF[:5])
        model = KMeans(5, init=feature_SF[:5].numpy(), n_init=1, tol=0).fit(feature_SF.numpy())
        assert np.array_equal(label_S, model.labels_)
        assert close(centre_KF.numpy(), model.cluster_centers_, 1e-6)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_clusters": 0}, "num_clusters must be at least 1, got 0"),
        ({"weight_S": np.ones(2)}, r"3 rows need as many weights, got shape \(2,\)"),
        ({"weight_S": np.array([1, -1, 1])}, "they are -1.0..1.0"),
        ({"weight_S": np.zeros(3)}, "not all 0; they are 0.0..0.0"),
        ({"centres_KF": torch.ones(3, 1)}, r"centres must have shape \(2, 1\) \(clusters, features\), got \(3, 1\)"),
        ({"feature_SF": column(0, torch.nan, 1)}, "1 of 3 rows are not, the first is row 1"),
        (
            {"feature_SF": column(0, torch.nan, 1), "centres_KF": torch.ones(2, 1)},
            "1 of 3 rows are not, the first is row 1",
        ),
    ],
)
def test_errors(arguments, message):
    with pytest.raises(ValueError, match=message):
        kmeans(**{"feature_SF": column(0, 1, 2), "num_clusters": 2, "seed": 0} | arguments)
