"""What is asked of a live run: checked, written down, taken up by the next round, and done again by a resumed or replayed run."""

import threading

import numpy as np
import pytest
import torch

from cfl_ray.config import Data
from cfl_ray.core.cohort import Population
from cfl_ray.core.errors import ConfigError, DataError, RunError
from cfl_ray.data import build, open_shards
from cfl_ray.engine.local import InProcess
from cfl_ray.methods import REGISTRY
from cfl_ray.runtime.journal import EVENTS, Event, Journal, Shards, copy_events
from cfl_ray.runtime.lifecycle import Running, Stopped
from cfl_ray.runtime.server import Server
from cfl_ray.runtime.session import store_of
from cfl_ray.runtime.setup import prepare
from cfl_ray.tracking import RoundRecord

torch.set_num_threads(1)
PARTITION = {"clients": 8, "samples": 20}


@pytest.fixture
def digits(experiment, tmp_path):
    """Makes an experiment on eight clients of rotated digits."""
    shards = str(tmp_path.parent / "shards")

    def make(**changes):
        data = {"source": "digits", "shift": {"kind": "rotated"}, "partition": PARTITION, "shards": shards}
        return experiment(**{"data": data, "local": {"epochs": 1, "batch_size": None, "momentum": 0.0}, "rounds": 6} | changes)

    return make


@pytest.fixture
def newcomers(tmp_path):
    """Makes four clients in shards of their own."""

    def make(seed=1, **options):
        partition = {"clients": 4, "samples": 20}
        federation = build(Data(**{"source": "digits", "shift": {"kind": "rotated"}, "partition": partition} | options), seed, tmp_path / "newcomers")
        return Shards(federation.uri, federation.digest), federation

    return make


@pytest.fixture
def serve(digits):
    """Makes a server in this process whose run directory is `directory`; a second one there goes on where the first stopped."""

    def make(directory, session="here", **changes):
        setup = prepare(digits(**changes))
        (label,) = setup.methods
        worker = setup.worker()
        server = Server(setup, label, worker.network, InProcess(worker), store_of(setup, directory, label), session)
        return server, server.advance()

    return make


def play(server, until=6, **asked):
    """Figures of every round; `asked={3: f}` calls f(server.requests) when round 3 has ended."""
    figures = []
    while server.now.round <= until and isinstance(server.now, Running):
        report = server.advance()
        figures.append((report.round, {name: value for name, value in report.metrics.items() if name != "round_seconds"}, report.moved))
        asked.get(f"after_{report.round}", lambda requests: None)(server.requests)
    return figures


def some_of_all(newcomers):
    """Requests of every kind."""
    return {
        "after_1": lambda requests: requests.leave([0, 5]),
        "after_2": lambda requests: requests.join_shards(*newcomers()),
        "after_3": lambda requests: (requests.join([5]), requests.leave([9, 1])),
    }


@pytest.mark.parametrize("method", REGISTRY)
def test_every_method_takes_newcomers_it_never_heard_of(method, serve, newcomers, tmp_path):
    server, _ = serve(tmp_path / "run", methods=[method], cohort={"fraction": 1.0})
    figures = play(server, after_1=lambda requests: requests.leave([0]), after_2=lambda requests: requests.join_shards(*newcomers()))
    assert [metrics["clients_online"] for _, metrics, _ in figures] == [8, 7, 11, 11, 11, 11]
    assert ["newcomer_accuracy" in metrics for _, metrics, _ in figures] == [False, False, True, True, True, True]
    assert len(server.state.assign_N) == 12 and server.state.assign_N[0] == -1 and (server.held_N2[1:, 0] >= 0).all()


@pytest.mark.parametrize("method", ["ditto", "autocfl"])
@pytest.mark.parametrize("checkpoint_every", [1, 4])
@pytest.mark.parametrize("died", [1, 2, 5])
def test_a_server_that_starts_anew_does_the_same(method, checkpoint_every, died, serve, newcomers, tmp_path):
    """In whatever round the first one was lost, before or after what was asked of it."""
    changes = {"methods": [method], "runtime": {"checkpoint_every": checkpoint_every, "engine": "sequential"}}
    expected = play(serve(tmp_path / "whole", **changes)[0], **some_of_all(newcomers))
    before = play(serve(tmp_path / "run", **changes)[0], until=died, **some_of_all(newcomers))
    server, report = serve(tmp_path / "run", **changes)
    assert report.round == died // checkpoint_every * checkpoint_every
    asked = {name: f for name, f in some_of_all(newcomers).items() if int(name[-1]) > died}
    after = play(server, **asked)
    assert before == expected[:died] and after == expected[report.round :]


@pytest.mark.parametrize("method", ["ditto", "fedgroup"])
def test_a_replay_does_the_same(method, serve, newcomers, tmp_path):
    expected = play(serve(tmp_path / "run", methods=[method])[0], **some_of_all(newcomers))
    assert copy_events(tmp_path / "run" / method, tmp_path / "again" / method) == 4
    assert play(serve(tmp_path / "again", methods=[method])[0]) == expected
    assert play(serve(tmp_path / "without", methods=[method])[0]) != expected


def test_what_is_asked_after_a_fault_comes_after_what_is_on_record(serve, newcomers, tmp_path):
    """Rounds 4 and 5 are computed again; their figures are recorded, so they may not change."""
    runtime = {"runtime": {"checkpoint_every": 3, "engine": "sequential"}}
    first, _ = serve(tmp_path / "run", **runtime)
    expected = play(first, until=5, after_3=lambda requests: requests.leave([0]))
    (tmp_path / "run/ditto/metrics.jsonl").write_text("".join(RoundRecord(number, {}, 0).to_line() for number in range(1, 6)))
    again, report = serve(tmp_path / "run", **runtime)
    assert report.round == 3 and again.requests.leave([1]) == "ditto: client 1 leaves before round 6"
    assert play(again, until=5) == expected[3:]
    assert again.population.online.tolist() == [1, 2, 3, 4, 5, 6, 7] and play(again)[0][1]["clients_online"] == 6


def test_the_schedule_and_requests_go_together(serve, tmp_path):
    server, _ = serve(tmp_path / "run", schedule=[{"round": 3, "leave": [1]}, {"round": 4, "join": [7]}])
    asked = server.requests
    assert server.population.online.tolist() == [0, 1, 2, 3, 4, 5, 6]
    assert asked.join([7]) == "ditto: client 7 joins before round 1"
    assert asked.leave([2, 4, 3]) == "ditto: clients 2-4 leave before round 1"
    assert asked.pending() == ["client 7 joins before round 1", "clients 2-4 leave before round 1"]
    figures = play(server)
    assert [metrics["clients_online"] for _, metrics, _ in figures] == [5, 5, 4, 4, 4, 4]
    assert asked.pending() == [] and [round for round, metrics, _ in figures if "newcomer_accuracy" in metrics] == [1, 2, 3, 4, 5, 6]


def test_bad_requests_are_refused_and_leave_no_trace(serve, newcomers, tmp_path):
    expected = play(serve(tmp_path / "quiet", schedule=[{"round": 4, "leave": [1, 2, 3]}])[0])
    server, _ = serve(tmp_path / "run", schedule=[{"round": 4, "leave": [1, 2, 3]}])
    figures = play(server, until=1)
    asked, other = server.requests, newcomers(shift={"kind": "none"}, test={"view": "holdout"})
    for request, says in (
        (lambda: asked.leave([99]), r"leave: client 99 does not exist; the federation has clients 0 \.\. 7"),
        (lambda: asked.leave([-1]), "client -1 does not exist"),
        (lambda: asked.leave([3, 4, 3]), "leave: client 3 is named twice"),
        (lambda: asked.leave([]), "no client is named"),
        (lambda: asked.leave(range(8)), "leave: no client would be left in round 2"),
        (lambda: asked.leave([0, 4, 5, 6, 7]), "leave: no client would be left in round 4; let fewer leave or others join first"),
        (lambda: asked.join([3]), "join: client 3 is online already in round 2"),
        (lambda: asked.join([8]), "client 8 does not exist"),
        (lambda: asked.join_shards(Shards("there", "0"), other[1]), "test view: the new clients have holdout, the federation has cluster"),
        (lambda: asked.join_shards(Shards("there", "0"), server.whole), "same id twice"),
    ):
        with pytest.raises(ConfigError, match=says):
            request()
    assert asked.pending() == [] and not (tmp_path / "run/ditto" / EVENTS).exists()
    assert [*figures, *play(server)] == expected
    with pytest.raises(ConfigError, match=r"ditto has begun its last round \(6\); nobody can join or leave any more"):
        asked.leave([0])


def test_who_is_asked_for_already_is_not_asked_for_again(serve, newcomers, tmp_path):
    server, _ = serve(tmp_path / "run")
    asked, shards = server.requests, newcomers()
    asked.leave([3])
    assert asked.join_shards(*shards) == "ditto: clients 8-11 join before round 1"
    for request, says in (
        (lambda: asked.leave([3]), "client 3 leaves before round 1 already, as was asked"),
        (lambda: asked.join([3]), "client 3 leaves before round 1 already"),
        (lambda: asked.leave([9]), "client 9 joins before round 1 already"),
        (lambda: asked.join_shards(*shards), "same id twice: the clients of these shards are in the federation already"),
    ):
        with pytest.raises(ConfigError, match=says):
            request()
    play(server, until=1)
    assert asked.leave([9]) == "ditto: client 9 leaves before round 2" and asked.join([3]) == "ditto: client 3 joins before round 2"
    with pytest.raises(ConfigError, match="leave: client 3 joins before round 2 already"):
        asked.leave([3])


def test_what_a_leaver_owned_is_dropped(serve, tmp_path):
    server, _ = serve(tmp_path / "run", cohort={"fraction": 1.0})
    play(server, until=1)
    assert {client for _, client in server.backend.memory.keys()} == set(range(8))
    server.requests.leave([2])
    server.requests.leave([5])
    play(server, until=2)
    assert {client for _, client in server.backend.memory.keys()} == {0, 1, 3, 4, 6, 7} and np.isnan(server.held_N2[[2, 5]]).all()


@pytest.mark.parametrize("checkpoint_every, every", [(1, 1), (4, 1), (4, 5)])
def test_stop_saves_the_round_and_resume_goes_on(checkpoint_every, every, serve, tmp_path):
    changes = {"runtime": {"checkpoint_every": checkpoint_every, "engine": "sequential"}, "evaluation": {"every": every}}
    expected = play(serve(tmp_path / "whole", **changes)[0])
    first, _ = serve(tmp_path / "run", **changes)
    said = []
    before = play(first, after_2=lambda requests: said.extend([requests.stop(), requests.stop()]))
    assert said == ["ditto: the run ends after round 3, which is saved"] * 2 and first.now == Stopped(3) and len(before) == 3
    same, report = serve(tmp_path / "run", **changes)  # a server that died before the driver heard of it
    assert report.round == 3 and report.stop
    second, report = serve(tmp_path / "run", session="another", **changes)
    assert report.round == 3 and not report.stop
    assert [*before, *play(second)] == expected


def test_stop_that_was_lost_in_a_crash_is_done_by_the_next_server_of_the_session(serve, tmp_path):
    first, _ = serve(tmp_path / "run")
    play(first, until=2, after_2=lambda requests: requests.stop())
    second, report = serve(tmp_path / "run")
    assert report.round == 2 and not report.stop
    assert second.advance().stop and second.now == Stopped(3)
    with pytest.raises(RunError, match="ditto is not at work just now; ask again in a moment"):
        second.requests.stop()


def test_stop_in_the_last_round_lets_the_method_finish(serve, tmp_path):
    server, _ = serve(tmp_path / "run", rounds=2)
    play(server, after_1=lambda requests: requests.stop())
    assert server.requests.stop_after == 2 and server.now.round == 2 and server._report(2).stop and server._report(2).finished


def test_requests_while_a_round_is_at_work(serve, tmp_path):
    """Many at once, in the middle of rounds: each is granted once, and happens before the round it was promised for."""
    server, _ = serve(tmp_path / "run", rounds=12)
    said, threads = {}, []

    def leave(client):
        try:
            said.setdefault(client, []).append(int(server.requests.leave([client]).rpartition(" ")[2]))
        except ConfigError:
            pass

    train = server.method.round

    def round(*arguments):
        if len(threads) < 14:
            threads.extend(threading.Thread(target=leave, args=(client,)) for client in (len(threads) // 2, len(threads) // 2))
            [thread.start() for thread in threads[-2:]]
        return train(*arguments)

    object.__setattr__(server.method, "round", round)
    online = [metrics["clients_online"] for _, metrics, _ in play(server, until=12)]
    [thread.join() for thread in threads]
    assert sorted(said) == [0, 1, 2, 3, 4, 5, 6] and all(len(rounds) == 1 for rounds in said.values())
    promised = [rounds[0] for rounds in said.values()]
    assert online == [8 - sum(one <= number for one in promised) for number in range(1, 13)]
    assert {(event.round, event.leave) for event in Journal(tmp_path / "run/ditto").events} == {(rounds[0], (client,)) for client, rounds in said.items()}


class TestJournal:
    EVENTS = (Event(3, join=(8, 9), shards=Shards("s3://there", "abc")), Event(4, leave=(1,)), Event(4, stop="here"))

    def test_is_read_as_written(self, tmp_path):
        journal = Journal(tmp_path / "fedavg")
        for event in self.EVENTS:
            journal.add(event)
        again = Journal(tmp_path / "fedavg")
        assert tuple(again.events) == self.EVENTS and again.until(3) == [self.EVENTS[0]] and again.until(9) == list(self.EVENTS[:2])
        assert (again.stop_after("here"), again.stop_after("there"), again.stop_after("")) == (4, None, None)

    def test_a_torn_line_is_cut_off_by_who_writes_next_and_by_nobody_else(self, tmp_path):
        Journal(tmp_path).add(*self.EVENTS[:2])
        whole = (tmp_path / EVENTS).read_bytes()
        for torn in (b'{"round": 5, "jo', b"\x00" * 40, self.EVENTS[2].to_line().encode()[:-1]):
            (tmp_path / EVENTS).write_bytes(whole + torn)
            journal = Journal(tmp_path)
            assert tuple(journal.events) == self.EVENTS[:2] and (tmp_path / EVENTS).read_bytes() == whole + torn
            journal.add(self.EVENTS[2])
            assert (tmp_path / EVENTS).read_bytes() == whole + self.EVENTS[2].to_line().encode()

    def test_an_event_that_could_not_be_written_did_not_happen(self, tmp_path):
        journal = Journal(tmp_path)
        journal.add(self.EVENTS[0])
        (tmp_path / EVENTS).rename(tmp_path / "away")
        (tmp_path / EVENTS).mkdir()
        with pytest.raises(OSError):
            journal.add(self.EVENTS[1])
        assert journal.events == [self.EVENTS[0]]

    def test_a_damaged_line_is_named(self, tmp_path):
        (tmp_path / EVENTS).write_text("{}\n")
        with pytest.raises(DataError, match=f"{EVENTS} is damaged"):
            Journal(tmp_path)

    def test_shards_that_changed_are_refused(self, newcomers):
        (first, _), (second, federation) = newcomers(), newcomers(seed=2)
        assert open_shards(first.uri).digest == first.digest and second.open().num_clients == federation.num_clients == 4
        with pytest.raises(DataError, match="holds other shards than those that joined"):
            Shards(first.uri, second.digest).open()


def test_a_population_that_grows_draws_as_before_until_then():
    small, large = Population(8, (), 3), Population(8, (), 3)
    large.add(Event(3, join=(8, 9)).change, 10)
    for number in (1, 2):
        assert [population.advance(number) and population.draw(number, 0.5).ids_M.tolist() for population in (small, large)][0] == large.draw(number, 0.5).ids_M.tolist()
    came, gone = large.advance(3)
    assert came.tolist() == [8, 9] and not len(gone) and large.newcomers.tolist() == [8, 9] and len(large.online) == 10
