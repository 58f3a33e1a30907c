import itertools
import tracemalloc

import numpy as np
import pytest

from cfl_ray.core.reassigned import ids_where
from cfl_ray.core.rng import uniforms
from cfl_ray.errors import ConfigError
from cfl_ray.population.availability import Bernoulli
from cfl_ray.population.population import Population, PopulationChange, count_of


def draws(population, rounds, fraction=0.3, clients=None, availability=1.0, dropout=0.0):
    found = []
    for number in range(1, rounds + 1):
        population.advance(number)
        found.append(population.draw(number, fraction, clients, Bernoulli(availability), dropout))
    return found


@pytest.mark.parametrize(
    "fraction, count, expected",
    [
        (0.1, 4800, 480),
        (0.29, 100, 29),
        (0.57, 100, 57),
        (0.005, 100, 1),
        (1.0, 7, 7),
        (0.999, 1000, 999),
        (0.25, 7, 1),
    ],
)
def test_count_is_the_floor_of_the_product_of_decimals(fraction, count, expected):
    """0.29 * 100 is 28.999999999999996 in float64."""
    assert count_of(fraction, count) == expected


class TestDraw:
    def test_is_sorted_without_repetition_and_of_the_given_size(self):
        for drawn in draws(Population(40, (), 0), 20):
            assert len(drawn.ids_M) == 12 and drawn.dropped == 0
            assert (np.diff(drawn.ids_M) > 0).all() and drawn.ids_M[0] >= 0 and drawn.ids_M[-1] < 40

    def test_is_uniform(self):
        """Each of 40 clients takes part in a round with chance 0.3.

        Over 2000 rounds its count has mean 600 and standard deviation sqrt(2000 * 0.3 * 0.7) = 20.5.
        """
        count = np.zeros(40)
        for drawn in draws(Population(40, (), 1), 2000):
            count[drawn.ids_M] += 1
        assert np.abs(count - 600).max() < 5 * 20.5

    def test_depends_on_seed_and_round_and_not_on_earlier_draws(self):
        late = Population(40, (), 0)
        late.advance(7)
        alone = late.draw(7, 0.3, None, Bernoulli(1.0), 0.0).ids_M
        assert np.array_equal(alone, draws(Population(40, (), 0), 7)[-1].ids_M)
        assert not np.array_equal(alone, draws(Population(40, (), 0), 8)[-1].ids_M)
        assert not np.array_equal(alone, draws(Population(40, (), 1), 7)[-1].ids_M)

    def test_a_number_of_clients_overrides_the_fraction_and_is_limited_by_the_online_clients(self):
        population = Population(10, (), 0)
        assert len(population.draw(1, 0.1, 4, Bernoulli(1.0), 0.0).ids_M) == 4
        assert population.draw(1, 0.1, 99, Bernoulli(1.0), 0.0).ids_M.tolist() == list(range(10))

    def test_availability_draws_from_reachable_clients(self):
        """Of 300 clients about 300 a are reachable with availability a; a cohort of all has every one of them."""
        drawn = draws(Population(300, (), 0), 20, fraction=1.0, availability=0.3)
        count = np.array([len(one.ids_M) for one in drawn])
        assert abs(count.mean() - 90) < 5 * np.sqrt(300 * 0.3 * 0.7 / 20)
        assert len({tuple(one.ids_M) for one in drawn}) == 20, "reachability is drawn anew every round"

    def test_finds_enough_if_enough_are_reachable(self):
        """At least 80 of 4000 clients are reachable on average: the cohort is complete, however rare they are."""
        population = Population(4000, (), 0)
        for number in (1, 2):
            chance = uniforms(0, number, 0, np.arange(4000), "availability")
            for availability, wanted in itertools.product((0.02, 0.5), (1, 20)):
                ids = population.draw(number, 0.1, wanted, Bernoulli(availability), 0.0).ids_M
                assert len(ids) == wanted and (chance[ids] < availability).all()

    def test_one_client_reports_even_if_none_is_reachable(self):
        assert [len(one.ids_M) for one in draws(Population(3, (), 0), 20, availability=1e-9)] == [1] * 20

    def test_dropout_is_a_share_of_the_selected_clients(self):
        drawn = draws(Population(200, (), 0), 50, fraction=0.5, dropout=0.2)
        assert all(len(one.ids_M) + one.dropped == 100 for one in drawn)
        dropped = np.mean([one.dropped for one in drawn])
        assert abs(dropped - 20) < 5 * np.sqrt(100 * 0.2 * 0.8 / 50)
        kept = [set(one.ids_M) for one in drawn]
        whole = [set(one.ids_M) for one in draws(Population(200, (), 0), 50, fraction=0.5)]
        assert all(a < b for a, b in zip(kept, whole)), "dropout has no effect on the selection"

    def test_at_least_one_reports(self):
        drawn = draws(Population(10, (), 0), 20, clients=2, dropout=1 - 1e-9)
        assert [(len(one.ids_M), one.dropped) for one in drawn] == [(1, 1)] * 20


class TestChanges:
    def test_clients_that_join_are_absent_before_unless_they_left(self):
        changes = (PopulationChange(5, join=(0,), leave=(8,)), PopulationChange(3, join=(8, 9), leave=(0,)))
        population = Population(10, changes, 0)
        assert population.online.tolist() == [0, 1, 2, 3, 4, 5, 6, 7] and population.newcomers.tolist() == [8, 9]
        assert [part.tolist() for part in population.advance(3)] == [[8, 9], [0]]
        assert [part.tolist() for part in population.advance(5)] == [[0], [8]]

    def test_changes_happen_before_their_round(self):
        population = Population(10, (PopulationChange(3, join=(8, 9), leave=(0,)),), 0)
        assert [part.tolist() for part in population.advance(2)] == [[], []]
        assert [part.tolist() for part in population.advance(3)] == [[8, 9], [0]]
        assert population.online.tolist() == [1, 2, 3, 4, 5, 6, 7, 8, 9]
        assert [part.tolist() for part in population.advance(4)] == [[], []]
        assert all(set(population.draw(r, 1.0, None, Bernoulli(1.0), 0.0).ids_M) == set(range(1, 10)) for r in (4, 5))

    def test_a_resumed_population_is_the_one_that_advanced_round_by_round(self):
        """Also if a client left and returned in between."""
        changes = (
            PopulationChange(2, leave=(1,)),
            PopulationChange(3, join=(5,)),
            PopulationChange(4, join=(1,), leave=(5,)),
            PopulationChange(6, leave=(1, 2)),
        )
        step_by_step = Population(6, changes, 0)
        for number in range(7):
            step_by_step.advance(number)
            resumed = Population(6, changes, 0)
            resumed.advance(number)
            assert resumed.online.tolist() == step_by_step.online.tolist()

    def test_online_clients_do_not_join_and_offline_clients_do_not_leave(self):
        changes = (
            PopulationChange(2, join=(5,)),
            PopulationChange(3, join=(5,), leave=(4,)),
            PopulationChange(4, leave=(4,)),
        )
        population = Population(6, changes, 0)
        advanced = [[part.tolist() for part in population.advance(number)] for number in (2, 3, 4)]
        assert advanced == [[[5], []], [[], [4]], [[], []]]

    def test_a_federation_without_clients_is_rejected(self):
        population = Population(2, (PopulationChange(3, leave=(0, 1)),), 0)
        population.advance(2)
        with pytest.raises(ConfigError, match="no client is left in round 3"):
            population.advance(3)


@pytest.mark.parametrize("availability, dropout", [(1.0, 0.0), (0.5, 0.1)])
def test_a_round_costs_what_its_cohort_costs(availability, dropout):
    """Drawing 20 of a million clients allocates what drawing 20 of ten thousand does."""

    def peak(num_clients: int) -> int:
        population = Population(num_clients, (), 0)
        population.advance(1)
        tracemalloc.start()
        population.draw(1, 0.1, 20, Bernoulli(availability), dropout)
        allocated = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return allocated

    peak(10_000)
    small, large = peak(10_000), peak(1_000_000)
    assert large < 2 * small + 50_000 < 1_000_000 * 8


def test_ids_of_a_mask_are_those_of_numpy():
    for count in (0, 1, 65_536, 200_000):
        is_chosen_N = np.random.default_rng(count).random(count) < 0.3
        found = ids_where(is_chosen_N)
        assert found.dtype == np.int32 and found.tolist() == np.flatnonzero(is_chosen_N).tolist()
