import numpy as np
import pytest
from pydantic import ValidationError

from cfl_ray.config.partition import PARTITION_KINDS
from cfl_ray.data.partition import divide, even_shares, writers
from cfl_ray.errors import DataError

LABELS = np.arange(1003) % 10
MNIST = np.repeat(np.arange(10), [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949])
FASHION = np.repeat(np.arange(10), 7000)  # both of its parts


def table(parts, y):
    """Returns int64 (N, C): samples of each class of each client."""
    return np.array([np.bincount(y[part], minlength=10) for part in parts])


def draw(seed=0, clients=20, min_samples=1, y=LABELS, **options):
    return divide(y, clients, PARTITION_KINDS.of(clients=clients, **options), min_samples, np.random.default_rng(seed))


@pytest.mark.parametrize(
    "options",
    [
        {"kind": "iid"},
        {"kind": "iid", "share_alpha": 0.5},
        {"kind": "dirichlet", "alpha": 0.5},
        {"kind": "dirichlet", "alpha": 1e-3, "clients": 3},
        {"kind": "classes", "classes_per_client": 2},
        {"kind": "dirichlet", "groups": 4, "alpha": 10, "group_alpha": 0.5},
        {"kind": "dirichlet", "alpha": 0.5, "capped": False},
        {"kind": "classes", "groups": 4},
        {"kind": "classes", "share_alpha": 0.5},
        {"kind": "classes", "share_alpha": 1.0, "groups": 4},
    ],
)
def test_every_sample_belongs_to_exactly_one_client(options):
    parts = draw(**options)
    assert np.array_equal(np.sort(np.concatenate(parts)), np.arange(len(LABELS)))
    assert all((np.diff(part) > 0).all() for part in parts)


@pytest.mark.parametrize("kind", ["iid", "dirichlet", "classes"])
def test_the_generator_decides(kind):
    first, again, other = (draw(seed, kind=kind) for seed in (0, 0, 1))
    assert all(map(np.array_equal, first, again))
    assert not all(map(np.array_equal, first, other))


def test_iid_sizes_differ_by_at_most_one():
    assert {len(part) for part in draw(kind="iid", clients=20)} == {50, 51}


def test_random_sizes_of_iid_clients_follow_the_dirichlet_distribution():
    """A share has the mean 1 / N and the variance (1 / N)(1 - 1 / N) / (N alpha + 1); labels stay mixed."""
    y = np.arange(20_000) % 10
    for alpha in (0.5, 5.0):
        sizes = np.array([[len(part) for part in draw(seed, 10, 1, y, share_alpha=alpha)] for seed in range(300)])
        assert (sizes.sum(1) == len(y)).all() and (sizes >= 1).all()
        assert np.std(sizes / len(y)) == pytest.approx((0.09 / (10 * alpha + 1)) ** 0.5, rel=0.05)
    largest = max(draw(0, 10, 1, y, share_alpha=0.5), key=len)
    assert np.abs(np.bincount(y[largest]) / len(largest) - 0.1).max() < 0.03


def test_random_sizes_of_iid_clients_are_drawn_again_until_the_smallest_has_enough(monkeypatch):
    sizes = [min(map(len, draw(share_alpha=0.5, clients=10, min_samples=least))) for least in (1, 10)]
    assert sizes[0] < 10 <= sizes[1]
    monkeypatch.setattr("cfl_ray.data.partition.MAX_REDRAWS", 20)
    with pytest.raises(DataError, match=r"client \d of 10 got \d+ samples?, each needs 90; lower data"):
        draw(share_alpha=0.1, clients=10, min_samples=90)
    with pytest.raises(ValidationError, match="sizes and share_alpha .0.5. both say how large clients are"):
        draw(share_alpha=0.5, clients=2, sizes=[1, 2])


def test_dirichlet_is_skewed_for_small_alpha_and_even_for_large():
    def classes_per_client(alpha):
        return np.mean([len(np.unique(LABELS[part])) for part in draw(kind="dirichlet", alpha=alpha)])

    assert classes_per_client(0.05) < 4 and classes_per_client(1000.0) > 9.5


@pytest.mark.parametrize("alpha", [1e-300, 1e-100, 1e100, 1e300])
def test_concentrations_at_their_limits(alpha):
    """Small ones give all samples of a class to one client, each equally likely; large ones equal shares."""
    y = np.zeros(1000, int)
    owners = np.zeros(5)
    for seed in range(200):
        parts = draw(seed, 5, 1, y, kind="classes", classes_per_client=1, share_alpha=alpha)
        sizes = np.array([len(part) for part in parts])
        assert sizes.sum() == 1000 and (
            sorted(sizes) == [1, 1, 1, 1, 996] if alpha < 1 else (abs(sizes - 200) <= 1).all()
        )
        owners[sizes.argmax()] += 1
    if alpha < 1:  # binomial (200, 1/5): 40 +- 5.7
        assert abs(owners - 40).max() < 4 * 5.7


@pytest.mark.parametrize(
    "key, kind",
    [("alpha", "dirichlet"), ("group_alpha", "dirichlet"), ("share_alpha", "classes"), ("share_alpha", "iid")],
)
@pytest.mark.parametrize(
    "value, message",
    [
        (0, "greater than 0"),
        (-1, "greater than 0"),
        (float("inf"), "a finite number"),
        (float("nan"), "a finite number"),
        (5e-324, "must lie between 1e-300 and 1e[+]300, got 4.94066e-324"),
        (1e-310, "must lie between 1e-300 and 1e[+]300, got 1e-310"),
        (1e308, "must lie between 1e-300 and 1e[+]300, got 1e[+]308"),
    ],
)
def test_concentrations_beyond_their_limits(key, kind, value, message):
    with pytest.raises(ValidationError, match=f"{key}\n.*{message}"):
        PARTITION_KINDS.of(kind=kind, **{key: value})


def test_dirichlet_redraws_until_the_smallest_client_has_enough():
    sizes = {
        least: min(len(part) for part in draw(kind="dirichlet", alpha=0.3, min_samples=least)) for least in (1, 20)
    }
    assert sizes[1] < 20 <= sizes[20]


def test_dirichlet_that_cannot_succeed_names_the_client_and_what_to_change(monkeypatch):
    monkeypatch.setattr("cfl_ray.data.partition.MAX_REDRAWS", 20)
    with pytest.raises(
        DataError,
        match=r"in 20 draws .* client \d+ of 20 got \d+ of 1003, each needs 50\. "
        r"Raise .*alpha .*lower clients.*lower min_samples",
    ):
        draw(kind="dirichlet", alpha=0.01, min_samples=50)


def test_random_shares_of_classes_spread_sizes_and_leave_each_owner_a_sample():
    even, random, wild = (
        table(draw(y=MNIST, clients=100, kind="classes", share_alpha=alpha), MNIST) for alpha in (None, 1.0, 0.05)
    )
    for counts_NC in (even, random, wild):
        assert ((counts_NC > 0).sum(1) == 2).all() and counts_NC.sum() == len(MNIST)
    assert np.array_equal(even > 0, random > 0), "the same owners, whatever their shares"
    spread = [counts_NC.sum(1).std() / counts_NC.sum(1).mean() for counts_NC in (even, random, wild)]
    assert spread[0] < 0.2 and 0.4 < spread[1] < 1.0 < spread[2], spread


def test_random_shares_are_drawn_again_until_the_smallest_client_has_enough(monkeypatch):
    sizes = [
        min(map(len, draw(y=MNIST, clients=100, kind="classes", share_alpha=1.0, min_samples=least)))
        for least in (1, 100)
    ]
    assert sizes[0] < 100 <= sizes[1]
    monkeypatch.setattr("cfl_ray.data.partition.MAX_REDRAWS", 20)
    with pytest.raises(
        DataError, match=r"client \d+ of 100 got \d+ samples, each needs 500; lower data.partition.client"
    ):
        draw(y=MNIST, clients=100, kind="classes", share_alpha=1.0, min_samples=500)


def test_classes_counts_the_classes_that_exist_in_the_group():
    y = np.array([3, 4] * 50)
    assert all(len(np.unique(y[part])) == 2 for part in draw(y=y, kind="classes", classes_per_client=2))
    with pytest.raises(DataError, match="classes_per_client is 3, but the samples of this group have 2 classes"):
        draw(y=y, kind="classes", classes_per_client=3)


def test_more_clients_than_samples_is_an_error():
    with pytest.raises(
        DataError,
        match="2000 clients cannot hold at least 1 sample each of 1003 samples; lower data.partition.clients",
    ):
        draw(kind="iid", clients=2000)


def test_classes_that_starves_a_client_names_it():
    y = np.repeat(np.arange(10), [191, 1, 1, 1, 1, 1, 1, 1, 1, 1])
    with pytest.raises(DataError, match=r"client \d+ of 40 got 0 samples, each needs 1; lower data.partition.clients"):
        draw(y=y, kind="classes", classes_per_client=1, clients=40)


class TestPublishedDivisions:
    """The federations of the papers, on the label counts of their data sets."""

    @pytest.mark.parametrize("s", [2, 3])
    def test_label_skew_of_fedclust(self, s):
        counts_NC = table(draw(y=FASHION, clients=100, kind="classes", classes_per_client=s), FASHION)
        assert ((counts_NC > 0).sum(1) == s).all() and all(counts_NC[client, client % 10] for client in range(100))
        for shares, owners in zip(counts_NC.T, (counts_NC > 0).sum(0)):
            assert owners >= 10 and sorted({*shares} - {0}) in ([7000 // owners], [7000 // owners, 7000 // owners + 1])

    @pytest.mark.parametrize("capped", [True, False])
    def test_dirichlet_of_fedclust_and_fedac(self, capped):
        counts_NC = table(draw(y=MNIST, clients=100, kind="dirichlet", alpha=0.1, capped=capped, min_samples=10), MNIST)
        assert counts_NC.sum(1).min() >= 10 and np.array_equal(counts_NC.sum(0), np.bincount(MNIST))
        assert np.median((counts_NC / counts_NC.sum(1, keepdims=True)).max(1)) > 0.5, "one class is most of a client"

    def test_only_the_cap_ends_at_one_class_beyond_an_even_share(self):
        def beyond(capped):  # before its last class, a capped client has less than an even share
            counts_NC = table(draw(y=MNIST, clients=10, kind="dirichlet", alpha=0.5, capped=capped), MNIST)
            before = [counts[: np.flatnonzero(counts)[-1]].sum() for counts in counts_NC]
            return max(before) >= 6000

        assert not beyond(True) and beyond(False)

    @pytest.mark.parametrize("groups", [5, 10])
    @pytest.mark.parametrize("capped", [True, False])
    def test_cluster_wise_dirichlet_of_fed_cam(self, groups, capped):
        options = {"kind": "dirichlet", "groups": groups, "group_alpha": 0.1, "alpha": 10, "capped": capped}
        counts_GNC = table(draw(y=FASHION, clients=200, min_samples=64, **options), FASHION).reshape(
            groups, 200 // groups, 10
        )
        assert counts_GNC.sum() == 70_000 and counts_GNC.sum(2).min() >= 64
        share_GNC = counts_GNC / counts_GNC.sum(2, keepdims=True)
        mean_GC = share_GNC.mean(1)
        within = np.abs(share_GNC - mean_GC[:, None]).sum(2).mean()  # total variation, twice
        between = np.abs(mean_GC[:, None] - mean_GC).sum(2)[~np.eye(groups, dtype=bool)].mean()
        assert between > 1.0 > 0.5 > within

    def test_cluster_wise_n_class_of_fed_cam(self):
        counts_NC = table(
            draw(y=FASHION, clients=200, kind="classes", groups=10, classes_per_group=3, classes_per_client=2), FASHION
        )
        held_GNC = (counts_NC > 0).reshape(10, 20, 10)
        assert (held_GNC.sum(2) == 2).all() and (held_GNC.any(1).sum(1) == 3).all() and counts_NC.sum() == 70_000
        assert (held_GNC.any(1).sum(0) == 3).all(), "10 groups of 3 use each of 10 classes 3 times"
        for shares in counts_NC.T:  # images of a class: as evenly as possible among its owners of all groups
            assert np.ptp(shares[shares > 0]) <= 1

    @pytest.mark.parametrize("groups, per_group", [(5, 3), (7, 3), (10, 4), (3, 10), (6, 9)])
    def test_the_use_of_classes_by_groups_is_balanced(self, groups, per_group):
        for seed in range(5):
            options = {"groups": groups, "classes_per_group": per_group, "classes_per_client": 1}
            parts = draw(seed, y=MNIST, clients=groups * per_group, kind="classes", **options)
            counts_NC = table(parts, MNIST)
            used_GC = (counts_NC > 0).reshape(groups, per_group, 10).any(1)
            assert (used_GC.sum(1) == per_group).all() and np.ptp(used_GC.sum(0)) <= 1

    def test_the_ten_sizes_of_autocfl(self):
        sizes = [380, 3100, 1150, 510, 640, 380, 2680, 2200, 380, 1020]
        parts = draw(y=MNIST, clients=10, kind="iid", sizes=sizes)
        assert [len(part) for part in parts] == sizes and len(np.unique(np.concatenate(parts))) == sum(sizes)
        assert table(parts, MNIST).min() > 15, "every class is there"
        with pytest.raises(DataError, match="data.partition.sizes add up to 60001, but there are 60000 samples"):
            draw(y=MNIST, clients=2, kind="iid", sizes=[60_000, 1])


def test_a_class_with_fewer_images_than_owners_goes_to_the_first_of_them():
    y = np.repeat([0, 1], [20, 1])
    parts = draw(y=y, clients=4, kind="classes", classes_per_client=2)
    assert [np.bincount(y[part], minlength=2).tolist() for part in parts] == [[5, 1], [5, 0], [5, 0], [5, 0]]


def test_an_empty_group_is_drawn_again():
    y = np.arange(40) % 2  # 4 groups at alpha 0.05 over 2 classes: mostly, some group is empty
    for seed in range(8):
        with np.errstate(all="raise"):
            parts = draw(
                seed, y=y, clients=8, kind="dirichlet", groups=4, group_alpha=0.05, alpha=10, capped=seed % 2 == 0
            )
        assert min(map(len, parts)) >= 1 and sum(map(len, parts)) == 40


def test_groups_that_do_not_fit(monkeypatch):
    with pytest.raises(DataError, match="classes_per_group is 11, but the samples of this group have 10 classes"):
        draw(kind="classes", groups=2, classes_per_group=11)
    with pytest.raises(DataError, match="clients is 20, but there are 21 groups and each needs a client"):
        draw(kind="dirichlet", groups=21)
    monkeypatch.setattr("cfl_ray.data.partition.MAX_REDRAWS", 20)
    with pytest.raises(DataError, match=r"alpha \(now 10\) or group_alpha \(now 0.01\)"):
        draw(kind="dirichlet", groups=5, alpha=10, group_alpha=0.01, min_samples=50)


def test_shares_are_even_and_the_first_groups_take_the_rest():
    assert even_shares(10, 4) == [3, 3, 2, 2] and even_shares(20, 4) == [5] * 4


class TestWriters:
    IDS = np.array(["b", "a", "c", "a", "b", "a"])

    def draw(self, seed=0, **limits):
        return writers(self.IDS, PARTITION_KINDS.of(kind="writer", **limits), "toy", np.random.default_rng(seed))

    def test_keep_their_samples_and_are_sorted_by_name(self):
        found = self.draw(clients=None)
        assert [(name, rows.tolist()) for name, rows in found] == [("a", [1, 3, 5]), ("b", [0, 4]), ("c", [2])]

    def test_small_ones_are_excluded(self):
        assert [name for name, _ in self.draw(clients=None, min_samples=2)] == ["a", "b"]

    def test_clients_draws_that_many(self):
        chosen = {tuple(name for name, _ in self.draw(seed, clients=2)) for seed in range(20)}
        assert chosen == {("a", "b"), ("a", "c"), ("b", "c")}

    def test_too_few_left_is_an_error_with_the_numbers(self):
        for limits in ({"clients": None, "min_samples": 4}, {"clients": 3, "min_samples": 2}):
            with pytest.raises(DataError, match=r"but \d of 3 writers have at least \d samples \(the largest has 3\)"):
                self.draw(**limits)

    def test_data_without_writers_are_an_error_that_names_data_with_writers(self):
        with pytest.raises(
            DataError,
            match="which 'mnist' does not name; set data.columns.client .csv, images, hf_disk.*or use femnist",
        ):
            writers(None, PARTITION_KINDS.of(kind="writer"), "mnist", np.random.default_rng(0))


class TestOwnPartition:
    def test_is_passed_labels_clients_and_draw(self):
        seen = {}

        def halves(labels, clients, draw, first=0.5):
            seen.update(labels=labels, clients=clients)
            rows = draw.permutation(len(labels))
            return np.split(rows, [int(first * len(labels))])

        parts = draw(clients=2, kind=halves, options={"first": 0.25})
        assert [len(part) for part in parts] == [250, 753] and all((np.diff(part) > 0).all() for part in parts)
        assert np.array_equal(seen["labels"], LABELS) and seen["labels"].dtype == np.int64 and seen["clients"] == 2

    @pytest.mark.parametrize(
        "result, message",
        [
            (None, "returned None, expected a list of 2 arrays of positions"),
            ([np.arange(5)], "returned list of 1, expected a list of 2 arrays"),
            (
                [np.arange(5), np.zeros((2, 2), int)],
                r"and shape \(2, 2\) for client 1, expected integers of shape \(n,\)",
            ),
            ([np.arange(5), np.array([0.5])], "float64 and shape .* for client 1, expected integers"),
            ([np.arange(5), np.array([7, 1003])], "position 1003 for client 1; there are 1003 samples, 0..1002"),
            ([np.arange(5), np.array([-1])], "position -1 for client 1"),
            ([np.arange(5), np.arange(4, 9)], "position 4 for client 0 and for client 1; .*, 1 of 10 positions"),
            ([np.array([3, 3]), np.arange(5, 9)], "position 3 for client 0 and for client 0"),
        ],
    )
    def test_results_that_are_no_division_name_the_function(self, result, message):
        with pytest.raises(DataError, match=rf"data.partition .*<lambda> \(.*.py, line \d+\) .*{message}"):
            draw(clients=2, kind=lambda labels, clients, draw: result)

    def test_too_few_samples_for_a_client(self):
        with pytest.raises(DataError, match=r"client 1 of 2 got 3 samples, each needs 5; lower data.partition.clients"):
            draw(clients=2, min_samples=5, kind=lambda labels, clients, draw: [np.arange(9), np.arange(9, 12)])
