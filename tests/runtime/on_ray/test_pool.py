"""The pool without Ray: how long a run waits for hosts, whom it tells, and which hosts it asks for."""

from types import SimpleNamespace

import pytest
import ray
from ray.exceptions import ActorDiedError, NodeDiedError, RaySystemError, RayTaskError

from cfl_ray.engine.choice import EngineChoice
from cfl_ray.errors import ConfigError, DataError, RunError, RunStopped
from cfl_ray.results.environment import HostEnvironment
from cfl_ray.runtime.on_ray import pool as pool_module
from cfl_ray.runtime.on_ray import retry, stall
from cfl_ray.runtime.on_ray.host_actor import StartedHost, start_host
from cfl_ray.runtime.on_ray.pool import _FIRST_HOST_SECONDS, Pool
from cfl_ray.setup.prepare import prepare

DAY = 86400.0


class Actor(str):
    @property
    def progress(self):
        return SimpleNamespace(remote=lambda: f"progress {self.split()[1]}")


class FakeCluster:
    """Room for hosts that changes at given times, and a clock that a wait moves on."""

    def __init__(self):
        self.now, self.started, self.room_at, self.nodes, self.errors, self.killed = 0.0, [], [], {}, {}, []
        self.instructions, self.devices = {}, {}  # by number, if not AVX2 and not a CPU
        self.halted = set()  # numbers of hosts that have a place, and never answer
        self.on_wait, self.asked, self.pauses, self.choices = lambda: None, 0, [], []

    def install(self, monkeypatch):
        fake_ray = SimpleNamespace(
            wait=self.wait,
            get=self.get,
            kill=self.killed.append,
            get_runtime_context=lambda: SimpleNamespace(get_node_id=lambda: "of the server"),
        )
        clock = SimpleNamespace(monotonic=lambda: self.now, time=lambda: self.now, sleep=self.sleep)
        monkeypatch.setattr(pool_module, "ray", fake_ray)
        placed = SimpleNamespace(wait=self.wait_for_places, get=lambda ref: (f"node {ref[-1]}", int(ref[-1])))
        monkeypatch.setattr(stall, "ray", placed)
        monkeypatch.setattr(pool_module, "time", clock)
        monkeypatch.setattr(retry, "time", clock)
        monkeypatch.setattr(pool_module, "start_host", self.start)
        monkeypatch.setattr(pool_module, "alive", self.alive)
        monkeypatch.setattr(pool_module, "free", lambda: "0 CPU")
        monkeypatch.setattr(pool_module, "room_of_cluster", lambda runtime: 0)
        monkeypatch.setattr(pool_module, "room_left", lambda runtime: 0)

    def sleep(self, seconds):
        self.now += seconds

    def alive(self, nodes):
        self.asked += 1
        return {node for node in nodes if self.now < self.nodes.get(node, float("inf"))}

    def start(self, runtime=None, setup_ref=None, engine="", last_batch=0, pause=0.0, federation_ref=None):
        self.pauses.append(pause)
        self.choices.append((engine, last_batch))
        number = len(self.started)
        self.started.append(StartedHost(Actor(f"actor {number}"), f"ready {number}", f"placed {number}"))
        return self.started[-1]

    def wait(self, refs, num_returns=1, timeout=None):
        self.on_wait()
        room = sum(at <= self.now for at in self.room_at)
        there = [ref for ref in refs if int(ref[-1]) < room and int(ref[-1]) not in self.halted]
        if not there:
            self.now += DAY if timeout is None else timeout
        return there, [ref for ref in refs if ref not in there]

    def wait_for_places(self, refs, timeout):
        return [ref for ref in refs if ref.startswith("placed") and int(ref[-1]) in self.halted], []

    def get(self, ref, timeout=None):
        number = int(ref.split()[1])
        if number in self.errors:
            raise self.errors[number]
        environment = HostEnvironment("a CPU", self.instructions.get(number, "AVX2"), "2.0")
        return {
            "node": f"node {number}",
            "pid": number,
            "device": self.devices.get(number, "cpu"),
            "environment": environment,
        }


@pytest.fixture
def fake(monkeypatch):
    cluster = FakeCluster()
    cluster.install(monkeypatch)
    return cluster


@pytest.fixture
def made(experiment, fake):
    """Returns a function: the pool of a run, with its hosts started."""

    def make(**runtime):
        pool = Pool(prepare(experiment(runtime=runtime)))
        pool.setup_ref = None
        pool.hosts = [pool._host(number, fake.start()) for number in range(pool.setup.experiment.runtime.hosts or 1)]
        return pool

    return make


def test_the_first_host_may_take_as_long_as_a_machine_takes_to_boot(made, fake):
    fake.room_at = [_FIRST_HOST_SECONDS - 1]
    assert [host.number for host in made().ready()] == [0]


def test_a_host_that_halts_while_it_starts_is_named_and_replaced(made, fake):
    fake.halted, fake.room_at = {0}, [0, 0]
    pool = made(hosts=1, wait_for_hosts=None, stall_warning=30, stall_limit=100)
    assert [host.pid for host in pool.ready()] == [1]
    assert fake.killed == ["actor 0"] and 600 < fake.now < 610
    named = [line for line in pool.notes if line.startswith("host 0 (process 0 on node node 0), which starts, has")]
    assert len(named) == 5 and "no progress for 3" in named[0]
    assert "another one is started after 10 min (runtime.stall_limit)" in named[0]
    assert "host 0 failed (it made no progress while it started)" in pool.last_fault[1] and not pool.halted_starts()


def test_a_host_that_halts_while_it_starts_does_not_hold_up_the_others(made, fake):
    fake.halted, fake.room_at = {1}, [0, 0, 0]
    pool = made(hosts=2, stall_warning=30, stall_limit=100)
    for fake.now in range(700):
        assert 0 in [host.pid for host in pool.ready()]
        pool.next_exchange()
        pool.wait(["call 0"])
        if fake.now == 300:
            (line,) = pool.halted_starts()
            assert line.startswith("host 1 (process 1 on node node 1), which starts, has made no progress for")
    assert fake.killed == ["actor 1"] and {host.pid for host in pool.ready()} == {0, 2}


def test_a_host_that_halts_always_while_it_starts_is_given_up(made, fake):
    fake.halted, fake.room_at = set(range(9)), [0] * 9
    with pytest.raises(RunError, match=r"the last client host failed after 2 restarts \(it made no progress while it"):
        made(hosts=1, wait_for_hosts=None, stall_limit=100, retries=2).ready()


@pytest.mark.parametrize("seconds, limit", [("auto", _FIRST_HOST_SECONDS), (40, 40)])
def test_without_a_host_the_run_ends_and_says_what_is_missing(seconds, limit, made, fake):
    with pytest.raises(RunError) as error:
        made(wait_for_hosts=seconds).ready()
    text = str(error.value)
    assert f"no client host is ready after {limit} s: 2 of 1 CPU each" in text and "free: 0 CPU" in text
    assert "runtime.wait_for_hosts" in text and fake.now == pytest.approx(limit)


def test_null_waits_for_ever(made, fake):
    fake.room_at = [2 * DAY]
    assert made(wait_for_hosts=None).ready() and fake.now >= 2 * DAY


def test_a_run_that_has_had_hosts_waits_for_ever(made, fake):
    """All machines are lost: the run asks for hosts, and goes on when one is there, a day later."""
    fake.room_at, pool = [0, 0], made(retries=0)
    pool.nodes()
    fake.nodes = {"node 0": 20, "node 1": 20}  # when the cluster notices the loss
    for host in list(pool.hosts):
        pool.lost(host, NodeDiedError("its machine is gone"))
    assert pool.hosts == [] and pool._written_off() == 0
    fake.room_at += [DAY]
    assert [host.node for host in pool.ready()] == ["node 2"]
    assert fake.now >= DAY and "waited 86380 s" in "".join(pool.notes) and not pool.waiting


def test_a_machine_that_vanishes_is_given_the_time_that_health_checks_take(made, fake):
    """Ray's defaults: five checks that fail after 10 s each, 3 s apart. The run waits for machines, it does not end."""
    fake.room_at, pool = [0], made(hosts=1, retries=0)
    pool.ready()
    fake.nodes = {"node 0": 5 * (10 + 3)}
    pool.lost(pool.hosts[0], ActorDiedError())
    assert pool.hosts == [] and pool._written_off() == 0


def test_the_last_host_that_dies_on_a_living_node_ends_the_run(made, fake):
    fake.room_at, pool = [0], made(hosts=1, retries=0)
    pool.ready()
    with pytest.raises(RunError, match="the last client host died after 0 restarts"):
        pool.lost(pool.hosts[0], ActorDiedError())


def test_two_hundred_hosts_that_die_at_once_are_started_again_at_once(made, fake):
    """Each new process pauses by itself: pauses one after another would be 40 s without a round."""
    fake.room_at, pool = [0] * 1000, made(hosts=200, retries=1)
    pool.nodes()
    for host in list(pool.hosts):
        pool.lost(host, ActorDiedError())
    assert fake.now == 0 and fake.pauses[200:] == [0.2] * 200
    assert len(pool.hosts) == 200 and pool.nodes() == 200 and len(fake.started) == 400


def test_hosts_given_up_with_two_hundred_machines_cost_one_look_and_are_forgotten(made, fake):
    """Spot machines come and go for months: nothing grows with those that went."""
    fake.room_at, pool = [0] * 1000, made(hosts=201, retries=0)
    pool.nodes()
    fake.nodes = {f"node {number}": 10 for number in range(200)}
    for host in list(pool.hosts[:200]):
        pool.lost(host, ActorDiedError())
    assert fake.now == 0 and fake.asked == 0 and len(pool.given_up) == 200
    assert pool._written_off() == 200 and fake.asked == 1
    fake.now = 20  # the cluster has noticed
    assert pool._written_off() == 0 and pool.given_up == [] and fake.asked == 2
    pool.next_exchange()
    assert len(pool.hosts) == 201 and len(fake.started) == 401


def test_half_of_the_machines_preempted_at_once_cost_no_wait(made, fake):
    """Spot machines: the run goes on with the other half at once, and with new ones when there is room for them."""
    fake.room_at, pool = [0] * 8, made(hosts=8, retries=3)
    pool.nodes()
    for host in pool.hosts[::2]:
        pool.lost(host, NodeDiedError("preempted"))
    assert fake.now == 0 and [host.number for host in pool.ready()] == [1, 3, 5, 7] and fake.now == 0
    assert [host.retry.used for host in pool.hosts] == [1, 0] * 4
    fake.room_at += [60] * 4
    fake.now = 61
    assert pool.nodes() == 8 and not pool.given_up


def test_what_the_run_waits_for_can_be_read_while_it_waits(made, fake):
    fake.room_at, pool, seen = [700], made(), []
    fake.on_wait = lambda: seen.append(pool.waiting)
    pool.ready()
    told = list(dict.fromkeys(filter(None, seen)))
    assert [line.partition(":")[0] for line in told] == [
        f"no client host is ready after {seconds} s" for seconds in (30, 120, 600)
    ]
    assert all("the run waits up to 900 s" in line for line in told)


def test_a_request_to_stop_ends_the_wait(made, fake):
    pool = made(wait_for_hosts=None)
    pool.stop_asked = lambda: fake.now > 50
    with pytest.raises(RunStopped, match="waited for client hosts"):
        pool.ready()
    assert 50 < fake.now < 60


def test_hosts_that_the_config_asks_for_are_asked_for_without_room(made, fake):
    """A host that waits for room is the demand that an autoscaler sees; it is no reason to wait for the others."""
    fake.room_at, pool = [0], made(hosts=3)
    pool.hosts = pool.hosts[:1]
    pool.ready()
    pool.next_exchange()
    assert [(host.number, host.added) for host in pool.hosts] == [(0, False), (1, True), (2, True)]
    fake.now += 10
    pool.next_exchange()
    assert len(pool.hosts) == 3, "once"


def test_the_autoscaler_knows_of_a_host_that_waits_for_room(cluster, experiment, until):
    """Ray hands the demand of an actor that fits on no node to its autoscaler, and withdraws it with the actor."""
    from ray._raylet import GcsClient
    from ray.autoscaler.v2.sdk import get_cluster_resource_state

    def demand():
        state = get_cluster_resource_state(GcsClient(address=cluster))
        return [dict(one.request.resources_bundle) for one in state.pending_resource_requests]

    setup = prepare(experiment(runtime={"cpus_per_host": 77}))
    host = start_host(setup.experiment.runtime, ray.put(setup))
    until(lambda: {"CPU": 77.0} in demand())
    ray.kill(host.actor)
    until(lambda: {"CPU": 77.0} not in demand())


def failed_start(cause):
    return RayTaskError("start", "traceback", cause).as_instanceof_cause()


def test_a_host_that_cannot_read_the_data_is_replaced_and_given_up(made, fake):
    """Its machine lacks a mount. The others go on."""
    fake.room_at, pool = [0] * 9, made(hosts=2, retries=1)
    fake.errors = {number: failed_start(DataError("/mnt/shards is missing")) for number in (1, 2)}
    while len(pool.hosts) == 2:
        pool.wait([])
    assert [host.number for host in pool.ready()] == [0] and pool._written_off() == 1
    assert "failed after 1 restarts (/mnt/shards is missing)" in pool.notes[-1]


@pytest.mark.parametrize("failing, hosts", [([0, 1], 2), ([0], 1)])
def test_data_that_no_host_can_read_end_the_run(failing, hosts, made, fake):
    fake.room_at, pool = [0] * 9, made(hosts=hosts)
    fake.errors = dict.fromkeys([*failing, 2, 3], failed_start(DataError("/mnt/shards is missing")))
    with pytest.raises(DataError, match="^/mnt/shards is missing"):
        pool.ready()


def test_a_start_that_fails_in_the_cluster_is_tried_again(made, fake):
    """The setup was not fetched: that says nothing about the data."""
    fake.room_at, pool = [0] * 9, made(hosts=1)
    fake.errors = {0: failed_start(RaySystemError("the object could not be fetched"))}
    assert [host.node for host in pool.ready()] == ["node 1"] and "host 0 failed" in pool.notes[0]


def test_an_error_of_the_user_at_the_start_ends_the_run_at_once(made, fake):
    fake.room_at, pool = [0] * 9, made(hosts=2)
    fake.errors = {0: failed_start(ConfigError("no GPU"))}
    with pytest.raises(ConfigError, match="no GPU"):
        pool.ready()


def test_the_device_of_a_run_is_that_of_the_host_that_measures_its_engines(made, fake):
    fake.room_at, pool = [0, 0], made(hosts=2)
    fake.devices = {0: "H100", 1: "A100"}
    assert pool.nodes() == 2 and pool.device == "H100" == pool.ready()[0].device


@pytest.mark.parametrize(
    "runtime, count", [({"gpus_per_host": 0.5}, 2), ({}, 0), ({"gpus_per_host": 1, "device": "cpu"}, 0)]
)
def test_a_gpu_that_is_reserved_and_not_used_is_named(made, fake, runtime, count):
    fake.room_at, pool = [0, 0, 0], made(hosts=3, **runtime)
    fake.devices = {1: "cuda"}
    pool.nodes()
    assert [line.startswith("host 0 reserves 0.5 GPU and computes on the CPU") for line in pool.notes[:1]] == [
        True
    ] * bool(count)
    assert len(pool.notes) == count, "one for each node, with its number: hosts 0 and 2"


def test_a_host_that_starts_later_has_the_engine_and_the_programs_of_the_run(made, fake):
    pool = made()
    pool.choice = EngineChoice("compiled", "compiled: as configured", last_batch=8)
    pool._start_another()
    assert fake.choices[-1] == ("compiled", 8)


def test_hosts_that_compute_other_bits_are_named_once_for_each_kind(made, fake):
    fake.room_at, pool = [0] * 4, made(hosts=4)
    fake.instructions = {2: "AVX512", 3: "AVX512"}
    pool.nodes()
    (line,) = pool.notes
    assert line.startswith("host 2 (a CPU, AVX512, PyTorch 2.0) may compute other last bits than others (AVX2,")
