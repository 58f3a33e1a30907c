import numpy as np
import pytest

from cfl_ray.errors import RunError
from cfl_ray.population.availability import ALWAYS, Bernoulli, Diurnal, OwnAvailability, Trace
from cfl_ray.population.population import Population, PopulationChange


def cohort(population, number, availability, clients=None, fraction=1.0):
    population.advance(number)
    return population.draw(number, fraction, clients, availability, 0.0).ids_M


def test_always_is_all_clients():
    assert ALWAYS.always and not Bernoulli(0.999).always and not Diurnal(1.0, 0.2, 24, 0).always
    assert cohort(Population(5, (), 0), 1, ALWAYS).tolist() == [0, 1, 2, 3, 4]


class TestDiurnal:
    def test_follows_the_formula(self):
        """mean + amplitude sin(2 pi (t / period + phase)), clipped to 0..1; a single zone has phase 0.

        The peak is at a quarter of the day, the trough at three quarters.
        """
        day = Diurnal(0.5, 0.3, 8, seed=0, zones=1)
        one = np.array([7])
        assert [round(*day.reachable(t, 1).of(one), 9) for t in (0, 2, 4, 6, 8)] == [0.5, 0.8, 0.5, 0.2, 0.5]
        assert Diurnal(0.9, 0.3, 8, 0, 1).reachable(2, 1).of(one) == 1.0
        assert Diurnal(0.1, 0.3, 8, 0, 1).reachable(6, 1).of(one) == 0.0

    def test_zones_are_equally_spaced_phases(self):
        day = Diurnal(0.5, 0.5, 8, seed=3, zones=4)
        expected = {round(0.5 + 0.5 * np.sin(2 * np.pi * (1 / 8 + zone / 4)), 6) for zone in range(4)}
        assert set(day.reachable(1, 100).of(np.arange(100)).round(6).tolist()) == expected

    def test_the_mean_is_that_over_clients(self):
        """Chances are in 0..0.8: the mean of 600 has a standard deviation of at most 0.4 / sqrt(600) = 0.016."""
        for zones in (None, 3):
            day = Diurnal(0.4, 0.4, 10, seed=1, zones=zones)
            for t in (1, 8):
                chances = day.reachable(t, 600)
                assert chances.mean == pytest.approx(chances.of(np.arange(600)).mean(), abs=0.05)

    def test_fewer_take_part_at_night(self):
        """Chances of 0.95, 0.5 and 0.05 for 400 clients: standard deviations of at most 10."""
        day, population = Diurnal(0.5, 0.45, 20, seed=0, zones=1), Population(400, (), 0)
        sizes = [len(cohort(population, t, day)) for t in (5, 10, 15)]
        assert np.abs(np.array(sizes) - [380, 200, 20]).max() < 40

    def test_finds_enough_also_at_night(self):
        """In round 15 one client of 20 is reachable: 100 of 2000 on average, so 20 can be found."""
        assert len(cohort(Population(2000, (), 0), 15, Diurnal(0.5, 0.45, 20, 0, 1), clients=20)) == 20


class TestTrace:
    def trace(self, unit=1.0):
        return Trace(np.array([0, 1, 1, 3]), np.array([1.0, 2, 5, 3]), np.array([4.0, 2, 6, 3]), unit)

    def test_names_the_clients_of_a_round_with_both_ends_of_an_interval(self):
        assert [self.trace().reachable(t, 4).tolist() for t in range(8)] == [[], [0], [0, 1], [0, 3], [0], [1], [1], []]

    def test_unit_is_the_length_of_a_round(self):
        assert [self.trace(2.0).reachable(t, 4).tolist() for t in range(4)] == [[], [0, 1], [0], [1]]

    def test_only_its_clients_are_drawn_and_a_cohort_may_be_empty(self):
        population = Population(5, (), 0)
        drawn = [cohort(population, t, self.trace()).tolist() for t in range(1, 8)]
        assert drawn == [[0], [0, 1], [0, 3], [0], [1], [1], []]

    def test_an_empty_cohort_has_no_dropout(self):
        drawn = Population(5, (), 0).draw(7, 1.0, None, self.trace(), 0.5)
        assert len(drawn.ids_M) == 0 and drawn.dropped == 0

    def test_clients_that_left_are_not_drawn(self):
        population = Population(5, (PopulationChange(3, leave=(0,)),), 0)
        assert [cohort(population, t, self.trace()).tolist() for t in (2, 3, 4)] == [[0, 1], [3], []]

    def test_the_fraction_is_of_online_clients_and_the_draw_is_uniform_among_reachable_ones(self):
        trace, population = Trace(np.arange(10), np.zeros(10), np.full(10, 9999.0)), Population(20, (), 0)
        count = np.zeros(20)
        for number in range(1, 1001):
            ids = cohort(population, number, trace, fraction=0.2)
            assert len(ids) == 4
            count[ids] += 1
        assert not count[10:].any() and np.abs(count[:10] - 400).max() < 5 * np.sqrt(1000 * 0.4 * 0.6)


class TestOwn:
    def own(self, function):
        return OwnAvailability(function, seed=0)

    def test_names_the_clients_for_which_it_is_true(self):
        model = self.own(lambda clients, round, draw: clients % 3 == round % 3)
        assert [model.reachable(t, 6).tolist() for t in (1, 2, 3)] == [[1, 4], [2, 5], [0, 3]]
        assert cohort(Population(6, (), 0), 2, model).tolist() == [2, 5]

    def test_draws_are_of_the_round(self):
        model = self.own(lambda clients, round, draw: draw.random(len(clients)) < 0.5)
        assert model.reachable(1, 50).tolist() == model.reachable(1, 50).tolist() != model.reachable(2, 50).tolist()

    def test_a_federation_that_grew_is_asked_for_whole(self):
        """Client 6 came with its own shards: population of 7."""
        model = self.own(lambda clients, round, draw: np.ones(len(clients), bool))
        population = Population(6, (), 0)
        population.add(PopulationChange(2, (6,)), 7)
        assert cohort(population, 2, model).tolist() == list(range(7))

    @pytest.mark.parametrize(
        "found, came",
        [
            (np.ones(6), r"ndarray of float64 and shape \(6,\)"),
            (np.ones(5, bool), r"and shape \(5,\)"),
            (True, "bool True"),
        ],
    )
    def test_other_results_name_the_authors_line(self, found, came):
        with pytest.raises(RunError, match=rf"availability .*<lambda> \(.*\) returned .*{came}, expected"):
            self.own(lambda clients, round, draw: found).reachable(1, 6)
