"""Requests to the server of a live run, from a process outside the run."""

from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayError, RayTaskError
from ray.experimental.internal_kv import _internal_kv_del, _internal_kv_get, _internal_kv_put

from cfl_ray.errors import NotReady, RunError
from cfl_ray.run_directory.session_file import NAMESPACE, ServerAddress
from cfl_ray.runtime.on_ray.connect import as_user_error, join_cluster, short_reason

_ANSWER_SECONDS, _STOP_SECONDS = 120, 8
_AFTER_ROUND, _NOW = b"after the round", b"now"  # when a run ends after a request to stop


def ask_server(server: ServerAddress, verb: str, *arguments: Any) -> Any:
    """The server's answer to a request. Raises RunError if it cannot be reached, ConfigError if it refuses."""
    joined = not ray.is_initialized()
    try:
        if joined:
            join_cluster(server.address, server.loopback)
        actor = ray.get_actor(server.actor, namespace=NAMESPACE)
        if verb == "stop":
            return _ask_to_stop(server, actor)
        return ray.get(actor.ask.remote(verb, *arguments), timeout=_ANSWER_SECONDS)
    except RayTaskError as error:
        raise as_user_error(error) from error
    except GetTimeoutError:
        raise RunError(
            f"the server has not answered within {_ANSWER_SECONDS} s; it may still do what was asked: see "
            "`cfl-ray status`"
        ) from None
    except RayActorError as error:
        raise RunError(
            f"the server died when it was asked ({short_reason(error)}); another one is started: "
            "see `cfl-ray status` for what it knows"
        ) from None
    except (OSError, RuntimeError, ValueError, RayError) as error:
        raise RunError(
            f"the server of this run cannot be reached ({short_reason(error)}); ask again in a moment, on the machine "
            f"that runs it ({_driver(server)} takes SIGTERM for a request to stop)"
        ) from None
    finally:
        if joined and ray.is_initialized():
            ray.shutdown()


def _ask_to_stop(server: ServerAddress, actor: Any) -> str:
    """Requests the end of the run, and returns a line for the user that says when it ends.

    The request is left on the cluster as well, for the driver of a server that hangs, or that is not ready. Raises
    RayTaskError if the server refuses.
    """
    key = _stop_key(server.actor)
    _internal_kv_put(key, _AFTER_ROUND)
    try:
        answer: str = ray.get(actor.ask.remote("stop"), timeout=_STOP_SECONDS)
        return answer
    except RayTaskError as error:
        if isinstance(as_user_error(error), NotReady):
            _internal_kv_put(key, _NOW)
            return "no round is running just now: the run ends now; every saved round is kept"
        _internal_kv_del(key)
        raise
    except GetTimeoutError:
        return (
            f"the server has not answered within {_STOP_SECONDS} s: {_driver(server)} ends the run now if the server "
            "hangs, otherwise after the round; every saved round is kept. If the run is still live in a minute, use "
            f"`kill {server.pid}` on that machine"
        )
    except RayActorError:  # the driver then ends the run instead of starting another server
        return "the server was ended before it answered: the run ends now; every saved round is kept"


def _driver(server: ServerAddress) -> str:
    return f"the driver, process {server.pid} on {server.host},"


def stop_is_asked(actor: str) -> bool:
    """Whether a request to stop was left for the driver of this server, or of another server of its session."""
    return _internal_kv_get(_stop_key(actor)) is not None


def stop_is_due(actor: str) -> bool:
    """Whether the driver must end the run now, because the server was not ready when a user asked to stop."""
    return bool(_internal_kv_get(_stop_key(actor)) == _NOW)


def _stop_key(actor: str) -> str:
    return f"{NAMESPACE} stop {actor.rpartition('-')[0]}"
