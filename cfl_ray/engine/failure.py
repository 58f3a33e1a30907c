"""Errors in the work on a client, with the client, and whether the machine or the user caused them.

The machine may cause these errors: files that cannot be read or are damaged (OSError, pyarrow's errors, DataError),
lack of memory, also on the GPU, and errors of CUDA and cuDNN. On Ray the work is then retried elsewhere, a bounded
number of times.

All other errors are the user's and end the run: exceptions in a method, a model or data, such as TypeError, ValueError
and shapes that do not fit; ConfigError and RunError.
"""

import re
import traceback
from collections.abc import Iterator
from contextlib import contextmanager

from cfl_ray.errors import DataError, RunError, UserError, class_and_text, text_of
from cfl_ray.nn.places import layer_of
from cfl_ray.plugins.calling import users_place

_MACHINE = (OSError, MemoryError, DataError)
# text of a RuntimeError: accelerator errors of torch are also RuntimeErrors, and importing torch takes seconds
_IN_TEXT = re.compile(r"out of memory|can't allocate memory|(CUDA|HIP|XPU|cuDNN|MIOpen) error|CUBLAS_STATUS")


class ClientFailure(RunError):
    """Work on one client failed. The message names the client and the stage."""

    may_be_machine = False  # see `may_be_machine`; an attribute, since causes are lost on the way to another process


def may_be_machine(error: BaseException | None) -> bool:
    """Whether an error may be due to the machine, so that the same work may succeed on another one."""
    if isinstance(error, ClientFailure):
        return error.may_be_machine
    if isinstance(error, _MACHINE) or (isinstance(error, RuntimeError) and _IN_TEXT.search(text_of(error))):
        return True
    # by name, because the engines also work without pyarrow (benchmarks/gpu.py)
    return any(base.__module__ == "pyarrow.lib" for base in type(error).__mro__)


@contextmanager
def naming_client(client: int, stage: str, what: str = "client") -> Iterator[None]:
    """Context that raises any exception of its block as a `ClientFailure` with this client and stage.

    what: the kind of unit that `client` numbers, if not a client.
    """
    try:
        yield
    except ClientFailure:
        raise
    except Exception as error:
        if isinstance(error, UserError):  # says where
            text = str(error)
        else:
            last = traceback.extract_tb(error.__traceback__)[-1]
            place = users_place(error) or f"{last.name}, line {last.lineno}"
            text = f"{class_and_text(error)} ({place}){layer_of(error)}"
        failure = ClientFailure(f"{what} {client} failed while {stage}: {text}")
        failure.may_be_machine = may_be_machine(error)
        raise failure from error
