import numpy as np
import torch

from cfl_ray.core import work
from cfl_ray.core.local import LocalSGD
from cfl_ray.core.work import Address, Losses, Mix, Own, PullRows, Rows, Train

TABLE = torch.zeros(3, 4)


def train(**changes) -> Train:
    """Five clients, two output rows; client 3 goes into both of them and client 4 into none."""
    mix = Mix(2, np.array([0, 0, 1, 0, 1]), np.array([0, 1, 2, 3, 3]), np.array([0.2, 0.3, 0.4, 0.5, 0.6]), np.array([10.0, 20.0]))
    return Train(
        Address(0, 1, 2), np.array([10, 11, 12, 13, 14]), (TABLE,), start=Rows(0, np.array([0, 1, 2, 0, 1])), local=LocalSGD(), mix=mix,
        steps_M=np.array([1, 2, 3, 4, 5]), pulls=(PullRows(0.1, Rows(0, np.array([2, 2, 1, 1, 0]))),), own=Own("mine"), **changes,
    )  # fmt: skip


def test_a_piece_holds_its_clients_and_no_tables():
    piece = train().take(np.array([3, 1]))
    assert piece.ids_M.tolist() == [13, 11] and piece.steps_M.tolist() == [4, 2]
    assert piece.start == Rows(0, piece.start.row_M) and piece.start.row_M.tolist() == [0, 1]
    assert piece.pulls[0].anchor.row_M.tolist() == [1, 2] and piece.pulls[0].weight == 0.1
    assert piece.tables == () and piece.address == Address(0, 1, 2) and piece.own == Own("mine")


def test_a_piece_keeps_its_part_of_the_mix_with_its_own_numbering():
    mix = train().take(np.array([3, 1])).mix
    edges = sorted(zip(mix.out_E.tolist(), mix.client_E.tolist(), mix.weight_E.tolist()))
    assert edges == [(0, 0, 0.5), (0, 1, 0.3), (1, 0, 0.6)]
    assert mix.num_rows == 2 and mix.total_R.tolist() == [10, 20]
    assert train().take(np.array([4])).mix.out_E.tolist() == []


def test_pieces_make_up_the_whole():
    whole, edges = train(), []
    for index_m in (np.array([4, 0]), np.array([2]), np.array([1, 3])):
        mix = whole.take(index_m).mix
        edges += zip(mix.out_E.tolist(), index_m[mix.client_E].tolist(), mix.weight_E.tolist())
    assert sorted(edges) == sorted(zip(whole.mix.out_E.tolist(), whole.mix.client_E.tolist(), whole.mix.weight_E.tolist()))


def test_what_is_absent_stays_absent():
    piece = Train(Address(0, 1, 2), np.arange(3), (TABLE,), start=Rows(0, np.zeros(3, int)), local=LocalSGD(), steps_M=np.ones(3, int)).take(np.array([2]))
    assert piece.mix is None and piece.keep is None and piece.own is None and piece.pulls == () and not any(piece.stays)


def test_every_table_in_use_is_known():
    assert [rows.row_M.tolist() for rows in train().rows()] == [[0, 1, 2, 0, 1], [2, 2, 1, 1, 0]]
    assert [rows.row_M.tolist() for rows in Losses(Address(0, 1, 1), np.arange(9), (TABLE,), num_models=3).rows()] == [[0, 1, 2]]
    assert [rows.row_M.tolist() for rows in work.TestShared(Address(0, 1, -1), np.array([0, 0]), (TABLE,), start=Rows(0, np.array([1, 2]))).rows()] == [[1, 2]]


def test_every_piece_of_losses_compares_all_models():
    piece = Losses(Address(0, 1, 1), np.arange(9), (TABLE,), num_models=3, max_samples=5).take(np.array([8, 2]))
    assert piece.ids_M.tolist() == [8, 2] and (piece.num_models, piece.max_samples, piece.tables) == (3, 5, ())
