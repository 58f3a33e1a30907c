"""Tracking URIs: resolution, display without credentials, and a check that the server accepts connections."""

import os
import re
import socket
import urllib.request
from pathlib import Path
from typing import Any
from urllib.parse import SplitResult, parse_qsl, unquote, urlsplit

HIDDEN = "***"
_USER = re.compile(r"://[^\s'\"]*@")  # up to the last @: a password that was typed by hand may contain / and @
_QUERY = re.compile(r"([?&;][\w.~%-]+=)[^\s&;'\"]+")
_SECRETS_IN_ENVIRONMENT = ("MLFLOW_TRACKING_PASSWORD", "MLFLOW_TRACKING_TOKEN")


def resolve_uri(tracking: Any, output: str | Path) -> str:
    """Returns the destination of results: `tracking.uri` of the config, MLFLOW_TRACKING_URI, or an SQLite store.

    The first that is set counts. The SQLite store is `mlflow.db` below `output`.
    """
    uri = tracking.uri or os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{Path(output) / 'mlflow.db'}"
    path = None if "?" in uri else sqlite_path(uri)
    return f"sqlite:///{path}" if path else uri  # absolute: a later command may run in another folder


def redact(text: str, uri: str = "") -> str:
    """Returns `text` without credentials: the user, password and query values of every URI in it become ***.

    uri: a URI whose secrets are hidden also where they stand alone in `text`, as in the message of an exception.
    """
    for secret in sorted(_secrets(uri), key=len, reverse=True):
        text = text.replace(secret, HIDDEN)
    return _QUERY.sub(rf"\1{HIDDEN}", _USER.sub(f"://{HIDDEN}@", text))


def with_credentials(redacted_uri: str, *candidates: str | None) -> str | None:
    """Returns the URI with its credentials, or None if they are not known.

    A URI that hides nothing is returned as it is; otherwise the candidates and MLFLOW_TRACKING_URI are compared.
    """
    for uri in (*candidates, os.environ.get("MLFLOW_TRACKING_URI")):
        if uri and redact(uri) == redacted_uri:
            return uri
    return None if HIDDEN in redacted_uri else redacted_uri


def accepts_connection(uri: str, seconds: float = 2.0) -> bool:
    """Returns False for a server that refuses connections or does not answer within `seconds`.

    True for a file, and for a server behind a proxy, where only a request can tell.
    """
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
    host = parts.hostname or ""
    return parts.scheme in urllib.request.getproxies() and not urllib.request.proxy_bypass(host)


def _secrets(uri: str) -> set[str]:
    """Returns the password and query values of `uri`, as typed and decoded, and the secrets of the environment.

    Values of fewer than 4 characters are omitted: hiding them would hide ordinary words too.
    """
    parts = _split(uri)
    password = parts.netloc.rpartition("@")[0].partition(":")[2]
    values = [
        password,
        *(value for _, value in parse_qsl(parts.query)),
        *(os.environ.get(name, "") for name in _SECRETS_IN_ENVIRONMENT),
    ]
    return {form for value in values for form in (value, unquote(value)) if len(form) >= 4}


def _split(uri: str) -> SplitResult:
    try:
        return urlsplit(uri)
    except ValueError:  # for example an unclosed [ of an IPv6 address
        return urlsplit("")
