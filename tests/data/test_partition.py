import numpy as np
import pytest

from cfl_ray.config import Partition
from cfl_ray.data.partition import divide, writers
from cfl_ray.core.errors import DataError

LABELS = np.arange(1003) % 10


def draw(seed=0, clients=20, min_samples=1, y=LABELS, **options):
    return divide(y, clients, Partition(clients=clients, **options), min_samples, np.random.default_rng(seed))


@pytest.mark.parametrize("options", [{"kind": "iid"}, {"kind": "dirichlet", "alpha": 0.5}, {"kind": "dirichlet", "alpha": 1e-3, "clients": 3},
                                     {"kind": "classes", "classes_per_client": 2}])
def test_every_sample_has_exactly_one_owner(options):
    parts = draw(**options)
    assert np.array_equal(np.sort(np.concatenate(parts)), np.arange(len(LABELS)))
    assert all((np.diff(part) > 0).all() for part in parts)


@pytest.mark.parametrize("kind", ["iid", "dirichlet", "classes"])
def test_the_generator_decides(kind):
    first, again, other = (draw(seed, kind=kind, alpha=1.0) for seed in (0, 0, 1))
    assert all(map(np.array_equal, first, again))
    assert not all(map(np.array_equal, first, other))


def test_iid_sizes_differ_by_at_most_one():
    assert {len(part) for part in draw(kind="iid", clients=20)} == {50, 51}


def test_dirichlet_is_skewed_for_small_alpha_and_even_for_large():
    def classes_per_client(alpha):
        return np.mean([len(np.unique(LABELS[part])) for part in draw(kind="dirichlet", alpha=alpha)])
    assert classes_per_client(0.05) < 4 and classes_per_client(1000.0) > 9.5


def test_dirichlet_redraws_until_the_smallest_client_has_enough():
    sizes = {least: min(len(part) for part in draw(kind="dirichlet", alpha=0.3, min_samples=least)) for least in (1, 20)}
    assert sizes[1] < 20 <= sizes[20]


def test_dirichlet_that_cannot_succeed_says_who_got_what_and_what_to_change():
    with pytest.raises(DataError, match=r"client \d+ of 20 got \d+ of 1003, each needs 50\. Raise .*alpha .*lower clients.*lower min_samples"):
        draw(kind="dirichlet", alpha=0.01, min_samples=50)


def test_classes_gives_client_i_class_i_mod_c_and_others():
    for client, part in enumerate(draw(kind="classes", classes_per_client=3, clients=25)):
        held = np.unique(LABELS[part])
        assert len(held) == 3 and client % 10 in held


def test_each_class_is_split_evenly_among_its_owners():
    parts = draw(kind="classes", classes_per_client=2)
    for label in range(10):
        shares = [count for part in parts if (count := (LABELS[part] == label).sum())]
        assert max(shares) - min(shares) <= 1


def test_classes_counts_the_classes_that_exist_in_the_group():
    assert all(len(np.unique(np.array([3, 4] * 50)[part])) == 2 for part in draw(y=np.array([3, 4] * 50), kind="classes", classes_per_client=2))
    with pytest.raises(DataError, match="classes_per_client is 3, but the samples of this group have 2 classes"):
        draw(y=np.array([3, 4] * 50), kind="classes", classes_per_client=3)


def test_more_clients_than_samples_is_an_error():
    with pytest.raises(DataError, match="2000 clients cannot hold at least 1 samples each of 1003 samples; lower data.partition.clients"):
        draw(kind="iid", clients=2000)


def test_classes_that_starves_a_client_names_it():
    y = np.repeat(np.arange(10), [191, 1, 1, 1, 1, 1, 1, 1, 1, 1])
    with pytest.raises(DataError, match=r"client \d+ of its group got 0 samples, each needs 1; lower data.partition.clients"):
        draw(y=y, kind="classes", classes_per_client=1, clients=40)


class TestWriters:
    IDS = np.array(["b", "a", "c", "a", "b", "a"])

    def test_are_taken_as_they_are_in_order_of_their_names(self):
        found = writers(self.IDS, Partition(kind="writer", clients=None), "toy", np.random.default_rng(0))
        assert [(name, rows.tolist()) for name, rows in found] == [("a", [1, 3, 5]), ("b", [0, 4]), ("c", [2])]

    def test_small_ones_are_left_out(self):
        found = writers(self.IDS, Partition(kind="writer", clients=None, min_samples=2), "toy", np.random.default_rng(0))
        assert [name for name, _ in found] == ["a", "b"]

    def test_clients_draws_that_many(self):
        chosen = {tuple(name for name, _ in writers(self.IDS, Partition(kind="writer", clients=2), "toy", np.random.default_rng(seed)))
                  for seed in range(20)}
        assert chosen == {("a", "b"), ("a", "c"), ("b", "c")}

    @pytest.mark.parametrize("limits", [{"clients": None, "min_samples": 4}, {"clients": 3, "min_samples": 2}])
    def test_too_few_left_is_an_error_with_the_numbers(self, limits):
        with pytest.raises(DataError, match=r"but \d of 3 writers have at least \d samples \(the largest has 3\)"):
            writers(self.IDS, Partition(kind="writer", **limits), "toy", np.random.default_rng(0))

    def test_data_without_names_say_where_to_find_some(self):
        with pytest.raises(DataError, match="which 'mnist' does not say; use femnist"):
            writers(None, Partition(kind="writer"), "mnist", np.random.default_rng(0))
