"""Texts without credentials: the user, password and query values of every URI become ***.

A typed password may contain blanks, quotes, @ and //, so in a sentence nothing marks the end of a URI. Too much is
hidden rather than too little: all from the first // of a line to its last @.
"""

import os
import re
from itertools import zip_longest
from urllib.parse import SplitResult, parse_qsl, unquote, urlsplit

HIDDEN = "***"
_OPENING = re.compile(r"\\?/\\?/|%2F%2F", re.I)  # also as in escaped JSON, and as in a URI within another URI
# A user is not named so: after these hosts, and after what is hidden already, a blank ends a URI.
_KNOWN = re.compile(r"((localhost|\d+(\.\d+){3}|\[[\da-f:.%]+\])(?![^\s/:,;)'\"\]}])|\*\*\*@)\S*", re.I)
# workflowType names the interface in which MLflow opens a page
_KEY = re.compile(r"[?&;#](?!workflowType=machine_learning\b)[^\s?&;#=/]+=")
_VALUE = re.compile(r"""\A(?:[^\s'"]|['"](?=[^\s,:)\]}'"]))*""")  # a quote ends it unless the value goes on after it
_SECRETS_IN_ENVIRONMENT = (
    "MLFLOW_TRACKING_PASSWORD",
    "MLFLOW_TRACKING_TOKEN",
    "RAY_AUTH_TOKEN",
    "AWS_SECRET_ACCESS_KEY",
    "AWS_SESSION_TOKEN",
)


def redact(text: str, uri: str = "") -> str:
    """`text` without credentials: the user, password and query values of every URI in it become ***.

    uri: a URI whose secrets are also hidden outside of URIs in `text`, as in the message of an exception.
    """
    for secret in sorted(_secrets(uri), key=len, reverse=True):
        text = text.replace(secret, HIDDEN)
    return "\n".join(_without_values(_without_users(line)) for line in text.split("\n"))


def _without_users(line: str) -> str:
    hidden, shown = "", 0
    for opening in _OPENING.finditer(line):
        if (start := opening.end()) > shown:
            end = known.end() if (known := _KNOWN.match(line, start)) else len(line)
            at = max(line.rfind("@", start, end), line.rfind("%40", start, end))
            hidden += line[shown:start] + (HIDDEN if at >= 0 else line[start:end])
            shown = at if at >= 0 else end
    return hidden + line[shown:]


def _without_values(line: str) -> str:
    opening = _OPENING.search(line)
    keys = list(_KEY.finditer(line, opening.end())) if opening else []
    hidden = line[: keys[0].start()] if keys else line
    for key, after in zip_longest(keys, keys[1:]):
        value = line[key.end() : after.start() if after else len(line)]
        whole = after and after[0][0] != "?" and not _OPENING.search(value)  # also if it has blanks
        hidden += key[0] + HIDDEN + ("" if whole else _VALUE.sub("", value))
    return hidden


def _secrets(uri: str) -> set[str]:
    """The password and query values of `uri`, as typed and decoded, and the secrets of the environment.

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
