"""Dispatch without Ray: calls that fail on some hosts are made on others, a bounded number of times."""

from types import SimpleNamespace

import numpy as np
import pytest
from ray.exceptions import ActorDiedError, ObjectFetchTimedOutError, ObjectLostError, RaySystemError, RayTaskError

from cfl_ray.engine.chunks import Chunk
from cfl_ray.engine.failure import ClientFailure
from cfl_ray.errors import ConfigError, DataError, RunError, RunStopped
from cfl_ray.runtime.on_ray import dispatch as dispatch_module
from cfl_ray.runtime.on_ray.chunk_queue import ChunkQueue
from cfl_ray.runtime.on_ray.dispatch import _FAILED_HOSTS, _FAILED_TIMES, Dispatch
from cfl_ray.runtime.on_ray.stall import StallRule

CHUNKS = 12


class FakePool:
    """Hosts that end a call as soon as they are asked. `retries` restarts each, then a host is given up."""

    def __init__(self, hosts, retries=3):
        self.hosts = [SimpleNamespace(number=n, is_ready=True, added=False, node="") for n in range(hosts)]
        self.changes, self.left, self.notes = 0, dict.fromkeys(range(hosts), retries), []

    def ready(self):
        return self.hosts

    def wait(self, calls, seconds=None):
        return calls[:1]

    def watch_starts(self):
        return False

    def failed(self, host, error):
        self.lost(host, error)

    def lost(self, host, error):
        self.notes.append((host.number, str(error)))
        self.changes += 1
        if not self.left[host.number]:
            self.hosts.remove(host)
            if not self.hosts:
                raise RunError(f"the last client host failed ({error})")
        else:
            self.left[host.number] -= 1


class Calls:
    """Calls whose chunks raise what `fault(host, chunks)` returns; None: they are done."""

    stays_on_hosts = True

    def __init__(self, fault):
        self.fault, self.done, self.at = fault, [], {}

    def start(self, host, chunks):
        ref = f"call {len(self.at)}"
        self.at[ref] = host.number, [int(chunk.index_m[0]) for chunk in chunks]
        return [ref]

    def get(self, ref):
        if error := self.fault(*self.at[ref]):
            raise error
        return ref

    def receive(self, chunks, returns):
        self.done += self.at[returns[0]][1]

    def seconds(self, chunks):
        return None


def task_error(cause):
    return RayTaskError("work", "traceback", cause).as_instanceof_cause()


@pytest.fixture
def run(monkeypatch):
    """Returns a function: (fault, hosts, retries) -> (numbers of the chunks done, notes, calls)."""

    def start(fault, hosts=4, retries=3):
        pool, calls = FakePool(hosts, retries), Calls(fault)
        monkeypatch.setattr(
            dispatch_module, "ray", SimpleNamespace(get=calls.get, wait=lambda refs, timeout: (refs, []))
        )
        queue = ChunkQueue([Chunk(np.array([number])) for number in range(CHUNKS)], together=False)
        dispatch = Dispatch(pool, queue, calls)
        dispatch.run()
        done = sorted(number for numbers in dispatch.done.values() for number in numbers)
        assert done == list(range(CHUNKS)), "what stays on hosts that are alive"
        return pool, calls

    return start


def client_failure(text, machine):
    failure = ClientFailure(text)
    failure.may_be_machine = machine
    return failure


@pytest.mark.parametrize(
    "cause",
    [
        DataError("/mnt/shards is missing"),
        OSError("read error"),
        client_failure("client 3 failed while training: CUDA error", True),
        RaySystemError("an object could not be read"),
        ObjectFetchTimedOutError("00", "owner", "site"),
    ],
    ids=lambda cause: type(cause).__name__,
)
def test_a_host_on_which_everything_fails_is_given_up(cause, run):
    pool, _ = run(lambda host, chunks: task_error(cause) if host == 2 else None, retries=1)
    assert [host.number for host in pool.hosts] == [0, 1, 3]
    assert [number for number, _ in pool.notes] == [2] * 2, "one restart"


def test_errors_of_the_cluster_count_as_a_death(run):
    """They are no errors of a call."""
    failing = [RaySystemError("broken"), ActorDiedError()]
    pool, _ = run(lambda host, chunks: failing.pop() if failing and host == 1 else None)
    assert len(pool.notes) == 2 and len(pool.hosts) == 4


@pytest.mark.parametrize("hosts", [6, 2])
def test_work_that_fails_everywhere_ends_the_run_with_its_cause(hosts, run):
    tries = []

    def fault(host, chunks):
        if 5 in chunks:
            tries.append(host)
            return task_error(client_failure("client 5 failed while training: CUDA out of memory", True))
        return None

    with pytest.raises(RunError, match=r"client 5 failed .* out of memory; the same work failed \d times, on hosts"):
        run(fault, hosts)
    assert len(set(tries)) == _FAILED_HOSTS if hosts == 6 else len(tries) == _FAILED_TIMES


def test_the_only_host_ends_the_run_after_its_retries(run):
    with pytest.raises(RunError, match=r"the last client host failed \(OSError: read error\)"):
        run(lambda host, chunks: task_error(OSError("read error")), hosts=1)


@pytest.mark.parametrize("cause", [ConfigError("no such option"), client_failure("a bug", False), KeyError("a bug")])
def test_errors_of_the_user_end_the_run_at_once(cause, run):
    tries = []
    with pytest.raises((RunError, ConfigError), match="a bug|no such option"):
        run(lambda host, chunks: tries.append(host) or task_error(cause))
    assert len(tries) == 1


def test_objects_that_are_lost_go_to_the_caller(run):
    with pytest.raises(ObjectLostError):
        run(lambda host, chunks: task_error(ObjectLostError("00", "owner", "site")))


class HangingPool(FakePool):
    """Host 0 hangs, with a CPU share of `computes`; the others end a call every half second. The clock is fake."""

    stall_rule, polls, slow, reported = StallRule(30, None), 0, "", ""

    def __init__(self, hosts, usual=1.0, computes=0.0, asked=float("inf")):
        super().__init__(hosts)
        self.now, self.usual, self.computes, self.asked = 0.0, usual, computes, asked
        for host in self.hosts:
            host.pid = host.number

    def wait(self, calls, seconds=None):
        ended = [ref for ref in calls if self.calls.at[ref][0] != 0 or self.now > 300][:1]
        self.now += 0.5 if ended else seconds
        return ended

    def stop_asked(self):
        return self.now >= self.asked

    def progress(self, host):
        return 0, self.computes * self.now


@pytest.fixture
def dispatch(monkeypatch):
    """Returns a function: the dispatch of `chunks` chunks of 4 in a pool."""

    def make(pool, chunks):
        pool.calls = calls = Calls(lambda host, chunks: None)
        calls.usual_seconds, calls.clients = lambda chunks: pool.usual, lambda chunks: [0]
        fake_ray = SimpleNamespace(get=calls.get, wait=lambda refs, timeout: ([], refs))
        monkeypatch.setattr(dispatch_module, "ray", fake_ray)
        monkeypatch.setattr(dispatch_module, "time", SimpleNamespace(monotonic=lambda: pool.now))
        return Dispatch(pool, ChunkQueue([Chunk(np.array([n])) for n in range(chunks)], together=False), calls)

    return make


def test_a_host_that_hangs_is_named_while_others_end_calls(dispatch):
    pool = HangingPool(3)
    begun = dispatch(pool, 200)
    begun.run()
    assert "host 0 (process 0 on node ) has made no progress for 3" in pool.notes[0], "after 30 s, not after 100"


@pytest.mark.parametrize("asked", [0.0, 7.3, 41.0])
@pytest.mark.parametrize("hosts", [1, 3])
def test_stop_ends_work_that_usually_takes_long_within_ten_seconds_if_its_host_idles(hosts, asked, dispatch):
    pool = HangingPool(hosts, usual=60.0, asked=asked)
    with pytest.raises(RunStopped, match="stopped, as asked, while host 0"):
        dispatch(pool, 200).run()
    assert pool.now - asked < 10


def test_stop_waits_for_a_host_that_computes(dispatch):
    """Up to three times as long as such work takes; hosts that share a busy CPU compute slowly."""
    pool = HangingPool(1, usual=60.0, computes=0.1, asked=3.0)
    with pytest.raises(RunStopped):
        dispatch(pool, 1).run()
    assert 180 <= pool.now < 183


def test_stop_does_not_wait_for_a_host_that_does_not_answer(dispatch):
    pool = HangingPool(1, usual=60.0, asked=3.0)
    pool.progress = lambda host: None
    with pytest.raises(RunStopped):
        dispatch(pool, 1).run()
    assert 5 < pool.now < 8
