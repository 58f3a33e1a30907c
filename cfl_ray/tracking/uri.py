"""Tracking URIs: resolution, and a check that the server accepts connections."""

import os
import socket
import urllib.request
from pathlib import Path
from typing import Any

from cfl_ray.errors.redaction import split
from cfl_ray.security.credentials import with_credentials

_CONNECT_SECONDS = 2.0


def resolve_uri(tracking: Any, output: str | Path) -> str:
    """Returns the destination of results: `tracking.uri` of the config, MLFLOW_TRACKING_URI, or an SQLite store.

    The first that is set counts; hidden credentials in it are restored if they are known. The SQLite store is
    `mlflow.db` below `output`.
    """
    uri = tracking.uri or os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{Path(output) / 'mlflow.db'}"
    uri = with_credentials(uri) or uri
    path = None if "?" in uri else sqlite_path(uri)
    return f"sqlite:///{path}" if path else uri  # absolute, since a later command may run in another folder


def accepts_connection(uri: str) -> bool:
    """Returns False for a server that refuses connections or does not answer within two seconds.

    True for a file, and for a server behind a proxy, which only a request could check.
    """
    parts = split(uri)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        return True
    if parts.scheme in urllib.request.getproxies() and not urllib.request.proxy_bypass(parts.hostname):
        return True
    try:
        port = parts.port or (443 if parts.scheme == "https" else 80)
        socket.create_connection((parts.hostname, port), timeout=_CONNECT_SECONDS).close()
    except (OSError, ValueError):
        return False
    return True


def sqlite_path(uri: str) -> Path | None:
    """Returns the file of an SQLite URI, None for any other URI."""
    if not uri.startswith("sqlite:///"):
        return None
    return Path(uri.removeprefix("sqlite:///").split("?")[0]).resolve()
