"""Events of clusters: what a method may report, their form in files, and the drawing of phases."""

import json

import numpy as np
import pytest
import torch
from federations import Stage, linear, planted

from cfl_ray.core.events import PHASES, ClusterEvent, births_and_deaths, check_phases, drawn, phase_change
from cfl_ray.methods import REGISTRY


@pytest.fixture
def clients():
    return Stage(planted(4), linear).clients(round=21)


def test_a_split_goes_through_json_as_it_is(clients):
    because = {"mean": np.float32(0.5), "max": torch.tensor(2.0), "clients": np.int64(7)}
    clients.event("split", cluster=np.int64(0), into=np.array([0, 1]), because=because)
    (event,) = clients.stats.events
    fields = {"mean": 0.5, "max": 2.0, "clients": 7}
    assert event.to_fields() == {"round": 21, "event": "split", "cluster": 0, "into": [0, 1], "because": fields}
    assert ClusterEvent.from_fields(json.loads(json.dumps(event.to_fields()))) == event
    assert event.text == "cluster 0 split into 0, 1 (mean 0.5, max 2, clients 7)"


@pytest.mark.parametrize(
    "kind, fields, message",
    [
        ("divorce", {}, "'divorce' is none of split, merge, birth, death"),
        ("phase", {}, "the round loop records changes of the phase"),
        ("split", {"into": [0, 1]}, "'split' has cluster None"),
        ("birth", {"cluster": 1, "into": [1]}, "'birth' has cluster 1"),
        ("death", {"cluster": 1, "into": [0]}, r"'death' has cluster 1 and into \(0,\)"),
        ("death", {"cluster": 1, "because": {"why": "old"}}, "value why 'old', expected a number"),
        ("death", {"cluster": 1, "because": {"norm": [1.0, 2.0]}}, "value norm .*, expected a number"),
    ],
)
def test_an_event_that_is_none(clients, kind, fields, message):
    with pytest.raises(ValueError, match=message):
        clients.event(kind, **{"because": {}} | fields)


def test_an_evaluation_has_no_events(clients):
    from dataclasses import replace

    evaluated = replace(clients, evaluated=True)
    evaluated.member_events(np.array([0]), np.array([1]))
    assert not clients.stats.events
    with pytest.raises(ValueError, match="reported in an evaluation"):
        evaluated.event("death", cluster=0, because={})


@pytest.mark.parametrize("fields", [None, {"round": 1}, {"round": 1, "event": "x"}, {"round": "x", "event": "split"}])
def test_fields_that_are_no_event(fields):
    with pytest.raises(ValueError):
        ClusterEvent.from_fields(fields)


def test_members_that_come_and_go_are_births_and_deaths():
    birth, death = births_and_deaths(3, np.array([2, 0, 4]), np.array([6, 1, 0, 5]), {"clients": 9})
    assert birth.to_fields() == {"round": 3, "event": "birth", "into": [1, 3], "because": {"clients": 9}}
    because = {"members_before": 4, "clients": 9}
    assert death.to_fields() == {"round": 3, "event": "death", "cluster": 2, "because": because}
    assert births_and_deaths(3, np.array([2, 0]), np.array([1, 0]), {}) == ()


def test_a_change_of_the_phase():
    (event,) = phase_change(4, "warmup", "federate")
    assert event.to_fields() == {"round": 4, "event": "phase", "before": "warmup", "phase": "federate"}
    assert event.text == "phase warmup -> federate" and phase_change(4, "warmup", "warmup") == ()


@pytest.mark.parametrize(
    "phases, drawing",
    [
        ({"federate": ()}, "federate"),
        ({"a": ("b",), "b": ("c",), "c": ()}, "a -> b -> c"),
        ({"a": ("b", "c"), "b": (), "c": ("a",)}, "a -> b | c, c -> a"),
        ({"a": (), "b": ("c",), "c": ("b",)}, "b -> c, c -> b, a"),
    ],
)
def test_phases_are_drawn(phases, drawing):
    check_phases("mine", phases)
    assert drawn(phases) == drawing


def test_every_phase_of_a_method_of_this_package_has_a_meaning():
    assert {phase for cls in REGISTRY.values() for phase in cls.phases} == set(PHASES)
