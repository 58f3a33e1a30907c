import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from cfl_ray.core.reassigned import Reassigned
from cfl_ray.report import assignments
from cfl_ray.report.assignments import write_assignments


def test_rows_come_back_with_their_types(tmp_path):
    path = tmp_path / "assignments.parquet"
    write_assignments(path, [(3, Reassigned.of([(2, 1), (1, 0)])), (4, Reassigned.of([(1, -1)]))], np.array([5, -1, 0]))
    table = pq.read_table(path)
    assert table.to_pylist() == [
        {"client": 1, "name": None, "group": None, "cluster": 0, "round": 3},
        {"client": 2, "name": None, "group": 0, "cluster": 1, "round": 3},
        {"client": 1, "name": None, "group": None, "cluster": -1, "round": 4},
    ]
    assert table.schema.types == [pa.int64(), pa.string(), pa.int32(), pa.int32(), pa.int32()]
    assert [entry.name for entry in tmp_path.iterdir()] == [path.name]


def test_no_change_at_all_is_an_empty_table(tmp_path):
    write_assignments(tmp_path / "a.parquet", [])
    table = pq.read_table(tmp_path / "a.parquet")
    assert table.num_rows == 0
    assert table.column_names == ["client", "name", "group", "cluster", "round"]


def test_rows_are_written_in_groups_of_about_the_same_size(tmp_path, monkeypatch):
    """Large rounds are divided, and small rounds share a group."""
    monkeypatch.setattr(assignments, "_ROWS", 10)
    rounds = [(1, Reassigned.of([(client, 0) for client in range(25)]))]
    rounds += [(round, Reassigned.of([(0, round), (1, round), (2, round)])) for round in range(2, 11)]
    write_assignments(tmp_path / "a.parquet", rounds)
    file = pq.ParquetFile(tmp_path / "a.parquet")
    assert [file.metadata.row_group(at).num_rows for at in range(file.num_row_groups)] == [10, 10, 11, 12, 9]
    expected = [(client, cluster, round) for round, one in rounds for client, cluster in one]
    assert [(row["client"], row["cluster"], row["round"]) for row in file.read().to_pylist()] == expected
