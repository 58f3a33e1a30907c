"""An MLflow server as a process that can be killed and started again."""

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

START_SECONDS = 240
USER = "admin", "a-long-password"


class MlflowServer:
    """`mlflow server` on a free port of this machine, with its whole process group.

    database: of its SQLite store. login: whether users have to log in (`mlflow[auth]`); the first is `USER`.
    store: URI of another database for the store. artifacts: where the server keeps them; None: beside `database`.
    variables: of its environment.
    """

    def __init__(
        self,
        database: Path,
        login: bool = False,
        store: str | None = None,
        artifacts: str | None = None,
        variables: Mapping[str, str] | None = None,
    ):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.uri = f"http://127.0.0.1:{self.port}"
        options = {
            "--host": "127.0.0.1",
            "--port": str(self.port),
            "--workers": "1",
            "--backend-store-uri": store or f"sqlite:///{database}",
            "--artifacts-destination": artifacts or str(database.parent / "artifacts"),
        }
        self._command = [sys.executable, "-m", "mlflow", "server", *(word for pair in options.items() for word in pair)]
        self._log = database.with_suffix(".log")
        # without it, a server starts eight processes for jobs of its own, which take more CPU than the server
        self._environment = {**os.environ, "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false", **(variables or {})}
        if login:
            self._command += ["--app-name", "basic-auth"]
            settings = database.with_suffix(".ini")
            values = {
                "default_permission": "READ",
                "database_uri": f"sqlite:///{database.with_suffix('.users')}",
                "admin_username": USER[0],
                "admin_password": USER[1],
                "authorization_function": "mlflow.server.auth:authenticate_request_basic_auth",
                "auth_cache_ttl_seconds": "600",  # to check a password takes a tenth of a second of CPU
            }
            lines = [f"{name} = {value}" for name, value in values.items()]
            settings.write_text("\n".join(["[mlflow]", *lines]))
            self._environment |= {"MLFLOW_AUTH_CONFIG_PATH": str(settings), "MLFLOW_FLASK_SERVER_SECRET_KEY": "a test"}

    def launch(self) -> None:
        """Starts the process; it does not answer yet."""
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                self._command, stdout=log, stderr=log, env=self._environment, start_new_session=True
            )

    def start(self) -> None:
        """Starts the process and waits until it answers. Raises RuntimeError if it ends, TimeoutError if it is slow."""
        self.launch()
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline:
            try:
                return urllib.request.urlopen(f"{self.uri}/health", timeout=2).close()
            except OSError:
                if self._process.poll() is not None:
                    raise RuntimeError(self._log.read_text()) from None
                time.sleep(0.1)
        raise TimeoutError(self._log.read_text())

    def kill(self) -> None:
        with suppress(ProcessLookupError):  # it has ended by itself
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
