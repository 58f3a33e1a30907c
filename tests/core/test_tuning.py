"""Compactness of clusters, and the rule that splits and merges, on representations made by hand."""

from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch

from cfl_ray.core.method import option
from cfl_ray.core.state import State
from cfl_ray.core.tuning import ClusterTuning, compactness, merged_into


@dataclass(frozen=True)
class Checks:
    """Stands for a method."""

    name = "tuned"
    num_clusters: int = option(3, "K")

    def __post_init__(self):
        pass


@dataclass(frozen=True)
class Tuned(ClusterTuning, Checks):
    pass


def at(*degrees: float) -> torch.Tensor:
    """Directions in the plane, of different lengths."""
    angle = torch.tensor(degrees) / 180 * torch.pi
    return torch.stack([angle.cos(), angle.sin()], 1) * torch.linspace(0.5, 3, len(degrees))[:, None]


def far(degrees: float) -> float:
    """1 - cos."""
    return 1 - np.cos(np.deg2rad(degrees))


class TestCompactness:
    def test_is_the_mean_distance_inside_over_that_to_the_nearest_other_centre(self):
        """Centres at 0, 90 and 120 degrees; members 10 and 30 degrees off the first, 20 off the second, none of the third."""
        rho_K, nearest_K, members_K = compactness(at(10, -30, 110, 77), np.array([0, 0, 1, -1]), at(0, 90))
        assert rho_K == pytest.approx([(far(10) + far(30)) / 2 / far(90), far(20) / far(90)], abs=1e-6)
        assert nearest_K.tolist() == [1, 0] and members_K.tolist() == [2, 1]

    def test_the_nearest_is_the_nearest(self):
        rho_K, nearest_K, _ = compactness(at(5, 95, 130), np.array([0, 1, 2]), at(0, 90, 120))
        assert nearest_K.tolist() == [1, 2, 1]
        assert rho_K == pytest.approx([far(5) / far(90), far(5) / far(30), far(10) / far(30)], abs=1e-6)

    def test_centres_without_members_are_nobody_s_nearest(self):
        """The third would be nearest to both."""
        rho_K, nearest_K, members_K = compactness(at(5, 95), np.array([0, 1]), at(0, 90, 45))
        assert members_K.tolist() == [1, 1, 0] and nearest_K[:2].tolist() == [1, 0]
        assert rho_K == pytest.approx([far(5) / far(90), far(5) / far(90), 0], abs=1e-6)

    @pytest.mark.parametrize("centres", [(0,), (0, 20)])
    def test_the_only_cluster_is_compared_with_an_orthogonal_one(self, centres):
        rho_K, nearest_K, _ = compactness(at(40, -40), np.array([0, 0]), at(*centres))
        assert rho_K[0] == pytest.approx(far(40), abs=1e-6) and nearest_K[0] == 0

    def test_nobody_is_known(self):
        rho_K, _, members_K = compactness(torch.zeros(0, 2), np.zeros(0, np.int64), at(0, 90))
        assert rho_K.tolist() == [0, 0] and members_K.tolist() == [0, 0]


class TestStep:
    def step(self, rho, known, members=None, **options):
        return Tuned(**options).step(np.array(rho), np.array(known), np.array(known if members is None else members))

    @pytest.mark.parametrize("rho, members, expected", [
        ([0.5, 1.1, 1.5], [9, 9, 9], (2, None)),  # the loosest
        ([0.5, 1.1, 1.5], [9, 9, 3], (1, None)),  # of those with 4 members
        ([0.5, 0.9, 1.0], [9, 9, 9], (None, None)),
        ([0.1, 0.05, 0.5], [3, 2, 9], (None, 1)),  # the tightest
        ([0.1, 0.05, 0.5], [3, 4, 9], (None, 0)),  # of those with fewer than 4 members
        ([0.0, 0.5, 0.5], [0, 9, 9], (None, None)),  # an empty one is no cluster to merge
        ([0.1, 0.0, 0.0], [3, 0, 0], (None, None)),  # nor one to merge with
        ([0.1, 1.5, 0.5], [1, 9, 9], (1, None)),  # one or the other
        ([0.2, 0.5, 0.5], [1, 9, 9], (None, None)),
    ])  # fmt: skip
    def test_is_one_split_or_one_merge_at_most(self, rho, members, expected):
        assert self.step(rho, members) == expected

    def test_never_makes_more_than_max_clusters(self):
        assert self.step([0.5, 1.5, 0.5], [9, 9, 9], max_clusters=3) == (None, None)
        assert self.step([0.1, 1.5, 0.5], [1, 9, 9], max_clusters=3) == (None, 0), "a merge makes room"

    def test_remembered_members_split_and_all_members_keep_from_merging(self):
        assert self.step([1.5, 0.1, 0.5], [3, 2, 9], [30, 20, 9]) == (None, None)
        assert self.step([1.5, 0.1, 0.5], [4, 2, 9], [30, 3, 9]) == (0, None)
        assert self.step([0.5, 0.1, 0.5], [4, 2, 9], [30, 3, 9]) == (None, 1)

    def test_a_lone_cluster_does_not_merge(self):
        assert self.step([0.1], [3]) == (None, None)

    @pytest.mark.parametrize("number, due", [(10, False), (20, False), (21, False), (30, True), (35, False), (40, True)])
    def test_is_due_every_10_rounds_after_round_20(self, number, due):
        assert Tuned().due(number) == due and not Tuned(tune_clusters=False).due(number)

    def test_thresholds_keep_their_distance(self):
        with pytest.raises(ValueError, match=r"tuned.rho_high must be at least 3 rho_low = 1.2, got 1.0"):
            Tuned(rho_low=0.4)
        assert replace(Tuned(), rho_low=0.2, rho_high=0.6).rho_high == 0.6

    def test_the_first_number_of_clusters_is_in_range(self):
        with pytest.raises(ValueError, match="tuned.num_clusters must be at most max_clusters = 20, got 21"):
            Tuned(num_clusters=21)
        assert Tuned(num_clusters=21, tune_clusters=False).num_clusters == 21


@pytest.mark.parametrize("k, other, expected", [(1, 2, [0, 1, 1, 2, -1]), (3, 0, [0, 1, 2, 0, -1]), (0, 3, [2, 0, 1, 2, -1])])
def test_merging_moves_members_and_numbers_and_leaves_the_other_s_model(k, other, expected):
    state = State(torch.arange(4.0)[:, None], np.array([0, 1, 2, 3, -1], np.int32))
    merged = merged_into(state, k, np.int64(other))
    assert merged.assign_N.tolist() == expected and merged.assign_N.dtype == np.int32
    assert merged.models_KP[:, 0].tolist() == [row for row in range(4) if row != k]
