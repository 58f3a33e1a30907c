import tracemalloc

import numpy as np
import pytest

from cfl_ray.core.availability import Bernoulli
from cfl_ray.core.cohort import Change, Population, share
from cfl_ray.core.errors import ConfigError


def draws(population, rounds, fraction=0.3, clients=None, availability=1.0, dropout=0.0):
    found = []
    for number in range(1, rounds + 1):
        population.advance(number)
        found.append(population.draw(number, fraction, clients, Bernoulli(availability), dropout))
    return found


@pytest.mark.parametrize("fraction, count, expected", [(0.1, 4800, 480), (0.29, 100, 29), (0.57, 100, 57), (0.005, 100, 1), (1.0, 7, 7), (0.999, 1000, 999), (0.25, 7, 1)])
def test_share_is_the_floor_of_the_product_of_decimals(fraction, count, expected):
    """0.29 * 100 is 28.999999999999996 in float64."""
    assert share(fraction, count) == expected


class TestDraw:
    def test_is_sorted_without_repetition_and_of_the_wanted_size(self):
        for drawn in draws(Population(40, (), 0), 20):
            assert len(drawn.ids_M) == 12 and drawn.dropped == 0
            assert (np.diff(drawn.ids_M) > 0).all() and 0 <= drawn.ids_M[0] and drawn.ids_M[-1] < 40

    def test_is_uniform(self):
        """Each of 40 clients takes part in a round with chance 0.3: over 2000 rounds the count has mean 600 and standard deviation
        sqrt(2000 * 0.3 * 0.7) = 20.5. The largest of 40 deviations stays below 5 of them."""
        count = np.zeros(40)
        for drawn in draws(Population(40, (), 1), 2000):
            count[drawn.ids_M] += 1
        assert np.abs(count - 600).max() < 5 * 20.5

    def test_depends_on_seed_and_round_and_not_on_what_was_drawn_before(self):
        late = Population(40, (), 0)
        late.advance(7)
        alone = late.draw(7, 0.3, None, Bernoulli(1.0), 0.0).ids_M
        assert np.array_equal(alone, draws(Population(40, (), 0), 7)[-1].ids_M)
        assert not np.array_equal(alone, draws(Population(40, (), 0), 8)[-1].ids_M)
        assert not np.array_equal(alone, draws(Population(40, (), 1), 7)[-1].ids_M)

    def test_a_number_of_clients_overrules_the_fraction_and_is_limited_by_who_is_there(self):
        population = Population(10, (), 0)
        assert len(population.draw(1, 0.1, 4, Bernoulli(1.0), 0.0).ids_M) == 4
        assert population.draw(1, 0.1, 99, Bernoulli(1.0), 0.0).ids_M.tolist() == list(range(10))

    def test_availability_draws_from_those_reachable(self):
        """With availability a, the reachable ones of 1000 number about 1000 a; who asks for more gets them all."""
        drawn = draws(Population(1000, (), 0), 30, fraction=1.0, availability=0.3)
        count = np.array([len(one.ids_M) for one in drawn])
        assert abs(count.mean() - 300) < 5 * np.sqrt(1000 * 0.3 * 0.7 / 30)
        assert len({tuple(one.ids_M) for one in drawn}) == 30, "reachability is drawn anew every round"

    @pytest.mark.parametrize("availability", [0.02, 0.5])
    @pytest.mark.parametrize("wanted", [1, 20])
    def test_finds_enough_where_enough_are_reachable(self, availability, wanted):
        """5000 clients, at least 100 of them reachable on average: nobody comes short, however rare reachable clients are."""
        population = Population(5000, (), 0)
        reachable = {number: {i for i in range(5000) if population._chance(number, i, "availability") < availability} for number in (1, 2, 3)}
        for number, expected in reachable.items():
            ids = population.draw(number, 0.1, wanted, Bernoulli(availability), 0.0).ids_M
            assert len(ids) == wanted and set(ids.tolist()) <= expected

    def test_somebody_reports_even_where_nobody_is_reachable(self):
        assert [len(one.ids_M) for one in draws(Population(3, (), 0), 20, availability=1e-9)] == [1] * 20

    def test_dropout_takes_that_share_of_those_selected(self):
        drawn = draws(Population(200, (), 0), 50, fraction=0.5, dropout=0.2)
        assert all(len(one.ids_M) + one.dropped == 100 for one in drawn)
        dropped = np.mean([one.dropped for one in drawn])
        assert abs(dropped - 20) < 5 * np.sqrt(100 * 0.2 * 0.8 / 50)
        kept = [set(one.ids_M) for one in drawn]
        whole = [set(one.ids_M) for one in draws(Population(200, (), 0), 50, fraction=0.5)]
        assert all(a < b for a, b in zip(kept, whole)), "dropout changes who reports, not who is selected"

    def test_at_least_one_reports(self):
        drawn = draws(Population(10, (), 0), 20, clients=2, dropout=1 - 1e-9)
        assert [(len(one.ids_M), one.dropped) for one in drawn] == [(1, 1)] * 20


class TestComingAndGoing:
    def test_clients_that_join_are_absent_before_unless_they_left(self):
        population = Population(10, (Change(5, join=(0,), leave=(8,)), Change(3, join=(8, 9), leave=(0,))), 0)
        assert population.online.tolist() == [0, 1, 2, 3, 4, 5, 6, 7] and population.newcomers.tolist() == [8, 9]
        assert [[part.tolist() for part in population.advance(number)] for number in (3, 5)] == [[[8, 9], [0]], [[0], [8]]]

    def test_changes_happen_before_their_round(self):
        population = Population(10, (Change(3, join=(8, 9), leave=(0,)),), 0)
        assert [part.tolist() for part in population.advance(2)] == [[], []]
        assert [part.tolist() for part in population.advance(3)] == [[8, 9], [0]]
        assert population.online.tolist() == [1, 2, 3, 4, 5, 6, 7, 8, 9]
        assert [part.tolist() for part in population.advance(4)] == [[], []]
        assert all(set(population.draw(r, 1.0, None, Bernoulli(1.0), 0.0).ids_M) == set(range(1, 10)) for r in (4, 5))

    @pytest.mark.parametrize("upto", range(7))
    def test_a_resumed_population_is_the_one_that_went_round_by_round(self, upto):
        """Also where a client left and came again on the way."""
        changes = (Change(2, leave=(1,)), Change(3, join=(5,)), Change(4, join=(1,), leave=(5,)), Change(6, leave=(1, 2)))
        one, other = Population(6, changes, 0), Population(6, changes, 0)
        one.advance(upto)
        for number in range(1, upto + 1):
            other.advance(number)
        assert one.online.tolist() == other.online.tolist()

    def test_who_is_there_cannot_come_and_who_is_not_cannot_go(self):
        population = Population(6, (Change(2, join=(5,)), Change(3, join=(5,), leave=(4,)), Change(4, leave=(4,))), 0)
        assert [[part.tolist() for part in population.advance(number)] for number in (2, 3, 4)] == [[[5], []], [[], [4]], [[], []]]

    def test_a_federation_without_clients_is_refused(self):
        population = Population(2, (Change(3, leave=(0, 1)),), 0)
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
