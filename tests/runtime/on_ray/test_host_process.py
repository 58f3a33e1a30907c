"""What a host does with a federation that it cannot open."""

import pytest

from cfl_ray.runtime.on_ray import host_process
from cfl_ray.runtime.on_ray.host_process import HostProcess


def test_a_federation_that_cannot_be_opened_is_said_by_the_next_chunk(monkeypatch):
    """Nothing waits for the call `use`, so that an error of it would be lost."""
    process = object.__new__(HostProcess)
    monkeypatch.setattr(host_process, "fetch", lambda packed: {}["newcomers"])
    process.use([None])
    with pytest.raises(KeyError, match="newcomers"):
        process.work(0, *[None] * 9)
