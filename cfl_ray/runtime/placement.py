"""How many hosts there may be, and where."""

import ray

from cfl_ray.core.errors import ConfigError
from cfl_ray.runtime.setup import Setup
from cfl_ray.sections import Runtime


def room(runtime: Runtime, resources: dict[str, float]) -> int:
    """Hosts that these resources are enough for."""
    cpus, gpus = resources.get("CPU", 0), resources.get("GPU", 0)
    return int(min(cpus / runtime.cpus_per_host, gpus / runtime.gpus_per_host if runtime.gpus_per_host else float("inf")) + 1e-9)


def hosts_asked_for(setup: Setup) -> int | None:
    """Hosts that the config asks for; None: as many as there is room for."""
    runtime = setup.experiment.runtime
    return -(-setup.federation.num_clients // runtime.clients_per_host) if runtime.clients_per_host else runtime.hosts


def host_count(setup: Setup, resources: dict[str, float]) -> int:
    """Hosts to start. Raises ConfigError where more are asked for than the cluster has room for."""
    runtime = setup.experiment.runtime
    count = hosts_asked_for(setup) or max(room(runtime, resources), 1)
    for kind, key, share in (("GPU", "gpus_per_host", runtime.gpus_per_host), ("CPU", "cpus_per_host", runtime.cpus_per_host)):
        there = resources.get(kind, 0)
        if share and count * share > there + 1e-9:
            raise ConfigError(
                f"runtime: {count} hosts with {share:g} {kind} each need {count * share:g} {kind}s, the cluster has {there:g}; lower runtime.{key} or runtime.hosts"
            )
    return count


def free() -> str:
    """What the cluster has left, for a person."""
    return ", ".join(f"{value:g} {name}" for name, value in sorted(ray.available_resources().items()) if name in ("CPU", "GPU")) or "no CPU"


def alive(node: str) -> bool:
    """Whether a node still belongs to the cluster."""
    return any(entry["NodeID"] == node and entry["Alive"] for entry in ray.nodes())
