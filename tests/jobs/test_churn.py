"""The schedule of the churn job."""

from jobs.chaos.churn import churn_schedule


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
