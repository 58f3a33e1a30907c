"""Pairs of clients by the divergence of their labels and what a method makes of them."""

import math

import numpy as np
import pytest
from closeness import close
from pages import per_client
from scipy.stats import entropy, spearmanr

from cfl_ray.report.matrices import against_labels, divergences
from cfl_ray.report.report_data import PerClient, RecordedMatrix

CLIENTS, CLASSES = 9, 4
UPPER = np.triu_indices(CLIENTS, 1)


def counts(seed=0) -> np.ndarray:
    """Of which some clients lack classes, and two have the same shares."""
    found = np.random.default_rng(seed).poisson(3, (CLIENTS, CLASSES)).astype(np.float32)
    found[found < 2] = 0
    found[:, 0] += 1
    found[1] = 7 * found[0]
    return found


def matrix(values, label_counts_SC) -> RecordedMatrix:
    return RecordedMatrix(3, np.arange(100, 100 + CLIENTS), values, of_pairs=True, label_counts_SC=label_counts_SC)


def symmetric(seed=1) -> np.ndarray:
    values = np.random.default_rng(seed).normal(size=(CLIENTS, CLIENTS))
    return ((values + values.T) / 2).astype(np.float32)


def drawn(figure) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Clients, divergences and values of all points."""
    traces = figure.plot["data"]
    return tuple(np.concatenate([trace[key] for trace in traces]) for key in ("customdata", "x", "y"))


def test_divergences_are_the_mean_kl_to_the_mixture_in_bits():
    share = counts() / counts().sum(1, keepdims=True)
    expected = []
    for i, j in zip(*UPPER, strict=True):
        middle = (share[i] + share[j]) / 2
        expected.append((entropy(share[i], middle, base=2) + entropy(share[j], middle, base=2)) / 2)
    found = divergences(counts())
    assert close(found, expected, 1e-6) and found[0] == pytest.approx(0, abs=1e-12)
    assert divergences(np.array([[5.0, 0.0], [0.0, 2.0]])).tolist() == [pytest.approx(1)]
    many = np.tile(
        np.random.default_rng(2).random((1, 7)), (40, 1)
    )  # equal rows: rounding makes the root's argument < 0
    assert np.allclose(divergences(many), 0, atol=1e-12)
    assert len(divergences(counts()[:1])) == 0


def test_every_pair_is_a_point_and_the_caption_has_the_rank_correlation():
    values = symmetric()
    figure = against_labels("title", "a", "similarity", matrix(values, counts()), PerClient())
    clients, x, y = drawn(figure)
    expected = {(100 + i, 100 + j): (d, values[i, j]) for i, j, d in zip(*UPPER, divergences(counts()), strict=True)}
    assert len(clients) == len(expected) == math.comb(CLIENTS, 2)
    for pair, *point in zip(map(tuple, clients.tolist()), x, y, strict=True):
        assert point == pytest.approx(expected[pair])
    rho = spearmanr(divergences(counts()), values[UPPER]).statistic
    assert f"correlation of the similarity and the divergence of labels is {rho:.3f} over 36 pairs" in figure.caption
    assert "drawn" not in figure.caption and [trace["showlegend"] for trace in figure.plot["data"]] == [False]


def test_colours_say_whether_the_true_group_is_the_same():
    group_of = {100 + client: client % 2 for client in range(CLIENTS - 1)}  # that of the last one is not known
    figure = against_labels("title", "a", "distance", matrix(symmetric(), counts()), per_client(group_of))
    found = {trace["name"]: trace for trace in figure.plot["data"]}
    assert list(found) == ["different true groups", "same true group", "true group not known"]
    assert len({trace["marker"]["color"] for trace in found.values()}) == 3
    for name, trace in found.items():
        pairs = [[group_of.get(client) for client in pair] for pair in trace["customdata"].tolist()]
        assert {None in pair for pair in pairs} == {name == "true group not known"}
        assert name == "true group not known" or {a == b for a, b in pairs} == {name == "same true group"}
    assert sum(len(trace["x"]) for trace in found.values()) == math.comb(CLIENTS, 2)


def test_clients_without_counts_and_undefined_values_are_left_out():
    labels, values = counts(), symmetric()
    labels[2], values[4, 5] = np.nan, np.nan
    figure = against_labels("title", "a", "distance", matrix(values, labels), PerClient())
    clients, _, _ = drawn(figure)
    assert 102 not in clients and [104, 105] not in clients.tolist()
    assert f"{math.comb(CLIENTS - 1, 2) - 1} pairs of {CLIENTS - 1} clients" in figure.caption


def test_there_is_none_where_nothing_can_be_compared():
    same = np.tile(counts()[:1], (CLIENTS, 1))
    alone = np.full_like(counts(), np.nan)
    alone[0] = 1
    for values, labels in (
        (symmetric(), None),
        (symmetric(), same),
        (np.ones((CLIENTS, CLIENTS)), counts()),
        (np.full((CLIENTS, CLIENTS), np.nan), counts()),
        (symmetric(), alone),
        (symmetric(), np.full_like(counts(), np.nan)),
    ):
        assert against_labels("title", "a", "distance", matrix(values, labels), PerClient()) is None
