"""The program that Ray starts for a worker: asks `fork_server` for a fork, or else starts the worker itself.

Imports nothing but a few modules of Python.
"""

import json
import os
import socket
import sys
from contextlib import suppress
from pathlib import Path

if __name__ == "__main__":
    sys.path.pop(0)
    program = sys.argv[1]
    with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
        connection.connect(os.environ.get("CFL_RAY_FORK_SERVER", ""))
        socket.send_fds(connection, [json.dumps([sys.argv[1:], dict(os.environ)]).encode()], [0, 1, 2])
        if connection.recv(16):
            sys.exit()
    os.execv(sys.executable, [sys.executable, str(Path(program).with_name("setup_worker.py")), *sys.argv[1:]])
