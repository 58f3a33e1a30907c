"""Requests to the server of a live run, from a process outside the run."""

import os
import signal
import socket
from contextlib import suppress
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayError, RayTaskError

from cfl_ray.errors import RunError
from cfl_ray.run_directory.session_file import NAMESPACE, ServerAddress
from cfl_ray.runtime.on_ray.connect import as_user_error, join_cluster, short_reason

_ANSWER_SECONDS, _STOP_SECONDS = 120, 8


def ask_server(server: ServerAddress, verb: str, *arguments: Any) -> Any:
    """The server's answer to a request. Raises RunError if it cannot be reached, ConfigError if it refuses.

    A request to stop that is not answered, by a server that hangs, interrupts the driver if it is on this machine.
    """
    seconds = _STOP_SECONDS if verb == "stop" else _ANSWER_SECONDS
    joined = not ray.is_initialized()
    try:
        if joined:
            join_cluster(server.address, server.loopback)
        actor = ray.get_actor(server.actor, namespace=NAMESPACE)
        return ray.get(actor.ask.remote(verb, *arguments), timeout=seconds)
    except RayTaskError as error:
        raise as_user_error(error) from error
    except GetTimeoutError:
        if verb == "stop" and server.host == socket.gethostname():
            with suppress(ProcessLookupError, PermissionError):
                os.kill(server.pid, signal.SIGTERM)
                return f"the server has not answered within {seconds} s: the run ends now; every saved round is kept"
        raise RunError(
            f"the server has not answered within {seconds} s; it may still do what was asked: see `cfl-ray status`"
        ) from None
    except RayActorError as error:
        raise RunError(
            f"the server died when it was asked ({short_reason(error)}); another one is started: "
            "see `cfl-ray status` for what it knows"
        ) from None
    except (OSError, RuntimeError, ValueError, RayError) as error:
        raise RunError(
            f"the server of this run cannot be reached ({short_reason(error)}); "
            "ask again in a moment, on the machine that runs it"
        ) from None
    finally:
        if joined and ray.is_initialized():
            ray.shutdown()
