"""Opening the Ray cluster of a run. Fast to import: `cfl-ray run` does it before torch is imported."""

from __future__ import annotations

import os
import sys
from importlib import import_module
from threading import Thread
from typing import TYPE_CHECKING

from cfl_ray.config import RuntimeConfig
from cfl_ray.run_directory.session_file import cluster_address

if TYPE_CHECKING:
    from cfl_ray.runtime.on_ray.cluster import Cluster


def open_cluster(runtime: RuntimeConfig, meanwhile: str | None = None) -> Cluster | None:
    """The cluster of a run, joined or started; None if the run is in this process (runtime.backend).

    meanwhile: a module that another thread imports, since this one waits for Ray's processes.
    Raises ConfigError if the cluster cannot be joined, or lacks the resources.
    """
    if runtime.backend != "ray":
        return None
    if cluster_address(runtime.address) is None and "ray" not in sys.modules:
        # Ray reads it when it is imported; it keeps other users out of a cluster that is started for this run
        os.environ.setdefault("RAY_AUTH_MODE", "token")
    from cfl_ray.runtime.on_ray.cluster import Cluster  # imports ray

    if meanwhile is not None:
        Thread(target=import_module, args=(meanwhile,), daemon=True).start()
    return Cluster(runtime)
