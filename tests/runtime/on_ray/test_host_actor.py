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
    with pytest.raises(RuntimeError), host_actor.host_environment(None):
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

    monkeypatch.setattr(ray, "remote", lambda **options: lambda host: ActorClass())
    monkeypatch.delenv(host_actor._INHERITED, raising=False)
    if inherited:
        monkeypatch.setenv(host_actor._INHERITED, "")
    with pytest.raises(Started):
        host_actor.start_host(RuntimeConfig(), None)
    assert given == [None if inherited else {"env_vars": host_actor.ONE_THREAD}]


def test_instructions_are_given_where_the_cluster_was_started_with_others(monkeypatch):
    """(those of the cluster; None: not started by this run) -> whether host and server get an environment."""
    for inherited, wanted, of_host, of_server in (
        (None, None, True, False),
        (None, "avx2", True, True),
        ("", None, False, False),
        ("", "avx2", True, True),
        ("avx2", "avx2", False, False),
    ):
        monkeypatch.delenv(host_actor._INHERITED, raising=False)
        if inherited is not None:
            monkeypatch.setenv(host_actor._INHERITED, inherited)
        host, server = host_actor.host_runtime_env(wanted), host_actor.server_runtime_env(wanted)
        assert (host is not None, server is not None) == (of_host, of_server)
        for given in (host, server):
            if given is not None:
                assert given["env_vars"].get("ATEN_CPU_CAPABILITY") == wanted
