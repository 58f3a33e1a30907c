"""The session without Ray: a server that dies is ended before another one is started, a bounded number of times."""

from types import SimpleNamespace

import pytest
from ray.exceptions import ActorUnavailableError

from cfl_ray.errors import RunError
from cfl_ray.runtime.on_ray import retry
from cfl_ray.runtime.on_ray import session as session_module
from cfl_ray.runtime.on_ray.retry import RetryPolicy
from cfl_ray.runtime.on_ray.session import RaySession
from cfl_ray.runtime.prepare import prepare


@pytest.fixture
def session(experiment, monkeypatch, tmp_path):
    """A session whose servers are names, and `session.steps` what was done to them; `saved` is the last round saved."""
    made = object.__new__(RaySession)
    made.setup = prepare(experiment(methods=["fedavg", "ditto"], rounds=9, runtime={"retries": 2}))
    made.run_dir, made.label = tmp_path, "ditto"
    made.retry, made.faults, made.actor, made.steps, made.saved = RetryPolicy("the server", 2), [], "server 1", [], 3

    def start():
        made.actor = f"server {len(made.steps) // 2 + 2}"
        made.steps.append(f"start {made.actor}")

    made._start_server = start
    monkeypatch.setattr(session_module, "ray", SimpleNamespace(kill=lambda actor: made.steps.append(f"kill {actor}")))
    store = SimpleNamespace(rounds=lambda: [made.saved])
    monkeypatch.setattr(session_module, "checkpoint_store", lambda *_: store)
    clock = [0.0]

    def later():
        clock[0] += 3600
        return clock[0]

    monkeypatch.setattr(retry.time, "monotonic", later)
    return made


def unreachable():
    return ActorUnavailableError("the network is down", b"0" * 16)


def test_a_server_out_of_reach_is_ended_before_the_next_one_starts(session):
    session._recover(unreachable())
    assert session.steps == ["kill server 1", "start server 2"]


def test_a_server_that_always_dies_before_it_saves_ends_the_run(session):
    """Each lived an hour."""
    for _ in range(2):
        session._recover(unreachable())
    with pytest.raises(RunError, match="the server died after round 3, the last one saved .*2 restarts were used up"):
        session._recover(unreachable())


def test_a_saved_round_grants_all_retries_again(session):
    for session.saved in range(3, 9):
        session._recover(unreachable())
    assert len(session.steps) == 12
