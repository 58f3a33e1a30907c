"""The environment of hosts: inherited in a cluster of this run, given to each host elsewhere."""

import os

import pytest
import ray

from cfl_ray.config import RuntimeConfig
from cfl_ray.runtime.on_ray import host_actor


def test_the_environment_is_only_changed_while_a_cluster_starts(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    monkeypatch.delenv("MKL_NUM_THREADS", raising=False)
    before = dict(os.environ)
    with pytest.raises(RuntimeError), host_actor.host_environment():
        changed = {name: value for name, value in os.environ.items() if before.get(name) != value}
        raise RuntimeError
    assert changed["OMP_NUM_THREADS"] == changed["MKL_NUM_THREADS"] == "1" and os.environ == before


@pytest.mark.parametrize("inherited", [True, False])
def test_hosts_get_an_environment_where_they_inherit_none(inherited, monkeypatch):
    given = []

    class Started(Exception):
        pass

    class ActorClass:
        def options(self, **options):
            given.append(options["runtime_env"])
            raise Started

    monkeypatch.setattr(ray, "remote", lambda _: ActorClass())
    monkeypatch.delenv(host_actor._INHERITED, raising=False)
    if inherited:
        monkeypatch.setenv(host_actor._INHERITED, "1")
    with pytest.raises(Started):
        host_actor.start_host(RuntimeConfig(), None)
    assert given == [None if inherited else {"env_vars": host_actor._HOST_ENVIRONMENT}]
