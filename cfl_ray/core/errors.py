"""Errors that a user can act on. The command line prints their text alone and exits with their status."""

import difflib
from collections.abc import Iterable


class UserError(Exception):
    """An error whose message says what is wrong, what the limit is and what to do. It is shown without a traceback."""

    exit_status = 1


class ConfigError(UserError):
    """Invalid input: a key, a value, a name or a file."""

    exit_status = 2


class DataError(ConfigError):
    """Data that is missing, damaged, or does not fit the configuration."""


class RunError(UserError):
    """A failure of a run that had started correctly."""


class Interrupted(RunError):
    """An interruption of the run by the user."""

    exit_status = 130


class RunStopped(UserError):
    """An early end of the run on request; nothing is wrong."""

    exit_status = 0


def did_you_mean(word: str, valid: Iterable[str]) -> str:
    """Returns ` (did you mean 'x'?)`, or the list of valid words when none is close."""
    valid = sorted(set(valid))
    close = difflib.get_close_matches(str(word), valid, n=1, cutoff=0.5)
    return f" (did you mean {close[0]!r}?)" if close else f"; valid: {', '.join(valid)}"
