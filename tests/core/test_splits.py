"""A tree of splits made by hand: who went where, and the way down."""

import numpy as np
import pytest
import torch

from cfl_ray.core.splits import SplitState

E1, E2, E3 = torch.eye(3)


@pytest.fixture
def tree():
    """Leaf 0 is split by (+-e1) into 0 and 1, then leaf 1 by (+-e2) into 1 and 2."""
    state = SplitState(torch.zeros(1, 4), np.zeros(8, np.int32), **SplitState.unsplit(torch.zeros(1, 4), 3))
    state = state.with_split(0, np.array([0, 1, 2, 3]), torch.stack([E1, E1 + 0.1 * E3, -E1, -E1 + 0.1 * E2]), np.array([0, 0, 1, 1]))
    state = state.advance(models_KP=torch.tensor([[1.0] * 4, [2.0] * 4]))
    return state.with_split(1, np.array([2, 3]), torch.stack([E2, -E2]), np.array([0, 1]))


def test_a_new_leaf_starts_from_the_model_that_was_split_and_takes_side_1(tree):
    assert tree.assign_N.tolist() == [0, 0, 1, 2, 0, 0, 0, 0] and tree.assign_N.dtype == np.int32
    assert tree.models_KP[:, 0].tolist() == [1, 2, 2] and tree.split_KP[:, 0].tolist() == [0, 2]
    assert tree.leaves_K2.tolist() == [[0, 1], [1, 2]] and tree.split_E.tolist() == [0, 0, 0, 0, 1, 1] and tree.side_E.tolist() == [0, 0, 1, 1, 0, 1]


def test_updates_follow_the_side_they_are_like(tree):
    assert tree.leaf_at(0, torch.stack([3 * E1, -E1, E1 + 9 * E3]), "mean").tolist() == [0, 1, 0]
    assert tree.leaf_at(1, torch.stack([E2, -5 * E2]), "max").tolist() == [1, 2]


def test_max_and_mean_differ(tree):
    """Side 0 of split 0 looks like e1 and e1 + 0.1 e3, side 1 like -e1 and -e1 + 0.1 e2. Far along e2, both see side 1 ahead; one update
    of side 0 that is close outweighs a mean only by `max`."""
    state = SplitState(torch.zeros(1, 4), np.zeros(4, np.int32), **SplitState.unsplit(torch.zeros(1, 4), 3))
    state = state.with_split(0, np.arange(4), torch.stack([E1, -E1, E1 + E2, E1 + E2]), np.array([0, 0, 1, 1]))
    near_e1 = (E1 + 0.1 * E2)[None]  # cosines 0.995 and -0.995 with side 0, 0.774 twice with side 1
    assert (state.leaf_at(0, near_e1, "max").item(), state.leaf_at(0, near_e1, "mean").item()) == (0, 1)


def test_ties_stay_in_the_old_leaf(tree):
    assert tree.leaf_at(1, torch.stack([E1, torch.zeros(3)]), "mean").tolist() == [1, 1]


def test_the_way_down_goes_through_later_splits(tree):
    rows = torch.stack([E1 + 5 * E2, -E1 + E2, -E1 - E2])
    assert tree.leaf_below(0, rows, "mean").tolist() == [0, 1, 2]
    assert tree.leaf_below(1, rows, "mean").tolist() == [1, 1, 2]


def test_a_checkpoint_of_the_tree_is_the_tree(tree):
    again = SplitState.join(*tree.split())
    for name, value in tree.split()[0].items():
        assert torch.equal(torch.as_tensor(getattr(again, name)), value) and type(getattr(again, name)) is type(getattr(tree, name)), name


def test_updates_of_leavers_are_forgotten_and_a_side_keeps_the_mean_of_its_last(tree):
    left = tree.forget(np.array([0]))
    assert left.client_E.tolist() == [1, 2, 3, 2, 3] and torch.equal(left.update_EF, tree.update_EF[1:])
    left = left.forget(np.array([2, 3]))  # both of side 1 of split 0, and the only one of either side of split 1
    sides = {(split, side): (client, update.tolist()) for split, side, client, update in zip(left.split_E, left.side_E, left.client_E, left.update_EF)}
    assert sides[0, 0] == (1, tree.update_EF[1].tolist())
    assert sides[0, 1] == (-1, tree.update_EF[2:4].mean(0).tolist())
    assert (sides[1, 0], sides[1, 1]) == ((-1, E2.tolist()), (-1, (-E2).tolist()))
    assert left.leaf_at(1, torch.stack([E2, -E2]), "max").tolist() == [1, 2]
    assert torch.equal(left.forget(np.array([0, 2])).update_EF, left.update_EF), "they have nothing left to forget"
