import pytest
import yaml

from cfl_ray.config import Experiment
from cfl_ray.config.schedule import check_schedule
from cfl_ray.errors import ConfigError


@pytest.mark.parametrize(
    "schedule, message",
    [
        ("[{round: 2, leave: [50]}]", "round 2: client 50 does not exist; the federation has clients 0 .. 39"),
        ("[{round: 2, join: [70]}]", "round 2: client 70 does not exist; the federation has clients 0 .. 39"),
        ("[{round: 2, join: [7]}, {round: 4, join: [7]}]", "round 4: client 7 joins, but it joined in round 2 already"),
        ("[{round: 4, leave: [7]}, {round: 2, leave: [7]}]", "round 4: client 7 leaves, but it left in round 2"),
        ("[{round: 2, leave: [7, 7]}]", "7 leaves, but it left in round 2 already; leave one of the two out"),
        ("[{round: 2, join: [7], leave: 5-9}]", "round 2: client 7 joins and leaves; name it once"),
        ("[{round: 2, join: 0-39}]", "schedule: all 40 clients join later, so round 1 has none"),
    ],
)
def test_events_that_cannot_be(schedule, message):
    with pytest.raises(ConfigError) as error:
        check_schedule(Experiment(schedule=yaml.safe_load(schedule)).schedule, num_clients=40)
    assert message in str(error.value)


def test_every_client_may_leave_and_return():
    """Clients that return are online in round 1: only clients whose first event is that they join are absent then."""
    schedule = "[{round: 2, leave: 0}, {round: 3, join: 0, leave: 1}, {round: 4, join: 1}]"
    check_schedule(Experiment(schedule=yaml.safe_load(schedule)).schedule, num_clients=2)


@pytest.mark.parametrize(
    "drift", [{"kind": "incremental", "groups": 2, "every": 2**63 - 1}, {"kind": "recurrent", "rounds": [10**30]}]
)
def test_a_process_may_go_on_in_rounds_that_are_never_reached(drift):
    change = {"clients": [0, 1], "relabel": 1, "drift": drift}
    first, later = Experiment(schedule=[{"round": 2, "change": [change]}]).events
    assert first.round == 2 and later.round >= 2**63 and (later.join, later.leave) == ([], [])
