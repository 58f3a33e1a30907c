"""A Ray cluster of several nodes on this machine, for tests, benchmarks and faults."""

import os
from typing import Any

os.environ.setdefault("RAY_AUTH_MODE", "token")  # read when ray is imported

from ray.cluster_utils import Cluster

_TRIES = 3


class LocalCluster(Cluster):  # type: ignore[misc]  # without types
    """Its nodes are real processes: a head, and raylets with an object store of their own.

    Ray gives up a node that has not started after half a minute, as on a busy machine; here it is tried again.
    """

    def add_node(self, wait: bool = True, **options: Any) -> Any:
        for _ in range(_TRIES - 1):
            try:
                return super().add_node(wait, **options)
            except Exception as error:
                if type(error) is not Exception:  # as which Ray raises it
                    raise
        return super().add_node(wait, **options)
