"""Placement of hosts: shares of logical GPUs, one process per client, and the errors without room or cluster."""

import os
import subprocess
import sys
from types import SimpleNamespace

import pytest

from cfl_ray import ConfigError, run, simulate
from cfl_ray.config import RuntimeConfig
from cfl_ray.runtime.on_ray.placement import host_count, room


@pytest.mark.slow
def test_four_hosts_share_one_gpu(experiment, figures, cluster, notes, actors):
    shared, seen = experiment(runtime={"hosts": 4, "gpus_per_host": 0.25}), []
    results = run(shared, watcher=notes(lambda number: seen.append((len(actors("ClientHost")), free_gpus()))))
    assert results.run_info["hosts"] == "4 on 1 node" and seen[-1] == (4, 0.0)
    assert figures(results) == figures(simulate(shared))


def free_gpus():
    import ray

    return ray.available_resources().get("GPU", 0.0)


@pytest.mark.parametrize(
    "runtime, message",
    [
        ({"hosts": 5, "gpus_per_host": 0.25}, "5 hosts with 0.25 GPU each need 1.25 GPUs, the cluster has 1"),
        ({"hosts": 2, "gpus_per_host": 1}, "2 hosts with 1 GPU each need 2 GPUs, the cluster has 1"),
        ({"hosts": 7}, "need 7 CPUs, the cluster has 6"),
        ({"clients_per_host": 1}, "12 hosts with 1 CPU each need 12 CPUs, the cluster has 6"),
    ],
)
def test_more_than_the_cluster_has(experiment, cluster, actors, runtime, message):
    before = set(actors("ServerActor"))  # of a run that has just ended, on its way out
    with pytest.raises(ConfigError) as error:
        run(experiment(runtime=runtime))
    assert message in str(error.value) and "lower runtime." in str(error.value)
    assert error.value.exit_status == 2 and set(actors("ServerActor")) <= before


TWO_GPUS = {"CPU": 4, "GPU": 2}


@pytest.mark.parametrize(
    "runtime, machines, hosts",
    [
        ({"gpus_per_host": 0.6}, [TWO_GPUS], 2),  # 2 / 0.6 = 3.3, but two shares of 0.6 are more than one GPU
        ({"gpus_per_host": 0.4}, [TWO_GPUS, {"CPU": 1, "GPU": 1}], 5),  # 2 x 2, and 1 for which there is a CPU
        ({"gpus_per_host": 0.25}, [{"CPU": 64}, TWO_GPUS], 4),  # the CPUs are those of the machine with the GPUs
        ({"gpus_per_host": 0.33333}, [TWO_GPUS], 4),
        ({"gpus_per_host": 0.1}, [{"CPU": 64, "GPU": 1}], 10),
        ({"cpus_per_host": 2}, [{"CPU": 3}, {"CPU": 3}], 2),
        ({"cpus_per_host": 0.1}, [{"CPU": 0.3}], 3),
        ({}, [{}, {"CPU": 3}], 3),
    ],
)
def test_a_host_is_on_one_machine_and_one_gpu(runtime, machines, hosts):
    assert room(RuntimeConfig(**runtime), machines) == hosts


def test_hosts_that_fit_on_no_machine(experiment):
    """Together the machines have the CPUs and GPUs: 3 x 0.6 < 2, and 5 < 3 + 3."""
    setup = SimpleNamespace(experiment=experiment(runtime={"hosts": 3, "gpus_per_host": 0.6}))
    message = r"3 hosts with 0.6 GPU and 1 CPU .*room for 2 hosts \(4 CPU, 2 GPU\); lower runtime.hosts"
    with pytest.raises(ConfigError, match=message):
        host_count(setup, [TWO_GPUS])
    assert host_count(setup, [TWO_GPUS], grows=True) == 3
    setup = SimpleNamespace(experiment=experiment(runtime={"hosts": 1, "cpus_per_host": 5}))
    with pytest.raises(ConfigError, match=r"1 host with 5 CPU .*room for 0 hosts \(3 CPU, 0 GPU; 3 CPU, 0 GPU\)"):
        host_count(setup, [{"CPU": 3}, {"CPU": 3}])


@pytest.mark.slow
def test_one_process_per_client(experiment, figures, cluster, logged):
    literal = experiment(data=logged(5), cohort={"fraction": 1.0}, rounds=3, runtime={"clients_per_host": 1})
    results = run(literal)
    hosts_of = {client: {pid for pid, owner in logged.read() if owner == client} for client in range(5)}
    assert all(len(pids) == 1 for pids in hosts_of.values()) and len(set.union(*hosts_of.values())) == 5
    assert figures(results) == figures(simulate(literal))
    assert results.run_info["hosts"] == "5 on 1 node"


NO_CLUSTER = """
import sys, time
from cfl_ray import ConfigError, config, run
for address in sys.argv[2:]:
    began = time.monotonic()
    try:
        run(config.load(sys.argv[1], [f"runtime.address={address}"]))
    except ConfigError as error:
        print(round(time.monotonic() - began), error)
"""


@pytest.mark.slow
def test_no_cluster_at_the_address(experiment, cluster, tmp_path):
    """No process that answers, and a cluster whose token this driver does not have."""
    (tmp_path / "small.yaml").write_text(experiment().to_yaml())
    command = [sys.executable, "-c", NO_CLUSTER, str(tmp_path / "small.yaml"), "127.0.0.1:1", cluster]
    env = os.environ | {"RAY_AUTH_TOKEN": "0" * 64}
    found = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300)
    nothing, refused = found.stdout.splitlines()
    for line, address in ((nothing, "127.0.0.1:1"), (refused, cluster)):
        seconds, text = line.split(" ", 1)
        assert int(seconds) <= 20 and text.startswith(f"no Ray cluster at {address}")
        assert "ray start --head" in text and "token" in text
    assert "refused" in nothing and "Traceback" not in found.stdout
