"""Output of commands, without credentials: results on standard output, warnings and errors on standard error."""

import io
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import TextIO

from rich.console import Console

from cfl_ray.errors.redaction import redact


class _Output:
    """Standard output as it is at the moment, without which a run or a study goes on if it cannot be written."""

    may_be_lost = False

    @property
    def _file(self) -> TextIO:
        if sys.stdout is None:  # it was closed when Python started, and `main` has not replaced it yet
            return io.StringIO()
        return getattr(sys.stdout, "rich_proxied_file", sys.stdout)  # while Rich shows bars, `sys.stdout` is a proxy

    @property
    def encoding(self) -> str:
        return self._file.encoding

    def isatty(self) -> bool:
        return self._file.isatty()

    def fileno(self) -> int:
        return self._file.fileno()

    def write(self, text: str) -> None:
        self._unless_lost(lambda: self._file.write(text))

    def flush(self) -> None:
        self._unless_lost(self._file.flush)

    def _unless_lost(self, write: Callable[[], object]) -> None:
        try:
            write()
        except OSError as error:  # a full disk, a pipe whose reader has ended, a terminal that was closed
            if not self.may_be_lost:
                raise
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self.fileno())  # also for what is in the buffer, and for what Python writes at its end
            os.close(nowhere)
            with suppress(OSError):
                warn(
                    f"note: standard output cannot be written ({error.strerror}) and is lost from here on; the command "
                    "goes on, and `cfl-ray status` shows the progress of a run or a study"
                )


_output = _Output()
out, err = Console(file=_output, highlight=False), Console(stderr=True, highlight=False)  # type: ignore[arg-type]


def go_on_without_output() -> None:
    """From now on, standard output that cannot be written ends no command: what it shows is on the disk."""
    _output.may_be_lost = True


def say(text: str, console: Console = out) -> None:
    """Prints a line, by default to standard output."""
    console.print(redact(text), markup=False, soft_wrap=True)


def warn(text: str) -> None:
    """Prints a line to standard error."""
    say(text, err)
