"""Errors that a user can act on. The command line prints their text alone and exits with their status."""

import difflib
from collections.abc import Iterable


class UserError(Exception):
    """A message for the person who runs this: what is wrong, the limit, and what to do. No traceback is shown."""

    exit_status = 1


class ConfigError(UserError):
    """Bad input: a key, a value, a name or a file that the run was given."""

    exit_status = 2


class DataError(ConfigError):
    """Data that is absent, damaged, or does not fit what was asked of it."""


class RunError(UserError):
    """A run that was started correctly and could not go on."""


class Interrupted(RunError):
    """A run that a person stopped."""

    exit_status = 130


class Stopped(UserError):
    """A run that ended early because it was asked to: nothing is wrong."""

    exit_status = 0


def nearest(word: str, valid: Iterable[str]) -> str:
    """Returns ` (did you mean 'x'?)`, or the list of valid words when none is close."""
    valid = sorted(valid)
    close = difflib.get_close_matches(str(word), valid, n=1, cutoff=0.5)
    return f" (did you mean {close[0]!r}?)" if close else f"; valid: {', '.join(valid)}"
