"""A run that starts before its machines are there says so, and begins when there is room."""

import pytest
import ray

from cfl_ray import run, simulate
from cfl_ray.core.errors import RunError

pytestmark = pytest.mark.slow  # a run tells after half a minute that it waits


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


def test_the_user_hears_of_the_wait_while_it_lasts(occupied, experiment, figures, notes):
    told, small = [], experiment(runtime={"hosts": 1})

    def warn(text):
        told.append(text)
        ray.kill(occupied)

    watcher = notes()
    watcher.warn = warn
    assert figures(run(small, watcher=watcher)) == figures(simulate(small))
    assert len(told) == 1 and "no client host is ready after 3" in told[0] and "free: 1 GPU" in told[0]
    assert [line for line in watcher.lines if line.startswith("waited ")]


def test_more_hosts_than_the_cluster_has_are_waited_for_where_it_grows(cluster, experiment):
    """Nothing starts machines here, so the wait ends as its limit says."""
    with pytest.raises(RunError, match=r"no client host is ready after 3 s: 1 of 7 CPU each .*up to 3 s"):
        run(experiment(runtime={"hosts": 1, "cpus_per_host": 7, "wait_for_hosts": 3}))
