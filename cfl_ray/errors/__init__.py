"""Errors that a user can act on. The command line prints their text alone and exits with their status."""

import difflib
import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from cfl_ray.errors.redaction import redact


class UserError(Exception):
    """An error whose message says what is wrong, what the limit is and what to do. It is shown without a traceback.

    Credentials of URIs in the message are hidden.
    """

    exit_status = 1
    says_where = True  # see `says_where`

    def __init__(self, message: str = "") -> None:
        super().__init__(redact(str(message)))


class ConfigError(UserError):
    """Invalid input: a key, a value, a name or a file."""

    exit_status = 2


class DataError(ConfigError):
    """Data that is missing, damaged, or does not fit the configuration."""


class RunError(UserError):
    """A failure of a run that had started correctly."""


class NotReproduced(RunError):
    """A complete run with a saved model that does not give the recorded scores."""


class NotReady(RunError):
    """A request that a live run cannot take just now: it is only starting, or between two methods."""


class Diverged(RunError):
    """A run that is complete, with a method that has no usable model."""

    exit_status = 3


class Interrupted(KeyboardInterrupt):
    """An interruption of the run by the user, as by Ctrl-C; so `except Exception` around runs does not go on."""

    exit_status = 130
    says_where = True

    def __init__(self, message: str = "") -> None:
        super().__init__(redact(str(message)))


class RunStopped(UserError):
    """An early end of the run on request; nothing is wrong."""

    exit_status = 0


def command(verb: str, *words: object) -> str:
    """The command `cfl-ray VERB WORDS`, quoted for a shell and without credentials; words that are None are left out.

    Credentials are hidden word by word: in the whole line, all words between two of them would be.
    """
    return shlex.join(["cfl-ray", verb, *(redact(str(word)) for word in words if word is not None)])


def did_you_mean(word: str, valid: Iterable[str]) -> str:
    """The text ` (did you mean 'x'?)`, or the list of valid words when none is close.

    Words of which it is a whole part, as leaf is of femnist_leaf, are closer than any other.
    """
    word, valid = str(word), sorted(set(valid))
    near = [each for each in valid if word in each.split("_")] or [each for each in [nearest(word, valid)] if each]
    return f" (did you mean {' or '.join(map(repr, near))}?)" if near else f"; valid: {', '.join(valid)}"


def nearest(word: str, valid: Iterable[str], cutoff: float = 0.5) -> str | None:
    """The valid word with the fewest edits of those that are close; None if none is. cutoff: of difflib's ratio."""
    close = difflib.get_close_matches(word, sorted(set(valid)), n=3, cutoff=cutoff)
    # difflib ranks by letters in common, by which adma is closer to adamax than to adam
    return min(close, key=lambda candidate: _edits(word, candidate), default=None)


def shown(value: object) -> str:
    """The repr of a value in a message, shortened: arrays given in Python have a long one."""
    text = repr(value)
    return text if len(text) <= 200 else f"{text[:200]}..."


def counted(number: int, noun: str, plural: str = "") -> str:
    """A number with its noun, in the plural unless it is 1. plural: if it is not the noun with an s."""
    return f"{number} {noun if number == 1 else plural or f'{noun}s'}"


def some_of(items: Sequence[object], most: int = 1) -> str:
    """The first `most` items and the number of the others: `a, b and 3 more`."""
    more = f" and {len(items) - most} more" if len(items) > most else ""
    return f"{', '.join(map(str, items[:most]))}{more}"


def duration(seconds: float) -> str:
    """Seconds as text: 45 s, 12 min, 3.5 h."""
    if seconds < 120:
        return f"{seconds:.{'0f' if seconds >= 1 else '1g'}} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


_NAME = "^[A-Za-z0-9][A-Za-z0-9"  # begins the pattern of a name, which goes on with signs and ends with ]*$


def what_is_wrong(problem: Mapping[str, Any]) -> str:
    """The message of a problem in pydantic's ValidationError, with the given value."""
    what: str = problem["msg"].removeprefix("Value error, ")
    given, pattern = problem["input"], str(problem.get("ctx", {}).get("pattern", ""))
    if problem["type"] == "list_type" and isinstance(given, str | int | float):
        what = f"expected a list, write [{given}]"
    elif problem["type"] == "list_type" and isinstance(given, Mapping):
        what = f"expected a list, write [{', '.join(f'{{{key}: ...}}' for key in given)}]"
    elif pattern.startswith(_NAME):
        what = f"expected ASCII letters, digits and {' '.join(pattern[len(_NAME) : -3])}, the first a letter or digit"
    ours = problem["type"] == "value_error"
    is_said = ours and (isinstance(problem["input"], dict) or re.search(r"\bgot\b", what))
    is_said = is_said or problem["type"] == "missing"  # its input is the whole enclosing mapping
    return what if is_said else f"{what}, got {shown(problem['input'])}"


# Of code of users and of libraries, where it must not end a run. Some libraries leave the process on an error.
FOREIGN = (Exception, SystemExit)
_MOST_TEXT = 1000  # characters of an error's text in a message


def text_of(error: BaseException) -> str:
    """The text of any error in one line that can be printed, shortened; empty without any."""
    try:
        text = " ".join(str(error).split())
    except Exception:  # a user's class of errors may have an error
        text = "(without a readable text)"
    text = text.encode(errors="backslashreplace").decode()
    return text if len(text) <= _MOST_TEXT else f"{text[:_MOST_TEXT]} ..."


def class_and_text(error: BaseException) -> str:
    """The class of an error with its text, if it has any, as `text_of` gives it."""
    text = text_of(error)
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def first_line(error: BaseException) -> str:
    """The first line of the text of an error; the name of its class without a text."""
    try:
        lines = str(error).splitlines()
    except Exception:  # as in `text_of`
        lines = [text_of(error)]
    return (lines or [type(error).__name__])[0]


def notes_of(error: BaseException) -> str:
    """The notes of an error, as of `BaseException.add_note`, after its text; empty without any."""
    return "".join(f"; {note}" for note in getattr(error, "__notes__", ()))


def says_where(error: BaseException) -> bool:
    """Whether the text of an error says where it arose, so that messages add no line of this package to it."""
    return getattr(error, "says_where", False) is True


def _edits(a: str, b: str) -> int:
    """Edit distance: least number of insertions, deletions, substitutions and swaps of neighbouring letters."""
    rows = [list(range(len(b) + 1))]
    for i in range(1, len(a) + 1):
        row = [i]
        for j in range(1, len(b) + 1):
            row.append(min(rows[-1][j] + 1, row[-1] + 1, rows[-1][j - 1] + (a[i - 1] != b[j - 1])))
            if i > 1 and j > 1 and a[i - 2 : i] == b[j - 1] + b[j - 2]:
                row[-1] = min(row[-1], rows[-2][j - 2] + 1)
        rows.append(row)
    return rows[-1][-1]
