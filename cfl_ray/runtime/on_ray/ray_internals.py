"""The only module that uses Ray's private modules, and the releases of Ray with which these have been tried.

A run's own cluster forks its workers (`fork_server.py`), and its head has no processes that no run uses. Ray has no
public interface for either. With another release, or if Ray lacks a name that is used here, it starts both as usual.
`python -m jobs.ray_releases` tries the releases that the package index offers.

Imports Ray in its functions: a fork server does so in the environment of its first worker.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from inspect import signature
from operator import attrgetter
from typing import Any

from cfl_ray.system.variables import environment

TRIED: tuple[str, ...] = (
    "2.52.0",
    "2.52.1",
    "2.53.0",
    "2.54.0",
    "2.54.1",
    "2.55.0",
    "2.55.1",
    "2.56.0",
    "2.56.1",
    "2.57.0",
    "2.57.1",
    "2.58.0",
    "2.58.1",
    "2.59.0",
    "2.60.0",
)
WORKER_MODULE = "ray._private.workers.default_worker"  # the program of a worker; imports what a worker needs
SETUP_VARIABLE = "CFL_RAY_SETUP_WORKER"  # with the path of Ray's program that starts a worker; also in fork_worker
_SETUP_MODULE = "ray._private.workers.setup_worker"
_USED = {
    "ray._private.node": ("Node.start_api_server", "Node.start_monitor", "Node.start_log_monitor"),
    "ray._private.parameter": ("RayParams",),
    "ray._private.runtime_env.context": ("RuntimeEnvContext.deserialize",),
    _SETUP_MODULE: ("parser.parse_known_args",),
}
_ARGUMENTS = (("ray._private.node", "Node", "ray_params"), ("ray._private.parameter", "RayParams", "setup_worker_path"))


def why_not() -> str:
    """The reason, for the user, why a cluster must start as Ray starts it; empty if the internals can be used."""
    import ray

    if ray.__version__ in TRIED:
        lacking = _lacking()
        reason = f"Ray {ray.__version__} lacks {lacking} here" if lacking else ""
    else:
        reason = f"its internals have been tried with Ray {TRIED[0]} to {TRIED[-1]}, and this is Ray {ray.__version__}"
    costs = "workers start as Ray starts them, each with 2 s of CPU time and 0.3 GB more than as a fork"
    return reason and f"{costs}: {reason}"


def _lacking() -> str:
    """The first name that is used here and that Ray does not have; empty if it has all."""
    for module, names in _USED.items():
        for name in names:
            try:
                attrgetter(name)(import_module(module))
            except Exception:  # of any kind in an import
                return f"{module}.{name}"
    for module, function, argument in _ARGUMENTS:
        if argument not in signature(getattr(import_module(module), function)).parameters:
            return f"the argument {argument} of {module}.{function}"
    return "" if _file_of(WORKER_MODULE) else WORKER_MODULE


def _file_of(module: str) -> str | None:
    """The file of a module, which is not imported; None if there is none."""
    try:
        found = find_spec(module)
    except (ImportError, ValueError):
        return None
    return found.origin if found else None


@contextmanager
def small_head(worker_program: str | None) -> Iterator[None]:
    """Context in which Ray starts a head without processes that no run uses: 0.2 GB, and 4 s of CPU when it starts.

    They serve the dashboard's pages, ask clouds for machines and copy the output of processes to drivers.

    worker_program: the file that Ray runs for each worker, with SETUP_VARIABLE set; None: Ray's own.
    """
    node: Any = import_module("ray._private.node")

    class SmallHead(node.Node):
        def __init__(self, ray_params: Any, *arguments: Any, **options: Any) -> None:
            if worker_program is not None:
                ray_params.setup_worker_path = worker_program
            super().__init__(ray_params, *arguments, **options)

        def start_api_server(self, **options: object) -> None:
            self._webui_url = ""  # as of include_dashboard=False, which starts a process without pages

        def start_monitor(self) -> None:
            pass

        def start_log_monitor(self) -> None:
            pass

    before, node.Node = node.Node, SmallHead
    try:
        with environment({SETUP_VARIABLE: _file_of(_SETUP_MODULE) or ""}):
            yield
    finally:
        node.Node = before


@contextmanager
def loopback_only() -> Iterator[None]:
    """Context in which Ray listens on 127.0.0.1 only; otherwise Ray replaces it by an address that others can reach.

    Also with a release that has not been tried, for the sake of security; `connect.listens_on_loopback` tells whether
    it had an effect.
    """
    try:
        constants: Any = import_module("ray._private.ray_constants")
        before = constants.ENABLE_RAY_CLUSTER
    except (ImportError, AttributeError):
        yield
        return
    constants.ENABLE_RAY_CLUSTER = False
    try:
        yield
    finally:
        constants.ENABLE_RAY_CLUSTER = before


def resolved(address: str) -> str | None:
    """HOST:PORT to which Ray connects for an address such as `auto` or localhost:6379; None if Ray does not tell."""
    try:
        services: Any = import_module("ray._private.services")
        found: str | None = services.canonicalize_bootstrap_address_or_die(address)
    except Exception:  # also of an address that is not valid, which `ray.init` then names
        return None
    return found


def program_of_worker(arguments: list[str]) -> list[str] | None:
    """The Python program of a worker, with its arguments; None if Ray has to prepare more than that.

    arguments: those with which Ray has started the worker.
    """
    from ray._private.runtime_env.context import RuntimeEnvContext
    from ray._private.workers.setup_worker import parser

    options, program = parser.parse_known_args(arguments)
    context = RuntimeEnvContext.deserialize(options.serialized_runtime_env_context or "{}")
    return program if options.language == "PYTHON" and vars(context) == vars(RuntimeEnvContext()) else None


def at_head(verb: str, *arguments: Any) -> bytes | None:
    """Puts, gets or deletes (`put`, `get`, `del`) a value kept by Ray's head; None also if this release keeps none."""
    try:
        function = getattr(import_module("ray.experimental.internal_kv"), f"_internal_kv_{verb}")
    except (ImportError, AttributeError):
        return None
    found: bytes | None = function(*arguments)
    return found
