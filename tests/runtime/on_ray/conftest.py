"""Runs of these tests draw no figures, which take longer than the runs and have tests of their own."""

import pytest

from cfl_ray.runtime import recorder


@pytest.fixture(autouse=True)
def no_figures(monkeypatch):
    monkeypatch.setattr(recorder, "write_figures", lambda *_: None)
