"""The measured times of engines, which no run uses."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from federations import uneven
from torch import nn

from cfl_ray.core.local_sgd import LocalSGD
from cfl_ray.engine import timing
from cfl_ray.engine.engines import ENGINES, Division
from cfl_ray.nn.network import Network


def mlp():
    return nn.Sequential(nn.Linear(36, 8), nn.ReLU(), nn.Linear(8, 3))


@pytest.mark.cpu
def test_every_engine_has_a_time_or_a_reason(monkeypatch):
    def fails(*_):
        raise RuntimeError("vmap cannot\nwith details")

    monkeypatch.setitem(ENGINES, "manual", replace(ENGINES["manual"], train=fails))
    found = timing.time_engines(Network(mlp, (36,)), uneven([9] * 12, (36,)), LocalSGD(batch_size=4), Division(12))
    assert list(found) == list(ENGINES)
    assert found["span"] == "batches are smaller than a client's data" and found["manual"] == "vmap cannot"
    assert 0 < found["sequential"] < 10 and 0 < found["vectorised"] < 10


@pytest.mark.cpu
def test_the_least_of_three_after_a_warm_up_by_step_and_client(monkeypatch):
    """A chunk of one client with 3 steps takes 8, 4, 2 and 4 seconds; four chunks are timed."""
    clock, calls = [0.0], []

    def add_up(engine, network, tasks):
        clock[0] += [8, 4, 2, 4][len(calls) // 4]
        calls.append([task.client for task in tasks])

    for name in ENGINES.keys() - {"sequential"}:
        monkeypatch.delitem(ENGINES, name)
    monkeypatch.setattr(timing, "_add_up", add_up)
    monkeypatch.setattr(timing, "time", SimpleNamespace(thread_time=lambda: clock[0], perf_counter=None))
    found = timing.time_engines(Network(mlp, (36,)), uneven([9], (36,)), LocalSGD(epochs=3), Division(3))
    assert found == {"sequential": pytest.approx(2 / 3)} and calls == 4 * [[0], [1], [2], [3]]


def test_on_a_gpu_times_end_when_it_is_done(monkeypatch):
    """A step only queues its work; the clock is that of the wall."""
    now, queued = [0.0], [0.0]

    def done(_):
        now[0], queued[0] = now[0] + queued[0], 0.0

    monkeypatch.setattr(timing, "_add_up", lambda engine, network, tasks: queued.__setitem__(0, queued[0] + 3.0))
    monkeypatch.setattr(timing, "time", SimpleNamespace(thread_time=None, perf_counter=lambda: now[0]))
    monkeypatch.setattr(torch.cuda, "synchronize", done)
    network = SimpleNamespace(device=torch.device("cuda"))
    assert timing._seconds(ENGINES["sequential"], network, [[None], [None]]) == 6.0
