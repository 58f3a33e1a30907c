"""Changes of clusters, as a run records them."""

import pyarrow as pa
import pytest

from cfl_ray.errors import DataError
from cfl_ray.results.client_metrics import ClientMetrics, read_client_metrics
from cfl_ray.results.reassignments import Reassignments


def test_a_first_cluster_is_no_change_and_nor_is_one_after_an_absence():
    reassignments = Reassignments(None)
    for round, moved in (
        (1, ((0, 0), (1, 1))),  # both appear
        (2, ((2, 0),)),  # another one
        (3, ((1, 0),)),  # a change
        (4, ((0, -1),)),  # leaves
        (5, ((0, 1),)),  # comes again
    ):
        reassignments.add(round, moved)
    assert reassignments.rounds == [3]


def test_clusters_that_are_formed_after_rounds_without_any_are_a_change():
    """AutoCFL and FL+HC train one model first: the round of their clustering counts, those of newcomers do not."""
    reassignments = Reassignments(None)
    for round, moved in ((5, ((0, 0), (1, 1))), (8, ((2, 1),))):
        reassignments.add(round, moved)
    assert reassignments.rounds == [5]


def test_reassignments_of_other_types_are_damage(tmp_path):
    for line in ('{"round": 1, "moved": 3}', '{"round": "x", "moved": []}', '{"round": 1, "moved": [[1]]}', "[]", "{"):
        (tmp_path / "reassignments.jsonl").write_text(line + "\n")
        with pytest.raises(DataError, match="reassignments.jsonl is damaged"):
            Reassignments(tmp_path)


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
