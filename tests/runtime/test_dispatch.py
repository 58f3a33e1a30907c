"""Which host does which call."""

from types import SimpleNamespace

import pytest

from cfl_ray.runtime.dispatch import Call, Dispatch


@pytest.fixture
def hand_out():
    """Returns a function: homes of calls, hosts that start -> the calls that each of hosts 0, 1, 2 would be given, in their order."""

    def handed(homes, starting=()):
        hosts = [SimpleNamespace(number=number, starting="soon" if number in starting else None) for number in range(3)]
        dispatch = Dispatch(SimpleNamespace(hosts=hosts), [Call(lambda actor: [], home) for home in homes], lambda *_: None)
        dispatch.todo.extend(range(len(homes)))
        return [[call for call in iter(lambda: dispatch._next_for(host), None)] for host in hosts if host.starting is None]

    return handed


def test_a_call_without_a_home_goes_to_whoever_asks(hand_out):
    assert hand_out([None, None]) == [[0, 1], [], []]


def test_a_call_with_a_home_waits_for_it(hand_out):
    assert hand_out([2, 0, 2, 1]) == [[1], [3], [0, 2]]


def test_calls_whose_home_is_gone_or_never_was_are_spread_over_ready_hosts(hand_out):
    assert hand_out([3, 4, 5, 7]) == [[0], [1, 3], [2]]
    assert hand_out([3, 4, 5, 7], starting=[1]) == [[1], [0, 2, 3]]
