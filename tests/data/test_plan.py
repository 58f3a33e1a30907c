import numpy as np
import pytest

from cfl_ray.data.plan import make_plan
from cfl_ray.core.errors import DataError


def owned(plan):
    return [np.concatenate([client.train, client.held_out]) for client in plan.clients]


def test_each_rotated_group_divides_the_whole_set_among_its_share_of_clients(toy, config):
    plan = make_plan(toy(), None, config(clients=10, shift={"kind": "rotated"}), seed=0)
    assert [client.group for client in plan.clients] == [0, 0, 0, 1, 1, 1, 2, 2, 3, 3]
    for group in range(4):
        rows = np.concatenate([client.train for client in plan.clients if client.group == group])
        assert np.array_equal(np.sort(rows), np.arange(400))
    assert [client.test_set for client in plan.clients] == [client.group for client in plan.clients] and len(plan.test_sets) == 4


def test_the_seed_decides_and_groups_draw_apart(toy, config):
    def rows(seed):
        return owned(make_plan(toy(), None, config(clients=4, shift={"kind": "shifted", "offsets": [0, 5]}), seed))
    first, again, other = rows(0), rows(0), rows(1)
    assert all(map(np.array_equal, first, again)) and not any(map(np.array_equal, first, other))
    assert not np.array_equal(first[0], first[2])


def test_no_truth_without_groups(toy, config):
    assert {client.group for client in make_plan(toy(), None, config(), 0).clients} == {-1}


def test_fewer_clients_than_groups(toy, config):
    with pytest.raises(DataError, match="clients is 3, but there are 4 groups and each needs a client"):
        make_plan(toy(), None, config(clients=3, shift={"kind": "rotated"}), 0)


def test_partition_errors_name_the_group(toy, config):
    with pytest.raises(DataError, match="group 1 of 4: 100 clients cannot hold at least 1 samples each of 80"):
        make_plan(toy(), None, config(clients=400, shift={"kind": "pathological"}), 0)


def test_samples_caps_the_training_samples_and_not_the_held_out_ones(toy, config):
    plan = make_plan(toy(), None, config(view="holdout", samples=30, fraction=0.25), 0)
    assert {(len(client.train), len(client.held_out)) for client in plan.clients} == {(30, 25)}


@pytest.mark.parametrize("n, fraction, sizes", [(10, 0.2, (8, 2)), (2, 0.01, (1, 1)), (2, 0.99, (1, 1)), (3, 0.5, (1, 2))])
def test_holdout_keeps_one_of_each(toy, config, n, fraction, sizes):
    plan = make_plan(toy(n=n, n_test=0), None, config(clients=1, view="holdout", fraction=fraction), 0)
    client = plan.clients[0]
    assert (len(client.train), len(client.held_out)) == sizes and plan.test_sets == []
    assert np.array_equal(np.sort(owned(plan)[0]), np.arange(n))


def test_holdout_needs_two_samples(toy, config):
    images = toy(n=3, client=np.array(["ann", "ann", "bob"]))
    with pytest.raises(DataError, match="client 'bob' has 1 sample; holding out a part needs 2: set data.partition.min_samples: 2"):
        make_plan(images, None, config("writer", None, view="holdout"), 0)
    assert len(make_plan(images, None, config("writer", None, view="holdout", min_samples=2), 0).clients) == 1


def test_shared_views_need_a_test_part(toy, config):
    with pytest.raises(DataError, match="view: cluster needs a test part, which 'digits' does not have; set data.test.view: holdout"):
        make_plan(toy(n_test=0), None, config(), 0)


def test_label_view_shares_one_set_where_images_are_the_same(toy, config):
    plan = make_plan(toy(), None, config(clients=8, view="label", shift={"kind": "pathological"}), 0)
    assert len(plan.test_sets) == 1 and len(plan.test_sets[0].rows) == 100
    assert [np.flatnonzero(labels).tolist() for labels in plan.labels_NC[::2]] == [[0, 1, 2], [3, 4], [5, 6], [7, 8, 9]]
    rotated = make_plan(toy(), None, config(clients=8, view="label", shift={"kind": "rotated_labels", "angles": [0, 180]}), 0)
    assert len(rotated.test_sets) == 2


def test_label_view_knows_labels_as_the_group_sees_them(toy, config):
    shift = {"kind": "shifted", "offsets": [0, 3]}
    plan = make_plan(toy(n=40), None, config("classes", 20, view="label", shift=shift, classes_per_client=1), 0)
    assert plan.labels_NC.sum(1).tolist() == [1] * 20
    assert np.flatnonzero(plan.labels_NC[0]) == [0] and np.flatnonzero(plan.labels_NC[10]) == [3]


def test_label_view_without_a_test_image_of_any_label_names_the_client(toy, config):
    with pytest.raises(DataError, match=r"client '9' has labels \[9\], none of which is in the test set"):
        make_plan(toy(n_test=9), None, config("classes", 10, view="label", classes_per_client=1), 0)


def test_test_images_are_capped_once_for_all(toy, config):
    plan = make_plan(toy(), None, config(max_images=30, shift={"kind": "rotated"}), 0)
    assert [len(one.rows) for one in plan.test_sets] == [30] * 4
    assert np.array_equal(plan.test_sets[0].rows, plan.test_sets[3].rows)


class TestWriters:
    def images(self, toy, **known):
        return toy(n=8, n_test=4, client=np.array([7, 7, 3, 3, 9, 9, 9, 9]), **known)

    def test_keep_their_names_groups_and_the_test_images_of_their_group(self, toy, config):
        images = self.images(toy, group=np.array([1, 1, 0, 0, 1, 1, 1, 1], np.int32), test_group=np.array([0, 1, 1, 1], np.int32))
        plan = make_plan(images, None, config("writer", None), 0)
        assert [(client.name, client.group, len(plan.test_sets[client.test_set].rows)) for client in plan.clients] == [
            ("3", 0, 1), ("7", 1, 3), ("9", 1, 3)]

    def test_belong_to_one_group(self, toy, config):
        with pytest.raises(DataError, match="client '9' has samples of groups 0 and 1"):
            make_plan(self.images(toy, group=np.array([0, 0, 0, 0, 0, 0, 1, 1], np.int32)), None, config("writer", None), 0)

    def test_exist_in_every_group_of_a_shift(self, toy, config):
        plan = make_plan(self.images(toy), None, config("writer", None, shift={"kind": "rotated", "angles": [0, 180]}), 0)
        assert [(client.name, client.group) for client in plan.clients] == [
            ("3/0", 0), ("7/0", 0), ("9/0", 0), ("3/1", 1), ("7/1", 1), ("9/1", 1)]
