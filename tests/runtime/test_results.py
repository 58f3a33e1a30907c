"""Changes of clusters, as a run records them."""

import pytest

from cfl_ray.core.errors import DataError
from cfl_ray.runtime.results import ClusterMoves
from cfl_ray.runtime.round_loop import RoundReport


def test_a_first_cluster_is_no_change_and_nor_is_one_after_an_absence():
    moves = ClusterMoves(None)
    for round, moved in (
        (1, ((0, 0), (1, 1))),  # both appear
        (2, ((2, 0),)),  # another one
        (3, ((1, 0),)),  # a change
        (4, ((0, -1),)),  # leaves
        (5, ((0, 1),)),  # comes again
    ):
        moves.add(RoundReport(None, round, moved=moved))
    assert moves.rounds == [3]


def test_moves_of_other_types_are_damage(tmp_path):
    for line in ('{"round": 1, "moved": 3}', '{"round": "x", "moved": []}', '{"round": 1, "moved": [[1]]}', "[]", "{"):
        (tmp_path / "moves.jsonl").write_text(line + "\n")
        with pytest.raises(DataError, match="moves.jsonl is damaged"):
            ClusterMoves(tmp_path)
