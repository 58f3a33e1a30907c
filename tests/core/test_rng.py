import itertools

import numpy as np
import torch

from cfl_ray.core.rng import Draws, stream, torch_stream, uniforms

ADDRESS = (3, 7, 2, 11, "batches")


def test_the_same_address_gives_the_same_draw_after_any_other_draws():
    first = stream(*ADDRESS).random(5)
    np.random.default_rng(0).random(100), torch.rand(100), stream(0, 0, 0, 0, "x").random(100)
    assert np.array_equal(stream(*ADDRESS).random(5), first)
    assert torch.equal(torch.rand(5, generator=torch_stream(*ADDRESS)), torch.rand(5, generator=torch_stream(*ADDRESS)))


def test_draws_never_change_from_one_version_to_the_next():
    """Golden values: with other draws, no published run of this package could be repeated.

    Made by the expressions below in the first version.
    """
    assert stream(*ADDRESS).integers(0, 1000, 4).tolist() == [662, 972, 129, 661]
    assert torch.randint(1000, (4,), generator=torch_stream(*ADDRESS)).tolist() == [724, 31, 716, 679]


def test_numbers_of_many_clients_are_those_of_a_counter():
    key = stream(3, 7, 2, -1, "dropout").bit_generator.state["state"]["key"]

    def of(client):
        return np.random.Generator(np.random.Philox(key=key, counter=[0, client, 0, 0])).random()

    clients = np.array([0, 1, 7, 2**40, 999_999])
    assert uniforms(3, 7, 2, clients, "dropout").tolist() == [of(client) for client in clients.tolist()]
    many = uniforms(3, 7, 2, np.arange(20_000), "dropout")  # more than a block
    assert many[-1] == of(19_999) and len(uniforms(3, 7, 2, clients[:0], "x")) == 0
    assert np.all(uniforms(3, 7, 2, clients, "x") != many[0]) and np.all(
        uniforms(3, 8, 2, clients, "dropout") != many[0]
    )
    assert abs(many.mean() - 0.5) < 0.01 and abs(np.corrcoef(many[:-1], many[1:])[0, 1]) < 0.03


def test_every_part_of_an_address_counts():
    others = [
        (4, 7, 2, 11, "batches"),
        (3, 8, 2, 11, "batches"),
        (3, 7, 3, 11, "batches"),
        (3, 7, 2, 12, "batches"),
        (3, 7, 2, 11, "dropout"),
        (7, 3, 2, 11, "batches"),
    ]
    for one, other in itertools.combinations([ADDRESS, *others], 2):
        assert not np.array_equal(stream(*one).random(4), stream(*other).random(4))
        assert torch_stream(*one).initial_seed() != torch_stream(*other).initial_seed()


def test_neighbouring_addresses_are_uncorrelated():
    """Correlations of 200 neighbouring streams of 500 draws have standard deviation 1 / sqrt(500) = 0.045."""
    draws = np.stack([stream(0, 1, 1, client, "batches").standard_normal(500) for client in range(200)])
    neighbours = [np.corrcoef(a, b)[0, 1] for a, b in itertools.pairwise(draws)]
    assert np.abs(neighbours).max() < 5 / np.sqrt(500) and abs(np.mean(neighbours)) < 5 / np.sqrt(500 * 199)


def test_the_draws_of_a_method_differ_from_those_of_batches():
    draws = Draws(seed=3, round=7)
    assert not np.array_equal(draws.stream("batches", 11).random(4), stream(3, 7, -1, 11, "batches").random(4))
    assert not np.array_equal(draws.stream("split").random(4), Draws(3, 8).stream("split").random(4))
    assert np.array_equal(draws.stream("split").random(4), Draws(3, 7).stream("split").random(4))
