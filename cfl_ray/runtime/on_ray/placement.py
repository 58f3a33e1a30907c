"""The number of hosts that a cluster has room for."""

from collections.abc import Iterable, Mapping, Sequence

import ray

from cfl_ray.config import RuntimeConfig
from cfl_ray.config.runtime import hosts_on_gpu
from cfl_ray.errors import ConfigError, counted
from cfl_ray.setup.setup import Setup

Machine = Mapping[str, float]  # number of "CPU" and "GPU"


def room(runtime: RuntimeConfig, machines: Iterable[Machine]) -> int:
    """Number of hosts that these machines suffice for. A host is on one machine, and its share is of one GPU."""
    return sum(_room_of(runtime, machine) for machine in machines)


def _room_of(runtime: RuntimeConfig, machine: Machine) -> int:
    by_cpus = int(machine.get("CPU", 0) / runtime.cpus_per_host + 1e-9)
    share = runtime.gpus_per_host
    return min(by_cpus, int(machine.get("GPU", 0)) * hosts_on_gpu(share)) if share else by_cpus


def room_of_cluster(runtime: RuntimeConfig) -> int:
    """Number of hosts that the cluster of this process has room for."""
    return room(runtime, machines())


def room_left(runtime: RuntimeConfig) -> int:
    """Number of hosts that the cluster may have room for beside the work that it has; no more than that many fit."""
    free, share = ray.available_resources(), runtime.gpus_per_host
    by_cpus = free.get("CPU", 0) / runtime.cpus_per_host
    return int((min(by_cpus, free.get("GPU", 0) / share) if share else by_cpus) + 1e-9)


def machines() -> list[Machine]:
    """The machines of the cluster that are alive."""
    return [node["Resources"] for node in ray.nodes() if node["Alive"]]


def hosts_asked_for(setup: Setup) -> int | None:
    """Number of hosts that the config asks for; None: as many as there is room for."""
    runtime = setup.experiment.runtime
    return -(-setup.federation.num_clients // runtime.clients_per_host) if runtime.clients_per_host else runtime.hosts


def host_count(setup: Setup, machines: Sequence[Machine], grows: bool = False) -> int:
    """Number of hosts to start. Raises ConfigError if the config asks for more than these machines have room for.

    grows: whether the cluster may grow; hosts without room then wait, so that its autoscaler adds machines.
    """
    runtime = setup.experiment.runtime
    there = room(runtime, machines)
    count = hosts_asked_for(setup) or max(there, 1)
    if grows or count <= there:
        return count
    advice = "or set runtime.wait_for_hosts (seconds) where the cluster grows on demand"
    need, shares = "needs" if count == 1 else "each need", {"GPU": runtime.gpus_per_host, "CPU": runtime.cpus_per_host}
    for kind, share in shares.items():
        total = sum(machine.get(kind, 0) for machine in machines)
        if count * share > total + 1e-9:
            raise ConfigError(
                f"runtime: {counted(count, 'host')} with {share:g} {kind} {need} {count * share:g} {kind}s, "
                f"the cluster has {total:g}; lower runtime.{kind.lower()}s_per_host or runtime.hosts, {advice}"
            )
    gpus = f"{runtime.gpus_per_host:g} GPU and " if runtime.gpus_per_host else ""
    sizes = "; ".join(_in_words(machine) for machine in machines)
    raise ConfigError(
        f"runtime: {counted(count, 'host')} with {gpus}{runtime.cpus_per_host:g} CPU {need} this on one machine, with "
        f"a share of one GPU, and the cluster has room for {counted(there, 'host')} ({sizes}); lower runtime.hosts, "
        f"runtime.gpus_per_host or runtime.cpus_per_host, {advice}"
    )


def _in_words(machine: Machine) -> str:
    return ", ".join(f"{machine.get(kind, 0):g} {kind}" for kind in ("CPU", "GPU"))


def free() -> str:
    """The free resources of the cluster, as text."""
    resources = sorted(ray.available_resources().items())
    return ", ".join(f"{value:g} {name}" for name, value in resources if name in ("CPU", "GPU")) or "no CPU"


def alive(nodes: Iterable[str]) -> set[str]:
    """The subset of these nodes that is alive in the cluster."""
    wanted = set(nodes)
    return {entry["NodeID"] for entry in ray.nodes() if entry["Alive"]} & wanted if wanted else wanted
