"""The results of a call are bounded."""

from types import SimpleNamespace

import numpy as np

from cfl_ray.core.work import Address, Describe, Rows
from cfl_ray.methods.pacfl import PrincipalVectors
from cfl_ray.runtime.on_ray.ray_backend import Exchange
from cfl_ray.setup.prepare import prepare


def test_the_descriptions_of_clients_are_in_the_budget_of_a_call(experiment):
    """Of 4 bytes a number: its length if the function has it, else that of the anchor, at most that of the sketch."""
    setup = prepare(experiment())
    start, shape = setup.network().new_model(0, 0), setup.federation.shape
    backend, first, ids = SimpleNamespace(pool=SimpleNamespace(setup=setup)), Rows(0, np.zeros(3, int)), np.arange(3)

    def bytes_of(function, anchor=None, sketch=None):
        tables = () if anchor is None else (start[None],)
        options = {"function": function, "anchor": anchor, "sketch": sketch, "local": setup.local}
        work = Describe(Address(0, 1, 1), ids, tables, **options)
        return Exchange(backend, work, 0).bytes_per_client

    def change(client, anchor_P):
        return anchor_P

    assert bytes_of(change, first) == 4 * len(start)
    assert bytes_of(change, first, 5) == bytes_of(change, None, 5) == 4 * 5
    assert bytes_of(change, first, 10**6) == 4 * len(start)
    assert bytes_of(change) == 0  # not known
    vectors = PrincipalVectors(3, None)
    assert bytes_of(vectors) == 4 * 3 * np.prod(shape.input) * shape.num_classes
