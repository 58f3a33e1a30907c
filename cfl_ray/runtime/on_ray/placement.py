"""The number of hosts that a cluster has room for."""

from collections.abc import Iterable

import ray

from cfl_ray.config import RuntimeConfig
from cfl_ray.errors import ConfigError, counted
from cfl_ray.setup.setup import Setup


def room(runtime: RuntimeConfig, resources: dict[str, float]) -> int:
    """Number of hosts that these resources suffice for."""
    by_cpus = resources.get("CPU", 0) / runtime.cpus_per_host
    by_gpus = resources.get("GPU", 0) / runtime.gpus_per_host if runtime.gpus_per_host else float("inf")
    return int(min(by_cpus, by_gpus) + 1e-9)


def room_of_cluster(runtime: RuntimeConfig) -> int:
    """Number of hosts that the cluster of this process has room for."""
    return room(runtime, ray.cluster_resources())


def hosts_asked_for(setup: Setup) -> int | None:
    """Number of hosts that the config asks for; None: as many as there is room for."""
    runtime = setup.experiment.runtime
    return -(-setup.federation.num_clients // runtime.clients_per_host) if runtime.clients_per_host else runtime.hosts


def host_count(setup: Setup, resources: dict[str, float], grows: bool = False) -> int:
    """Number of hosts to start. Raises ConfigError if the config asks for more than the cluster has room for.

    grows: whether the cluster may grow; hosts without room then wait, so that its autoscaler adds machines.
    """
    runtime = setup.experiment.runtime
    count = hosts_asked_for(setup) or max(room(runtime, resources), 1)
    shares = {"GPU": runtime.gpus_per_host, "CPU": runtime.cpus_per_host}
    for kind, share in shares.items():
        there = resources.get(kind, 0)
        if share and count * share > there + 1e-9 and not grows:
            need = "needs" if count == 1 else "each need"
            raise ConfigError(
                f"runtime: {counted(count, 'host')} with {share:g} {kind} {need} {count * share:g} {kind}s, "
                f"the cluster has {there:g}; lower runtime.{kind.lower()}s_per_host or runtime.hosts, or set "
                "runtime.wait_for_hosts (seconds) where the cluster grows on demand"
            )
    return count


def free() -> str:
    """The free resources of the cluster, as text."""
    resources = sorted(ray.available_resources().items())
    return ", ".join(f"{value:g} {name}" for name, value in resources if name in ("CPU", "GPU")) or "no CPU"


def alive(nodes: Iterable[str]) -> set[str]:
    """The subset of these nodes that is alive in the cluster."""
    wanted = set(nodes)
    return {entry["NodeID"] for entry in ray.nodes() if entry["Alive"]} & wanted if wanted else wanted
