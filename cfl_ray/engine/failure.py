"""Errors in a user's data, model or method, with the client at which they occurred. They end the run."""

import traceback
from types import TracebackType
from typing import Self

from cfl_ray.core.errors import UserError


class ClientFailure(Exception):
    """Work on one client failed. The message names the client and the stage."""


class naming_client:
    """Context manager that raises any exception of its block as a `ClientFailure` with this client and stage.

    what: what the number is of, where it is not a client's.
    """

    def __init__(self, client: int, stage: str, what: str = "client"):
        self.client, self.stage, self.what = client, stage, what

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, UserError):  # it says itself where it happened
            raise ClientFailure(f"{self.what} {self.client} failed while {self.stage}: {error}") from error
        if isinstance(error, Exception) and not isinstance(error, ClientFailure):
            if isinstance(error, UserError):  # it names the place itself
                raise ClientFailure(f"client {self.client} failed while {self.stage}: {error}") from error
            where = traceback.extract_tb(trace)[-1]
            raise ClientFailure(
                f"{self.what} {self.client} failed while {self.stage}: {error} ({where.name}, line {where.lineno})"
            ) from error
