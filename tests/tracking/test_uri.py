import json
import os
import random
import re
import string
from urllib.parse import quote

from cfl_ray.config import TrackingConfig
from cfl_ray.errors.redaction import HIDDEN
from cfl_ray.tracking import redact, resolve_uri
from cfl_ray.tracking.uri import accepts_connection, with_credentials

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
    "'http://host:80/x', said bob@x": "'http://host:80/x', said bob@x",
    '{"a":"http://host","b":"x@y"}': '{"a":"http://host","b":"x@y"}',
    "{'a': 'http://b:c@host', 'd': 'x@y'}": "{'a': 'http://***@host', 'd': 'x@y'}",
    "no route to http://a:b@c or https://d:e@f?g=h": "no route to http://***@c or https://***@f?g=***",
}


def test_redact_hides_the_credentials_of_uris():
    assert {text: redact(text) for text in REDACTED} == REDACTED


def test_redact_hides_whatever_a_password_is_made_of():
    """In a URI by itself, in a sentence and in JSON; a quote before , : ) ] } or a blank ends a URI."""
    draw = random.Random(0)
    for _ in range(2000):
        secret = (
            "Q" + "".join(draw.choice(string.ascii_letters + "0123456789'\"#?/:@ %&;=+!~*()") for _ in range(12)) + "Q"
        )
        secret = re.sub(r"""['"](?=[\s,:)\]}'"])""", "", secret)
        host = draw.choice(["host", "host:5000", "10.0.0.1/path"])
        uri = draw.choice([f"s3://user:{secret}@{host}", f"http://{quote(secret, safe='')}@{host}"])
        for text in (uri, f"no route to {uri}: it failed", json.dumps({"uri": quote(uri, safe=":/@")})):
            shown = redact(text)
            assert HIDDEN in shown and secret not in shown and not re.search(r"Q.{2,}Q", shown), (text, shown)


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
