import numpy as np
import pytest
import torch

from cfl_ray.engine import exact


def total_of(terms) -> torch.Tensor:
    """Both bins (2, P)."""
    total_2P = exact.zeros(len(terms[0]))
    for term in terms:
        exact.add_(total_2P, term)
    return total_2P


@pytest.mark.parametrize("scale", [1e-12, 1e-6, 1.0, 2.0**12, 2.0**21 / 40])
def test_the_order_of_the_terms_does_not_change_a_bit(scale):
    draw = np.random.default_rng(0)
    terms = [torch.from_numpy(draw.standard_normal(1000) * scale / 4) for _ in range(40)]
    expected = total_of(terms)
    for _ in range(5):
        assert torch.equal(total_of([terms[i] for i in draw.permutation(40)]), expected)
    plain = [sum(terms[i] for i in draw.permutation(40)) for _ in range(2)]
    assert not torch.equal(*plain), "plain sums agree too: these terms test nothing"


@pytest.mark.parametrize("large", [0.0, 2.0**20 + 7, -(2.0**20) - 7, 2.0**21 - 64])
def test_any_tree_of_partial_sums_has_the_same_bits(large):
    """Totals of hosts are added bin by bin, also where they are near the limit: nothing is rounded twice."""
    draw = np.random.default_rng(1)
    terms = [torch.from_numpy(draw.uniform(-1, 1, 200)) for _ in range(24)] + [torch.full((200,), large).double()]
    expected = total_of(terms)
    for hosts in (2, 3, 7):
        owner = draw.integers(0, hosts, len(terms))
        divided = [[term for term, its in zip(terms, owner) if its == host] for host in range(hosts)]
        partial = [total_of(mine) for mine in divided if mine]
        while len(partial) > 1:  # joins any two
            first, second = (partial.pop(draw.integers(len(partial))) for _ in range(2))
            partial.append(first + second)
        assert torch.equal(partial[0], expected)


def test_a_term_is_rounded_by_at_most_2_to_the_minus_64():
    terms = torch.from_numpy(np.random.default_rng(2).standard_normal(10_000))
    coarse, fine = total_of([terms])
    rest = terms - coarse  # exact: both have few bits apart
    assert rest.abs().max() <= 2.0**-31 and 0 < (rest - fine).abs().max() <= 2.0**-64
    for bin_P, grid in ((coarse, 2.0**-30), (fine, 2.0**-63)):
        assert torch.equal(bin_P / grid, (bin_P / grid).round())


def test_a_million_small_changes_have_an_exact_mean():
    """10^6 chunks whose mean change is 8e-7: relative error below 1e-5; the bound is 7e-8, before float32."""
    chunks, columns, distinct = 10**6, 8, 1000
    assert chunks < exact.MAX_TERMS
    draw = np.random.default_rng(3)
    changes = torch.from_numpy(draw.normal(8e-7, 4e-7, (distinct, columns)) / chunks).float()
    host = total_of(list(changes))  # every change occurs in a thousand chunks, on a thousand hosts
    total_2P = sum(host for _ in range(chunks // distinct))
    expected = changes.double().sum(0) * (chunks // distinct)
    assert ((total_2P.sum(0) - expected).abs() <= chunks * 2.0**-64).all()
    error = (exact.value(total_2P).double() - expected).abs() / expected.abs()
    assert error.max() < 1e-6


def test_terms_stay_as_they_are():
    term = torch.full((3,), 1 / 3, dtype=torch.float64)
    total_of([term])
    assert torch.equal(term, torch.full((3,), 1 / 3, dtype=torch.float64))


def test_blocks_cover_the_whole_row():
    length = 3 * exact._BLOCK + 5
    assert torch.equal(exact.value(total_of([torch.arange(length) / 2.0])), torch.arange(length) / 2)
