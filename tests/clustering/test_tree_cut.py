import math

import numpy as np
import pytest
from scipy.spatial.distance import pdist

from cfl_ray.clustering.tree_cut import TreeCut
from cfl_ray.methods.fl_hc import FLHC


def line(*places: float) -> np.ndarray:
    """Condensed distances of points on a line."""
    return pdist(np.array(places)[:, None])


# Two pairs with distances of 1, at 4 from each other, and a single point.
DISTANCE = line(0, 1, 5, 6, 20)


@pytest.mark.parametrize(
    "options, expected",
    [
        ({"threshold": 0.5}, [0, 1, 2, 3, 4]),
        ({"threshold": 1}, [0, 0, 1, 1, 2]),
        ({"threshold": 5}, [0, 0, 0, 0, 1]),
        ({"threshold": math.inf}, [0] * 5),
        ({"num_clusters": 4}, [0, 0, 1, 2, 3]),
        ({"num_clusters": 9}, [0, 1, 2, 3, 4]),
        ({"cut": "gap"}, [0, 0, 0, 0, 1]),
        ({"cut": "median"}, [0, 0, 1, 1, 2]),
        ({}, [0, 0, 1, 1, 2]),
        ({"threshold": 4.5}, [0, 0, 1, 1, 2]),
        ({"threshold": 4.5, "linkage": "single"}, [0, 0, 0, 0, 1]),
        ({"threshold": 5.5, "linkage": "complete"}, [0, 0, 1, 1, 2]),
    ],
    ids=str,
)
def test_clusters_of_points_on_a_line(options, expected):
    """Half the median of the distances 1, 5, 6, 20, 4, 5, 19, 1, 15, 14 is 5.5 / 2.

    The mean silhouette of the two pairs and {20} is 2 (1 - 1 / 5.5 + 1 - 1 / 4.5) / 5 = 0.638, that of two clusters is
    0.623: (1 - 4 / 20 + 1 - 10 / 3 / 19 + 1 - 10 / 3 / 15 + 1 - 4 / 14) / 5.
    """
    assert TreeCut(**options).cut_tree(DISTANCE, 5).cluster_S.tolist() == expected


def test_height_is_the_threshold_or_that_of_the_cut_or_none_for_other_rules():
    assert TreeCut(cut="median").cut_tree(DISTANCE, 5).height == 5.5 / 2
    assert [TreeCut(threshold=3).cut_tree(*of).height for of in ((DISTANCE, 5), (np.empty(0), 1))] == [3, 3]
    assert [cut.cut_tree(DISTANCE, 5).height for cut in (TreeCut(num_clusters=2), TreeCut(cut="gap"))] == [None, None]
    assert TreeCut().cut_tree(np.empty(0), 1).height is None
    assert TreeCut().cut_tree(DISTANCE, 5).height == 1, "the highest merge below the cut"
    assert TreeCut().cut_tree(line(0, 1), 2).height == 1, "two signatures are one cluster"


@pytest.mark.parametrize("options", [{}, {"threshold": 1.0}, {"num_clusters": 3}, {"cut": "gap"}], ids=str)
def test_of_one_signature_and_of_none(options):
    assert TreeCut(**options).cut_tree(np.empty(0), 1).cluster_S.tolist() == [0]
    assert TreeCut(**options).cut_tree(np.empty(0), 0).cluster_S.tolist() == []


def test_a_threshold_and_a_number_of_clusters_exclude_each_other():
    with pytest.raises(ValueError, match="give threshold or num_clusters, not both; got 2.5 and 3"):
        TreeCut(threshold=2.5, num_clusters=3)


def test_a_method_with_the_mixin_still_checks_its_options():
    with pytest.raises(ValueError, match="fl_hc.threshold: Input should be greater than or equal to 0, got -1"):
        FLHC(threshold=-1)
    with pytest.raises(ValueError, match="give threshold or num_clusters, not both; got 2.5 and 3"):
        FLHC(threshold=2.5, num_clusters=3)
