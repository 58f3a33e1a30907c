"""Ray clusters, and servers of other kinds, that tests start and kill as a whole."""

import os
import socket
import subprocess
import sys
import time
from contextlib import contextmanager

import psutil
from waiting import until

CLUSTER = """
import sys
from jobs.services.ray_cluster import LocalCluster
cluster = LocalCluster(initialize_head=True, head_node_args={"num_cpus": 2, "include_dashboard": False})
print(cluster.address, flush=True)
for line in sys.stdin:  # the name of a method of the head
    getattr(cluster.head_node, line.strip())()
    print("done", flush=True)
"""


class OtherCluster:
    """A Ray cluster whose processes are all below one of this test."""

    def __init__(self, **variables):
        environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
        environment |= {"RAY_AUTH_MODE": "token"} | variables
        self.process = subprocess.Popen(
            [sys.executable, "-c", CLUSTER], env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.address = self.process.stdout.readline().strip()
        self.environment = environment | {"RAY_ADDRESS": self.address}

    def head(self, verb):
        """Calls a method of the head's node."""
        self.process.stdin.write(f"{verb}\n")
        self.process.stdin.flush()
        assert self.process.stdout.readline() == "done\n"

    def kill(self):
        """Ends head, hosts and server at once, as a power failure does."""
        end(psutil.Process(self.process.pid))
        self.process.wait()


def end(process):
    for one in (process, *process.children(recursive=True)):
        one.kill()


def cfl_ray(on, log, *arguments, folder):
    command = [sys.executable, "-m", "cfl_ray", *arguments]
    return subprocess.Popen(command, env=on.environment, cwd=folder, stdout=log, stderr=log)


def rounds_in(records):
    return records.read_text().count("\n") if records.exists() else 0


def wait_for_rounds(number, records, run, log):
    until(lambda: run.poll() is not None or rounds_in(records) >= number, log.read_text)
    assert run.poll() is None, log.read_text()


@contextmanager
def served(*command):
    """The port of a server on this machine; the command ends with the port's number."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    server = subprocess.Popen([*command, str(port)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 60
        while socket.socket().connect_ex(("127.0.0.1", port)):
            assert time.monotonic() < deadline and server.poll() is None
            time.sleep(0.05)
        yield port
    finally:
        server.kill()
        server.wait()
