"""Machines in network namespaces: their links, and a short run over them with the same outcome."""

import os
import subprocess
import sys
import time

import pytest
from chaos_runs import check_same_outcome

from jobs.chaos.__main__ import main
from jobs.chaos.virtual_network import Link, Network, missing

RECEIVER = """
import socket
server = socket.create_server(("0.0.0.0", 9999))
while True:
    connection, _ = server.accept()
    while connection.recv(1 << 20): pass
    connection.send(b"."); connection.close()
"""
SENDER = """
import socket, sys, time
began = time.monotonic()
try:
    connection = socket.create_connection((sys.argv[1], 9999), timeout=1)
    connection.sendall(bytes(int(sys.argv[2]))); connection.shutdown(1); connection.recv(1)
    print(time.monotonic() - began)
except TimeoutError:
    print("nan")
"""
needs_network = pytest.mark.skipif(missing() is not None, reason=f"no network of namespaces here: {missing()}")


@needs_network
@pytest.mark.slow
def test_a_run_over_a_network_with_faults_has_the_same_outcome(tmp_path):
    printed = "node-vanishes-quick: equal after", "disk-full: equal after"
    options = ["--rounds", "4", "--epochs", "8", "--network", "node-vanishes-quick", "disk-full"]
    check_same_outcome(tmp_path, options, *printed)


def test_a_link_paces_delays_and_drops():
    link = Link(0, latency=0.5, bytes_per_second=100)
    assert link.passes_at("out", 10.0, 50) == 10 + 50 / 100 + 0.5
    assert link.passes_at("out", 10.0, 50) == 10 + 2 * 50 / 100 + 0.5, "after the one before"
    assert link.passes_at("in", 10.0, 50) == 10 + 50 / 100 + 0.5, "directions do not wait for each other"
    link.passes_at("out", 10.0, 50)
    assert link.passes_at("out", 10.0, 50) is None, "more than a second of packets waits"
    link.up = False
    assert link.passes_at("in", 99.0, 50) is None


@needs_network
@pytest.mark.slow
def test_machines_reach_each_other_as_their_links_allow(tmp_path):
    with Network(tmp_path) as network:
        one, two = network.add("one"), network.add("two")
        two.start([sys.executable, "-c", RECEIVER], os.environ, tmp_path / "log")

        def seconds(size: int) -> float:
            command = ["ip", "netns", "exec", one.namespace, sys.executable, "-c", SENDER, two.address, str(size)]
            done = subprocess.run(command, capture_output=True, text=True)
            return float(done.stdout or "inf")

        deadline = time.monotonic() + 60
        while seconds(1) == float("inf"):  # the receiver has not started
            assert time.monotonic() < deadline
        two.link.latency = 0.1
        assert seconds(1) >= 4 * 0.1, "one round trip to connect, one for the answer"
        two.link.latency, two.link.bytes_per_second = 0, 1e6
        assert seconds(1_000_000) > 0.5
        two.link.up = False
        assert seconds(1) != seconds(1), "nan"
        two.link.up = True
        assert seconds(1) < 60
    left = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True).stdout
    assert one.namespace not in left


def test_without_root_it_says_what_is_missing(monkeypatch, capsys):
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    monkeypatch.setattr(sys, "argv", ["chaos.py", "--network", "partition"])
    assert main() == 1
    assert "missing: root" in capsys.readouterr().out


def test_an_unknown_scenario_is_an_error(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["chaos.py", "--network", "earthquake"])
    assert main() == 2
    assert "unknown scenario 'earthquake'" in capsys.readouterr().out
