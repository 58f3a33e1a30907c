"""The policy by which hosts and the server are restarted."""

import logging

import pytest

from cfl_ray.runtime.on_ray import retry
from cfl_ray.runtime.on_ray.retry import Decision, RetryPolicy


@pytest.fixture
def clock(monkeypatch):
    """`clock(seconds)` lets so much time pass for every policy made in the test."""
    now = [1000.0]
    monkeypatch.setattr(retry.time, "monotonic", lambda: now[0])
    return lambda seconds: now.__setitem__(0, now[0] + seconds)


def test_grants_up_to_the_limit(clock):
    policy = RetryPolicy("host 3", limit=2)
    decisions = [policy.decide(0) for _ in range(4)]
    assert decisions == [Decision(True, 1, 2), Decision(True, 2, 2), Decision(False, 2, 2), Decision(False, 2, 2)]
    assert policy.used == 2


def test_a_limit_of_zero_grants_none(clock):
    assert RetryPolicy("host 3", limit=0).decide(0) == Decision(False, 0, 0)


def test_a_process_that_lived_long_has_all_its_retries_again(clock):
    policy = RetryPolicy("host 3", limit=2, forgiven_seconds=600)
    policy.decide(0), policy.started(), policy.decide(0), policy.started()
    clock(600)
    assert not policy.decide(1).granted, "it has to live longer than that"
    clock(0.1)
    assert policy.decide(2) == Decision(True, 1, 2)


def test_a_process_that_dies_in_the_same_place_has_no_retries_again(clock):
    """One that runs out of memory an hour into an exchange never gets past it."""
    policy, granted = RetryPolicy("the server", limit=2, forgiven_seconds=600), []
    for progress in (7, 7, 7, 7, 8, 8):
        clock(3600)
        granted.append(policy.decide(progress).granted)
        policy.started()
    assert granted == [True, True, False, False, True, True]


def test_life_is_counted_from_the_last_start(clock):
    policy = RetryPolicy("host 3", limit=1, forgiven_seconds=600)
    policy.decide(0)
    clock(500)
    policy.started()
    clock(500)
    assert not policy.decide(0).granted


def test_pauses_grow_up_to_five_seconds():
    assert [Decision(True, count, 9).pause_seconds for count in (1, 2, 3, 5, 6, 9)] == [0.2, 0.4, 0.8, 3.2, 5, 5]


def test_every_decision_is_logged(clock, caplog):
    policy = RetryPolicy("the server", limit=1)
    with caplog.at_level(logging.INFO, logger=retry.__name__):
        policy.decide(0), policy.decide(0)
    assert caplog.messages == ["the server died: restart 1 of 1", "the server died: 1 restarts were used up"]
