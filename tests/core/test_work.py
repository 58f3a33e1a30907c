from dataclasses import fields
from typing import get_args, get_type_hints

import numpy as np
import pytest
import torch

from cfl_ray.core.local_sgd import LocalSGD
from cfl_ray.core.work import (
    Address,
    Averaging,
    ClientState,
    EvaluateClients,
    EvaluateShared,
    Given,
    Losses,
    Proximal,
    Rows,
    Train,
    Work,
)

TABLE = torch.zeros(3, 4)


def train() -> Train:
    """Five clients, two output rows; client 13 is part of both rows and client 14 of none."""
    averaging = Averaging(
        num_rows=2,
        out_E=np.array([0, 0, 1, 0, 1]),
        client_E=np.array([0, 1, 2, 3, 3]),
        weight_E=np.array([0.2, 0.3, 0.4, 0.5, 0.6]),
        total_R=np.array([10.0, 20.0]),
    )
    return Train(
        Address(0, 1, 2),
        np.array([10, 11, 12, 13, 14]),
        (TABLE,),
        start=Rows(0, np.array([0, 1, 2, 0, 1])),
        local=LocalSGD(),
        steps_M=np.array([1, 2, 3, 4, 5]),
        averaging=averaging,
        given=Given(proximal=(Proximal(0.1, Rows(0, np.array([2, 2, 1, 1, 0]))),)),
        client_state=ClientState("personal"),
    )


def test_a_chunk_has_its_clients_and_no_tables():
    chunk = train().take(np.array([3, 1]))
    assert chunk.ids_M.tolist() == [13, 11] and chunk.steps_M.tolist() == [4, 2]
    assert chunk.start.table == 0 and chunk.start.row_M.tolist() == [0, 1]
    assert chunk.given.proximal[0].anchor.row_M.tolist() == [1, 2] and chunk.given.proximal[0].weight == 0.1
    assert chunk.tables == () and chunk.address == Address(0, 1, 2) and chunk.client_state == ClientState("personal")


def test_a_chunk_has_its_part_of_the_averages_with_its_own_numbering():
    averaging = train().take(np.array([3, 1])).averaging
    entries = sorted(zip(averaging.out_E.tolist(), averaging.client_E.tolist(), averaging.weight_E.tolist()))
    assert entries == [(0, 0, 0.5), (0, 1, 0.3), (1, 0, 0.6)]
    assert averaging.num_rows == 2 and averaging.total_R.tolist() == [10, 20]
    assert train().take(np.array([4])).averaging.out_E.tolist() == []


def test_the_averages_of_all_chunks_make_up_the_whole():
    whole, entries = train().averaging, []
    for index_m in (np.array([4, 0]), np.array([2]), np.array([1, 3])):
        part = train().take(index_m).averaging
        entries += zip(part.out_E.tolist(), index_m[part.client_E].tolist(), part.weight_E.tolist())
    assert sorted(entries) == sorted(zip(whole.out_E.tolist(), whole.client_E.tolist(), whole.weight_E.tolist()))


def kinds_of_work(kind: type[Work] = Work) -> set[type[Work]]:
    return {kind}.union(*map(kinds_of_work, kind.__subclasses__()))


@pytest.mark.parametrize("kind", sorted(kinds_of_work(), key=lambda kind: kind.__name__))
def test_fields_with_a_value_for_each_client_say_so(kind):
    """They are the arrays with an axis M, by their names, and the parts that can be cut."""
    types, expected = get_type_hints(kind), set()
    for item in fields(kind):
        has_take = any(hasattr(part, "take") for part in (types[item.name], *get_args(types[item.name])))
        if item.name.endswith(("_M", "_MK")) or (has_take and "ndarray" not in str(types[item.name])):
            expected.add(item.name)
    expected.discard("tables")
    assert {item.name for item in fields(kind) if "per_client" in item.metadata} == expected
    assert "ids_M" in expected


def test_optional_parts_are_absent_from_a_chunk_too():
    start, steps_M = Rows(0, np.zeros(3, int)), np.ones(3, int)
    work = Train(Address(0, 1, 2), np.arange(3), (TABLE,), start=start, local=LocalSGD(), steps_M=steps_M)
    chunk = work.take(np.array([2]))
    assert chunk.averaging is None and chunk.features is None and chunk.client_state is None
    assert chunk.given == Given()


def test_all_tables_in_use_are_listed():
    address, ids, start = Address(0, 1, 1), np.array([0, 0]), Rows(0, np.array([1, 2]))
    used = lambda work: [rows.row_M.tolist() for rows in work.rows()]
    assert used(train()) == [[0, 1, 2, 0, 1], [2, 2, 1, 1, 0]]
    assert used(Losses(address, ids, (TABLE,), num_models=3)) == [[0, 1, 2]]
    assert used(EvaluateShared(address, ids, (TABLE,), start=start)) == [[1, 2]]
    assert used(EvaluateClients(address, ids, (TABLE,), start=start, weight_MK=np.full((len(ids), 2), 0.5))) == [[0, 1]]
    assert used(EvaluateClients(address, ids, (TABLE,), start=start, frozen_model=start)) == [[1, 2], [1, 2]]


def test_every_chunk_of_losses_compares_all_models():
    chunk = Losses(Address(0, 1, 1), np.arange(9), (TABLE,), num_models=3, max_samples=5).take(np.array([8, 2]))
    assert chunk.ids_M.tolist() == [8, 2] and (chunk.num_models, chunk.max_samples, chunk.tables) == (3, 5, ())
