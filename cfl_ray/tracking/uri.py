"""Tracking URIs: which one holds, how it is shown without its credentials, and whether anything answers there."""

import os
import re
import socket
import urllib.request
from pathlib import Path
from typing import Any
from urllib.parse import SplitResult, parse_qsl, unquote, urlsplit

HIDDEN = "***"
_USER = re.compile(r"://[^\s'\"]*@")  # to the last @, since a password typed by hand may hold / and @
_QUERY = re.compile(r"([?&;][\w.~%-]+=)[^\s&;'\"]+")
_SECRETS_IN_ENVIRONMENT = ("MLFLOW_TRACKING_PASSWORD", "MLFLOW_TRACKING_TOKEN")


def resolve_uri(tracking: Any, output: str | Path) -> str:
    """Returns where results go: `tracking.uri` of the config, else MLFLOW_TRACKING_URI, else an SQLite store below `output`."""
    uri = tracking.uri or os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{Path(output) / 'mlflow.db'}"
    path = None if "?" in uri else sqlite_path(uri)
    return f"sqlite:///{path}" if path else uri  # absolute: a later call may run in another folder


def redact(text: str, uri: str = "") -> str:
    """Returns `text` fit to be shown: users, passwords and query values of any URI in it become ***.

    `uri`: one whose secrets may also stand by themselves in `text`, as in the message of an exception.
    """
    for secret in sorted(_secrets(uri), key=len, reverse=True):
        text = text.replace(secret, HIDDEN)
    return _QUERY.sub(rf"\1{HIDDEN}", _USER.sub(f"://{HIDDEN}@", text))


def with_credentials(shown: str, *candidates: str | None) -> str | None:
    """Returns the candidate that `redact` shows as `shown`, `shown` itself if it hides nothing, else None."""
    for uri in (*candidates, os.environ.get("MLFLOW_TRACKING_URI")):
        if uri and redact(uri) == shown:
            return uri
    return None if HIDDEN in shown else shown


def answers(uri: str, seconds: float = 2.0) -> bool:
    """Returns False if `uri` is a server that takes no connection; True for a file, or behind a proxy (only a request can tell)."""
    parts = _split(uri)
    if parts.scheme not in ("http", "https") or not parts.hostname or _through_proxy(parts):
        return True
    try:
        port = parts.port or (443 if parts.scheme == "https" else 80)
        socket.create_connection((parts.hostname, port), timeout=seconds).close()
    except (OSError, ValueError):
        return False
    return True


def sqlite_path(uri: str) -> Path | None:
    """Returns the file of an SQLite URI, None for any other URI."""
    if not uri.startswith("sqlite:///"):
        return None
    return Path(uri.removeprefix("sqlite:///").split("?")[0]).resolve()


def _through_proxy(parts: SplitResult) -> bool:
    return parts.scheme in urllib.request.getproxies() and not urllib.request.proxy_bypass(parts.hostname)


def _secrets(uri: str) -> set[str]:
    """Returns the password and query values of `uri` as typed and decoded, and those of the environment; short ones cannot be told from words."""
    parts = _split(uri)
    password = parts.netloc.rpartition("@")[0].partition(":")[2]
    values = [password, *(value for _, value in parse_qsl(parts.query)), *(os.environ.get(name, "") for name in _SECRETS_IN_ENVIRONMENT)]
    return {form for value in values for form in (value, unquote(value)) if len(form) >= 4}


def _split(uri: str) -> SplitResult:
    try:
        return urlsplit(uri)
    except ValueError:  # such as an unclosed [ of an IPv6 address
        return urlsplit("")
