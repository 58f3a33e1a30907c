"""Errors in what a user brought - data, model, method - that name the client they happened on. They end the run."""

import traceback


class ClientFailure(Exception):
    """Work on one client failed: says which client and at what."""


class named:
    """Names the client and the stage in whatever goes wrong inside."""

    def __init__(self, client: int, stage: str):
        self.client, self.stage = client, stage

    def __enter__(self):
        return self

    def __exit__(self, kind, error, trace):
        if error is not None and isinstance(error, Exception) and not isinstance(error, ClientFailure):
            where = traceback.extract_tb(trace)[-1]
            raise ClientFailure(f"client {self.client} failed while {self.stage}: {error} ({where.name}, line {where.lineno})") from error
