import math

import numpy as np
import pytest
from scipy.spatial.distance import pdist

from cfl_ray.core.treecut import TreeCut


def line(*places: float) -> np.ndarray:
    """Condensed distances of points on a line."""
    return pdist(np.array(places)[:, None])


# Pairs at 1 from each other, 4 to the next pair; then one alone.
DISTANCE = line(0, 1, 5, 6, 20)


@pytest.mark.parametrize("options, expected", [
    ({"threshold": 0.5}, [0, 1, 2, 3, 4]),
    ({"threshold": 1}, [0, 0, 1, 1, 2]),
    ({"threshold": 5}, [0, 0, 0, 0, 1]),
    ({"threshold": math.inf}, [0] * 5),
    ({"num_clusters": 4}, [0, 0, 1, 2, 3]),
    ({"num_clusters": 9}, [0, 1, 2, 3, 4]),
    ({"cut": "gap"}, [0, 0, 0, 0, 1]),
    ({}, [0, 0, 1, 1, 2]),
    ({"threshold": 4.5}, [0, 0, 1, 1, 2]),
    ({"threshold": 4.5, "linkage": "single"}, [0, 0, 0, 0, 1]),
    ({"threshold": 5.5, "linkage": "complete"}, [0, 0, 1, 1, 2]),
], ids=str)  # fmt: skip
def test_clusters_of_points_on_a_line(options, expected):
    """By default at half the median of 1, 5, 6, 20, 4, 5, 19, 1, 15, 14: 5.5 / 2."""
    assert TreeCut(**options).clusters(DISTANCE, 5).tolist() == expected


def test_height_is_the_threshold_or_half_the_median_unless_another_rule_decides():
    assert TreeCut().height(DISTANCE) == 5.5 / 2
    assert TreeCut(threshold=3).height(DISTANCE) == 3 and TreeCut(threshold=3).height(np.empty(0)) == 3
    assert [cut.height(DISTANCE) for cut in (TreeCut(num_clusters=2), TreeCut(cut="gap"))] == [None, None]
    assert TreeCut().height(np.empty(0)) is None


@pytest.mark.parametrize("options", [{}, {"threshold": 1.0}, {"num_clusters": 3}, {"cut": "gap"}], ids=str)
def test_of_one_and_of_nobody(options):
    assert TreeCut(**options).clusters(np.empty(0), 1).tolist() == [0]
    assert TreeCut(**options).clusters(np.empty(0), 0).tolist() == []
