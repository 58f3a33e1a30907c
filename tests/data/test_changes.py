"""Federations whose clients' data change from round to round."""

import pickle

import numpy as np
import pytest
import torch
from closeness import close
from federations import planted, uneven

from cfl_ray import config, data
from cfl_ray.data import federation_from_arrays, shifts
from cfl_ray.data.changes import ChangingFederation, DataChange, Domain
from cfl_ray.errors import DataError


def equal(a, b):
    return all(torch.equal(one, other) for one, other in zip(a, b))


@pytest.fixture
def base():
    return planted(6, groups=2, samples=20)


def test_before_the_first_change_it_is_the_base_itself(base):
    changing = ChangingFederation(base, [DataChange(5, (0,), turns=1)])
    assert changing.at(0) is base and changing.at(4) is base and changing.at(5) is not base
    assert {round: ids.tolist() for round, ids in changing.changed_in.items()} == {5: [0]}
    assert base.at(7) is base and base.changed_in == {}


def test_rotation_and_relabelling_add_up_and_affect_no_other_client(base):
    changing = ChangingFederation(
        base, [DataChange(2, (0, 3), turns=1, offset=1), DataChange(4, (3,), turns=2, offset=2)]
    )
    x, y = base.train(3)
    for now, turns, offset in (
        (changing.at(2), 1, 1),
        (changing.at(3), 1, 1),
        (changing.at(4), 3, 3),
        (changing.at(99), 3, 3),
    ):
        assert equal(now.train(3), (torch.from_numpy(np.rot90(x.numpy(), turns, (-2, -1)).copy()), (y + offset) % 4))
        for other in (1, 2, 4, 5):
            assert equal(now.train(other), base.train(other)) and equal(now.test(other), base.test(other))


def test_a_client_is_tested_on_its_changed_distribution(base):
    now = ChangingFederation(base, [DataChange(1, (3,), turns=1, offset=2)]).at(1)
    x, y = base.test(3)
    assert equal(now.test(3), (torch.rot90(x, 1, (-2, -1)), (y + 2) % 4))
    number = int(now.test_set_of(np.array([1, 3]))[1])
    assert now.test_set_of(np.array([1, 3])).tolist() == [1, 2] and now.num_test_sets() == 3
    assert equal(now.test_set(number), now.test(3)) and equal(now.test_set(0), base.test_set(0))
    with pytest.raises(IndexError):
        now.test_set(3)


def test_two_labels_take_each_others_place(base):
    changing = ChangingFederation(base, [DataChange(2, (0, 1), swap=(1, 3)), DataChange(4, (1,), swap=(3, 1))])
    x, y = base.train(0)
    now = changing.at(2)
    assert equal(now.train(0), (x, torch.tensor([0, 3, 2, 1])[y])) and equal(now.train(2), base.train(2))
    assert equal(now.test(0), (base.test(0)[0], torch.tensor([0, 3, 2, 1])[base.test(0)[1]]))
    assert equal(now.test_set(int(now.test_set_of(np.array([0]))[0])), now.test(0))
    assert base.group_N.tolist() == [0, 1, 0, 1, 0, 1] and now.group_N.tolist() == [2, 3, 0, 1, 0, 1]
    assert changing.at(4).group_N.tolist() == [2, 1, 0, 1, 0, 1]  # swapped back
    assert equal(changing.at(4).train(1), base.train(1)) and changing.at(4).num_test_sets() == 3


def test_a_swap_follows_the_offset_of_the_same_change_and_adds_up_with_earlier_ones(base):
    changing = ChangingFederation(base, [DataChange(1, (0,), offset=1, swap=(0, 1)), DataChange(2, (0,), swap=(1, 2))])
    # 0 1 2 3, moved by 1: 1 2 3 0, then 0 and 1 swapped: 0 2 3 1, then 1 and 2: 0 1 3 2
    for round, labels in ((1, [0, 2, 3, 1]), (2, [0, 1, 3, 2])):
        assert equal(changing.at(round).train(0), (base.train(0)[0], torch.tensor(labels)[base.train(0)[1]]))
    with pytest.raises(DataError, match="schedule, round 3: swap names label 4, the labels are 0 .. 3"):
        ChangingFederation(base, [DataChange(3, (0,), swap=(4, 1))])


def test_two_clients_swap_their_data(base):
    now = ChangingFederation(base, [DataChange(1, (0, 1), data_of=(1, 0))]).at(1)
    assert equal(now.train(0), base.train(1)) and equal(now.train(1), base.train(0))
    assert now.group_N.tolist() == [1, 0, 0, 1, 0, 1] and now.test_set_of(np.arange(2)).tolist() == [1, 0]


def test_data_are_taken_over_in_their_present_state(base):
    changing = ChangingFederation(
        base,
        [DataChange(1, (0,), offset=1), DataChange(2, (5,), data_of=(0,), offset=1), DataChange(3, (0,), offset=1)],
    )
    assert equal(changing.at(3).train(5), (base.train(0)[0], (base.train(0)[1] + 2) % 4))


def test_sizes_follow_the_data():
    base = uneven([10, 20, 30])
    now = ChangingFederation(base, [DataChange(2, (0,), data_of=(2,))]).at(2)
    assert now.num_samples_N.tolist() == [30, 20, 30] and base.num_samples_N.tolist() == [10, 20, 30]
    assert len(now.train(0)[1]) == 30 and equal(now.holdout(0), base.holdout(2))


def test_a_change_that_is_undone_leaves_no_trace(base):
    changing = ChangingFederation(base, [DataChange(1, (0,), turns=1), DataChange(2, (0,), turns=3)])
    assert changing.at(1).num_test_sets() == 3 and changing.at(2).num_test_sets() == 2
    assert changing.at(2).group_N.tolist() == base.group_N.tolist()


class TestGroups:
    def test_planted_groups_are_label_offsets_of_one_another(self, base):
        """Group g has x = prototype[(y + g) mod C]: relabelled by 1, group 1 becomes group 0 and group 0 a new one."""
        now = ChangingFederation(base, [DataChange(1, (0, 1), offset=1)]).at(1)
        assert now.group_N.tolist() == [2, 0, 0, 1, 0, 1]
        x, y = now.train(1)
        same = base.train(0)
        means = [torch.stack([part[0][part[1] == c].mean(0) for c in range(4)]) for part in ((x, y), same)]
        assert (means[0] - means[1]).abs().max() < 0.5 * (means[0] - means[1].roll(1, 0)).abs().max()

    def test_rotated_shards_know_their_angles(self, tmp_path):
        experiment = config.load(None, ["data.partition.clients=8"])  # digits by 0, 90, 180, 270: two clients each
        federation = data.build(experiment.data, 0, tmp_path)
        now = ChangingFederation(federation, [DataChange(1, (0, 6), turns=1), DataChange(1, (2,), offset=1)]).at(1)
        assert federation.group_N.tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
        assert now.group_N.tolist() == [1, 0, 4, 1, 2, 2, 0, 3]
        assert equal(now.test(0), federation.test(2))  # the same images, turned as often

    def test_without_groups_those_of_the_drift_are_known(self):
        """All clients are one group; who has the same new data shares a new one, and old data are group 0 again."""
        changes = [
            DataChange(2, (0, 1), offset=1),
            DataChange(3, (2,), swap=(0, 1)),
            DataChange(4, (0,), back_to=1),
            DataChange(5, (3,), data_of=(1,)),
        ]
        base = uneven([4, 4, 4, 4])
        changing = ChangingFederation(base, changes)
        found = [changing.at(round).group_N.tolist() for round in range(1, 6)]
        assert found == [[0, 0, 0, 0], [1, 1, 0, 0], [1, 1, 2, 0], [0, 1, 2, 0], [0, 1, 2, 1]]
        assert changing.at(1).data_version(0) == base.data_version(0) and base.group_N is None

    def test_without_groups_and_drift_they_stay_unknown(self):
        """Clients that swap their data do not give them another distribution."""
        now = ChangingFederation(uneven([4, 4]), [DataChange(1, (0, 1), data_of=(1, 0))]).at(1)
        assert now.group_N is None


def test_label_view_follows_the_labels():
    draw = np.random.default_rng(0)
    x, y = draw.random((40, 3)).astype("float32"), np.repeat([0, 1, 2, 3], 10)
    base = federation_from_arrays(x, y, np.repeat([0, 1], 20), x_test=x, y_test=y, num_classes=4, view="label")
    now = ChangingFederation(base, [DataChange(1, (0,), offset=3)]).at(1)  # labels 0, 1 become 3, 0
    assert now.labels_of(np.array([1, 0])).tolist() == [[False, False, True, True], [True, False, False, True]]
    swapped = ChangingFederation(base, [DataChange(1, (0,), swap=(1, 2))]).at(1)  # labels 0, 1 become 0, 2
    assert swapped.labels_of(np.array([0])).tolist() == [[True, False, True, False]]
    assert sorted(now.test(0)[1].unique().tolist()) == [0, 3] and len(now.test(0)[1]) == 20


def test_pickles_as_its_base_and_schedule(base):
    changing = ChangingFederation(base, [DataChange(2, (0,), turns=1)])
    assert changing.at(2).group_N is not None  # computed attributes are not pickled
    again = pickle.loads(pickle.dumps(changing))
    assert len(pickle.dumps(changing)) < 1000 and equal(again.at(2).train(0), changing.at(2).train(0))
    assert again.at(2).test_set_of(np.array([0])) == [2]


@pytest.mark.parametrize(
    "change, message",
    [
        (
            DataChange(3, (6,), offset=1),
            "schedule, round 3: client 6 does not exist; the federation has clients 0 .. 5",
        ),
        (DataChange(3, (1,), data_of=(-1,)), "schedule, round 3: client -1 does not exist"),
        (DataChange(3, (1, 1), offset=1), "schedule, round 3: change.clients names a client twice"),
    ],
)
def test_clients_that_do_not_exist(base, change, message):
    with pytest.raises(DataError, match=message):
        ChangingFederation(base, [change])


def test_only_images_can_be_rotated():
    with pytest.raises(
        DataError, match=r"rotate by 90 degrees needs square images .*, these samples have shape \(6,\)"
    ):
        ChangingFederation(uneven([4, 4]), [DataChange(1, (0,), turns=1)])
    with pytest.raises(DataError, match=r"rotate by 180 degrees needs images .*, these samples have shape \(6,\)"):
        ChangingFederation(uneven([4, 4]), [DataChange(1, (0,), turns=2)])


class TestDomains:
    @pytest.fixture(scope="class")
    def digits(self, tmp_path_factory):
        """Integer pixels 0..16, normalised, with two rotations."""
        settings = config.DataConfig.model_validate(
            {
                "source": "digits",
                "shift": {"kind": "rotated", "angles": [0, 90]},
                "partition": {"clients": 4, "samples": 30},
                "normalize": [[0.3], [0.4]],
                "test": {"view": "cluster"},
            }
        )
        return data.build(settings, seed=1, shards=tmp_path_factory.mktemp("shards"))

    @pytest.mark.parametrize(
        "kind, amount, expected",
        [
            ("brightness", 0.5, lambda x: np.rint(x * 0.5)),
            ("blur", 0.7, lambda x: shifts.blurred(x, x, 0, None, amount=0.7, scale=16)[0]),
        ],
    )
    def test_the_stored_pixels_are_changed(self, digits, kind, amount, expected):
        now = ChangingFederation(digits, [DataChange(1, (2,), domain=Domain(kind, amount))]).at(1)
        stored = np.rint((digits.train(2)[0].double().numpy() * 0.4 + 0.3) * 16).astype(np.int64)
        x = torch.from_numpy(expected(stored).astype(np.float32) / 16)
        assert close(now.train(2)[0], (x - 0.3) / 0.4, 1e-5) and not equal(now.train(2), digits.train(2))
        assert torch.equal(now.train(2)[1], digits.train(2)[1]) and equal(now.train(1), digits.train(1))

    def test_noise_has_its_deviation_and_is_the_same_in_every_call(self):
        federation = planted(6, groups=2, samples=400)
        changing = ChangingFederation(federation, [DataChange(1, (0, 1), domain=Domain("noise", 0.2, seed=3))])
        noise = changing.at(1).train(0)[0] - federation.train(0)[0]
        other = changing.at(1).train(1)[0] - federation.train(1)[0]
        assert (
            abs(float(noise.std()) - 0.2) < 0.01 and abs(float(noise.mean())) < 0.01 and not torch.equal(noise, other)
        )
        assert equal(pickle.loads(pickle.dumps(changing)).at(2).train(0), changing.at(1).train(0))

    @pytest.mark.parametrize("kind", ["noise", "brightness"])
    def test_a_client_is_tested_in_its_domain(self, digits, kind):
        now = ChangingFederation(digits, [DataChange(1, (0, 2), domain=Domain(kind, 0.2))]).at(1)
        for client in (0, 2):
            x, y = now.test_set(int(now.test_set_of(np.array([client]))[0]))
            assert equal(now.test(client), (x, y)) and not equal((x, y), digits.test(client))

    def test_a_client_with_few_test_images_is_tested_on_images_of_its_test_set(self, digits):
        """With the noise of that set, on which shared models are tested."""
        changes = [
            DataChange(1, (0,), domain=Domain("brightness", 0.5)),
            DataChange(1, (1, 2), swap=(1, 2), domain=Domain("noise", 1)),
        ]
        now = ChangingFederation(digits, changes).at(1)
        for client in (0, 1, 2, 1):
            x, y = now.test_set(int(now.test_set_of(np.array([client]))[0]))
            rows = now.test_rows(client, y.numpy(), 7, 0)
            assert len(rows) == 7 and equal(now.test(client, 7), (x[rows], y[rows]))
            assert equal(now.test(client), (x, y)) and not equal(now.test(client, 7), digits.test(client, 7))

    def test_held_out_images_have_one_noise(self):
        x = np.random.default_rng(0).random((20, 4), np.float32)
        own = federation_from_arrays(x, np.arange(20) % 3, np.repeat([0, 1], 10), holdout=0.4)
        now = ChangingFederation(own, [DataChange(1, (1,), domain=Domain("noise", 1))]).at(1)
        assert equal(now.test(1, 100), now.holdout(1)) and not equal(now.test(1), own.test(1))

    def test_the_latest_domain_counts_and_is_a_group_of_its_own(self, digits):
        changes = [
            DataChange(1, (0, 1), domain=Domain("brightness", 0.5)),
            DataChange(3, (1,), turns=1, domain=Domain("brightness", 0.25)),
            DataChange(5, (0, 1), back_to=0),
        ]
        changing = ChangingFederation(digits, changes)
        before = digits.group_N.tolist()
        assert before == [0, 0, 1, 1] and changing.at(1).group_N.tolist() == [2, 2, 1, 1]
        assert changing.at(3).group_N.tolist() == [2, 3, 1, 1] and changing.at(5).group_N.tolist() == before
        once = ChangingFederation(digits, [DataChange(3, (1,), turns=1, domain=Domain("brightness", 0.25))])
        assert equal(changing.at(3).train(1), once.at(3).train(1)) and equal(changing.at(5).train(1), digits.train(1))

    def test_a_blur_needs_images(self):
        with pytest.raises(
            DataError, match=r"round 1: blur needs images, these samples are of shape \(6,\); use relabel"
        ):
            ChangingFederation(uneven([4, 4]), [DataChange(1, (0,), domain=Domain("blur", 1.0))])


def test_a_client_gets_the_data_of_an_earlier_round_again(base):
    changes = [
        DataChange(3, (0, 1), turns=1),
        DataChange(5, (0,), offset=1),
        DataChange(7, (0, 1), back_to=4, offset=2),
        DataChange(9, (0, 1), back_to=0),
    ]
    changing = ChangingFederation(base, changes)
    for client in (0, 1):
        x, y = base.train(client)
        assert equal(changing.at(7).train(client), (torch.rot90(x, 1, (-2, -1)), (y + 2) % 4))
        assert equal(changing.at(9).train(client), base.train(client))
    assert changing.at(9).group_N.tolist() == base.group_N.tolist()


def test_a_change_without_effect_is_worth_a_warning(base):
    changes = [
        DataChange(2, (0, 1, 2), offset=4),  # of 4 classes
        DataChange(3, (1,), data_of=(1,)),
        DataChange(5, (0,), back_to=3),
        DataChange(5, (0, 1), swap=(0, 1)),
        DataChange(6, (0, 2), back_to=3),  # client 0 changes
    ]
    about = [(2, "clients 0-2"), (3, "client 1"), (5, "client 0")]
    assert ChangingFederation(base, changes).warnings == [
        f"schedule, round {round}: the change of {who} has no effect: the data are then as before"
        for round, who in about
    ]
