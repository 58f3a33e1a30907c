import pickle

import numpy as np
import pytest
import torch

from cfl_ray.data import federation_from_arrays
from cfl_ray.data.chained import grown
from cfl_ray.data.changes import ChangingFederation, DataChange
from cfl_ray.data.replay import ReplayedFederation
from cfl_ray.data.split import SplitFederation, with_validation
from cfl_ray.data.synthetic import SyntheticFederation
from cfl_ray.errors import DataError


def arrays(sizes=(20, 10, 1), first=0, **options):
    """A federation with a client for each size; the number of a sample is its input."""
    count = sum(sizes)
    x, y = np.arange(count, dtype=np.float32)[:, None] + 1000 * first, np.arange(count) % 2
    names = np.repeat(np.arange(len(sizes)) + first, sizes)
    x_test, y_test = np.zeros((4, 1), np.float32), np.arange(4) % 2
    return federation_from_arrays(x, y, names, **{"x_test": x_test, "y_test": y_test} | options)


def equal(samples, others):
    return all(map(torch.equal, samples, others))


def of(samples):
    return samples[0].flatten().tolist()


@pytest.mark.parametrize("order", ["random", "last"])
def test_training_and_validation_samples_are_apart_and_complete(order):
    base = arrays()
    split = with_validation(base, 0.2, order, seed=3)
    assert split.num_samples_N.tolist() == [16, 8, 1] and split.validation.num_samples_N.tolist() == [4, 2, 0]
    for client in range(3):
        trained, validated = of(split.train(client)), of(split.validation.test(client))
        assert sorted(trained + validated) == of(base.train(client))
        assert trained == sorted(trained) and len(validated) == split.validation.num_samples_N[client]
        assert equal(split.test(client), base.test(client))
        assert torch.equal(split.train_targets(client), split.train(client)[1])
    if order == "last":
        assert of(split.validation.test(0)) == [16, 17, 18, 19]
    assert "1 of 3 clients are too small" in split.notes[-1] and "6 in all" in split.notes[-1]
    assert split.content != base.content
    again = pickle.loads(pickle.dumps(split))
    assert equal(again.train(0), split.train(0)) and again.validation.num_samples_N.tolist() == [4, 2, 0]


def test_own_validation_data_stay():
    split = with_validation(arrays(), 0.2, "last", 0)
    assert with_validation(split, 0.5, "random", 0) is split


def test_a_fraction_that_no_client_has():
    with pytest.raises(DataError, match=r"0.01 of the largest client's 20 training samples is none"):
        with_validation(arrays(), 0.01, "last", 0)


def test_generated_clients_hold_out_some_of_their_samples():
    base = SyntheticFederation(6, input=(3,), classes=2, groups=2, samples=10)
    split = with_validation(base, 0.3, "random", 0)
    assert split.num_samples_N.tolist() == [7] * 6 and len(split.train(5)[1]) == 7
    assert split.group_N.tolist() == [0, 1] * 3 and split.test_set_of(np.array([1])).tolist() == [1]


def test_labels_are_those_left_for_training():
    y = np.array([0, 0, 0, 0, 1, 0, 0, 0, 0, 1])
    options = {"x_test": np.zeros((2, 1), np.float32), "y_test": np.array([0, 1]), "view": "label"}
    base = federation_from_arrays(np.zeros((10, 1), np.float32), y, np.repeat([0, 1], 5), **options)
    split = with_validation(base, 0.2, "last", 0)  # takes the only samples of class 1
    assert base.labels_of(np.arange(2)).all() and split.labels_of(np.arange(2)).tolist() == [[True, False]] * 2
    assert split.test(0)[1].tolist() == [0] and split.validation.test(0)[1].tolist() == [1]


class TestLiveChanges:
    def test_validation_data_change_as_training_data_do(self):
        change = DataChange(2, (0,), offset=1)
        changing = ChangingFederation(with_validation(arrays(), 0.2, "random", 0), [change])
        before, after = (changing.at(round).validation.test(0) for round in (1, 2))
        assert torch.equal(before[0], after[0]) and torch.equal(1 - before[1], after[1])

    def test_sizes_follow_the_data(self):
        changing = ChangingFederation(with_validation(arrays(), 0.2, "random", 0), [DataChange(2, (2,), data_of=(0,))])
        assert changing.at(2).num_samples_N.tolist() == [16, 8, 16]
        assert changing.at(2).validation.num_samples_N.tolist() == [4, 2, 4]
        whole = changing.at(2).whole
        assert whole.num_samples_N.tolist() == [20, 10, 20] and len(whole.train(2)[1]) == 20

    def test_parts_of_one_client_have_versions_of_their_own(self):
        changing = ChangingFederation(with_validation(arrays(), 0.2, "random", 0), [DataChange(2, (0,), offset=1)])
        versions = [
            part.data_version(0) for round in (1, 2) for part in (changing.at(round), changing.at(round).validation)
        ]
        assert len(set(versions)) == 4

    def test_replayed_rounds(self):
        changing = ChangingFederation(with_validation(arrays(), 0.2, "random", 0), [DataChange(2, (0,), offset=1)])
        replayed = ReplayedFederation(changing, 2, {0: (1, 2)})
        y = replayed.validation.test(0)[1]
        assert len(replayed.train(0)[1]) == 32 and torch.equal(y[:4], 1 - y[4:])
        assert len(replayed.validation.test(1)[1]) == 2

    def test_newcomers_hold_out_the_same_share(self):
        whole = grown(with_validation(arrays(), 0.2, "last", 0), arrays((10, 2), first=5))
        assert whole.num_samples_N.tolist() == [16, 8, 1, 8, 2]
        assert whole.validation.num_samples_N.tolist() == [4, 2, 0, 2, 0]
        assert of(whole.validation.test(3)) == [5008, 5009]
        more = grown(whole, arrays((5,), first=9))
        assert isinstance(more.parts[-1], SplitFederation) and more.validation.num_samples_N[-1] == 1

    def test_newcomers_without_validation_data_join_a_run_without_them(self):
        assert grown(arrays(), arrays((10, 2), first=5)).validation is None
