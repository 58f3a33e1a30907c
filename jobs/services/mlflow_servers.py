"""MLflow servers of several kinds: their database, login, and where they keep artifacts."""

import importlib.metadata
import importlib.util
import os
import sqlite3
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from jobs.chaos.mlflow_server import USER, MlflowServer
from jobs.services import servers

KINDS = [f"{base}{more}" for base in ("sqlite", *servers.DATABASES) for more in ("", ", login")] + ["sqlite, S3"]


@contextmanager
def mlflow_server(kind: str, folder: Path) -> Iterator[MlflowServer]:
    """A running server of one of `KINDS`; MLflow's client in this process logs in where it is asked to."""
    base, _, more = kind.partition(", ")
    with ExitStack() as parts:
        store = parts.enter_context(servers.DATABASES[base]()) if base in servers.DATABASES else None
        bucket = servers.s3_variables(parts.enter_context(servers.s3())) if more == "S3" else None
        artifacts = f"s3://{servers.BUCKET}/artifacts" if bucket else None
        server = MlflowServer(folder / "server.db", more == "login", store, artifacts, bucket)
        os.environ |= {"MLFLOW_TRACKING_USERNAME": USER[0], "MLFLOW_TRACKING_PASSWORD": USER[1]}
        os.environ["MLFLOW_HTTP_REQUEST_TIMEOUT"] = "60"  # it may share a busy machine, and has to start
        parts.callback(server.kill)
        server.start()
        yield server


def version(kind: str) -> str:
    """The version of what a kind adds, and of MLflow for any other name, in words."""
    base, _, more = kind.partition(", ")
    if more == "S3":
        return f"moto {importlib.metadata.version('moto')}"
    if base in servers.DATABASES:
        return servers.version(base)
    return f"SQLite {sqlite3.sqlite_version}" if base == "sqlite" else f"MLflow {importlib.metadata.version('mlflow')}"


def why_not(kind: str) -> str:
    """Returns the programs and packages that a server of this kind lacks here, in words; empty if it can start."""
    base, _, more = kind.partition(", ")
    lacks_login = more == "login" and importlib.util.find_spec("flask_wtf") is None
    lacking = [servers.missing(base), servers.missing(servers.S3) if more == "S3" else ""]
    return "; ".join(filter(None, [*lacking, "a login needs mlflow[auth]" if lacks_login else ""]))
