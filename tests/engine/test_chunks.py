import numpy as np
import pytest
import torch

from cfl_ray.core.local_sgd import LocalSGD
from cfl_ray.core.work import Address, Averaging, EvaluateShared, Rows, Train
from cfl_ray.engine.chunks import chunks_of
from cfl_ray.engine.engines import chunk_size


def training(steps_M, averaging=None, **changes) -> Train:
    ids_M = np.arange(len(steps_M)) + 100
    start = Rows(0, np.zeros(len(ids_M), int))
    tables, local = (torch.zeros(1, 3),), LocalSGD(batch_size=10)
    work = Train(
        Address(0, 1, 1), ids_M, tables, start=start, local=local, steps_M=steps_M, averaging=averaging, **changes
    )
    return work


def test_hold_every_client_once_and_clients_of_one_output_row_side_by_side():
    weight_RM = np.zeros((2, 10))
    weight_RM[np.arange(10) % 2, np.arange(10)] = 1
    chunks = chunks_of(training(np.ones(10, int), Averaging.of(weight_RM, 10)), 4)
    assert [chunk.index_m.tolist() for chunk in chunks] == [[0, 2, 4, 6], [8, 1, 3, 5], [7, 9]]
    assert [chunk.row for chunk in chunks] == [0, 0, 1]


def test_costs_are_steps_times_samples_of_a_batch():
    steps_M, num_samples_M = np.array([1, 2, 3, 4, 5]), np.array([5, 10, 100, 8, 7])
    chunks = chunks_of(training(steps_M), 2, num_samples_M)
    assert [chunk.cost for chunk in chunks] == [5 + 20, 30 + 32, 35]
    shared = EvaluateShared(Address(0, 1, 1), np.arange(4), (), start=Rows(0, np.zeros(4, int)))
    assert [chunk.cost for chunk in chunks_of(shared, 2)] == [1, 1]


def test_no_clients_are_one_empty_chunk_and_a_chain_is_one_chunk():
    (chunk,) = chunks_of(training(np.zeros(0, int)), 4, np.zeros(0, int))
    assert chunk.index_m.tolist() == []
    (chunk,) = chunks_of(training(np.ones(9, int), chained=True), 4, np.ones(9, int))
    assert chunk.index_m.tolist() == list(range(9)) and chunk.cost == 9


@pytest.mark.parametrize(
    "clients, engine, expected",
    [
        (100, "sequential", 1),  # a hundred hosts have one each
        (480, "sequential", 3),
        (10_000, "sequential", 8),
        (480, "manual", 3),
        (480, "span", 8),
        (10_000, "span", 24),
        (1, "vectorised", 1),
        (10, "vectorised", 3),
        (256, "vectorised", 16),
        (10_000, "vectorised", 64),
        (2**30, "sequential", 1024),  # exact sums have at most 2^20 terms
    ],
)
def test_size_follows_the_cohort_within_bounds(clients, engine, expected):
    assert chunk_size(clients, engine) == expected
    assert chunk_size(clients, engine, one_by_one=True) == 1
