"""The server's process without Ray: what it does where client states are lost again and again."""

from types import SimpleNamespace

import pytest
from ray.exceptions import ObjectLostError

from cfl_ray.errors import RunError
from cfl_ray.runtime.on_ray import server_process
from cfl_ray.runtime.on_ray.server_process import ServerProcess
from cfl_ray.setup.prepare import prepare
from cfl_ray.tracking import RoundRecord


class LosingLoop:
    """A round loop that loses client states in every round, and has saved round `saved` when it is made."""

    saved = 0
    made = 0

    def __init__(self, *_):
        LosingLoop.made += 1
        self.saved, self.round = LosingLoop.saved, LosingLoop.saved + 1
        self.requests = SimpleNamespace(stop_after=None)

    def rounds(self):
        yield RoundRecord(self.saved, {})
        raise ObjectLostError("00", "owner", "site")


@pytest.fixture
def process(experiment, monkeypatch):
    setup = prepare(experiment())
    monkeypatch.setattr(server_process, "fetch", lambda ref: setup)
    monkeypatch.setattr(server_process, "RoundLoop", LosingLoop)
    monkeypatch.setattr(server_process, "time", SimpleNamespace(sleep=lambda seconds: None))
    LosingLoop.saved, LosingLoop.made = 3, 0
    made = ServerProcess([None], None, "session", None)
    made.next_round("ditto")
    return made


def test_going_back_to_the_same_checkpoint_has_an_end(process):
    for count in range(1, server_process._GOING_BACK + 1):
        assert f"back to round 3, the last one saved ({count} of 5 times)" in process.next_round("ditto").notes[0]
    with pytest.raises(RunError, match=r"in round 4 .*after going back to round 3.* 5 times; .*checkpoint_every"):
        process.next_round("ditto")
    assert LosingLoop.made == 6


def test_a_round_saved_in_between_begins_the_count_anew(process):
    for saved in range(4, 20):
        process.next_round("ditto")
        process.loop.saved = LosingLoop.saved = saved
