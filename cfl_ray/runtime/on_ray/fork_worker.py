"""The program that Ray starts for a worker: asks `fork_server` for a fork, or else starts the worker itself.

Ray ends a worker by ending this process.
Imports nothing but a few modules of Python.
"""

import json
import os
import socket
import sys
from contextlib import suppress

if __name__ == "__main__":
    sys.path.pop(0)
    with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
        connection.connect(os.environ.get("CFL_RAY_FORK_SERVER", ""))
        ends_with_this, _ = os.pipe()
        message = json.dumps([sys.argv[1:], dict(os.environ)]).encode()
        socket.send_fds(connection, [message], [ends_with_this, 0, 1, 2])
        if connection.recv(16):
            connection.recv(1)  # returns when the worker has ended
            sys.exit()
    os.execv(sys.executable, [sys.executable, os.environ["CFL_RAY_SETUP_WORKER"], *sys.argv[1:]])
