"""A clock of the machine that jumps, by an hour and both ways: durations come from another clock, results from none."""

import itertools
import time

import pytest
from small_runs import simulate_until

from cfl_ray import load_run, resume, simulate
from cfl_ray.cli.live_client import status

HOUR = 3600 * 10**9


@pytest.fixture
def jumping(monkeypatch):
    """Every look at the clock finds it an hour ahead, then an hour back, and so on."""
    now, jumps = time.time_ns, itertools.cycle([HOUR, 0, -HOUR])
    monkeypatch.setattr(time, "time_ns", lambda: now() + next(jumps))
    monkeypatch.setattr(time, "time", lambda: time.time_ns() / 1e9)


def test_results_and_durations_are_those_of_a_steady_clock(experiment, tmp_path, figures, jumping):
    began, made = time.monotonic(), experiment(rounds=6)
    simulate_until(2, made, tmp_path / "run")
    found = figures(resume(tmp_path / "run", on_ray=False))
    took = time.monotonic() - began
    assert found == figures(simulate(made))
    records = load_run(tmp_path / "run")["ditto"].records
    times = [record.time_ms for record in records]
    assert times != sorted(times)  # the clock did jump
    assert [record.round for record in records] == [1, 2, 3, 4, 5, 6]
    assert 0 < sum(record.metrics["round_seconds"] for record in records) < took
    assert status(tmp_path / "run").state == "finished" and status(tmp_path / "run").seconds_per_round >= 0
