"""Hosts and servers that hang: named, replaced with the same results, and no obstacle to a request to stop."""

import os
import re
import signal
import time
from contextlib import suppress
from threading import Thread

import pytest
import ray
import torch
from federations import clients_of

from cfl_ray import run, simulate
from cfl_ray.cli.live_client import ask
from cfl_ray.errors import RunError, RunStopped, duration
from cfl_ray.run_directory.session_file import ServerAddress
from cfl_ray.runtime.on_ray.stall import Progress, ProgressWatch, StallRule
from cfl_ray.setup.prepare import prepare


class TestRule:
    rule = StallRule(warning=30, limit=600)

    def test_slow_is_ten_times_the_usual_and_at_least_the_warning(self):
        assert [self.rule.slow_after(usual) for usual in (None, 1.0, 4.0)] == [30, 30, 40]

    def test_a_host_is_given_up_after_the_limit_or_ten_times_as_long_as_it_takes_to_be_slow(self):
        assert [self.rule.given_up_after(usual) for usual in (None, 1.0, 100.0)] == [3600, 600, 10_000]
        assert StallRule(30, None).given_up_after(1.0) == float("inf")

    def test_a_server_that_starts_has_six_times_as_long(self):
        watch = ProgressWatch(self.rule.for_start(), 0.0)
        assert not watch.is_over(3599) and watch.is_over(3601)
        assert StallRule(30, None).for_start().limit is None

    def test_stop_waits_for_work_that_is_nearly_done(self):
        assert [self.rule.stop_after(usual) for usual in (None, 1.0, 60.0)] == [5, 5, 180]

    def test_durations(self):
        assert [duration(seconds) for seconds in (4.0, 90, 600, 9000)] == ["4 s", "90 s", "10 min", "2.5 h"]


class TestProgressWatch:
    def watched(self, *answers):
        """A watch after an answer every 5 seconds; None: there was none."""
        watch, now = ProgressWatch(StallRule(30, 600), 0.0), 0.0
        for answer in answers:
            now += 5.0
            watch.update(answer, now)
        return watch, now

    @pytest.mark.parametrize(
        "answer",
        [lambda i: Progress("", ("round", i)), lambda i: Progress("", ("clustering",), cpu_seconds=4.0 * i)],
        ids=["steps", "computing"],
    )
    def test_progress_is_a_step_or_computing(self, answer):
        watch, now = self.watched(*map(answer, range(200)))
        assert not watch.warning(now) and not watch.is_over(now)

    @pytest.mark.parametrize(
        "answer", [None, Progress("", ("saving", 3), cpu_seconds=7.0)], ids=["no answer", "a deadlock"]
    )
    def test_silence_is_named_and_ends(self, answer):
        watch, now = self.watched(*[answer] * 8)
        line = watch.warning(now)
        assert "no progress for" in line and "after 10 min (runtime.stall_limit)" in line
        assert not watch.warning(now + 1), "again when it is twice as long"
        assert not watch.is_over(now) and self.watched(*[answer] * 130)[0].is_over(650)

    def test_stop_waits_for_a_server_that_goes_on(self):
        asked = [Progress("", (step,), stop_asked=True) for step in (1, 1, 2, 2, 2)]
        assert [self.watched(*asked[:looks])[0].stops(5.0 * looks) for looks in (1, 2, 3, 4, 5)] == [False] * 4 + [True]
        assert not self.watched(*[Progress("", (1,))] * 5)[0].stops(25.0), "no request to stop"
        assert self.watched(*[Progress("", (1,))] * 5)[0].stops(25.0, asked=True), "a request that it has not answered"

    def test_a_server_that_goes_on_is_not_over(self):
        watch, now = self.watched(*[None] * 100, Progress("", (1,)))
        assert not watch.warning(now) and not watch.is_over(now)


@pytest.fixture(scope="module")
def backend(two_hosts, module_experiment):
    """Two hosts that are named after a second, and replaced after ten times the time that makes them slow."""
    return two_hosts(prepare(module_experiment(methods=["fedavg"], runtime={"stall_warning": 0.3, "stall_limit": 1.0})))


def train(backend, number):
    setup = backend.pool.setup
    clients, start = clients_of(setup, backend, range(12), number), setup.network().new_model(0, 0)[None]
    return clients.train(clients.send(start), average=torch.ones(1, 12)).averaged(start)


@pytest.mark.slow
def test_a_host_that_halts_is_named_and_replaced(backend, until):
    expected = train(backend, 1)
    backend.pool.notes = []
    host = backend.pool.hosts[0]
    halted = host.pid
    os.kill(halted, signal.SIGSTOP)
    assert torch.equal(train(backend, 1), expected)
    named, replaced = backend.pool.notes[0], backend.pool.notes[-1]
    assert f"host 0 (process {halted} on node " in named and "with clients " in named and "such work takes" in named
    assert "host 0 made no progress for" in replaced and "was started again" in replaced
    until(lambda: backend.pool.nodes() == 1 and host.pid != halted)


@pytest.mark.slow
def test_a_host_that_halts_while_it_starts_is_named_and_replaced(backend, until):
    """The other host does the work meanwhile."""
    pool, host = backend.pool, backend.pool.hosts[0]
    expected, pool.notes = train(backend, 1), []
    pool.end(host, "was ended")
    _, halted = ray.get(host.start.started.placed)
    os.kill(halted, signal.SIGSTOP)
    began = time.monotonic()
    while not pool.notes[-1].startswith("host 0 failed (it made no progress while it started)"):
        assert torch.equal(train(backend, 1), expected) and time.monotonic() < began + 60
    assert any(f"host 0 (process {halted} on node " in line and "which starts, has made" in line for line in pool.notes)
    until(lambda: pool.nodes() == 1 and host.pid not in (0, halted))


@pytest.mark.slow
def test_stop_ends_an_exchange_that_hangs(backend):
    train(backend, 1)
    host = backend.pool.hosts[1]
    os.kill(host.pid, signal.SIGSTOP)
    backend.pool.setup = prepare(
        backend.pool.setup.experiment.model_copy(
            update={"runtime": backend.pool.setup.experiment.runtime.model_copy(update={"stall_limit": None})}
        )
    )
    backend.pool.stop_asked = lambda: True
    began = time.monotonic()
    try:
        with pytest.raises(RunStopped, match="stopped, as asked, while host 1 .* has made no progress"):
            train(backend, 2)
        assert time.monotonic() - began < 10
    finally:
        os.kill(host.pid, signal.SIGKILL)


@pytest.mark.slow
def test_a_server_that_halts_is_replaced_with_the_same_figures(experiment, figures, cluster, notes, actors, tmp_path):
    runtime = {"stall_warning": 3, "stall_limit": 10}
    changed = experiment(rounds=3, runtime=runtime)
    halted = []

    def halt(round):
        if round == 1 and not halted:
            (pid,) = actors("ServerActor")
            halted.append(pid)
            os.kill(pid, signal.SIGSTOP)

    watcher = notes(halt)
    found = figures(run(changed, tmp_path / "run", watcher))
    assert found == figures(simulate(experiment(rounds=3)))
    assert any("the server died and was started again: it made no progress" in line for line in watcher.lines)


STUCK = """
import time
from dataclasses import dataclass
from pathlib import Path

from cfl_ray.methods.fedavg import FedAvg


@dataclass(frozen=True)
class Stuck(FedAvg, name="stuck"):
    def round(self, state, clients, rng):
        while Path(__file__).with_name("stuck").exists():
            time.sleep(1)
        return super().round(state, clients, rng)
"""


@pytest.mark.slow
@pytest.mark.parametrize("hang", ["a process that halts", "a round that never ends"])
def test_stop_ends_a_run_whose_server_hangs(hang, experiment, cluster, notes, actors, tmp_path, until, monkeypatch):
    """Asked on another machine: without the request the run would wait for ever."""
    until(lambda: not actors("ServerActor"), 60)  # Ray kills the halted server of the test before after 5 s
    elsewhere = classmethod(
        lambda cls, address, actor, loopback: cls(address, actor, "token", loopback, "elsewhere", 7)
    )
    monkeypatch.setattr(ServerAddress, "here", elsewhere)
    (tmp_path / "own.py").write_text(STUCK)
    method = f"{tmp_path}/own.py:Stuck"
    changed = experiment(methods=[method], rounds=50, runtime={"stall_warning": 3, "stall_limit": None})
    answers = []

    def stop():
        while not answers:
            with suppress(RunError):  # between two rounds
                answers.append(ask(tmp_path / "run", "stop"))

    asking = Thread(target=stop, daemon=True)

    def let_hang(round):
        if round == 1:
            if hang == "a process that halts":
                os.kill(actors("ServerActor")[0], signal.SIGSTOP)
            else:
                (tmp_path / "stuck").touch()
            asking.start()

    with pytest.raises(RunStopped, match="Every saved round is kept; go on with: cfl-ray resume"):
        run(changed, tmp_path / "run", notes(let_hang))
    asking.join(60)
    (answer,) = answers
    halted = r"elsewhere, ends the run now|before it answered: the run ends now"  # the driver may be faster than `ask`
    assert re.search(halted if hang == "a process that halts" else "the run ends after round", answer)
    until(lambda: not actors("ServerActor"), 60)
