"""Requests to the server of a live run, from a process outside the run; the driver reads those to stop the run."""

import threading
import time
from contextlib import suppress
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayError, RayTaskError

from cfl_ray.errors import NotReady, RunError
from cfl_ray.run_directory.session_file import NAMESPACE, ServerAddress
from cfl_ray.runtime.on_ray.connect import as_user_error, join_cluster, short_reason
from cfl_ray.runtime.on_ray.ray_internals import at_head
from cfl_ray.system.signals import Flag

_ANSWER_SECONDS, _STOP_SECONDS = 120, 8
_READ_SECONDS = 1.0  # between two reads of a request to stop: with STOP_SECONDS and a poll, `stop` holds within 10 s
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
    at_head("put", key, _AFTER_ROUND)
    try:
        return ray.get(actor.ask.remote("stop"), timeout=_STOP_SECONDS)
    except RayTaskError as error:
        if isinstance(as_user_error(error), NotReady):
            at_head("put", key, _NOW)
            return "no round is running just now: the run ends now; every saved round is kept"
        at_head("del", key)
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


class StopRequests:
    """Requests to stop the run of a session. A thread reads them from Ray's head, since a read waits if it is away."""

    def __init__(self, session: str) -> None:
        self.key = _stop_key(f"{session}-")
        self.request: bytes | None = None
        self.read_at = time.monotonic()  # the last time that the head answered
        self.closed = Flag()
        self.thread = threading.Thread(target=self._read_on, name="stop-requests", daemon=True)
        self.thread.start()

    @property
    def is_asked(self) -> bool:
        """Whether a request to stop was left for the driver of the session's servers."""
        return self.request is not None

    @property
    def is_due(self) -> bool:
        """Whether the driver must end the run now, because the server was not ready when a user asked to stop."""
        return self.request == _NOW

    def silence(self, now: float) -> float:
        """Seconds for which the head has not answered."""
        return now - self.read_at

    def read(self) -> None:
        """Reads the request now."""
        self.request, self.read_at = at_head("get", self.key), time.monotonic()

    def close(self) -> None:
        """Ends the thread, before Ray's client is shut down."""
        self.closed.set()
        self.thread.join(_READ_SECONDS)

    def _read_on(self) -> None:
        while not self.closed.wait(_READ_SECONDS):
            with suppress(Exception):  # of several kinds while the head is away
                self.read()


def _stop_key(actor: str) -> str:
    return f"{NAMESPACE} stop {actor.rpartition('-')[0]}"
