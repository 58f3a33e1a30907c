import os

from cfl_ray.config import TrackingConfig
from cfl_ray.tracking import redact, resolve_uri
from cfl_ray.tracking.uri import accepts_connection, with_credentials

REDACTED = {
    "http://host:5000/path": "http://host:5000/path",
    "sqlite:////tmp/runs/mlflow.db": "sqlite:////tmp/runs/mlflow.db",
    "http://bob:hunter2@host:5000": "http://***@host:5000",
    "https://token@host": "https://***@host",
    "postgresql://bob:p@ss/word@db/x": "postgresql://***@db/x",
    "http://host?token=abc&user=bob#top": "http://host?token=***&user=***",
    "no route to http://a:b@c or https://d:e@f?g=h": "no route to http://***@c or https://***@f?g=***",
}


def test_redact_hides_the_credentials_of_uris():
    assert {text: redact(text) for text in REDACTED} == REDACTED


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
