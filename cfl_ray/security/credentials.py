"""Credentials of this user's URIs, restored in URIs that a record has redacted.

The records and messages of a run have URIs without credentials (`redaction.py`). The full URIs are kept in
`credentials.json` in the user's folder, readable by the user alone, so that a run is resumed and its results are
delivered without typing them again.
"""

import os
from contextlib import suppress
from typing import Any

from filelock import FileLock, Timeout

from cfl_ray.errors import DataError
from cfl_ray.errors.redaction import HIDDEN, redact
from cfl_ray.system.files import private_folder, read_json, user_folder, write_json
from cfl_ray.system.nested import each_text, texts_of


def redact_values(values: Any) -> Any:
    """JSON values with every URI in them redacted."""
    return each_text(values, lambda text: redact(text) if "//" in text else text)


def with_known_credentials(values: Any) -> Any:
    """JSON values in which every redacted URI has its credentials again, if they are known."""
    return each_text(values, lambda text: with_credentials(text) or text)


def with_credentials(redacted_uri: str, *candidates: str | None) -> str | None:
    """The URI with its credentials, or None if they are not known.

    A URI without hidden credentials is returned unchanged; otherwise it is compared with the candidates,
    MLFLOW_TRACKING_URI and the URIs that this user has used before.
    """
    for uri in (*candidates, os.environ.get("MLFLOW_TRACKING_URI")):
        if uri and HIDDEN not in uri and redact(uri) == redacted_uri:
            return uri
    if not hides(redacted_uri):
        return redacted_uri
    return _remembered().get(redacted_uri)


def hides(uri: str) -> bool:
    """Whether the credentials of a URI are hidden."""
    return "//" in uri and HIDDEN in uri


def remember_credentials(values: Any) -> None:
    """Saves the URIs with credentials among JSON values for `with_credentials`. An OSError is ignored."""
    uris = {redact(text): text for text in texts_of(values) if "//" in text and not hides(text)}
    uris = {redacted: uri for redacted, uri in uris.items() if redacted != uri}
    if uris:
        with suppress(OSError):
            _remember(uris)


def _remember(uris: dict[str, str]) -> None:
    private_folder(user_folder())
    with suppress(Timeout), FileLock(user_folder() / "credentials.lock", timeout=5, mode=0o600):
        known = _remembered()
        if known | uris != known:
            write_json(user_folder() / "credentials.json", known | uris)


def _remembered() -> dict[str, str]:
    try:
        known = read_json(user_folder() / "credentials.json", follow=True) or {}
    except (DataError, OSError):
        return {}
    return {str(redacted): str(uri) for redacted, uri in known.items()}
