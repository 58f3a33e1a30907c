"""Requests to the server of a live run, from a process outside the run."""

from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayError, RayTaskError

from cfl_ray.errors import RunError
from cfl_ray.run_directory.session_file import NAMESPACE, ServerAddress
from cfl_ray.runtime.on_ray.connect import as_user_error, join_cluster, short_reason

_ANSWER_SECONDS = 120


def ask_server(server: ServerAddress, verb: str, *arguments: Any) -> Any:
    """The server's answer to a request. Raises RunError if it cannot be reached, ConfigError if it refuses."""
    joined = not ray.is_initialized()
    try:
        if joined:
            join_cluster(server.address, server.loopback)
        actor = ray.get_actor(server.actor, namespace=NAMESPACE)
        return ray.get(actor.ask.remote(verb, *arguments), timeout=_ANSWER_SECONDS)
    except RayTaskError as error:
        raise as_user_error(error) from error
    except GetTimeoutError:
        raise RunError(
            f"the server has not answered within {_ANSWER_SECONDS} s; it may still do what was asked: "
            "see `cfl-ray status`"
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
