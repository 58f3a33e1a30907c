import pickle

import numpy as np
import pytest
import torch

from cfl_ray.data import federation_from_arrays
from cfl_ray.errors import DataError

RNG = np.random.default_rng(0)
X = RNG.integers(0, 256, (40, 1, 3, 3), dtype=np.uint8)
Y = np.arange(40) % 4
CLIENTS = np.array(["b", "a", "c", "a"] * 10)


def test_clients_are_numbered_in_order_of_their_ids():
    federation = federation_from_arrays(X, Y, CLIENTS, x_test=X[:8], y_test=Y[:8])
    assert [federation.client_name(client) for client in range(3)] == ["a", "b", "c"]
    assert federation.num_samples_N.tolist() == [20, 10, 10]
    x, y = federation.train(1)
    assert torch.equal(x, torch.from_numpy(X[CLIENTS == "b"]) / 255) and y.tolist() == Y[CLIENTS == "b"].tolist()
    assert federation.view == "cluster" and federation.num_test_sets() == 1
    assert federation.test_set_of(np.arange(3)).tolist() == [0, 0, 0]
    assert federation.shape.input == (1, 3, 3) and federation.shape.num_classes == 4 and federation.group_N is None


def test_float_and_torch_inputs_are_taken_as_they_are():
    x = torch.randn(40, 5, generator=torch.Generator().manual_seed(0))
    federation = federation_from_arrays(x, torch.from_numpy(Y), torch.arange(40) % 2, x_test=x[:4], y_test=Y[:4])
    assert torch.equal(federation.train(0)[0], x[::2]) and torch.equal(federation.test_set(0)[0], x[:4])


def test_samples_are_held_out_where_there_is_no_test_set():
    federation = federation_from_arrays(X, Y, CLIENTS, holdout=0.3)
    assert federation.view == "holdout" and federation.num_test_sets() == 0
    assert federation.num_samples_N.tolist() == [14, 7, 7]
    for client, name in enumerate("abc"):
        rows = torch.cat([federation.train(client)[0], federation.holdout(client)[0]]).flatten(1).numpy()
        expected = np.float32(X[name == CLIENTS].reshape(-1, 9)) / np.float32(255)
        assert np.array_equal(np.unique(rows, axis=0), np.unique(expected, axis=0))
    other = federation_from_arrays(X, Y, CLIENTS, holdout=0.3, seed=1)
    assert not torch.equal(other.train(0)[0], federation.train(0)[0])


def test_test_samples_belong_to_test_clients():
    federation = federation_from_arrays(X, Y, CLIENTS, x_test=X[:4], y_test=Y[:4], test_clients=CLIENTS[:4])
    assert federation.num_samples_N.tolist() == [20, 10, 10]
    assert torch.equal(federation.test(0)[0], torch.from_numpy(X[[1, 3]]) / 255)
    assert federation.test(2)[1].tolist() == [2]


def test_label_view():
    federation = federation_from_arrays(X, Y, CLIENTS, x_test=X[:8], y_test=Y[:8], view="label")
    assert federation.labels_of(np.arange(3)).tolist() == [
        [False, True, False, True],
        [True, False, False, False],
        [False, False, True, False],
    ]
    assert federation.test(0)[1].tolist() == [1, 3, 1, 3]


@pytest.mark.parametrize(
    "groups", [{"a": "x", "b": "y", "c": "x"}, np.where(CLIENTS == "b", "y", "x"), np.where(CLIENTS == "b", 9, 2)]
)
def test_groups_by_client_or_by_sample(groups):
    assert federation_from_arrays(X, Y, CLIENTS, groups=groups).group_N.tolist() == [0, 1, 0]


def test_it_pickles_with_its_arrays():
    federation = federation_from_arrays(X, Y, CLIENTS, normalize=[[0.5], [0.25]])
    again = pickle.loads(pickle.dumps(federation))
    assert all(map(torch.equal, again.train(2), federation.train(2))) and again.recipe == federation.recipe


def test_the_recipe_depends_on_every_sample():
    changed = X.copy()
    changed[39, 0, 2, 2] ^= 1
    assert federation_from_arrays(changed, Y, CLIENTS).recipe != federation_from_arrays(X, Y, CLIENTS).recipe


def test_the_recipe_depends_on_the_owners_of_test_samples_and_the_number_of_classes():
    test = {"x_test": X[:4], "y_test": Y[:4]}
    first, second = (federation_from_arrays(X, Y, CLIENTS, test_clients=list(ids), **test) for ids in ("baca", "abca"))
    assert first.test(0)[1].tolist() != second.test(0)[1].tolist() and first.recipe != second.recipe
    inferred, same, more = (federation_from_arrays(X, Y, CLIENTS, num_classes=count).recipe for count in (None, 4, 9))
    assert inferred == same != more


def nan_in_row_7():
    x = X.astype(np.float64)
    x[7, 0, 1, 1] = np.nan
    return x


@pytest.mark.parametrize(
    "change, message",
    [
        ({"y": Y[:39]}, "y has 39 entries, x has 40"),
        ({"clients": CLIENTS[:5]}, "clients has 5 entries, x has 40"),
        ({"groups": [0, 1, 0, 1]}, "groups has 4 entries, x has 40; each sample needs an entry, or give groups as {cl"),
        ({"x": nan_in_row_7()}, "x has NaN or infinity as float32 in 1 of 40 rows, first in row 7"),
        ({"x": X.astype(np.int64)}, "x must be uint8 or float, got int64"),
        ({"x": np.zeros((0, 3), np.uint8), "y": [], "clients": []}, r"x must be \(n, \*input\) with n >= 1"),
        ({"x": Y}, r"x must be \(n, \*input\)"),
        ({"y": Y - 1}, "y has the negative label -1 in row 0"),
        (
            {"y": Y / 2},
            r"y must be integers .* float64 of shape \(40,\); it is 0.5 in row 1: set task: regression .*targets=.real",
        ),
        ({"y": np.where(Y == 2, np.nan, Y)}, "it is nan in row 2: leave samples without a label out"),
        ({"y": Y * 1.0}, r"convert them, e.g. y.astype\(int\), or set task: regression"),
        ({"y": np.array([*"abc", None] * 10, object)}, "it is None in row 3: leave samples without a label out"),
        ({"y": np.array([*"abcd"] * 10, object)}, r"numpy.unique\(..., return_inverse=True\)\[1\] numbers words"),
        ({"num_classes": "3"}, "num_classes must be a whole number of at least 1, got '3'"),
        ({"num_classes": 0}, "num_classes must be a whole number of at least 1, got 0"),
        ({"num_classes": 3}, "label 3 does not fit num_classes 3; labels run from 0 to 2"),
        ({"clients": np.array(["a", 1] * 20, object)}, "clients must be all integers or all strings, got int, str"),
        ({"clients": np.array([object()] * 40)}, "got object"),
        ({"clients": np.linspace(0, 1, 40)}, "clients must be integers or strings of shape"),
        ({"clients": np.arange(40)}, "client '0' has 1 sample; holding out a part needs 2; leave its sample out, or"),
        ({"holdout": 1.0}, "holdout is a share between 0 and 1, got 1.0"),
        ({"x_test": X}, "x_test and y_test belong together"),
        ({"x_test": X, "y_test": Y[:3]}, "y_test has 3 entries, x_test has 40"),
        ({"x_test": X / 255, "y_test": Y}, r"x_test holds float32 \(1, 3, 3\), x holds uint8 \(1, 3, 3\)"),
        ({"x_test": X, "y_test": Y, "test_clients": np.array(["d"] * 40)}, "client 'd' has no training sample"),
        ({"x_test": X, "y_test": Y, "test_clients": np.array(["a"] * 40)}, "client 'b' has no test sample"),
        ({"test_clients": CLIENTS}, "test_clients names the owners of x_test, which is not given"),
        ({"view": "cluster"}, "the test view cluster does not fit these arrays, holdout does"),
        ({"groups": {"a": 0}}, "no group for client 'b' .2 of 3"),
        ({"groups": np.arange(40)}, r"groups: client \w is in groups \d+ and \d+ \(row \d+\)"),
        ({"normalize": [[0.5, 0.5], [1, 1]]}, "data.normalize must be"),
        ({"normalize": [[0.5], [np.nan]]}, "data.normalize must be .* all finite"),
    ],
)
def test_wrong_input_is_named(change, message):
    with pytest.raises(DataError, match=message):
        federation_from_arrays(**{"x": X, "y": Y, "clients": CLIENTS, **change})
