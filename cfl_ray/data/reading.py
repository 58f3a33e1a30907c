"""The boundary to libraries that read a user's data: their errors, of any class, become a DataError."""

from collections.abc import Iterator
from contextlib import contextmanager

from cfl_ray.errors import DataError, UserError, text_of


@contextmanager
def reading(name: str, as_what: str, remedy: str = "") -> Iterator[None]:
    """Context that raises any error of its block as a DataError; errors for users stay as they are.

    The block has the calls of a library on the user's data and no other code, since an error of this package would be
    taken for one of the data. name: the file or value. as_what: what it should be. remedy: what to do.
    """
    try:
        yield
    except UserError:
        raise
    except Exception as error:  # damaged data make libraries raise errors of many classes
        advice = f"; {remedy}" if remedy else ""
        raise DataError(f"{name} cannot be read as {as_what}: {reason(error)}{advice}") from error


def reason(error: Exception) -> str:
    """The text of an error, with its class where the text alone says too little."""
    text = text_of(error)
    if isinstance(error, MemoryError):
        return f"it does not fit into memory{f' ({text})' if text else ''}"
    return text if text and isinstance(error, OSError | ValueError) else f"{type(error).__name__} {text}".strip()
