import json
import os
import random
import re
import string
from collections.abc import Iterator
from urllib.parse import quote

import pytest

from cfl_ray.config import Experiment, TrackingConfig
from cfl_ray.errors import ConfigError
from cfl_ray.errors.redaction import HIDDEN, redact
from cfl_ray.tracking import check_destination, resolve_uri
from cfl_ray.tracking.mlflow import accepts_connection, with_credentials

REDACTED = {
    "http://host:5000/path": "http://host:5000/path",
    "sqlite:////tmp/runs/mlflow.db": "sqlite:////tmp/runs/mlflow.db",
    "http://bob:hunter2@host:5000": "http://***@host:5000",
    "https://token@host": "https://***@host",
    "postgresql://bob:p@ss/word@db/x": "postgresql://***@db/x",
    "http://host?token=abc&user=bob#top": "http://host?token=***&user=***",
    "http://bob:pa'ss@host/x": "http://***@host/x",
    'http://bob:p"a ss@host': "http://***@host",
    "http://host?password=a'b&key=c": "http://host?password=***&key=***",
    "http://host/x#token=abc": "http://host/x#token=***",
    "http://host/#/runs/1?workflowType=machine_learning": "http://host/#/runs/1?workflowType=machine_learning",
    "http://host/x?workflowType=s3cret": "http://host/x?workflowType=***",
    "http://u:sec' x@h": "http://***@h",
    "http://u:12 3@h": "http://***@h",
    "//u:pw@h": "//***@h",
    "http://u:[12]@[::1]:80": "http://***@[::1]:80",
    "see http%3A%2F%2Fu%3Apw%40h": "see http%3A%2F%2F***%40h",
    r"http:\/\/u:pw@h": r"http:\/\/***@h",
    "http://h?password=a b&key=c": "http://h?password=***&key=***",
    "//h?key=c": "//h?key=***",
    "two lines: http://h\nbob@x": "two lines: http://h\nbob@x",
    # too much rather than too little, unless a user cannot be named so
    "'http://host:80/x', said bob@x": "'http://***@x",
    "'http://127.0.0.1:80/x', said bob@x": "'http://127.0.0.1:80/x', said bob@x",
    "http://***@host lacks /home/bob@x": "http://***@host lacks /home/bob@x",
    "http://localhost lacks http://a:b@h": "http://localhost lacks http://***@h",
    "no route to http://a:b@c or https://d:e@f?g=h": "no route to http://***@f?g=***",
}


def test_redact_hides_the_credentials_of_uris():
    assert {text: redact(text) for text in REDACTED} == REDACTED


def drawn_uri(draw: random.Random) -> str:
    """Returns a URI whose secret, typed or quoted, has all of its upper-case letters."""
    signs = string.ascii_uppercase + string.digits + "'\"#?/:@ %&;=+!~*()[]{}<>,.\\\t$|^`"
    secret = draw.choice(["", "1", "80/", "80 "]) + "".join(draw.choice(signs) for _ in range(draw.randint(4, 20)))
    secret += draw.choice(["", "' ", '" ', "%40", "%2F%2F", "@h@"]) + draw.choice(string.ascii_uppercase)
    typed = draw.choice([secret, secret, quote(secret, safe=""), quote(secret, safe="@/")])
    user = draw.choice(["", "u", "u.v", "u%40v", "u@v", "*"])
    host = draw.choice(["host", "host:5000", "10.0.0.1/path", "[::1]:80", "host?b=c", "host/x@y"])
    scheme = draw.choice(["http:", "s3:", "postgresql+psycopg2:", "", "", "file:/", "see http:"])
    return f"{scheme}//{draw.choice([f'{user}:{typed}', typed])}@{host}"


def texts_with(uri: str) -> Iterator[str]:
    yield from (uri, f"no route to {uri}: it failed", f"'{uri}', then", f'"{uri}"', f"(see {uri})", f"a=b;x={uri},y")
    yield from (repr({"uri": uri}), json.dumps({"uri": uri, "x": 1}), json.dumps({"uri": quote(uri, safe="")}))
    yield f"first http://a:b@c\nthen {uri} and https://d:e@f?g=h"


def test_redact_hides_whatever_a_password_is_made_of():
    """In a URI by itself, in quotes, in a sentence and in JSON, with a scheme and without."""
    draw = random.Random(0)
    for _ in range(3000):
        for text in texts_with(drawn_uri(draw)):
            shown = redact(text)
            without_escapes = re.sub(r"%[0-9A-F]{2}|\\\\t", "", shown)
            assert HIDDEN in shown and not re.search(r"[A-Z]", without_escapes), (text, shown)
            assert redact(shown) == shown, (text, shown)


def test_yaml_without_credentials_has_none_on_folded_lines_either():
    secret = " ".join(["QQQQQQQ"] * 30)
    experiment = Experiment(tracking={"uri": f"http://u:{secret}@h"})
    assert sum("QQQ" in line for line in experiment.to_yaml().splitlines()) > 1
    assert "QQQ" not in experiment.to_yaml(credentials=False)


def test_redact_hides_the_secrets_of_a_uri_where_they_stand_alone(monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_TOKEN", "from-environment")
    text = "refused: password 'p@ss word', key abcd1234, token from-environment"
    assert redact(text, "http://bob:p%40ss%20word@host?key=abcd1234") == "refused: password '***', key ***, token ***"


def test_resolve_uri_takes_config_then_environment_then_a_file_below_output(tmp_path, monkeypatch):
    assert resolve_uri(TrackingConfig(), tmp_path) == f"sqlite:///{tmp_path}/mlflow.db"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://environment")
    assert resolve_uri(TrackingConfig(), tmp_path) == "http://environment"
    assert resolve_uri(TrackingConfig(uri="http://config"), tmp_path) == "http://config"


def test_resolve_uri_makes_a_file_absolute():
    assert resolve_uri(TrackingConfig(uri="sqlite:///runs/x.db"), "runs") == f"sqlite:///{os.getcwd()}/runs/x.db"


@pytest.mark.parametrize("uri", ["localhost:5000", "10.0.0.7:5000/", "mlflow.lab-3.org:443/mlflow"])
def test_the_address_of_a_server_without_its_scheme_is_refused(uri):
    with pytest.raises(ConfigError, match=f"MLFLOW_TRACKING_URI, to http://{uri}$"):
        check_destination(uri)


def test_other_destinations_are_left_to_mlflow():
    for uri in (
        "http://host:5000",
        "https://host",
        "sqlite:////a/b.db",
        "file:///a",
        "/a/mlruns",
        "runs",
        "databricks",
    ):
        check_destination(uri)
    check_destination("databricks://profile")


def test_with_credentials(monkeypatch):
    assert with_credentials("http://host") == "http://host"
    assert with_credentials("http://***@host") is None
    assert with_credentials("http://***@host", None, "http://a:b@other", "http://a:b@host") == "http://a:b@host"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://c:d@host")
    assert with_credentials("http://***@host") == "http://c:d@host"


def test_a_closed_or_invalid_port_does_not_accept_a_connection():
    for uri in ("http://127.0.0.1:1", "http://bob:hunter2@127.0.0.1:1?x=y", "http://127.0.0.1:99999"):
        assert not accepts_connection(uri), uri


def test_where_only_a_request_can_tell_a_connection_is_assumed(monkeypatch):
    assert accepts_connection("sqlite:////tmp/x.db")
    assert accepts_connection("http://[unclosed")
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    assert accepts_connection("http://mlflow.invalid")
