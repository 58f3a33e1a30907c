import pyarrow as pa
import pyarrow.parquet as pq

from cfl_ray.report.assignments import Assignment, write_assignments


def test_rows_come_back_with_their_types(tmp_path):
    path = tmp_path / "assignments.parquet"
    write_assignments(path, [Assignment(2**40, 1, 3, group=0, name="writer-7"), Assignment(1, -1, 4)])
    table = pq.read_table(path)
    assert table.to_pylist() == [
        {"client": 2**40, "name": "writer-7", "group": 0, "cluster": 1, "round": 3},
        {"client": 1, "name": None, "group": None, "cluster": -1, "round": 4},
    ]
    assert table.schema.types == [pa.int64(), pa.string(), pa.int32(), pa.int32(), pa.int32()]
    assert [entry.name for entry in tmp_path.iterdir()] == [path.name]


def test_no_change_at_all_is_an_empty_table(tmp_path):
    write_assignments(tmp_path / "a.parquet", iter(()))
    table = pq.read_table(tmp_path / "a.parquet")
    assert table.num_rows == 0
    assert table.column_names == ["client", "name", "group", "cluster", "round"]
