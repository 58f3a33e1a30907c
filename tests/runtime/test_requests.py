"""Requests to a running method: checked, journaled, taken up by the next round, repeated by a replay."""

import threading

import numpy as np
import pytest
from torch import nn

from cfl_ray import simulate
from cfl_ray.config.client_ids import clients_in_words, parse_ids
from cfl_ray.config.data import SOURCE_KINDS
from cfl_ray.core.work import TEST
from cfl_ray.data import build
from cfl_ray.engine.in_process import InProcessBackend
from cfl_ray.errors import ConfigError, RunError, RunStopped
from cfl_ray.methods import REGISTRY
from cfl_ray.run_directory import RunDirectory
from cfl_ray.runtime.journal import JoinedShards, Journal, JournalEvent, copy_events
from cfl_ray.runtime.round_loop import RoundLoop
from cfl_ray.runtime.session import checkpoint_store
from cfl_ray.setup.prepare import prepare
from cfl_ray.tracking import RoundRecord

EVENTS = RunDirectory.events.name

ROTATED = {"source": "digits", "shift": {"kind": "rotated"}}


@pytest.fixture(scope="module")
def shards(tmp_path_factory):
    """Folder with the shards of the experiments of this file."""
    return str(tmp_path_factory.mktemp("shards"))


@pytest.fixture
def digits(experiment, shards):
    """Makes an experiment on eight clients of rotated digits."""
    data = ROTATED | {"partition": {"clients": 8, "samples": 20}, "shards": shards}
    local = {"epochs": 1, "batch_size": None, "momentum": 0.0}
    return lambda **changes: experiment(**{"data": data, "local": local, "rounds": 6} | changes)


@pytest.fixture
def newcomers(tmp_path):
    """Makes four clients in shards of their own."""

    def make(seed=1, **options):
        config = SOURCE_KINDS.of(**ROTATED | {"partition": {"clients": 4, "samples": 20}} | options)
        federation = build(config, seed, tmp_path / "newcomers")
        return JoinedShards(federation.uri, federation.digest), federation

    return make


@pytest.fixture
def begin(digits):
    """Begins a round loop whose run directory is `directory`; a second one there continues where the first stopped."""

    def make(directory, session="here", **changes):
        setup = prepare(digits(**changes))
        (label,) = setup.methods
        return begun(setup, label, directory, session)

    return make


def begun(setup, label, directory, session="here"):
    engine = setup.experiment.runtime.engine
    worker = setup.worker(engine="manual" if engine == "auto" else engine)
    store = checkpoint_store(setup, directory, label)
    loop = RoundLoop(setup, label, worker.network, InProcessBackend(worker), store, session)
    loop.reports = loop.rounds()
    return loop, next(loop.reports)


def play(loop, until=6, **requests):
    """(round, metrics, reassignments) of every round; `after_3=f` calls f(loop.requests) when round 3 has ended."""
    figures = []
    while loop.round <= until and loop.status == "running":
        report = next(loop.reports)
        metrics = {name: value for name, value in report.metrics.items() if name != "round_seconds"}
        figures.append((report.round, metrics, report.reassigned))
        if request := requests.get(f"after_{report.round}"):
            request(loop.requests)
    return figures


def owners(loop):
    """Clients that have a state."""
    keys = loop.backend.backend.client_states.keys()
    return {client for _, client in keys}


def with_batchnorm(shape, classes):
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.BatchNorm1d(8), nn.Linear(8, classes))


def requests_of_all_kinds(newcomers):
    return {
        "after_1": lambda requests: requests.leave([0, 5]),
        "after_2": lambda requests: requests.join_shards(*newcomers()),
        "after_3": lambda requests: (requests.join([5]), requests.leave([9, 1])),
    }


def test_ids_are_written_as_ranges():
    assert parse_ids(["7", "0-2", "7"]) == [7, 0, 1, 2, 7]
    assert clients_in_words([7, 0, 2, 1, 9, 8]) == "clients 0-2, 7-9" and clients_in_words([3]) == "client 3"
    assert clients_in_words(range(0, 40, 2), limit=3) == "clients 0, 2, 4 and 17 more"
    for word in ("a", "3-", "-3", "5-2", "1.5", "0-99999999999", ""):
        with pytest.raises(ConfigError, match=f"'{word}' is not a client: write an id or a range of ids"):
            parse_ids([word])


def test_every_method_takes_unknown_newcomers(digits, newcomers, tmp_path):
    """Three rounds: one client leaves, and four that the federation did not know join."""
    joined = newcomers()
    changes = {"cohort": {"fraction": 1.0}, "rounds": 3, "runtime": {"checkpoint_every": 3}}
    setup = prepare(digits(methods=list(REGISTRY), **changes))
    for method in REGISTRY:
        loop, _ = begun(setup, method, tmp_path / "run")
        figures = play(
            loop, after_1=lambda requests: requests.leave([0]), after_2=lambda requests: requests.join_shards(*joined)
        )
        assert [metrics["clients_online"] for _, metrics, _ in figures] == [8, 7, 11], method
        assert ["newcomer_accuracy" in metrics for _, metrics, _ in figures] == [False, False, True], method
        assert [metrics.get("clients_joined") for _, metrics, _ in figures] == [None, None, 4], method
        assert [metrics.get("clients_left") for _, metrics, _ in figures] == [None, 1, None], method
        assert len(loop.state.assign_N) == 12 and loop.state.assign_N[0] == -1, method
        assert (loop.evaluation.local_scores[TEST][1:, 0] >= 0).all(), method


@pytest.mark.parametrize("method, checkpoint_every", [("ditto", 4), ("autocfl", 1), ("autocfl", 4)])
def test_a_restarted_server_does_the_same(method, checkpoint_every, begin, newcomers, tmp_path):
    """In whatever round the first one was lost, before or after the requests."""
    changes = {"methods": [method], "runtime": {"checkpoint_every": checkpoint_every, "engine": "manual"}}
    expected = play(begin(tmp_path / "whole", **changes)[0], **requests_of_all_kinds(newcomers))
    for died in (1, 2, 5):
        folder = tmp_path / f"died_{died}"
        before = play(begin(folder, **changes)[0], until=died, **requests_of_all_kinds(newcomers))
        loop, report = begin(folder, **changes)
        assert report.round == died // checkpoint_every * checkpoint_every
        still_to_come = {key: f for key, f in requests_of_all_kinds(newcomers).items() if int(key[-1]) > died}
        after = play(loop, **still_to_come)
        assert before == expected[:died] and after == expected[report.round :], died


@pytest.mark.parametrize("method", ["ditto", "fedgroup"])
def test_a_replay_does_the_same(method, begin, newcomers, tmp_path):
    expected = play(begin(tmp_path / "run", methods=[method])[0], **requests_of_all_kinds(newcomers))
    copy_events(tmp_path / "run" / method, tmp_path / "again" / method)
    assert len(Journal(tmp_path / "again" / method).events) == 4
    assert play(begin(tmp_path / "again", methods=[method])[0]) == expected
    assert play(begin(tmp_path / "without", methods=[method])[0]) != expected


def test_newcomers_of_a_live_run_are_on_record(digits, newcomers, tmp_path):
    """In the metrics of the round, the artifacts and the summary, which MLflow gets."""
    import pyarrow.parquet as pq

    changes = {"rounds": 4, "methods": ["stocfl"]}
    simulate(digits(**changes), tmp_path / "first")
    events = JournalEvent(2, leave=(0,)), JournalEvent(3, join=(8, 9, 10, 11), shards=newcomers()[0])
    Journal(tmp_path / "first/stocfl").add(*events)
    result = simulate(digits(**changes), tmp_path / "run", replay=tmp_path / "first")["stocfl"]
    metrics = [record.metrics for record in result.records]
    assert [one.get("clients_joined", 0) for one in metrics] == [0, 0, 4, 0]
    assert [one.get("clients_left", 0) for one in metrics] == [0, 1, 0, 0]
    assert [one["clients_online"] for one in metrics] == [8, 7, 11, 11] and 0 <= result.summary[
        "newcomer_accuracy"
    ] <= 1
    artifacts = tmp_path / "run/stocfl/artifacts"
    assert (artifacts / EVENTS).read_bytes() == (tmp_path / "run/stocfl" / EVENTS).read_bytes()
    assert {*pq.read_table(artifacts / "assignments.parquet")["client"].to_pylist()} >= {8, 9, 10, 11}


def test_requests_after_a_fault_come_after_the_recorded_rounds(begin, tmp_path):
    """Rounds 4 and 5 are computed again; their metrics are recorded, so they must not change."""
    runtime = {"runtime": {"checkpoint_every": 3, "engine": "manual"}}
    first, _ = begin(tmp_path / "run", **runtime)
    expected = play(first, until=5, after_3=lambda requests: requests.leave([0]))
    lines = [RoundRecord(round, {}, 0).to_line() for round in range(1, 6)]
    (tmp_path / "run/ditto/metrics.jsonl").write_text("".join(lines))
    again, report = begin(tmp_path / "run", **runtime)
    assert report.round == 3 and again.requests.leave([1]) == "ditto: client 1 leaves before round 6"
    assert play(again, until=5) == expected[3:]
    assert (
        again.membership.population.online.tolist() == [1, 2, 3, 4, 5, 6, 7]
        and play(again)[0][1]["clients_online"] == 6
    )


def test_the_schedule_and_requests_add_up(begin, tmp_path):
    loop, _ = begin(tmp_path / "run", schedule=[{"round": 3, "leave": [1]}, {"round": 4, "join": [7]}])
    requests = loop.requests
    assert loop.membership.population.online.tolist() == [0, 1, 2, 3, 4, 5, 6]
    assert requests.join([7]) == "ditto: client 7 joins before round 1"
    assert requests.leave([2, 4, 3]) == "ditto: clients 2-4 leave before round 1"
    assert requests.pending() == ["client 7 joins before round 1", "clients 2-4 leave before round 1"]
    figures = play(loop)
    assert [metrics["clients_online"] for _, metrics, _ in figures] == [5, 5, 4, 4, 4, 4]
    assert requests.pending() == [] and all("newcomer_accuracy" in metrics for _, metrics, _ in figures)


def test_bad_requests_are_refused_and_leave_no_trace(begin, newcomers, tmp_path):
    schedule = [{"round": 4, "leave": [1, 2, 3]}]
    expected = play(begin(tmp_path / "quiet", schedule=schedule)[0])
    loop, _ = begin(tmp_path / "run", schedule=schedule)
    figures = play(loop, until=1)
    requests, shards = loop.requests, JoinedShards("there", "0")
    _, holdout = newcomers(shift={"kind": "none"}, test={"view": "holdout"})
    for request, message in (
        (lambda: requests.leave([99]), r"leave: client 99 does not exist; the federation has clients 0 \.\. 7"),
        (lambda: requests.leave([-1]), "client -1 does not exist"),
        (lambda: requests.leave([3, 4, 3]), "leave: client 3 is named twice"),
        (lambda: requests.leave([]), "no client is named"),
        (lambda: requests.leave(range(8)), "leave: no client would be left in round 2"),
        (
            lambda: requests.leave([0, 4, 5, 6, 7]),
            "leave: no client would be left in round 4; let fewer leave or others join first",
        ),
        (lambda: requests.join([3]), "join: client 3 is online already in round 2"),
        (lambda: requests.join([8]), "client 8 does not exist"),
        (
            lambda: requests.join_shards(shards, holdout),
            "test view: the new clients have holdout, the federation has cluster",
        ),
        (lambda: requests.join_shards(shards, loop.membership.federation), "same id twice"),
    ):
        with pytest.raises(ConfigError, match=message):
            request()
    assert requests.pending() == [] and not (tmp_path / "run/ditto" / EVENTS).exists()
    assert [*figures, *play(loop)] == expected
    with pytest.raises(ConfigError, match=r"ditto has begun its last round \(6\); clients can no longer join or leave"):
        requests.leave([0])


@pytest.mark.parametrize(
    ("sections", "options", "message"),
    [
        ({"secure_aggregation": {"bits": 25}, "cohort": {"fraction": 0.75}}, {}, "a sum of 9 clients goes up to"),
        ({"model": with_batchnorm}, {"samples": 1}, "clients 8-11 would train on a batch of one sample"),
        (
            {"privacy": {"examples": {"noise_multiplier": 1.0, "delta": 0.04}}, "runtime": {"engine": "sequential"}},
            {"samples": 30},
            "must be below 1 / 30 samples of the largest client = 0.0333, got 0.04",
        ),
    ],
)
def test_newcomers_that_would_end_the_run_are_refused(begin, newcomers, tmp_path, sections, options, message):
    loop, _ = begin(tmp_path / "run", methods=["fedavg"], **sections)
    play(loop, until=1)
    with pytest.raises(ConfigError, match=message):
        loop.requests.join_shards(*newcomers(partition={"clients": 4, "samples": 20} | options))
    play(loop)
    assert loop.status == "finished"


def test_a_client_that_would_choose_by_a_loss_that_is_not_protected_cannot_join(begin, tmp_path):
    private = {"privacy": {"examples": {"noise_multiplier": 1.0}}, "cohort": {"fraction": 1.0}}
    loop, _ = begin(tmp_path / "run", methods=["cflgp"], runtime={"engine": "sequential"}, **private)
    loop.requests.leave([5])
    play(loop, until=1)
    with pytest.raises(ConfigError, match="cflgp cannot protect single samples of clients that join: its server reads"):
        loop.requests.join([5])
    play(loop)
    assert loop.status == "finished"


def test_a_client_is_requested_once_per_round(begin, newcomers, tmp_path):
    loop, _ = begin(tmp_path / "run")
    requests, shards = loop.requests, newcomers()
    requests.leave([3])
    assert requests.join_shards(*shards) == "ditto: clients 8-11 join before round 1"
    for request, message in (
        (lambda: requests.leave([3]), "client 3 leaves before round 1 already, as requested earlier"),
        (lambda: requests.join([3]), "client 3 leaves before round 1 already"),
        (lambda: requests.leave([9]), "client 9 joins before round 1 already"),
        (
            lambda: requests.join_shards(*shards),
            "same id twice: the clients of these shards are in the federation already",
        ),
    ):
        with pytest.raises(ConfigError, match=message):
            request()
    play(loop, until=1)
    assert requests.leave([9]) == "ditto: client 9 leaves before round 2"
    assert requests.join([3]) == "ditto: client 3 joins before round 2"
    with pytest.raises(ConfigError, match="leave: client 3 joins before round 2 already"):
        requests.leave([3])


def test_the_states_of_clients_that_leave_are_dropped(begin, tmp_path):
    loop, _ = begin(tmp_path / "run", cohort={"fraction": 1.0})
    play(loop, until=1)
    assert owners(loop) == set(range(8))
    loop.requests.leave([2])
    loop.requests.leave([5])
    play(loop, until=2)
    assert owners(loop) == {0, 1, 3, 4, 6, 7}
    assert np.isnan(loop.evaluation.local_scores[TEST][[2, 5]]).all()


@pytest.mark.parametrize("checkpoint_every, every", [(1, 1), (4, 5)])
def test_stop_saves_the_round_and_a_later_session_continues(checkpoint_every, every, begin, tmp_path):
    changes = {"runtime": {"checkpoint_every": checkpoint_every, "engine": "manual"}, "evaluation": {"every": every}}
    expected = play(begin(tmp_path / "whole", **changes)[0])
    first, _ = begin(tmp_path / "run", **changes)
    answers = []
    before = play(first, after_2=lambda requests: answers.extend([requests.stop(), requests.stop()]))
    assert answers == ["ditto: the run ends after round 3, which is saved"] * 2
    assert (first.status, first.round) == ("stopped", 3) and len(before) == 3
    same, report = begin(tmp_path / "run", **changes)  # the server died before the driver had its answer
    assert report.round == 3 and report.stop
    second, report = begin(tmp_path / "run", session="another", **changes)
    assert report.round == 3 and not report.stop
    assert [*before, *play(second)] == expected


def test_the_next_server_of_a_session_carries_out_its_stop(begin, tmp_path):
    first, _ = begin(tmp_path / "run")
    play(first, until=2, after_2=lambda requests: requests.stop())
    second, report = begin(tmp_path / "run")
    assert report.round == 2 and not report.stop
    assert next(second.reports).stop and (second.status, second.round) == ("stopped", 3)
    with pytest.raises(RunError, match="ditto is not running just now; ask again in a moment"):
        second.requests.stop()


def test_a_stop_that_no_session_lived_to_carry_out_holds_for_the_next_one(begin, tmp_path):
    """Driver and server die when the request is on the disk; the session after the one that stops goes on."""
    first, _ = begin(tmp_path / "run")
    play(first, until=2, after_2=lambda requests: requests.stop())
    second, report = begin(tmp_path / "run", session="another")
    assert not report.stop and "ends after round 3, as was asked before the fault" in report.notes
    assert next(second.reports).stop and (second.status, second.round) == ("stopped", 3)
    third, report = begin(tmp_path / "run", session="a third")
    assert not report.stop and third.requests.pending() == []
    assert play(third)[-1][0] == 6


def test_a_stop_within_a_round_is_carried_out(begin, tmp_path):
    """A run that waits for hosts ends without the round that the request named."""
    first, _ = begin(tmp_path / "run")

    def waiting(*arguments):
        first.requests.stop()
        raise RunStopped("stopped while it waited for client hosts, as asked")

    next(first.reports)
    object.__setattr__(first.checked_method.method, "round", waiting)
    with pytest.raises(RunStopped):
        next(first.reports)
    second, report = begin(tmp_path / "run", session="another")
    assert report.round == 1 and not report.stop and second.requests.stop_after is None


def test_stop_in_the_last_round_lets_the_method_finish(begin, tmp_path):
    loop, _ = begin(tmp_path / "run", rounds=2)
    reports = [next(loop.reports)]
    loop.requests.stop()
    reports.append(next(loop.reports))
    assert loop.requests.stop_after == 2 and reports[1].round == 2
    assert [(report.stop, report.finished) for report in reports] == [(False, False), (True, True)]


def test_requests_during_a_round(begin, tmp_path):
    """Many at once, in the middle of rounds: each is granted once, for the round that was promised."""
    loop, _ = begin(tmp_path / "run", rounds=12)
    promised, threads = {}, []

    def leave(client):
        try:
            answer = loop.requests.leave([client])
        except ConfigError:
            return
        promised.setdefault(client, []).append(int(answer.rpartition(" ")[2]))

    train = loop.checked_method.method.round

    def round(*arguments):
        if len(threads) < 14:  # two requests for the same client
            client = len(threads) // 2
            threads.extend(threading.Thread(target=leave, args=(client,)) for _ in range(2))
            [thread.start() for thread in threads[-2:]]
        return train(*arguments)

    object.__setattr__(loop.checked_method.method, "round", round)
    online = [metrics["clients_online"] for _, metrics, _ in play(loop, until=12)]
    [thread.join() for thread in threads]
    assert sorted(promised) == [0, 1, 2, 3, 4, 5, 6] and all(len(rounds) == 1 for rounds in promised.values())
    assert online == [8 - sum(first <= round for (first,) in promised.values()) for round in range(1, 13)]
    assert {(event.round, event.leave) for event in Journal(tmp_path / "run/ditto").events} == {
        (first, (client,)) for client, (first,) in promised.items()
    }
