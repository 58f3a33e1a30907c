import numpy as np
import pytest

from cfl_ray.data.plan import make_plan
from cfl_ray.errors import DataError


def rows_of(plan):
    """Returns all rows of each client."""
    return [np.concatenate([client.train, client.held_out]) for client in plan.clients]


def test_each_rotated_group_divides_the_whole_set_among_its_share_of_clients(planned):
    plan = planned(clients=10, shift={"kind": "rotated"})
    assert [client.group for client in plan.clients] == [0, 0, 0, 1, 1, 1, 2, 2, 3, 3]
    for group in range(4):
        rows = np.concatenate([client.train for client in plan.clients if client.group == group])
        assert np.array_equal(np.sort(rows), np.arange(400))
    assert [client.test_set for client in plan.clients] == [client.group for client in plan.clients]
    assert len(plan.test_sets) == 4


def test_the_seed_decides_and_groups_draw_apart(planned):
    def rows(seed):
        return rows_of(planned(clients=4, shift={"kind": "shifted", "offsets": [0, 5]}, seed=seed))

    first, again, other = rows(0), rows(0), rows(1)
    assert all(map(np.array_equal, first, again)) and not any(map(np.array_equal, first, other))
    assert not np.array_equal(first[0], first[2])


def test_no_true_groups_without_groups(planned):
    assert {client.group for client in planned().clients} == {-1}


def test_classes_without_a_client_are_named(planned):
    """Three clients of two classes own at most six of the ten."""
    plan = planned("classes", 3, classes_per_client=2)
    owned = {label for client in plan.clients for label in plan.data_set.train_y[client.train]}
    unused = sorted(set(range(10)) - owned)
    (warning,) = plan.warnings
    assert warning.startswith("data.partition.kind classes: no client has samples of ")
    assert ", ".join(map(str, unused[:5])) in warning and f"{40 * len(unused)} training samples are unused" in warning
    assert planned("classes", 10, classes_per_client=2).warnings == ()
    groups = planned(
        clients=4, shift={"kind": "pathological"}
    )  # a group has some classes, and its clients all of these
    assert groups.warnings == ()


def test_fewer_clients_than_groups(planned):
    with pytest.raises(DataError, match="clients is 3, but there are 4 groups and each needs a client"):
        planned(clients=3, shift={"kind": "rotated"})


def test_partition_errors_name_the_group(planned):
    with pytest.raises(DataError, match="group 1 of 4: 100 clients cannot hold at least 1 sample each of 80"):
        planned(clients=400, shift={"kind": "pathological"})


def test_samples_caps_the_training_samples_and_not_the_held_out_ones(planned):
    plan = planned(view="holdout", samples=30, fraction=0.25)
    assert {(len(client.train), len(client.held_out)) for client in plan.clients} == {(30, 25)}


@pytest.mark.parametrize(
    "n, fraction, sizes", [(10, 0.2, (8, 2)), (2, 0.01, (1, 1)), (2, 0.99, (1, 1)), (3, 0.5, (1, 2))]
)
def test_holdout_keeps_one_of_each(planned, toy, n, fraction, sizes):
    plan = planned(clients=1, view="holdout", fraction=fraction, images=toy(n=n, n_test=0))
    client = plan.clients[0]
    assert (len(client.train), len(client.held_out)) == sizes and plan.test_sets == []
    assert np.array_equal(np.sort(rows_of(plan)[0]), np.arange(n))


def test_holdout_needs_two_samples(planned, toy):
    images = toy(n=3, client=np.array(["ann", "ann", "bob"]))
    with pytest.raises(
        DataError,
        match="client 'bob' has 1 sample; holding out a part needs 2; leave it out",
    ):
        planned("writer", None, view="holdout", images=images)
    assert len(planned("writer", None, view="holdout", min_samples=2, images=images).clients) == 1


def test_shared_views_need_a_test_part(planned, toy):
    with pytest.raises(
        DataError, match="view: cluster needs a test part, which 'digits' does not have; set data.test.view: holdout"
    ):
        planned(images=toy(n_test=0))


def test_label_view_shares_one_set_where_images_are_the_same(planned):
    plan = planned(clients=8, view="label", shift={"kind": "pathological"})
    assert len(plan.test_sets) == 1 and len(plan.test_sets[0].rows) == 100
    assert [np.flatnonzero(labels).tolist() for labels in plan.labels_NC[::2]] == [[0, 1, 2], [3, 4], [5, 6], [7, 8, 9]]
    rotated = planned(clients=8, view="label", shift={"kind": "rotated_labels", "angles": [0, 180]})
    assert len(rotated.test_sets) == 2


def test_all_view_has_the_labels_that_a_group_lacks(planned):
    """Shared by groups with the same images, and changed as the group's are; `cluster` has the group's labels only."""
    plan = planned(clients=8, view="all", shift={"kind": "pathological"})
    assert [len(test_set.rows) for test_set in plan.test_sets] == [100] and plan.labels_NC is None
    assert {client.test_set for client in plan.clients} == {0}
    shift = {"kind": "rotated_labels", "angles": [0, 180], "label_sets": [[0, 1], [2]]}
    all_ = planned(clients=4, view="all", shift=shift)
    assert [client.test_set for client in all_.clients] == [0, 0, 1, 1]
    assert [(len(one.rows), one.variant.turns) for one in all_.test_sets] == [(100, 0), (100, 2)]
    own = planned(clients=4, view="cluster", shift=shift)
    assert [sorted(set(one.labels().tolist())) for one in own.test_sets] == [[0, 1], [2], [0, 1], [2]]


def test_label_view_knows_labels_as_the_group_sees_them(planned, toy):
    shift = {"kind": "shifted", "offsets": [0, 3]}
    plan = planned("classes", 20, view="label", shift=shift, classes_per_client=1, images=toy(n=40))
    assert plan.labels_NC.sum(1).tolist() == [1] * 20
    assert np.flatnonzero(plan.labels_NC[0]) == [0] and np.flatnonzero(plan.labels_NC[10]) == [3]


def test_label_view_without_a_test_image_of_any_label_names_the_client(planned, toy):
    with pytest.raises(DataError, match=r"client '9' has labels \[9\], none of which is in the test set"):
        planned("classes", 10, view="label", classes_per_client=1, images=toy(n_test=9))


def test_test_images_are_capped_once_for_all(planned):
    plan = planned(max_samples=30, shift={"kind": "rotated"})
    assert [len(one.rows) for one in plan.test_sets] == [30] * 4
    assert np.array_equal(plan.test_sets[0].rows, plan.test_sets[3].rows)


THREE_SIZES = [{"keep": 0.1, "clients": 3}, {"keep": 0.3, "clients": 3}, {"keep": 0.6, "clients": 3}]


def labels(client):
    """Returns int64 (C,): training samples of each label of a client."""
    return np.bincount(client.variant.train_labels(client.train), minlength=client.variant.data_set.num_classes)


class TestCut:
    def test_shrinks_that_many_random_clients_and_leaves_the_others(self, planned):
        cut = [{"keep": 0.1, "clients": 2}, {"keep": 0.5, "clients": 1}]
        whole, plan, other = (
            planned(clients=8, view="holdout", samples=30, cut=c, seed=seed)
            for c, seed in (([], 0), (cut, 0), (cut, 1))
        )
        sizes = [len(client.train) for client in plan.clients]
        assert sorted(sizes) == [3, 3, 15, 30, 30, 30, 30, 30]
        assert sizes != [len(client.train) for client in other.clients]
        for before, after in zip(whole.clients, plan.clients):
            assert np.array_equal(before.held_out, after.held_out), "a cut leaves held-out samples"
            assert len(after.train) < 30 or np.array_equal(before.train, after.train)

    def test_leaves_one_sample(self, planned, toy):
        plan = planned(clients=4, cut=[{"keep": 0.1, "clients": 4}], images=toy(n=8))
        assert [len(client.train) for client in plan.clients] == [1] * 4

    def test_of_more_clients_than_there_are(self, planned):
        with pytest.raises(DataError, match="cut takes 9 clients, but the federation has 8; at most 8"):
            planned(clients=8, cut=THREE_SIZES)


def test_sizes_are_those_of_the_clients_in_order_whatever_their_group(planned):
    sizes = [10, 70, 20, 5, 90, 1]
    plan = planned(clients=6, sizes=sizes, shift={"kind": "rotated", "angles": [0, 180]})
    assert [len(client.train) for client in plan.clients] == sizes
    with pytest.raises(DataError, match="group 1 of 2: data.partition.sizes add up to 401, but there are 400 samples"):
        planned(clients=2, sizes=[400, 401], shift={"kind": "rotated", "angles": [0, 180]})


def test_groups_of_the_partition_are_the_true_ones(toy, config):
    natural = {"group": (np.arange(400) // 200).astype(np.int32), "test_group": np.zeros(100, np.int32)}
    data = config("classes", 10, view="label", groups=4, classes_per_group=2, classes_per_client=1)
    plan = make_plan(toy(**natural), None, data, 0)  # the groups of the partition replace the natural ones
    assert [client.group for client in plan.clients] == [0, 0, 0, 1, 1, 1, 2, 2, 3, 3] and len(plan.test_sets) == 1
    assert [client.name for client in plan.clients] == [str(number) for number in range(10)]


class TestPool:
    def test_divides_both_parts(self, toy, config):
        images = toy()
        data = config(clients=5, view="holdout", pool=True)
        plan = make_plan(images, None, data, 0)
        assert np.array_equal(np.sort(np.concatenate(rows_of(plan))), np.arange(500)) and plan.test_sets == []
        x, y = plan.clients[0].variant.train(np.array([3, 403]))
        assert np.array_equal(x, [images.train_x[3], images.test_x[3]])
        assert y.tolist() == [images.train_y[3], images.test_y[3]]
        assert {(len(client.train), len(client.held_out)) for client in plan.clients} == {(80, 20)}

    def test_of_a_hybrid_divides_both_parts_of_both(self, planned, toy):
        plan = planned(clients=2, view="holdout", pool=True, shift={"kind": "hybrid"}, other=toy(n=200, seed=1))
        assert [len(rows) for rows in rows_of(plan)] == [500, 300]

    def test_keeps_the_groups_that_both_parts_name(self, planned, toy):
        images = toy(group=(np.arange(400) // 200).astype(np.int32), test_group=np.ones(100, np.int32))
        plan = planned(clients=4, view="holdout", pool=True, images=images)
        found = [(client.group, len(rows)) for client, rows in zip(plan.clients, rows_of(plan))]
        assert found == [(0, 100), (0, 100), (1, 150), (1, 150)]
        with pytest.raises(DataError, match="the training files name a true group, the test files do not"):
            planned(view="holdout", pool=True, images=toy(group=np.zeros(400, np.int32)))

    def test_needs_a_test_part(self, planned, toy):
        with pytest.raises(DataError, match="data.test.pool needs a test part, which 'digits' does not have"):
            planned(view="holdout", pool=True, images=toy(n_test=0))


class TestPublishedFederations:
    """Sizes, groups and test sets of the papers, on the labels of the real data."""

    @pytest.mark.parametrize("source, trained, tested", [("mnist", 9600, 2400), ("images", 8000, 2000)])
    def test_the_cfl_setting_of_stocfl(self, planned, real, source, trained, tested):
        plan = planned(clients=20, view="holdout", shift={"kind": "shifted"}, images=real(source))
        assert [client.group for client in plan.clients] == np.repeat(range(4), 5).tolist()
        assert {(len(client.train), len(client.held_out)) for client in plan.clients} == {(trained, tested)}

    def test_the_clustering_study_of_stocfl(self, planned, real):
        plans = {
            kind: planned(
                clients=200 if kind == "hybrid" else 400,
                shift={"kind": kind},
                images=real("mnist"),
                other=real("fashion_mnist") if kind == "hybrid" else None,
            )
            for kind in ("rotated", "shifted", "pathological", "hybrid")
        }
        for kind, plan in plans.items():
            assert np.bincount([client.group for client in plan.clients]).tolist() == [100] * (
                2 if kind == "hybrid" else 4
            )
            assert kind == "pathological" or {len(client.train) for client in plan.clients} == {600}
        for client in plans["pathological"].clients:
            assert np.flatnonzero(labels(client)).tolist() == [[0, 1, 2], [3, 4], [5, 6], [7, 8, 9]][client.group]

    @pytest.mark.parametrize("cut", [[], THREE_SIZES])
    def test_label_skew_of_autocfl(self, planned, real, cut):
        sets = [[0, 1, 2], [3, 4, 5, 6], [4, 5, 6, 7, 8, 9], list(range(10))]
        shift = {"kind": "pathological", "label_sets": sets}
        plan = planned(clients=20, view="label", shift=shift, samples=1800, cut=cut, images=real("mnist"))
        sizes = sorted(len(client.train) for client in plan.clients)
        assert sizes == (sorted([180, 540, 1080] * 3 + [1800] * 11) if cut else [1800] * 20)
        assert np.mean(sizes) == (1260 if cut else 1800)
        assert [client.group for client in plan.clients] == np.repeat(range(4), 5).tolist()
        tested = [np.flatnonzero(labels).tolist() for labels in plan.labels_NC]
        assert tested == [sets[client.group] for client in plan.clients]


class TestWriters:
    def images(self, toy, **known):
        return toy(n=8, n_test=4, client=np.array([7, 7, 3, 3, 9, 9, 9, 9]), **known)

    def test_keep_their_names_groups_and_the_test_images_of_their_group(self, planned, toy):
        images = self.images(
            toy, group=np.array([1, 1, 0, 0, 1, 1, 1, 1], np.int32), test_group=np.array([0, 1, 1, 1], np.int32)
        )
        plan = planned("writer", None, images=images)
        assert [(client.name, client.group, len(plan.test_sets[client.test_set].rows)) for client in plan.clients] == [
            ("3", 0, 1),
            ("7", 1, 3),
            ("9", 1, 3),
        ]

    def test_belong_to_one_group(self, planned, toy):
        with pytest.raises(DataError, match="client '9' has samples of groups 0 and 1"):
            planned("writer", None, images=self.images(toy, group=np.array([0, 0, 0, 0, 0, 0, 1, 1], np.int32)))

    def test_exist_in_every_group_of_a_shift(self, planned, toy):
        plan = planned("writer", None, shift={"kind": "rotated", "angles": [0, 180]}, images=self.images(toy))
        assert [client.name for client in plan.clients] == ["3/0", "7/0", "9/0", "3/1", "7/1", "9/1"]
        assert [client.group for client in plan.clients] == [0, 0, 0, 1, 1, 1]
