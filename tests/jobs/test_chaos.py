"""A short run with kills: the same outcome; clients that join and leave; disturbances that no run can have."""

import sys

import pytest
from chaos_runs import check_same_outcome

from jobs.chaos.__main__ import main
from jobs.chaos.churn import churn_schedule


@pytest.mark.slow
def test_a_run_with_kills_has_the_same_outcome(tmp_path):
    options = ["--kills", "2", "--rounds", "3", "--epochs", "8", "--targets", "host", "server"]
    check_same_outcome(tmp_path, options, "2 kills")


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--hang", "2", "--targets", "node"], "--targets node: expected host, server, data"),
        (["--hang", "2", "--targets", "host", "driver"], "--targets driver: expected host, server, data"),
        (
            ["--kills", "8", "--rounds", "4", "--methods", "ditto", "ifca_cam"],
            "--kills must be below 8, the rounds of all methods, got 8",
        ),
    ],
)
def test_disturbances_that_no_run_can_have(monkeypatch, capsys, arguments, message):
    monkeypatch.setattr(sys, "argv", ["chaos.py", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2 and message in capsys.readouterr().err


# ---- clients that join and leave


def test_before_every_round_offline_clients_join_and_online_clients_leave():
    events = churn_schedule(clients=200, rounds=30, share=0.01)
    assert [event["round"] for event in events] == list(range(2, 31))
    first_join = {}  # clients that join before they leave were offline at the start
    for event in events:
        assert len(event["join"]) == len(event["leave"]) == 2 and not {*event["join"]} & {*event["leave"]}
        for client in event["join"]:
            first_join.setdefault(client, True)
        for client in event["leave"]:
            first_join.setdefault(client, False)
    offline = {client for client, joins in first_join.items() if joins}
    assert len(offline) <= 20
    for event in events:
        assert offline >= {*event["join"]} and not offline & {*event["leave"]}
        offline = (offline - {*event["join"]}) | {*event["leave"]}
