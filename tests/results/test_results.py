"""The record files of a method that grow with its rounds: changes of clusters, and metrics of clients."""

import tracemalloc
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from cfl_ray.core.reassigned import Reassigned
from cfl_ray.errors import DataError
from cfl_ray.results import arrow_log as module
from cfl_ray.results.arrow_log import ArrowLog, ClientMetrics, Reassignments, read_client_metrics, read_reassignments


def test_a_first_cluster_is_no_change_and_nor_is_one_after_an_absence():
    reassignments = Reassignments(None)
    for round, pairs in (
        (1, ((0, 0), (1, 1))),  # both appear
        (2, ((2, 0),)),  # another one
        (3, ((1, 0),)),  # a change
        (4, ((0, -1),)),  # leaves
        (5, ((0, 1),)),  # comes again
    ):
        reassignments.add(round, Reassigned.of(pairs))
    assert reassignments.rounds_with_changes == [3]


def test_clusters_that_are_formed_after_rounds_without_any_are_a_change():
    """AutoCFL and FL+HC train one model first: the round of their clustering counts, those of newcomers do not."""
    reassignments = Reassignments(None)
    for round, pairs in ((5, ((0, 0), (1, 1))), (8, ((2, 1),))):
        reassignments.add(round, Reassigned.of(pairs))
    assert reassignments.rounds_with_changes == [5]


def test_reassignments_come_back_from_the_file_without_a_round_twice(tmp_path):
    rounds = [(1, Reassigned.of([(0, 0), (1, 1), (7, 0)])), (4, Reassigned.of([(1, 0), (7, -1)]))]
    for last in (1, 2):  # the second writer replays the first round
        writer = Reassignments(tmp_path)
        for round, reassigned in rounds[:last]:
            writer.add(round, reassigned)
            writer.add(round, Reassigned.of([(3, 3)]))
        writer.add(9, Reassigned.of())
        assert writer.rounds == rounds[:last] == read_reassignments(tmp_path / "reassignments.arrow")
    federation = SimpleNamespace(num_clients=8, group_N=np.array([0, -1, 0, 0, 0, 0, 0, 5], np.int32))
    writer.write(tmp_path / "assignments.parquet", federation)
    rows = pq.read_table(tmp_path / "assignments.parquet").to_pylist()
    assert [tuple(row.values()) for row in rows] == [
        (0, None, 0, 0, 1),
        (1, None, None, 1, 1),
        (7, None, 5, 0, 1),
        (1, None, None, 0, 4),
        (7, None, 5, -1, 4),
    ]
    with pytest.raises(DataError, match="has client 7, and the federation 7 clients"):
        writer.write(tmp_path / "assignments.parquet", SimpleNamespace(num_clients=7, group_N=None))


def test_no_change_at_all_is_an_empty_table_with_its_types(tmp_path):
    Reassignments(None).write(tmp_path / "a.parquet", SimpleNamespace(num_clients=8, group_N=None))
    table = pq.read_table(tmp_path / "a.parquet")
    assert table.num_rows == 0 and table.column_names == ["client", "name", "group", "cluster", "round"]
    assert table.schema.types == [pa.int64(), pa.string(), pa.int32(), pa.int32(), pa.int32()]
    assert [entry.name for entry in tmp_path.iterdir()] == ["a.parquet"]


def test_rows_are_written_in_groups_of_about_the_same_size(tmp_path, monkeypatch):
    """Large rounds are divided, and small rounds share a group."""
    monkeypatch.setattr(module, "_ROWS", 10)
    rounds = [(1, Reassigned.of([(client, 0) for client in range(25)]))]
    rounds += [(round, Reassigned.of([(0, round), (1, round), (2, round)])) for round in range(2, 11)]
    writer = Reassignments(None)
    for one in rounds:
        writer.add(*one)
    writer.write(tmp_path / "a.parquet", SimpleNamespace(num_clients=25, group_N=None))
    file = pq.ParquetFile(tmp_path / "a.parquet")
    assert [file.metadata.row_group(at).num_rows for at in range(file.num_row_groups)] == [10, 10, 11, 12, 9]
    expected = [(client, cluster, round) for round, one in rounds for client, cluster in one]
    assert [(row["client"], row["cluster"], row["round"]) for row in file.read().to_pylist()] == expected


def test_an_incomplete_batch_is_left_out_by_readers_and_cut_off_by_the_next_writer(tmp_path):
    file = tmp_path / "reassignments.arrow"
    first, second = (1, Reassigned.of([(0, 0), (1, 1)])), (2, Reassigned.of([(1, 0)]))
    writer = Reassignments(tmp_path)
    writer.add(*first)
    size = file.stat().st_size
    writer.add(*second)
    whole = file.read_bytes()
    for cut in range(size + 1, len(whole)):
        file.write_bytes(whole[:cut])
        assert read_reassignments(file) == [first] and file.stat().st_size == cut
        writer = Reassignments(tmp_path)
        assert (writer.last, file.stat().st_size) == (1, size)
        writer.add(*second)
        assert file.read_bytes() == whole
    for cut in range(size):
        file.write_bytes(whole[:cut])
        writer = Reassignments(tmp_path)
        writer.add(*first), writer.add(*second)
        assert file.read_bytes() == whole


SCHEMA = pa.schema([("round", pa.int32()), ("client", pa.int32()), ("cluster", pa.int32())])


@pytest.mark.parametrize(
    ("columns", "reason"),
    [
        (([1, 1], [3, 2], [0, 0]), "clients are not ascending ids"),
        (([1, 1], [2, 2], [0, 0]), "clients are not ascending ids"),
        (([1], [-1], [0]), "clients are not ascending ids"),
        (([1], [1], [-2]), "cluster -2, expected -1 or more"),
        (([1, 2], [1, 2], [0, 0]), "a batch is not of one round"),
        (([], [], []), "a batch is not of one round"),
        (([1], [None], [0]), "Needed to copy 1 chunks"),
        (([0], [1], [0]), "round 0 after round 0"),
    ],
)
def test_reassignments_that_no_round_has_are_damage(tmp_path, columns, reason):
    log = ArrowLog(tmp_path / "reassignments.arrow", SCHEMA)
    for values in (([0], [1], [0]), columns):
        log.append(pa.record_batch([pa.array(column, pa.int32()) for column in values], schema=SCHEMA))
    for read in (Reassignments, lambda folder: read_reassignments(folder / "reassignments.arrow")):
        with pytest.raises(DataError, match=rf"reassignments.arrow is damaged \({reason}"):
            read(tmp_path)


@pytest.mark.parametrize("byte", [0, 4, 8])
def test_damage_before_the_last_batch_is_not_cut_off(tmp_path, byte):
    log = ArrowLog(tmp_path / "reassignments.arrow", SCHEMA)
    begins = []
    for round in (1, 2, 3):
        begins.append(log.file.stat().st_size if round > 1 else SCHEMA.serialize().size)
        log.append(pa.record_batch([pa.array([value], pa.int32()) for value in (round, 0, -1)], schema=SCHEMA))
    whole = bytearray(log.file.read_bytes())
    whole[begins[1] + byte] ^= 255
    log.file.write_bytes(whole)
    with pytest.raises(DataError, match="reassignments.arrow is damaged"):
        Reassignments(tmp_path)
    assert log.file.read_bytes() == whole


def test_a_million_reassignments_cost_a_few_bytes_each(tmp_path):
    """In the file, of the process that writes it, and of one that reads it; Python objects would cost a hundred."""
    count = 1_000_000
    round_1 = Reassigned.between(np.full(count, -1, np.int32), np.zeros(count, np.int32))
    federation = SimpleNamespace(num_clients=count, group_N=np.zeros(count, np.int32))
    tracemalloc.start()  # arrays of NumPy and objects of Python
    writer = Reassignments(tmp_path)
    writer.add(1, round_1)
    assert writer.rounds_with_changes == []
    writer.write(tmp_path / "assignments.parquet", federation)
    assert read_reassignments(tmp_path / "reassignments.arrow") == [(1, round_1)]
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 40 * count
    assert (tmp_path / "reassignments.arrow").stat().st_size < 12.1 * count


def test_client_metrics_of_a_type_that_does_not_exist_are_damage_and_are_not_cut_off(tmp_path):
    columns = [("round", pa.int32()), ("client", pa.int64()), ("accuracy", pa.float32()), ("loss", pa.float32())]
    header = pa.schema(columns).serialize().to_pybytes()
    bits = (64).to_bytes(4, "little")  # of an integer
    assert header.count(bits) == 1
    file = tmp_path / "client_metrics.arrow"
    file.write_bytes(header.replace(bits, (128).to_bytes(4, "little")))
    for read in (lambda: read_client_metrics(file), lambda: ClientMetrics(tmp_path)):
        with pytest.raises(DataError, match="client_metrics.arrow is damaged .Integers with more than 64 bits"):
            read()
    assert file.stat().st_size == len(header)


def test_client_metrics_of_another_form_are_named(tmp_path):
    with pa.ipc.new_stream(str(tmp_path / "client_metrics.arrow"), pa.schema([("x", pa.int8())])):
        pass
    for read in (lambda: read_client_metrics(tmp_path / "client_metrics.arrow"), lambda: ClientMetrics(tmp_path)):
        with pytest.raises(DataError, match=r"client_metrics.arrow has columns \['x'\]"):
            read()


def test_a_run_that_goes_on_does_not_read_what_it_has_recorded(tmp_path):
    scores_MV = np.zeros((100_000, 4))
    scores_MV[:, 0] = np.arange(100_000)
    writer = ClientMetrics(tmp_path)
    for round in (1, 2, 3):
        writer.add(round, scores_MV)
    before, pool = pa.default_memory_pool(), pa.proxy_memory_pool(pa.default_memory_pool())
    pa.set_memory_pool(pool)
    tracemalloc.start()
    try:
        resumed = ClientMetrics(tmp_path)
        peaks = pool.max_memory(), tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
        pa.set_memory_pool(before)
    assert resumed.last == 3 and max(peaks) < 500_000, peaks
    assert (tmp_path / "client_metrics.arrow").stat().st_size > 5_000_000
