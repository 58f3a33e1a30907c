"""Spectral clustering by interactions: affinities by the formula, and planted parts."""

import numpy as np
import pytest

from cfl_ray.clustering.agreement import agreement
from cfl_ray.clustering.spectral import affinities, best_parts


def test_affinities_are_those_of_the_double_loop():
    a = np.random.default_rng(0).random((6, 6))
    found, scaled = affinities(a, 0.7), (a.T - a.min()) / (a.max() - a.min())
    for i in range(6):
        for j in range(6):
            others = [x for x in range(6) if x not in (i, j)]
            square = np.square(scaled[i, others] - scaled[j, others]).sum()
            assert found[i, j] == pytest.approx(0 if i == j else np.exp(-0.7 * square), abs=1e-12)


def planted(groups, size):
    """Interactions of clients that are alike within their group."""
    group = np.arange(groups * size) % groups
    draw = np.random.default_rng(1)
    return group, (group[:, None] == group) + 0.05 * draw.random((groups * size, groups * size))


@pytest.mark.parametrize("count", [2, 3, 4])
def test_the_best_parts_are_planted_groups_or_several_of_them(count):
    """Of four groups two parts may be the best; they split again later."""
    group, interaction = planted(count, 6)
    part, index = best_parts(affinities(interaction, 0.1), 4, 0)
    assert index < 1 and part.max() > 0 and part[0] == 0
    assert len(set(zip(group, part, strict=True))) == count, "no group is torn"
    assert count > 2 or agreement(group, part)["ari"] == 1
    assert best_parts(affinities(interaction, 0.1), 1, 0)[0] is None
