"""Texts without credentials: the user, password and query values of every URI become ***."""

import os
import re
from urllib.parse import SplitResult, parse_qsl, unquote, urlsplit

HIDDEN = "***"
_CHAR = r"""(?:[^\s'"]|['"](?=[^\s,:)\]}'"]))"""  # a quote ends a URI unless the URI goes on after it
_URI = re.compile(rf"://{_CHAR}+")
# Up to the last @, since a typed password may contain any character; blanks only after USER:, unless a port follows.
_USER = re.compile(rf"""://(?:[^/\s@:'"]*:(?!\d+[\s/'"])(?:(?!://)(?:{_CHAR}|[ \t])){{0,80}}@|{_CHAR}*@)""")
# workflowType names the interface in which MLflow opens a page
_QUERY = re.compile(rf"([?&;#](?!workflowType=machine_learning\b)[\w.~%-]+=)(?:(?![&;]){_CHAR})+")
_SECRETS_IN_ENVIRONMENT = (
    "MLFLOW_TRACKING_PASSWORD",
    "MLFLOW_TRACKING_TOKEN",
    "RAY_AUTH_TOKEN",
    "AWS_SECRET_ACCESS_KEY",
    "AWS_SESSION_TOKEN",
)


def redact(text: str, uri: str = "") -> str:
    """Returns `text` without credentials: the user, password and query values of every URI in it become ***.

    uri: a URI whose secrets are also hidden outside of URIs in `text`, as in the message of an exception.
    """
    for secret in sorted(_secrets(uri), key=len, reverse=True):
        text = text.replace(secret, HIDDEN)
    text = _USER.sub(f"://{HIDDEN}@", text)
    return _URI.sub(lambda match: _QUERY.sub(rf"\1{HIDDEN}", match[0]), text)


def _secrets(uri: str) -> set[str]:
    """Returns the password and query values of `uri`, as typed and decoded, and the secrets of the environment.

    Values of fewer than 4 characters are omitted: hiding them would hide ordinary words too.
    """
    parts = split(uri)
    password = parts.netloc.rpartition("@")[0].partition(":")[2]
    values = [
        password,
        *(value for _, value in parse_qsl(parts.query)),
        *(os.environ.get(name, "") for name in _SECRETS_IN_ENVIRONMENT),
    ]
    return {form for value in values for form in (value, unquote(value)) if len(form) >= 4}


def split(uri: str) -> SplitResult:
    """The parts of a URI; empty parts if it is invalid, for example with an unclosed [ of an IPv6 address."""
    try:
        return urlsplit(uri)
    except ValueError:
        return urlsplit("")
