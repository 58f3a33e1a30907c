"""The journal of granted requests: read as written, torn lines dropped, damage named."""

import json

import pytest

from cfl_ray.config.data import SOURCE_KINDS
from cfl_ray.config.paths import recorded_in
from cfl_ray.data import build, open_shards
from cfl_ray.errors import DataError
from cfl_ray.population.population import Population
from cfl_ray.run_directory import RunDirectory
from cfl_ray.runtime.journal import JoinedShards, Journal, JournalEvent, copy_events

EVENTS = RunDirectory.events.name

JOIN = JournalEvent(3, join=(8, 9), shards=JoinedShards("s3://there", "abc"))
LEAVE = JournalEvent(4, leave=(1,))
STOP = JournalEvent(4, stop="here")


def test_is_read_as_written(tmp_path):
    journal = Journal(tmp_path / "fedavg")
    for event in (JOIN, LEAVE, STOP):
        journal.add(event)
    again = Journal(tmp_path / "fedavg")
    assert again.events == [JOIN, LEAVE, STOP]
    assert again.until(3) == [JOIN] and again.until(9) == [JOIN, LEAVE]
    assert [again.stop_after(session, saved=4) for session in ("here", "there", "")] == [4, None, None]
    assert [again.stop_after(session, saved=3) for session in ("here", "there", "")] == [4, 4, 4]
    again.add(JournalEvent(2, stop="here"))  # it was stopped earlier than it was to be
    assert again.stop_after("there", saved=2) is None


def test_a_copy_has_no_stop_and_replaces_that_of_a_start_that_was_killed(tmp_path):
    Journal(tmp_path / "run").add(JOIN, LEAVE, STOP)
    for _ in range(2):
        copy_events(tmp_path / "run", tmp_path / "again")
    assert Journal(tmp_path / "again").events == [JOIN, LEAVE]


def test_shards_of_newcomers_are_found_beside_a_run_that_has_moved(tmp_path):
    old, new = tmp_path / "old", tmp_path / "new"
    joins = [
        JournalEvent(round, join=(round,), shards=JoinedShards(uri, "abc"))
        for round, uri in ((2, f"{old}/late"), (3, "s3://there/late"), (4, "/nowhere/late"))
    ]
    Journal(old / "run" / "fedavg").add(*joins)
    (old / "run" / "config.yaml").write_text(recorded_in(old / "run") + "rounds: 9\n")
    (old / "late").mkdir()
    assert Journal(old / "run" / "fedavg").events == joins
    old.rename(new)
    found = Journal(new / "run" / "fedavg").events
    assert [event.shards.uri for event in found] == [f"{new}/late", "s3://there/late", "/nowhere/late"]


def test_a_torn_line_is_ignored_by_readers_and_removed_by_the_next_writer(tmp_path):
    Journal(tmp_path).add(JOIN, LEAVE)
    whole = (tmp_path / EVENTS).read_bytes()
    for torn in (b'{"round": 5, "jo', b"\x00" * 40, STOP.to_line().encode()[:-1]):
        (tmp_path / EVENTS).write_bytes(whole + torn)
        journal = Journal(tmp_path)
        assert journal.events == [JOIN, LEAVE] and (tmp_path / EVENTS).read_bytes() == whole + torn
        journal.add(STOP)
        assert (tmp_path / EVENTS).read_bytes() == whole + STOP.to_line().encode()


def test_an_event_that_could_not_be_written_is_not_kept(tmp_path):
    journal = Journal(tmp_path)
    journal.add(JOIN)
    (tmp_path / EVENTS).rename(tmp_path / "away")
    (tmp_path / EVENTS).mkdir()
    with pytest.raises(OSError):
        journal.add(LEAVE)
    assert journal.events == [JOIN]


def test_a_damaged_line_is_named(tmp_path):
    (tmp_path / EVENTS).write_text("{}\n")
    with pytest.raises(DataError, match=f"{EVENTS} is damaged"):
        Journal(tmp_path)


@pytest.mark.parametrize(
    "change", [{"round": "1"}, {"round": -1}, {"join": 3}, {"leave": ["x"]}, {"join": [-1]}, {"shards": 3}, {"stop": 1}]
)
def test_an_event_of_other_types_is_damage(tmp_path, change):
    values = json.loads(JournalEvent(1).to_line())
    (tmp_path / EVENTS).write_text(json.dumps(values | change) + "\n")
    with pytest.raises(DataError, match=f"{EVENTS} is damaged"):
        Journal(tmp_path)


def test_shards_that_changed_are_refused(tmp_path):
    config = SOURCE_KINDS.of(source="digits", partition={"clients": 4, "samples": 20})
    first, second = (build(config, seed, tmp_path / "shards") for seed in (1, 2))
    assert open_shards(first.uri).digest == first.digest
    assert JoinedShards(second.uri, second.digest).open().num_clients == 4
    with pytest.raises(DataError, match="holds other shards than those that joined"):
        JoinedShards(first.uri, second.digest).open()


def test_a_population_that_grows_draws_the_same_cohorts_until_then():
    small, large = Population(8, (), 3), Population(8, (), 3)
    large.add(JOIN, 10)
    for round in (1, 2):
        small.advance(round), large.advance(round)
        assert small.draw(round, 0.5).ids_M.tolist() == large.draw(round, 0.5).ids_M.tolist()
    joined, left = large.advance(3)
    assert joined.tolist() == [8, 9] and not len(left)
    assert large.newcomers.tolist() == [8, 9] and len(large.online) == 10
