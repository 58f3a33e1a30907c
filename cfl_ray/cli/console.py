"""Output of commands, without credentials: results on standard output, warnings and errors on standard error."""

from rich.console import Console

from cfl_ray.errors.redaction import redact

out, err = Console(highlight=False), Console(stderr=True, highlight=False)


def say(text: str, console: Console = out) -> None:
    """Prints a line, by default to standard output."""
    console.print(redact(text), markup=False, soft_wrap=True)


def warn(text: str) -> None:
    """Prints a line to standard error."""
    say(text, err)
