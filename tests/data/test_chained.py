import pickle
from dataclasses import replace

import numpy as np
import pytest
import torch

from cfl_ray.config.data import SOURCE_KINDS
from cfl_ray.data import build, federation_from_arrays
from cfl_ray.data.chained import ChainedFederation, grown
from cfl_ray.data.changes import ChangingFederation, DataChange
from cfl_ray.data.synthetic import SyntheticFederation
from cfl_ray.errors import DataError


@pytest.fixture(scope="module")
def digits(tmp_path_factory):
    """Makes a federation of shards: digits(clients, seed, view)."""
    folder = tmp_path_factory.mktemp("shards")

    def make(clients=4, seed=0, view="cluster", shift="rotated", **options):
        data = SOURCE_KINDS.of(
            source="digits",
            shift={"kind": shift},
            partition={"clients": clients, "samples": 20},
            test={"view": view},
            **options,
        )
        return build(data, seed, folder)

    return make


def equal(samples, others):
    return all(map(torch.equal, samples, others))


def shared_test_set(federation, client):
    return federation.test_set(int(federation.test_set_of(np.array([client]))[0]))


def arrays(names, seed=0, shape=(4,), classes=3, **options):
    """A federation with a client for each name, each with 10 samples; hold-out view."""
    draw = np.random.default_rng(seed)
    x, y = draw.standard_normal((10 * len(names), *shape)).astype(np.float32), np.arange(10 * len(names)) % classes
    return federation_from_arrays(x, y, np.repeat(names, 10), num_classes=classes, **options)


@pytest.mark.parametrize("view, shift", [("cluster", "rotated"), ("label", "pathological"), ("holdout", "rotated")])
def test_every_client_keeps_the_data_of_its_part(digits, view, shift):
    parts = [digits(4, 0, view, shift), digits(5, 1, view, shift), digits(4, 2, view, shift)]
    whole = grown(grown(parts[0], parts[1]), parts[2])
    assert isinstance(whole, ChainedFederation) and whole.parts == tuple(parts)  # one chain, not a chain of chains
    ids, client = np.arange(13), 0
    assert whole.num_clients == 13 and whole.num_test_sets() == sum(part.num_test_sets() for part in parts)
    for part in parts:
        for id_in_part in range(part.num_clients):
            assert equal(whole.train(client), part.train(id_in_part))
            assert equal(whole.test(client), part.test(id_in_part))
            assert equal(whole.test(client, 7), part.test(id_in_part, 7))
            assert whole.num_samples_N[client] == part.num_samples_N[id_in_part]
            assert whole.group_N[client] == part.group_N[id_in_part]
            if view == "holdout":
                assert equal(whole.holdout(client), part.holdout(id_in_part))
            else:
                assert equal(shared_test_set(whole, client), shared_test_set(part, id_in_part))
            client += 1
    assert (whole.test_set_of(ids) == -1).all() == (view == "holdout")
    labels = whole.labels_of(ids[::-1])
    if view == "label":
        expected = np.concatenate([part.labels_of(np.arange(part.num_clients)) for part in parts])
        assert np.array_equal(labels[::-1], expected)
    else:
        assert labels is None


def test_ids_outside_of_the_chain_are_errors(digits):
    whole = grown(digits(4), digits(5, 1))
    for read in (
        lambda: whole.train(9),
        lambda: whole.train(-1),
        lambda: whole.test_set(whole.num_test_sets()),
        lambda: whole.test_set(-1),
    ):
        with pytest.raises(IndexError):
            read()


def test_pickles_to_paths(digits):
    whole = grown(digits(4), digits(5, 1))
    content = pickle.dumps(whole)
    again = pickle.loads(content)
    assert len(content) < 1000 and torch.equal(again.train(8)[0], whole.train(8)[0]) and again.recipe == whole.recipe


def test_a_part_without_groups_stays_without():
    known = arrays(["a", "b"], groups={"a": 0, "b": 1})
    assert grown(known, arrays(["c"])).group_N.tolist() == [0, 1, -1]
    assert grown(arrays(["c"]), known).group_N.tolist() == [-1, 0, 1]
    assert grown(arrays(["a"]), arrays(["b"])).group_N is None


def test_names_are_kept_and_clients_without_names_are_numbered():
    whole = grown(grown(arrays(["a", "b"]), SyntheticLike(2)), arrays(["c"]))
    assert [whole.client_name(client) for client in range(5)] == ["a", "b", "2", "3", "c"]


class SyntheticLike(SyntheticFederation):
    """A federation whose clients have no names, and whose samples fit those of `arrays`."""

    view = "holdout"

    def __init__(self, clients):
        super().__init__(clients, input=(4,), classes=3)

    def num_test_sets(self):
        return 0


def test_federations_that_do_not_fit_are_refused(digits):
    base, named = arrays(["a", "b"]), arrays(["d"])
    base.shape, named.shape = (replace(base.shape, class_names=tuple(names)) for names in ("xyz", "xzy"))
    assert grown(base, arrays(["c"])).shape.class_names == ("x", "y", "z")
    for added, says in (
        (arrays(["c"], shape=(5,)), r"inputs of shape: the new clients have \(5,\), the federation has \(4,\)"),
        (named, r"names of the classes: the new clients have \('x', 'z', 'y'\), the federation has \('x', 'y', 'z'\)"),
        (arrays(["c"], classes=5), "number of classes: the new clients have 5, the federation has 3"),
        (
            arrays(["c"], normalize=[[0.5], [0.5]]),
            r"normalisation: the new clients have \[\[0.5\], \[0.5\]\], the federation has None",
        ),
        (
            SyntheticFederation(2, input=(4,), classes=3),
            "test view: the new clients have cluster, the federation has holdout",
        ),
    ):
        with pytest.raises(DataError, match=says):
            grown(base, added)


def test_the_same_clients_twice_are_refused(digits):
    with pytest.raises(
        DataError, match=r"same id twice: client 'b' is in the federation already \(1 of 2 new clients are\)"
    ):
        grown(grown(arrays(["a"]), arrays(["b"])), arrays(["b", "c"]))
    for there, clients in (
        (digits(4), "0 .. 3"),
        (grown(digits(5, 1), digits(4)), "5 .. 8"),
        (ChangingFederation(digits(4), [DataChange(3, (0,), offset=1)]), "0 .. 3"),
    ):
        with pytest.raises(DataError, match=f"same id twice: .* are in the federation already, as clients {clients}"):
            grown(there, digits(4))


def test_a_part_keeps_its_schedule_of_changes(digits):
    base = digits(4)
    whole = grown(
        ChangingFederation(base, [DataChange(3, (0, 2), offset=1), DataChange(5, (1,), turns=1)]), digits(5, 1)
    )
    assert {round: ids.tolist() for round, ids in whole.changed_in.items()} == {3: [0, 2], 5: [1]}
    assert torch.equal(whole.at(2).train(0)[1], base.train(0)[1])
    assert torch.equal(whole.at(3).train(0)[1], (base.train(0)[1] + 1) % 10) and whole.at(3) is whole.at(4)
    for client in (4, 6):  # the newcomers' test sets keep their content, although a change adds others before them
        for round in (2, 3, 5):
            now = whole.at(round)
            assert torch.equal(shared_test_set(now, client)[0], shared_test_set(whole, client)[0])
            assert torch.equal(now.train(client)[0], whole.train(client)[0])
