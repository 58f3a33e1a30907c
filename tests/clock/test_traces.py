import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from cfl_ray.clock.traces import read_trace
from cfl_ray.errors import DataError


@pytest.fixture
def csv(tmp_path):
    def write(text):
        file = tmp_path / "trace.csv"
        file.write_text(text)
        return file

    return write


def test_csv_and_parquet_read_alike(csv, tmp_path):
    pq.write_table(
        pa.table({"from": [1.5, 2], "client": [3, 0], "to": [4, 2], "more": ["a", "b"]}), tmp_path / "trace.parquet"
    )
    for file in (csv("client,from,to\n3,1.5,4\n0,2,2\n"), tmp_path / "trace.parquet"):
        assert [part.tolist() for part in read_trace(file, 4)] == [[3, 0], [1.5, 2.0], [4.0, 2.0]]


@pytest.mark.parametrize(
    "text, message",
    [
        ("client,from\n1,2\n", "has no column 'to'"),
        ("client,from,to\n1,2,3\n4,1,2\n", "row 1: client 4 does not exist; the federation has clients 0 .. 3"),
        ("client,from,to\n-1,2,3\n", "row 0: client -1 does not exist"),
        ("client,from,to\n1,2,3\n1,5,4\n", "row 1: an interval from 5 to 4; from must not be after to"),
        ("client,from,to\na,2,3\n", "column 'client' must hold client ids, integers, it holds string"),
        ("client,from,to\n1,x,3\n", "column 'from' must hold numbers, it holds string"),
        ("client,from,to\n1,true,3\n", "column 'from' must hold numbers, it holds bool"),
        ("client,from,to\n1,2,3\n1,,3\n", "column 'from' is empty .or NA or NaN. in row 1"),
        ("", "cannot be read as a CSV file"),
    ],
)
def test_unusable_content_is_named(csv, text, message):
    with pytest.raises(DataError, match=message):
        read_trace(csv(text), 4)


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(DataError, match="cohort.availability.file: there is no file .*no.csv"):
        read_trace(tmp_path / "no.csv", 4)


def test_a_file_that_is_no_parquet(tmp_path):
    (tmp_path / "a.parquet").write_text("client,from,to\n")
    with pytest.raises(DataError, match="a.parquet cannot be read as a Parquet file"):
        read_trace(tmp_path / "a.parquet", 4)
