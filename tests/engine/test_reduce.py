from dataclasses import replace

import numpy as np
import torch
from closeness import close

from cfl_ray.core.local_sgd import LocalSGD
from cfl_ray.core.params import Columns
from cfl_ray.core.updates import Updates
from cfl_ray.core.work import Address, Averaging, Outcome, Rows, Train
from cfl_ray.engine.reduce import ChunkSums, HostSums, weighted_means

M, P = 24, 50
DRAW = np.random.default_rng(3)
MODELS = torch.from_numpy(DRAW.standard_normal((3, P))).float()
SENT = DRAW.integers(0, 3, M)  # the model that each client was sent
WEIGHTS = DRAW.random((2, M))


def training(averaging: Averaging) -> Train:
    steps = np.ones(M, int)
    return Train(
        Address(0, 1, 1),
        np.arange(M),
        (MODELS,),
        start=Rows(0, SENT),
        local=LocalSGD(),
        steps_M=steps,
        averaging=averaging,
    )


def merged(work: Train, uploads: torch.Tensor, division: list[list[int]], valid_M: np.ndarray) -> HostSums:
    """Totals of chunks of four clients, by a host for each list of chunks."""
    whole = HostSums()
    for chunks in division:
        host = HostSums()
        for chunk in chunks:
            index_m = np.arange(4 * chunk, 4 * chunk + 4)
            sums = ChunkSums(work.take(index_m).averaging)
            for at, client in enumerate(index_m.tolist()):
                if valid_M[client]:
                    sums.add(at, uploads[client], MODELS[SENT[client]])
            host.add(sums)
        whole.merge(host.totals)
    return whole


def means_of(uploads, division, valid_M=None):
    valid_M = np.ones(M, bool) if valid_M is None else valid_M
    work = training(Averaging.of(WEIGHTS, M))
    return weighted_means(work, merged(work, uploads, division, valid_M).values(), valid_M)


def test_means_do_not_depend_on_the_hosts_that_did_the_chunks():
    """Clients of one output row were sent different models."""
    uploads = MODELS[SENT] + torch.from_numpy(DRAW.standard_normal((M, P))).float() * 0.01
    means, arrived_R = means_of(uploads, [[0, 1, 2, 3, 4, 5]])
    for division in ([[5, 0], [3], [1, 4, 2]], [[5], [4], [3], [2], [1], [0]]):
        other, _ = means_of(uploads, division)
        assert all(torch.equal(means[out], other[out]) for out in (0, 1))
    share_RM = WEIGHTS / WEIGHTS.sum(1, keepdims=True)
    expected = torch.from_numpy(share_RM) @ uploads.double()
    found = torch.stack([means[0], means[1]]).double()
    assert close(found, expected, 1e-7) and np.allclose(arrived_R, 1, rtol=1e-15)


def test_a_change_below_the_resolution_of_the_weights_is_kept():
    """Every client changes its model by 1e-9: as a float32 the sum of the models would not change at all."""
    zeros, uploads = torch.zeros(P), torch.full((P,), 1e-9)
    sums, averaging = HostSums(), Averaging.of(np.ones((1, M)), M)
    for first in range(0, M, 4):
        chunk_sums = ChunkSums(averaging.take(np.arange(first, first + 4)))
        for at in range(4):
            chunk_sums.add(at, uploads, zeros)
        sums.add(chunk_sums)
    assert torch.allclose(sums.values()[0], uploads, rtol=1e-6, atol=0)


def test_excluded_clients_do_not_count():
    valid_M = DRAW.random(M) < 0.7
    uploads = MODELS[SENT] + 0.1
    means, arrived_R = means_of(uploads, [[0, 1, 2], [3, 4, 5]], valid_M)
    share_RM = WEIGHTS * valid_M
    expected = torch.from_numpy(share_RM / share_RM.sum(1, keepdims=True)) @ uploads.double()
    assert close(torch.stack([means[0], means[1]]).double(), expected, 1e-6)
    assert np.allclose(arrived_R, share_RM.sum(1) / WEIGHTS.sum(1))


def test_a_row_whose_clients_are_all_excluded_has_no_mean():
    work = training(Averaging.of(np.stack([np.arange(M) < 4, np.arange(M) >= 4]), M))
    valid_M = np.arange(M) >= 4
    uploads = MODELS[SENT]
    means, arrived_R = weighted_means(work, merged(work, uploads, [[0, 1, 2, 3, 4, 5]], valid_M).values(), valid_M)
    assert list(means) == [1] and arrived_R[0] == 0


def test_the_means_of_all_rows_are_the_next_table_without_a_copy():
    """The server holds the models before and after a round, and no third table."""
    work = training(Averaging.of(WEIGHTS, M))
    means, arrived_R = means_of(MODELS[SENT] + 0.1, [[0, 1, 2, 3, 4, 5]])
    outcome = Outcome({"valid": np.ones(M, bool)}, means, arrived_R)
    updates = Updates(outcome, work.averaging, None, work, trained=MODELS.shape[1])
    averaged_RP = updates.averaged(MODELS[:2])
    assert averaged_RP.data_ptr() == means[0].data_ptr() and torch.equal(averaged_RP, torch.stack([*means.values()]))
    private = replace(updates, private=Columns(((0, 1),))).averaged(MODELS[:2])
    assert torch.equal(private, torch.cat([MODELS[:2, :1], averaged_RP[:, 1:]], 1)), "the means are as they were"
    assert torch.equal(updates.averaged(MODELS)[2], MODELS[2]), "a third row keeps its model"


def test_sums_on_a_device_have_the_bits_of_those_on_the_cpu(device):
    """Totals, values and merged totals; with `--device cuda` they are formed on the GPU, large ones on the CPU."""
    draw, averaging = torch.Generator().manual_seed(0), Averaging.of(np.ones((1, 3)), 3)
    terms = [torch.randn(70_000, generator=draw) * 10.0**power for power in (-9, 0, 2)]
    here, there = HostSums(), HostSums()
    for term_P in terms:
        for sums, place in ((here, "cpu"), (there, device)):
            chunk = ChunkSums(averaging)
            chunk.changes = {0: term_P.to(place), 1: term_P.to(place) if term_P.max() < 5 else term_P}
            sums.add(chunk)
    assert all(torch.equal(there.values()[out], value) for out, value in here.values().items())
    assert all(torch.equal(there.totals[out], total_2P) for out, total_2P in here.totals.items())
    assert all(torch.equal(there.values()[out], value) for out, value in here.values().items())
