"""A run that starts before its machines are there says so, and begins when there is room."""

import os
import re
import signal
import sys

import pytest
import ray

from cfl_ray import resume, run, simulate
from cfl_ray.cli import live_client
from cfl_ray.data.synthetic import SyntheticFederation
from cfl_ray.errors import RunError, RunStopped
from cfl_ray.runtime.on_ray import pool

pytestmark = pytest.mark.slow  # runs wait for seconds


class Impatient(SyntheticFederation):
    """Twelve clients, in whose server a run tells after two seconds that it waits; otherwise after half a minute."""

    def __init__(self):
        super().__init__(12, input=(8,), samples=20)
        pool._NOTICE_SECONDS = (2,)

    def __reduce__(self):
        return Impatient, ()


@pytest.fixture
def impatient(monkeypatch):
    monkeypatch.setattr(pool, "_NOTICE_SECONDS", pool._NOTICE_SECONDS)  # of this process, undone after the test
    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
    return Impatient()


@ray.remote(num_cpus=6)
class EveryCpu:
    def there(self):
        return True


@pytest.fixture
def occupied(cluster):
    """An actor that has every CPU of the cluster."""
    actor = EveryCpu.remote()
    ray.get(actor.there.remote())
    yield actor
    ray.kill(actor)


def test_the_user_hears_of_the_wait_while_it_lasts(occupied, impatient, experiment, figures, notes):
    told, small = [], experiment(data=impatient, runtime={"hosts": 1})

    def warn(text):
        told.append(text)
        ray.kill(occupied)

    watcher = notes()
    watcher.warn = warn
    assert figures(run(small, watcher=watcher)) == figures(simulate(small))
    assert len(told) == 1 and re.search("no client host is ready after [2-9] s", told[0]) and "free: 1 GPU" in told[0]
    assert [line for line in watcher.lines if line.startswith("waited ")]


def test_more_hosts_than_the_cluster_has_are_waited_for_where_it_grows(cluster, experiment):
    """Nothing starts machines here, so the wait ends as its limit says."""
    with pytest.raises(RunError, match=r"no client host is ready after 3 s: 1 of 7 CPU each .*up to 3 s"):
        run(experiment(runtime={"hosts": 1, "cpus_per_host": 7, "wait_for_hosts": 3}))


def test_a_request_to_stop_ends_a_wait_in_mid_run(cluster, impatient, experiment, figures, notes, actors, tmp_path):
    """The only host is killed, and its CPUs are taken: the run waits for ever, until it is asked to stop."""
    taken, answers = [], []
    small = experiment(data=impatient, runtime={"hosts": 1, "cpus_per_host": 6}, rounds=5)

    def after_round(number):
        if number == 2:
            taken.append(EveryCpu.remote())  # it is next
            (host,) = actors("ClientHost")
            os.kill(host, signal.SIGKILL)
            ray.get(taken[0].there.remote())

    watcher = notes(after_round)
    watcher.warn = lambda text: answers.append((text, live_client.ask(tmp_path / "run", "stop")))
    with pytest.raises(
        RunStopped, match=r"stopped while it waited for client hosts, as asked.*go on with: cfl_ray.resume"
    ):
        run(small, tmp_path / "run", watcher)
    ((text, answer),) = answers
    assert "the run waits for ever (runtime.wait_for_hosts)" in text
    assert answer == "ditto: the run ends now, for it waits for client hosts; every saved round is kept"
    assert live_client.status(tmp_path / "run").state == "stopped"
    ray.kill(taken[0])
    found = resume(tmp_path / "run", experiment=small)
    assert figures(found) == figures(simulate(small))
