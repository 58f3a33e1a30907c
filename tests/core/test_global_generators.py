"""Seeds of the global generators while code of users runs."""

import random

import numpy as np
import pytest
import torch

from cfl_ray.core import global_generators


def draw():
    return torch.rand(2).tolist(), np.random.rand(2).tolist(), random.random()


def test_all_generators_have_the_seed():
    drawn = []
    for seed in (5, 5, 6):
        with global_generators.seeded(seed):
            drawn.append(draw())
    assert drawn[0] == drawn[1]
    assert all(one != another for one, another in zip(drawn[0], drawn[2]))


@pytest.mark.parametrize("context", [global_generators.kept, lambda: global_generators.seeded(1)])
def test_their_states_are_restored_also_after_an_error(context):
    before = global_generators.states()
    with pytest.raises(ValueError), context():
        draw()
        raise ValueError
    assert global_generators.states() == before


@pytest.mark.parametrize("drawing", [torch.rand, np.random.rand, lambda _: random.random()])
def test_a_draw_changes_their_states(drawing):
    with global_generators.kept():
        before = global_generators.states()
        drawing(1)
        assert global_generators.states() != before
