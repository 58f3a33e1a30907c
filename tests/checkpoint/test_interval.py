"""Checkpoints as often as their cost allows."""

import math

import pytest

from cfl_ray import simulate
from cfl_ray.checkpoint import store
from cfl_ray.checkpoint.store import CheckpointInterval


class Clock:
    now = 100.0

    def __call__(self):
        return self.now


@pytest.mark.parametrize("seconds, pause", [(0.003, 4.6476), (1.0, 84.853), (60.0, 657.27)])
def test_youngs_interval(seconds, pause):
    """sqrt(2 C M) with M = 3600 s, from the end of a checkpoint on."""
    assert pause == pytest.approx(math.sqrt(2 * seconds * 3600), rel=1e-4)
    clock = Clock()
    interval = CheckpointInterval(clock=clock)
    assert interval.is_due(1), "what one costs is not known before the first"
    with interval.measured():
        clock.now += seconds
    ended = clock.now
    for since, due in ((0, False), (pause * 0.999, False), (pause * 1.001, True)):
        clock.now = ended + since
        assert interval.is_due(1) == due


def test_a_save_that_fails_stays_due():
    interval = CheckpointInterval(clock=Clock())
    with pytest.raises(OSError), interval.measured():
        raise OSError
    assert interval.is_due(1)


def test_the_first_and_the_last_round_of_a_short_run_are_saved(experiment, tmp_path, monkeypatch):
    saved, save = [], store.CheckpointStore.save
    monkeypatch.setattr(
        store.CheckpointStore, "save", lambda self, round, *rest: (saved.append(round), save(self, round, *rest))[1]
    )
    for every, rounds in ((None, [1, 6]), (2, [2, 4, 6])):
        saved.clear()
        short = experiment(methods=["fedavg"], rounds=6, runtime={"checkpoint_every": every})
        simulate(short, tmp_path / f"every-{every}")
        assert saved == rounds


@pytest.mark.parametrize("rounds_of_states, saved", [(0, [1, 2, 3, 4]), (1, [2, 4]), (100, [4])])
def test_rounds_are_saved_when_states_exceed_their_budget(experiment, figures, tmp_path, rounds_of_states, saved):
    """All twelve clients train in each round. Results do not depend on how often states leave memory."""
    values = {"methods": ["ditto"], "rounds": 4}
    plain = simulate(experiment(**values))
    bytes_of_round = 12 * 4 * plain["ditto"].trained.spec.size
    budget = {"checkpoint_every": 100, "keep_last": 9, "state_budget": rounds_of_states * bytes_of_round}
    assert figures(simulate(experiment(**values, runtime=budget), tmp_path / "run")) == figures(plain)
    assert store.CheckpointStore(tmp_path / "run" / "ditto", "").rounds() == saved
