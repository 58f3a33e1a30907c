"""The choice of the engine: which ones are timed, on what, and which one is taken."""

from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from closeness import close
from fake_memory import FakeMemory, install
from federations import uneven
from torch import nn

from cfl_ray.core.local_sgd import LocalSGD
from cfl_ray.core.work import Address
from cfl_ray.engine import autotune
from cfl_ray.engine.engines import ENGINES
from cfl_ray.engine.task import TrainingTask
from cfl_ray.engine.vmap_batches import DeviceMemoryError
from cfl_ray.nn.network import Network


def mlp(rest=nn.ReLU):
    return lambda: nn.Sequential(nn.Linear(36, 8), rest(), nn.Linear(8, 3))


CHUNKS = autotune.Division(3)  # of one client each


@pytest.mark.cpu
@pytest.mark.parametrize(
    "rest, local, expected",
    [
        (nn.ReLU, LocalSGD(epochs=3), {"sequential", "span", "manual"}),
        (nn.ReLU, LocalSGD(batch_size=4), {"sequential", "manual"}),
        (nn.GELU, LocalSGD(epochs=3), {"sequential", "span", "manual"}),
        (lambda: nn.BatchNorm1d(8), LocalSGD(batch_size=4), {"sequential", "manual"}),
    ],
)
def test_engines_that_apply_are_timed(rest, local, expected, monkeypatch):
    timed = []
    monkeypatch.setattr(autotune, "_seconds", lambda runs, *_: (timed.extend(runs), dict.fromkeys(runs, 1e-5))[1])
    choice = autotune.measure(Network(mlp(rest), (36,)), uneven([9, 6, 7], (36,)), local, 0, CHUNKS)
    assert set(timed) == expected and choice.engine == "sequential"
    statistics = isinstance(rest(), nn.BatchNorm1d)
    assert ("not vectorised: batch statistics" in choice.reason) == statistics
    assert ("not vectorised: no gain on a CPU" in choice.reason) != statistics


@pytest.mark.cpu
@pytest.mark.parametrize(
    "seconds, clients, timed",
    [(5e-4, 12, True), (5e-4, 6, False), (2e-3, 12, False), (1e-4, 12, False)],
    ids=["worth it", "few clients", "long steps", "short steps"],
)
def test_the_vectorised_engine_is_timed_where_it_may_win(seconds, clients, timed, monkeypatch):
    calls = []

    def times(runs, tasks, _):
        calls.append((list(runs), len(tasks), {name: run.size for name, run in runs.items()}))
        return (
            {"sequential": 3 * seconds, "manual": seconds}
            if len(calls) == 1
            else dict.fromkeys(runs, 1.0) | {"vectorised": 1e-5}
        )

    monkeypatch.setattr(autotune, "_seconds", times)
    federation, division = uneven([9] * clients, (36,)), autotune.Division(200)
    choice = autotune.measure(Network(mlp(), (36,)), federation, LocalSGD(epochs=2, batch_size=9), 0, division)
    assert calls[0] == (["sequential", "span", "manual"], 4, {"sequential": 1, "span": 3, "manual": 1})
    if timed:  # against the fastest of the others, on a chunk of 200 // 16 clients
        assert calls[1:] == [(["manual", "vectorised"], 12, {"manual": 1, "vectorised": 12})]
    else:
        assert len(calls) == 1
    assert choice.engine == ("vectorised" if timed else "manual")


@pytest.mark.cpu
def test_the_fastest_is_chosen_if_it_is_clearly_faster(monkeypatch):
    for seconds, engine in ((0.5, "manual"), (0.99, "sequential"), (2.0, "sequential")):
        times = {"sequential": 1.0, "manual": seconds}
        monkeypatch.setattr(autotune, "_seconds", lambda *_, times=times: times)
        network, federation = Network(mlp(), (36,)), uneven([9, 6], (36,))
        choice = autotune.measure(network, federation, LocalSGD(batch_size=4), 0, CHUNKS)
        assert choice.engine == engine and f"manual {1e3 * seconds:.2f} ms" in choice.reason
        assert "per client of 3 steps" in choice.reason


def test_a_slow_engine_is_timed_once(monkeypatch):
    now, calls = [0.0], Counter()
    for clock in ("perf_counter", "thread_time"):
        monkeypatch.setattr(autotune.time, clock, lambda: now[0])

    def runs(seconds):
        def engine(name):
            def do(part):
                calls[name] += 1
                now[0] += seconds[name] * len(part)

            return autotune._Run(2, do)

        return {name: engine(name) for name in seconds}

    expected, network, four_tasks = {"fast": 0.01, "close": 0.012, "slow": 0.02}, Network(mlp(), (36,)), [None] * 4
    assert autotune._seconds(runs(expected), four_tasks, network) == pytest.approx(expected)
    assert calls == {"fast": 1 + 6, "close": 1 + 6, "slow": 1 + 2}  # a chunk, and three times or once two chunks
    calls.clear()
    assert autotune._seconds(runs({"long": 1.0}), four_tasks, network) == {"long": 1.0} and calls == {"long": 1 + 2}


def test_on_a_gpu_times_end_when_it_is_done(monkeypatch):
    """A run only queues its work; the clock is that of the wall. What was queued before does not count."""
    now, queued = [0.0], [0.0]

    def done(_):
        now[0], queued[0] = now[0] + queued[0], 0.0

    monkeypatch.setattr(autotune.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(autotune.time, "thread_time", lambda: 0.0)
    monkeypatch.setattr(torch.cuda, "synchronize", done)

    def queues(seconds):
        return autotune._Run(2, lambda part: queued.__setitem__(0, queued[0] + seconds * len(part)))

    network = SimpleNamespace(device=torch.device("cuda"))
    found = autotune._seconds({"fast": queues(0.01), "slow": queues(0.03)}, [None] * 4, network)
    assert found == pytest.approx({"fast": 0.01, "slow": 0.03})


@pytest.mark.cpu
@pytest.mark.parametrize(
    "division, expected",
    [
        (autotune.Division(200), {"sequential": 1, "span": 200, "manual": 1, "vectorised": 200}),
        (autotune.Division(10_000), {"sequential": 8, "span": 256, "manual": 8, "vectorised": 256}),
        (autotune.Division(200, True), dict.fromkeys(("sequential", "span", "manual", "vectorised"), 1)),
    ],
    ids=["a cohort", "a large cohort", "one client per host"],
)
def test_where_chunks_are_stacked_the_measurement_has_full_stacks(division, expected):
    network = Network(mlp(), (36,))
    network.memory = FakeMemory(10**9)
    assert {engine: division.together(engine, network) for engine in expected} == expected
    network = Network(mlp(), (36,))
    assert all(division.together(engine, network) == division.size(engine) for engine in expected)


def test_the_measurement_of_stacks_runs(monkeypatch):
    """The vectorised engine is given the whole cohort, in stacks of the memory's size."""
    network, memory = Network(mlp(nn.GELU), (36,)), FakeMemory(1000, need=100)
    install(monkeypatch, memory, network)
    monkeypatch.setitem(ENGINES, "vectorised", replace(ENGINES["vectorised"], no_gain=lambda *_: None))
    choice = autotune.measure(network, uneven([9] * 30, (36,)), LocalSGD(batch_size=4), 0, autotune.Division(30))
    assert "vectorised" in choice.reason and set(memory.batches) == {2, 7}  # the trial, and 0.7 of 1,000 bytes


def test_the_key_names_the_device_of_the_hosts(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "GPU of a host")
    names = [autotune.device_name(device) for device in ("cpu", "cuda")]
    assert names == ["cpu", "cuda, GPU of a host"]
    network = Network(mlp(), (36,))
    keys = [autotune.cache_key(network, LocalSGD(), CHUNKS, name) for name in names]
    assert keys[0] == autotune.cache_key(network, LocalSGD(), CHUNKS) and keys[1].startswith(f"{names[1]}, torch ")


@pytest.mark.cpu
def test_precision_is_part_of_the_key_and_of_what_applies(monkeypatch):
    timed, networks = [], {p: Network(mlp(), (36,), precision=p) for p in ("float32", "tf32", "bf16")}
    assert len({autotune.cache_key(network, LocalSGD(), CHUNKS) for network in networks.values()}) == 3
    monkeypatch.setattr(autotune, "_seconds", lambda runs, *_: (timed.extend(runs), dict.fromkeys(runs, 1e-5))[1])
    autotune.measure(networks["bf16"], uneven([9, 6, 7], (36,)), LocalSGD(epochs=3), 0, CHUNKS)
    assert timed == ["sequential"]


class Own(nn.Module):
    """The tensors of `mlp`, with another forward pass."""

    def __init__(self, twice: bool = False):
        super().__init__()
        self.one, self.two, self.twice = nn.Linear(36, 8), nn.Linear(8, 3), twice

    def forward(self, x):
        hidden = torch.relu(self.one(x))
        return self.two(hidden + hidden if self.twice else hidden)


class Other(Own):
    def forward(self, x):
        return self.two(torch.tanh(self.one(x)))


def test_the_key_holds_what_the_network_computes():
    """Networks with equal tensors have keys of their own, and one network has the same key in every process."""
    factories = [mlp(), mlp(nn.Tanh), mlp(nn.GELU), Own, lambda: Own(twice=True), Other]
    networks = [Network(factory, (36,)) for factory in factories]
    assert len({network.spec.shapes for network in networks}) == 1
    keys = [autotune.cache_key(network, LocalSGD(), CHUNKS) for network in networks]
    assert len(set(keys)) == len(keys)
    assert keys == [autotune.cache_key(Network(factory, (36,)), LocalSGD(), CHUNKS) for factory in factories]


def test_every_size_of_chunks_is_measured_anew():
    network = Network(mlp(), (36,))
    keys = [
        autotune.cache_key(network, LocalSGD(), autotune.Division(*of)) for of in ((20,), (30,), (2000,), (20, True))
    ]
    assert keys[0] == autotune.cache_key(network, LocalSGD(), autotune.Division(19)) and len(set(keys)) == 4


def test_all_engines_are_timed_on_the_same_sum():
    network, federation, local = Network(mlp(), (36,)), uneven([9, 6, 7], (36,)), LocalSGD(epochs=3)
    start_P = network.new_model(0, 0)
    tasks = [TrainingTask(i, start_P, *federation.train(i), 3, local, Address(0, 0, 0)) for i in range(3)]
    one, other = (autotune._sum_of(ENGINES[name], network, tasks) for name in ("sequential", "span"))
    one, other = one.values()[0], other.values()[0]
    assert close(one, other, 2e-5) and one.abs().max() > 0.01


@pytest.mark.cpu
def test_an_engine_that_does_not_fit_into_the_memory_is_not_chosen(monkeypatch):
    """Of the sequential engine it is an error that names the client."""

    def too_large(*_):
        raise torch.OutOfMemoryError("CUDA out of memory.")

    network, federation = Network(mlp(), (36,)), uneven([9] * 4, (36,))
    monkeypatch.setitem(ENGINES, "manual", replace(ENGINES["manual"], train=too_large))
    choice = autotune.measure(network, federation, LocalSGD(batch_size=4), 0, CHUNKS)
    assert choice.engine != "manual" and "not manual: the memory of the device is too small" in choice.reason
    monkeypatch.setitem(ENGINES, "sequential", replace(ENGINES["sequential"], train=too_large))
    with pytest.raises(DeviceMemoryError, match="client 0 does not fit into the memory of cpu"):
        autotune.measure(network, federation, LocalSGD(batch_size=4), 0, CHUNKS)


@pytest.mark.cpu
def test_only_samples_that_fit_are_on_the_device(monkeypatch):
    """A share of the free memory, .3, holds the samples of two of these clients."""
    network, federation = Network(mlp(), (36,)), uneven([10] * 4, (36,))
    size = 10 * (36 * 4 + 8)
    network.memory = FakeMemory(int(2.5 * size / 0.3))
    moved, to = [], torch.Tensor.to
    monkeypatch.setattr(torch.Tensor, "to", lambda x, *a, **k: (moved.append(tuple(x.shape)), to(x, *a, **k))[1])
    seen = []
    monkeypatch.setattr(autotune, "_seconds", lambda runs, tasks, _: (seen.extend(tasks), dict.fromkeys(runs, 1.0))[1])
    monkeypatch.delitem(ENGINES, "vectorised")
    autotune.measure(network, federation, LocalSGD(batch_size=4), 0, CHUNKS)
    assert len(seen) == 4 and moved.count((10, 36)) == 2


class Step(torch.autograd.Function):
    """A function that vmap does not support, since it has no `setup_context`."""

    @staticmethod
    def forward(ctx, x):
        return x.sign()

    @staticmethod
    def backward(ctx, grad):
        return grad


class Binary(nn.Module):
    def __init__(self, error=None):
        super().__init__()
        self.first, self.head, self.error = nn.Linear(36, 8), nn.Linear(8, 3), error

    def forward(self, x):
        h = self.first(x)
        if self.error and torch._C._functorch.is_functorch_wrapped_tensor(h):
            raise self.error
        return self.head(h if self.error else Step.apply(h))


@pytest.mark.cpu
@pytest.mark.parametrize("error, reason", [(None, "an autograd.Function"), (IndexError("of the user"), "of the user")])
def test_a_network_that_vmap_does_not_support_is_a_reason(error, reason, monkeypatch):
    network, federation = Network(lambda: Binary(error), (36,)), uneven([9] * 12, (36,))
    assert reason in autotune.why_not("vectorised", network, federation, LocalSGD(batch_size=4))
    assert autotune.why_not("vectorised", Network(mlp(), (36,)), federation, LocalSGD(batch_size=4)) is None
    monkeypatch.setattr(autotune, "_seconds", lambda runs, *_: dict.fromkeys(runs, 4e-4))
    choice = autotune.measure(network, federation, LocalSGD(epochs=2, batch_size=9), 0, autotune.Division(200))
    assert choice.engine == "sequential" and reason in choice.reason.partition("not vectorised: ")[2]


@pytest.mark.cpu
@pytest.mark.parametrize(
    "seconds, repeated",
    [
        ((0.1, 0.2), (1, 1)),  # no noise makes the second the faster one
        ((0.1, 0.12), (3, 3)),
        ((0.05, 0.06, 0.1), (3, 3, 1)),
        ((0.5, 0.6), (1, 1)),  # the budget of a second is used up
        ((0.5, 0.55), (2, 2)),  # until three seconds, as close as that
        ((0.1,), (1,)),
    ],
)
def test_engines_are_timed_again_if_noise_may_decide(seconds, repeated, monkeypatch):
    clock, calls = [0.0], []
    monkeypatch.setattr(autotune.time, "perf_counter", lambda: clock[0])
    monkeypatch.setattr(autotune.time, "thread_time", lambda: clock[0])

    def run_of(place):
        def run(tasks):
            clock[0] += seconds[place]
            calls.append(place)

        return autotune._Run(len(tasks), run)

    tasks = ["task"]
    network = SimpleNamespace(device=torch.device("cpu"))
    found = autotune._seconds({place: run_of(place) for place in range(len(seconds))}, tasks, network)
    assert found == pytest.approx(dict(enumerate(seconds)))
    assert tuple(calls.count(place) - 1 for place in range(len(seconds))) == repeated, "after the warm-up"
