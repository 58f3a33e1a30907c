"""Both sides of a connection with and without TLS: who disagrees is told before Ray tries for a minute."""

import shutil
import socket
import ssl
import threading
import time

import pytest
from certificates import certificates, mixed

from cfl_ray.errors import ConfigError
from cfl_ray.runtime.on_ray import connect, tls

pytestmark = pytest.mark.skipif(shutil.which("openssl") is None, reason="makes its certificates with openssl")
SETTINGS = b"\0\0\0\4\0\0\0\0\0"  # an HTTP/2 server's first words, as gRPC sends them
VARIABLES = (tls.SWITCH, *tls.FILES)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Variables with two authorities, and with a certificate that is no longer valid."""
    days = {"ours": 2, "theirs": 2, "over": 0}
    return {name: certificates(tmp_path_factory.mktemp(name), days=number) for name, number in days.items()}


@pytest.fixture
def cluster():
    """Returns a function that starts a peer as Ray's head is one, and returns its port; None: without TLS."""
    opened = []

    def answer(server, context):
        while True:
            try:
                plain, _ = server.accept()
                connection = context.wrap_socket(plain, server_side=True) if context else plain
                connection.sendall(SETTINGS)
                connection.recv(1)
                connection.close()
            except ssl.SSLError:
                continue
            except OSError:
                if server.fileno() < 0:
                    return

    def start(variables, address="127.0.0.1"):
        context = None
        if variables is not None:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(variables["RAY_TLS_SERVER_CERT"], variables["RAY_TLS_SERVER_KEY"])
            context.load_verify_locations(variables["RAY_TLS_CA_CERT"])
            context.verify_mode = ssl.CERT_REQUIRED
            context.set_alpn_protocols(["h2"])
        server = socket.create_server((address, 0))
        opened.append(server)
        threading.Thread(target=answer, args=(server, context), daemon=True).start()
        return server.getsockname()[1]

    yield start
    for server in opened:
        server.shutdown(socket.SHUT_RDWR)
        server.close()


@pytest.fixture
def driver(monkeypatch):
    """Returns a function that sets Ray's variables of this process; None: it has none."""

    def have(variables):
        for name in VARIABLES:
            monkeypatch.delenv(name, raising=False)
        for name, value in (variables or {}).items():
            monkeypatch.setenv(name, value)

    return have


def test_sides_that_agree(made, cluster, driver):
    for variables in (None, made["ours"]):
        driver(variables)
        tls.check_tls("the head", "127.0.0.1", cluster(variables))
    driver(made["ours"] | {tls.SWITCH: "0"})
    tls.check_tls("the head", "127.0.0.1", cluster(None))


@pytest.mark.parametrize(
    "ours, theirs, says",
    [
        (None, "ours", "the Ray cluster at the head uses TLS, and this process does not: set RAY_USE_TLS=1, RAY_TLS"),
        ("ours", None, "the head does not use TLS: unset RAY_USE_TLS here, or start"),
        ("theirs", "ours", r"the head is not valid here \(.*RAY_TLS_CA_CERT=.*ca.crt"),
        (
            "mixed",
            "ours",
            r"does not take this process's certificate, RAY_TLS_SERVER_CERT=.*(unknown ca|closes the)",
        ),
        ("ours", "over", r"is not valid here \((certificate has expired|unable to get)"),
    ],
)
def test_sides_that_do_not(ours, theirs, says, made, cluster, driver):
    sets = made | {"mixed": mixed(made["theirs"], made["ours"]), None: None}
    port = cluster(sets[theirs])
    driver(mixed(made["ours"], made["over"]) if theirs == "over" else sets[ours])
    with pytest.raises(ConfigError, match=says) as error:
        tls.check_tls("the head", "127.0.0.1", port)
    assert "token" not in str(error.value)


def test_a_certificate_for_another_address(made, cluster, driver):
    driver(made["ours"])
    with pytest.raises(ConfigError, match=r"is not valid here \(IP address mismatch.*and name 127\.0\.0\.2"):
        tls.check_tls("127.0.0.2:1", "127.0.0.2", cluster(made["ours"], "127.0.0.2"))


@pytest.mark.parametrize("name", tls.FILES)
def test_variables_that_are_incomplete(name, made, driver, tmp_path):
    (tmp_path / "text").write_text("no certificate")
    for value, says in (
        ("", f"RAY_USE_TLS is set, and {name} is not"),
        (str(tmp_path / "none"), f"{name}={tmp_path}/none: No such file"),
        (str(tmp_path / "text"), f"{name}={tmp_path}/text .*certificate"),
    ):
        driver(made["ours"] | {name: value})
        with pytest.raises(ConfigError, match=says):
            tls.own_context()
        driver(made["ours"] | {name: value, tls.SWITCH: "0"})
        assert tls.own_context() is None


def test_a_run_with_its_own_cluster_needs_complete_variables(made, driver, no_fork_server, monkeypatch):
    monkeypatch.setattr(connect.ray, "is_initialized", lambda: False)
    monkeypatch.setattr(connect.ray, "shutdown", lambda: None)  # other tests share a cluster
    monkeypatch.setattr(connect, "cluster_address", lambda address: None)
    driver(made["ours"] | {"RAY_TLS_CA_CERT": ""})
    with pytest.raises(ConfigError, match="RAY_USE_TLS is set, and RAY_TLS_CA_CERT is not"):
        connect.connect(None)


def test_a_peer_that_says_nothing_is_left_to_ray(made, driver, monkeypatch):
    monkeypatch.setattr(tls, "_ANSWER_SECONDS", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        for variables in (None, made["ours"]):
            driver(variables)
            began = time.monotonic()
            tls.check_tls("the head", "127.0.0.1", silent.getsockname()[1])
            assert time.monotonic() - began < 60
