"""The session without Ray: a server that dies is ended before another one is started, a bounded number of times."""

import itertools
import threading
import time
from types import SimpleNamespace

import pytest
import ray
from ray.exceptions import ActorUnavailableError, OutOfMemoryError, RuntimeEnvSetupError
from torch import nn

from cfl_ray.errors import ConfigError, RunError, RunStopped
from cfl_ray.runtime.journal import Journal, JournalEvent
from cfl_ray.runtime.on_ray import ask, retry
from cfl_ray.runtime.on_ray import ray_session as session_module
from cfl_ray.runtime.on_ray.ray_session import RaySession
from cfl_ray.runtime.on_ray.retry import RetryPolicy
from cfl_ray.runtime.on_ray.stall import Progress, StallRule
from cfl_ray.setup.prepare import prepare


class Requests:
    """Requests to stop, of a user who asks when the functions say so; the head answers until `away`."""

    is_asked = property(lambda self: self.asked())
    is_due = property(lambda self: self.due())

    def __init__(self, asked=lambda: False, due=lambda: False, away=float("inf")):
        self.asked, self.due, self.away = asked, due, away

    def read(self):
        pass

    def silence(self, now):
        return max(now - self.away, 0.0)


@pytest.fixture
def session(experiment, monkeypatch, tmp_path):
    """A session whose servers are names, and `session.steps` what was done to them; `saved` is the last round saved."""
    made = object.__new__(RaySession)
    made.setup = prepare(experiment(methods=["fedavg", "ditto"], rounds=9, runtime={"retries": 2}))
    made.run_dir, made.label, made.stall_rule = tmp_path, "ditto", StallRule(30, 600)
    made.retry, made.faults, made.actor, made.steps, made.saved = RetryPolicy("the server", 2), [], "server 1", [], 3

    def start():
        made.actor = f"server {len(made.steps) // 2 + 2}"
        made.steps.append(f"start {made.actor}")

    made._start_server = start
    monkeypatch.setattr(session_module, "ray", SimpleNamespace(kill=lambda actor: made.steps.append(f"kill {actor}")))
    store = SimpleNamespace(rounds=lambda: [made.saved])
    monkeypatch.setattr(session_module, "checkpoint_store", lambda *_: store)
    made.requests = Requests()
    made.name, made.servers, made.ready, made.reported = "run", 1, True, ""
    made.warn = made.record_wait = lambda text: None
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


def test_no_server_is_started_for_a_run_that_is_to_stop(session):
    session.requests = Requests(asked=lambda: True)
    with pytest.raises(RunStopped, match="stopped, as asked, after the server died"):
        session._recover(unreachable())
    assert session.steps == []


@pytest.mark.parametrize("asked_after", [None, 5])
def test_a_run_that_was_stopped_goes_on_when_it_is_resumed(asked_after, session):
    """Also beyond the round that the server named before it died."""
    method = session.run_dir / "ditto"
    if asked_after:
        Journal(method).add(JournalEvent(asked_after, stop=session.name))
    session.requests = Requests(asked=lambda: True)
    with pytest.raises(RunStopped):
        session._recover(unreachable())
    assert Journal(method).stop_after("another", saved=session.saved) is None


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


class FailingOnce:
    """Answers of servers, the first of which is an error."""

    def __init__(self, error):
        self.errors = [error]

    def __call__(self, ref, rule):
        if ref == "answer" and self.errors:
            raise self.errors.pop()
        return ref


@pytest.mark.parametrize(
    "error", [OutOfMemoryError("ended by the memory monitor"), unreachable(), session_module.ServerStalled("no step")]
)
def test_whatever_ends_a_server_another_one_begins_the_method_again(error, session):
    asked = []
    session.actor = SimpleNamespace(call=SimpleNamespace(remote=lambda *order: asked.append(order) or "answer"))
    session.started, session._start_server = "started", lambda: None
    session._answer = FailingOnce(error)
    assert session._ask("next_round", "ditto") == "answer"
    assert asked == [("next_round", "ditto")] * 2 and str(error).splitlines()[0] in session.faults[0]


def test_a_server_that_cannot_start_ends_the_run_with_a_cause(session):
    session.actor = SimpleNamespace(call=SimpleNamespace(remote=lambda *order: "answer"))
    session.started, session._answer = "started", FailingOnce(RuntimeEnvSetupError("no such environment"))
    with pytest.raises(RunError, match="the server cannot start: .*no such environment.*; it needs the driver's node"):
        session._ask("next_round", "ditto")


class HangingServer:
    """A server of which every call takes an hour, on a fake clock. From second `hangs` on it makes no progress.

    It answers `progress` all the same if it `answers`; a user asks to stop in second `asked`.
    """

    def __init__(self, hangs, asked, answers):
        self.now, self.hangs, self.asked, self.answers = 0.0, hangs, asked, answers
        self.progress = SimpleNamespace(remote=lambda: "progress")

    def monotonic(self):
        return self.now

    def wait(self, refs, timeout):
        if refs == ["progress"] and (self.answers or self.now < self.hangs):
            return refs, []
        self.now += timeout
        return [], refs

    def get(self, ref):
        return Progress("", (min(self.now, self.hangs),), stop_asked=self.now >= self.asked)


@pytest.mark.parametrize("answers", [True, False], ids=["it answers", "it does not answer"])
def test_stop_ends_a_run_whose_server_hangs_within_ten_seconds(answers, session, monkeypatch):
    """At whatever moment the server hangs and a user asks."""
    for hangs, later in itertools.product((0.0, 0.7, 2.1, 3.9, 5.0), (0.1, 1.0, 2.9, 4.5, 60.0)):
        server = session.actor = HangingServer(hangs, hangs + later, answers)
        monkeypatch.setattr(session_module, "ray", server)
        monkeypatch.setattr(session_module, "time", server)
        session.requests = Requests(asked=lambda server=server: server.now >= server.asked)
        with pytest.raises(RunStopped, match="stopped, as asked, while the server has made no progress for"):
            session._answer("answer", StallRule(30, None))
        assert 0 <= server.now - server.asked < 10, (hangs, later)


@pytest.mark.parametrize("ready", [True, False])
def test_a_request_that_the_server_was_not_ready_for_ends_the_run(ready, session, monkeypatch):
    """A server that starts has not answered it at all."""
    session.ready, session.actor = ready, HangingServer(1e9, 1e9, True)
    monkeypatch.setattr(session_module, "ray", session.actor)
    monkeypatch.setattr(session_module, "time", session.actor)
    session.requests = Requests(**{"due" if ready else "asked": lambda: session.actor.now >= 7})
    with pytest.raises(RunStopped, match="stopped, as asked, when no round was running"):
        session._answer("answer", StallRule(30, 600))
    assert 7 <= session.actor.now <= 17


def test_a_request_is_seen_between_quick_rounds(session, monkeypatch):
    """The driver never waits, and looks all the same."""
    looks = []
    quick = SimpleNamespace(wait=lambda refs, timeout: (refs, []), get=lambda ref: ref)
    monkeypatch.setattr(session_module, "ray", quick)
    session.requests = Requests(due=lambda: looks.append(1) or len(looks) == 3)
    with pytest.raises(RunStopped):
        for _ in range(1000):
            session._answer("answer", StallRule(30, 600))
    assert len(looks) == 3


def test_the_user_hears_once_that_the_head_is_away(session, monkeypatch):
    """Whether rounds are quick or slow: the run goes on meanwhile."""
    clock, said = itertools.count(0.0, 0.1), []
    monkeypatch.setattr(session_module, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    quick = SimpleNamespace(wait=lambda refs, timeout: (refs, []), get=lambda ref: ref)
    monkeypatch.setattr(session_module, "ray", quick)
    session.requests, session.warn = Requests(away=5.0), said.append
    while next(clock) < 24:
        session._answer("answer", StallRule(30, 600))
    assert said == []
    while next(clock) < 60:
        session._answer("answer", StallRule(30, 600))
    (line,) = said
    assert "Ray's head does not answer" in line and f"cfl-ray resume {session.run_dir}" in line


@pytest.mark.parametrize("answer", [b"after the round", b"now", None, RuntimeError("the head is away")])
def test_a_request_on_the_cluster_is_read_meanwhile(answer, monkeypatch):
    def read(verb, key):
        assert (verb, key) == ("get", "cfl_ray stop run")
        if isinstance(answer, Exception):
            raise answer
        reads.append(key)
        return answer

    reads = []
    monkeypatch.setattr(ask, "_READ_SECONDS", 0.01)
    monkeypatch.setattr(ask, "at_head", read)
    began, requests = time.monotonic(), ask.StopRequests("run")
    try:
        time.sleep(0.3)
        failed = isinstance(answer, Exception)
        assert bool(reads) is not failed and (requests.silence(time.monotonic()) > 0.2) is failed
        assert requests.is_asked is (answer in (b"after the round", b"now")) and requests.is_due is (answer == b"now")
    finally:
        requests.close()
    assert not requests.thread.is_alive() and requests.read_at >= began


class SlowServer(HangingServer):
    """A server on a busy machine: it makes progress, and answers after three seconds."""

    def __init__(self):
        super().__init__(1e9, 1e9, True)
        self.progress, self.sent = SimpleNamespace(remote=self.send), 0.0

    def send(self):
        self.sent = self.now
        return "progress"

    def wait(self, refs, timeout):
        if refs == ["progress"] and self.now - self.sent >= 3:
            return refs, []
        self.now += timeout
        return (refs, []) if self.now > 100 else ([], refs)

    def get(self, ref):
        return Progress("", (self.now,)) if ref == "progress" else ref


def test_a_late_answer_shows_progress_all_the_same(session, monkeypatch):
    server = session.actor = SlowServer()
    monkeypatch.setattr(session_module, "ray", server)
    monkeypatch.setattr(session_module, "time", server)
    session.reported, session.warn = "", pytest.fail
    assert session._answer("answer", StallRule(8, 20)) == "answer"


def test_a_part_that_cannot_be_pickled_is_named(experiment, monkeypatch):
    lock = threading.Lock()

    def net(input_shape, num_classes):
        with lock:
            return nn.Sequential(nn.Flatten(), nn.Linear(input_shape[0], num_classes))

    setup = prepare(experiment(methods=["fedavg"], model=net))
    pickled = SimpleNamespace(put=ray.cloudpickle.dumps, cloudpickle=ray.cloudpickle)
    monkeypatch.setattr(session_module, "ray", pickled)
    with pytest.raises(
        ConfigError, match=r"net \(.*, line \d+\) cannot be sent to Ray's processes: TypeError: cannot pi"
    ):
        session_module._put(setup)
