import numpy as np
import pytest
import torch

from cfl_ray.core import exact
from cfl_ray.core.work import Mix
from cfl_ray.engine.reduce import HostSums, PieceSums


def total_of(terms) -> torch.Tensor:
    total = torch.zeros(terms[0].shape, dtype=torch.float64)
    for term in terms:
        exact.add_(total, term)
    return total


@pytest.mark.parametrize("scale", [1e-6, 1.0, 2.0**12, 2.0**19.9 / 40])
def test_the_order_of_the_terms_does_not_change_a_bit(scale):
    draw = np.random.default_rng(0)
    terms = [torch.from_numpy(draw.standard_normal(1000) * scale / 4) for _ in range(40)]
    expected = total_of(terms)
    for _ in range(5):
        assert torch.equal(total_of([terms[i] for i in draw.permutation(40)]), expected)
    plain = [sum(terms[i] for i in draw.permutation(40)) for _ in range(2)]
    assert not torch.equal(*plain), "plain sums agree too: these terms test nothing"


@pytest.mark.parametrize("large", [0.0, 2.0**19 + 7, -(2.0**19) - 7, 2.0**20 - 64])
def test_the_division_among_hosts_does_not_change_a_bit(large):
    """Partial sums are added like terms, also where they are near the limit: nothing is rounded twice."""
    draw = np.random.default_rng(1)
    terms = [torch.from_numpy(draw.uniform(-1, 1, 200)) for _ in range(24)] + [torch.full((200,), large, dtype=torch.float64)]
    expected = total_of(terms)
    for hosts in (2, 3, 7):
        owner = draw.integers(0, hosts, len(terms))
        partial = [total_of(mine) for host in range(hosts) if (mine := [term for term, its in zip(terms, owner) if its == host])]
        assert torch.equal(total_of([partial[i] for i in draw.permutation(len(partial))]), expected)


def test_a_term_is_rounded_by_at_most_half_of_2_to_the_minus_32():
    terms = torch.from_numpy(np.random.default_rng(2).standard_normal(10_000))
    error = (total_of([terms]) - terms).abs()
    assert 0 < error.max() <= 2.0**-33
    grid = total_of([terms]) * 2.0**32
    assert torch.equal(grid, grid.round())


def test_terms_stay_as_they_are_and_scalars_are_terms():
    term = torch.full((3,), 1 / 3, dtype=torch.float64)
    total_of([term])
    assert torch.equal(term, torch.full((3,), 1 / 3, dtype=torch.float64))
    assert total_of([torch.tensor(0.25, dtype=torch.float64)] * 3).item() == 0.75


def test_blocks_cover_the_whole_row():
    length = 3 * exact._BLOCK + 5
    assert torch.equal(total_of([torch.arange(length) / 2.0]), torch.arange(length, dtype=torch.float64) / 2)


def test_weighted_sums_of_pieces_do_not_depend_on_the_hosts_that_did_them():
    """Six pieces of four clients with two output rows, done by one host, by three, and in reverse."""
    draw = np.random.default_rng(3)
    rows = torch.from_numpy(draw.standard_normal((24, 50))).float()
    weights = draw.random((2, 24))
    weights /= weights.sum(1, keepdims=True)

    def piece(number: int) -> PieceSums:
        mine = np.arange(4 * number, 4 * number + 4)
        sums = PieceSums(Mix(2, np.repeat([0, 1], 4), np.tile(np.arange(4), 2), weights[:, mine].reshape(-1), np.ones(2)))
        for at, client in enumerate(mine):
            sums.add(at, rows[client])
        return sums

    def merged(division: list[list[int]]) -> HostSums:
        whole = HostSums()
        for numbers in division:
            host = HostSums()
            for number in numbers:
                host.add(piece(number).rows, piece(number).mass)
            whole.add(host.rows, host.mass)
        return whole

    one = merged([[0, 1, 2, 3, 4, 5]])
    for division in ([[5, 0], [3], [1, 4, 2]], [[5], [4], [3], [2], [1], [0]]):
        other = merged(division)
        assert all(torch.equal(one.rows[out], other.rows[out]) and torch.equal(one.mass[out], other.mass[out]) for out in (0, 1))
    expected = torch.from_numpy(weights) @ rows.double()
    assert torch.allclose(torch.stack([one.rows[0], one.rows[1]]), expected, rtol=0, atol=6 * 2**-33 + 1e-6)  # float32 inside a piece
    assert one.mass[0].item() == pytest.approx(1, abs=6 * 2**-33)
