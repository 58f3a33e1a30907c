"""Diagnostics that methods report: names and values are checked where they are reported, and arrays are bounded."""

import re
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from federations import Stage, linear, planted
from scipy.spatial.distance import squareform

from cfl_ray import Method, Serving, State
from cfl_ray.core.checked_method import CheckedMethod
from cfl_ray.core.clients import Clients
from cfl_ray.core.diagnostics import Diagnostics, sample_of
from cfl_ray.core.reported import Diagnostic
from cfl_ray.core.rng import Draws
from cfl_ray.errors import RunError


@pytest.fixture
def clients() -> Clients:
    """The clients 1, 3 and 4 of six; the label of the method is "own", and one metric is called accuracy."""
    stage = Stage(planted(6), linear)
    found = stage.clients([1, 3, 4])
    found.stats.diagnostics = Diagnostics("own", frozenset({"accuracy"}))
    return found


def reported(clients: Clients, name: str) -> Diagnostic:
    return clients.stats.diagnostics.array(name)


def test_numbers(clients):
    for value in (2, np.float32(2), torch.tensor(2), True + True, np.array(2.0)):
        clients.record("size", value)
        assert clients.stats.diagnostics.numbers == {"size": 2.0}
    clients.record("size", float("nan"))
    assert np.isnan(clients.stats.diagnostics.numbers["size"]) and not clients.stats.diagnostics.names


def test_arrays_keep_the_ids_of_clients_and_the_numbers_of_clusters(clients):
    loss_MK = np.arange(6.0).reshape(3, 2)
    clients.record("losses", loss_MK, ("clients", "clusters"))
    found = reported(clients, "losses")
    assert found.value.dtype == np.float32 and found.value.tolist() == loss_MK.tolist()
    assert [label.tolist() for label in found.labels] == [[1, 3, 4], [0, 1]] and found.axes == ("clients", "clusters")
    clients.record("map", torch.ones(2, 2), ("clients", "components"), ids=np.array([5, 0]))
    assert [label.tolist() for label in reported(clients, "map").labels] == [[5, 0], [0, 1]]
    clients.record("losses", lambda: loss_MK[:, 0], ["clients"])  # the last value of a name counts
    assert reported(clients, "losses").value.tolist() == [0, 2, 4]
    clients.select(np.array([True, False, True])).record("losses", [1, 2], ["clients"])
    assert reported(clients, "losses").labels[0].tolist() == [1, 4]


def test_the_condensed_form_is_the_symmetric_matrix(clients):
    condensed = np.array([0.25, 0.5, 0.75])
    for axes in (("clients", "clients"), ("clusters", "clusters")):
        clients.record("pairs", condensed, axes)
        assert np.array_equal(reported(clients, "pairs").value, squareform(condensed))


def test_a_function_is_called_where_the_array_is_recorded(clients):
    calls = []
    clients.record("lazy", lambda: calls.append(1) or [1.0], ["other"])
    assert not calls and reported(clients, "lazy").value.tolist() == [1] and calls == [1]
    clients.record("lazy", lambda: 1 / 0, ["other"])
    with pytest.raises(RunError, match=r"diagnostic 'lazy' of own failed: ZeroDivisionError"):
        reported(clients, "lazy")


WRONG = [
    ("Accuracy", 1, {}, "'Accuracy' has no valid name: it consists of a-z, 0-9 and _"),
    (7, 1, {}, "7 has no valid name"),
    ("accuracy", 1, {}, "'accuracy' has the name of a metric .*; give it another one"),
    ("x_std", 1, {}, "'x_std' has the name of a metric"),
    ("x", "many", {}, "'x' is .*many.*, expected a number, or an array of numbers with one or two axes"),
    ("x", None, {}, "'x' is None, expected a number"),
    ("x", np.inf, {}, "'x' has values that are infinite"),
    ("x", [1e39], {"axes": ["other"]}, "'x' has values that are infinite, or beyond float32"),
    ("x", [1, 2], {}, "without `axes`; name each axis: clients, clusters or another word"),
    ("x", [1, 2], {"axes": ["clients"]}, "has 2 entries on its axis 'clients', but there are 3 client ids; .*ids="),
    ("x", [[1, 2]], {"axes": ["other"]}, r"with the axes \('other',\), expected one axis for each"),
    ("x", np.ones((1, 1, 1)), {"axes": ["a", "b", "c"]}, "expected one or two words"),
    ("x", [1], {"axes": ["Clients"]}, "expected one or two words of a-z, 0-9 and _, such as 'clients'"),
    ("x", [1, 2], {"axes": ["clients", "clients"]}, "the pairs of 3 clients are 3 values with twice the same axis"),
    ("x", [1, 2, 3], {"axes": ["clients", "clusters"]}, "are 3 values with twice the same axis"),
    ("x", np.zeros((1001, 1000)), {"axes": ["a", "b"]}, "has 1,001,000 values, more than 1,000,000; report fewer"),
]


@pytest.mark.parametrize("name, value, options, message", WRONG, ids=[row[3][:40] for row in WRONG])
def test_what_cannot_be_recorded_names_the_method_and_the_diagnostic(name, value, options, message, clients):
    with pytest.raises(
        RunError, match=f"^own: the diagnostic {message}" if message[0] in "'7" else f"own: .*{message}"
    ):
        clients.record(name, value, **options)


def test_large_arrays_are_a_sample_of_clients_that_stays_the_same(clients):
    ids = np.arange(0, 40_000, 2)
    clients.record("vector", ids, ["clients"], ids=ids)
    vector = reported(clients, "vector")
    assert vector.value.shape == (10_000,) and np.array_equal(vector.value, vector.labels[0])
    few, more = ids[:3000], ids[:3500]
    condensed = np.arange(3000 * 2999 // 2)
    clients.record("pairs", condensed, ("clients", "clients"), ids=few)
    pairs = reported(clients, "pairs")
    at = pairs.labels[0] // 2  # position of client 2 i is i
    assert pairs.value.shape == (1000, 1000) and (np.diff(at) > 0).all()
    assert np.array_equal(pairs.value, squareform(condensed)[np.ix_(at, at)].astype(np.float32))
    clients.record("losses", np.zeros((3500, 300)), ("clients", "clusters"), ids=more)
    losses = reported(clients, "losses")
    assert losses.value.shape == (1000, 256) and losses.labels[1].tolist() == list(range(256))
    # who is in a sample depends on the client alone: of fewer clients, more of each are in it
    assert {*losses.labels[0][losses.labels[0] < 6000]} <= {*pairs.labels[0]} <= {*vector.labels[0]} | {*few}
    assert not np.array_equal(sample_of(few, 1000, 0), sample_of(few, 1000, 1))


def test_equal_arrays():
    one = Diagnostic(np.array([1, np.nan], np.float32), ("clients",), (np.array([3, 4]),))
    assert one.equals(replace(one, value=one.value.copy()))
    for other in ({"value": one.value[::-1]}, {"axes": ("other",)}, {"labels": (np.array([3, 5]),)}):
        assert not one.equals(replace(one, **other))


def test_an_error_has_the_line_of_the_author(clients):
    @dataclass(frozen=True)
    class Wrong(Method[State], name="wrong"):
        """For tests."""

        def init(self, start):
            raise AssertionError

        def round(self, state, clients, rng):
            clients.record("accuracy", 1.0)

        def diagnose(self, state, clients):
            clients.record("x", [1.0])

        def serve(self, state, clients):
            raise AssertionError

    checked_method, state = CheckedMethod(Wrong(), clients.spec.size), State(torch.zeros(1, 68), np.zeros(6, np.int32))
    for step in (
        lambda: checked_method.round(state, clients, Draws(0, 1)),
        lambda: checked_method.diagnose(state, clients),
    ):
        with pytest.raises(RunError, match="own: the diagnostic") as error:
            step()
        assert "test_diagnostics.py, line" in error.value.__notes__[0]
        assert re.search(r"\(\w+, .*test_diagnostics.py, line \d+\)$", str(error.value))


def test_training_does_not_see_test_data(clients):
    with pytest.raises(ValueError, match="clients are tested in `diagnose` only"):
        clients.test(Serving(torch.zeros(1, 68), clients.first_row()))
    tested = replace(clients, tester=lambda clients, serving: np.full((len(clients), 3), len(serving.models_KP)))
    assert tested.test(Serving(torch.zeros(2, 68), clients.first_row())).tolist() == [[2, 2, 2]] * 3
