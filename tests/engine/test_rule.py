"""The rule of `runtime.engine: auto`: a table of facts and engines, and the facts of networks and federations."""

import time
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from fake_memory import FakeMemory
from federations import uneven
from torch import nn

from benchmarks.models import LeafCNN, LeNet5
from cfl_ray.core.local_sgd import LocalSGD
from cfl_ray.data.synthetic import SyntheticFederation
from cfl_ray.engine.choice import choice_of, choose, facts_of, why_not
from cfl_ray.engine.engines import ENGINES, Division
from cfl_ray.engine.rule import Facts
from cfl_ray.nn.network import Network


def mlp(inputs=36, hidden=8, act=nn.ReLU):
    return lambda: nn.Sequential(nn.Flatten(), nn.Linear(inputs, hidden), act(), nn.Linear(hidden, 10))


# an MLP 64-64-10 on batches of 10 of 50 samples, with 20 clients in a round
SMALL = Facts(
    device="cpu",
    calls=3,
    parameters=4_810,
    activations=202,
    samples=50,
    batch=10,
    steps=5,
    together={"sequential": 1, "span": 1, "manual": 1, "vectorised": 5, "compiled": 1},
    cannot={"span": "batches are smaller than a client's data", "compiled": "there is no compiler"},
    first=(64, 64),
    operations=5,
)
# an MLP 784-2048-10 on all 50 samples, with 480 clients in a round (W1)
WIDE = Facts(
    "cpu",
    3,
    1_628_170,
    4_890,
    50,
    50,
    5,
    {"sequential": 3, "span": 8, "manual": 3, "vectorised": 30, "compiled": 3},
    {"compiled": "there is no compiler"},
    (2048, 784),
    operations=6,
)
GPU = replace(
    SMALL,
    device="cuda",
    cannot=dict.fromkeys(["manual", "compiled"], "it computes on a CPU only"),
    together=SMALL.together | {"vectorised": 20},
)


def without(facts, *engines):
    return replace(facts, cannot={**facts.cannot, **dict.fromkeys(engines, "a reason")})


def with_clients(facts, **together):
    return replace(facts, together={**facts.together, **together})


@pytest.mark.parametrize(
    "facts, expected",
    [
        pytest.param(SMALL, "manual", id="few clients: a quarter of the calls"),
        pytest.param(
            with_clients(SMALL, vectorised=62), "vectorised", id="many clients share the calls of a small step"
        ),
        pytest.param(
            replace(with_clients(SMALL, vectorised=62), batch=1000), "manual", id="a large batch has no use of it"
        ),
        pytest.param(replace(with_clients(SMALL, vectorised=62), parameters=10**6), "manual", id="nor a large model"),
        pytest.param(without(SMALL, "manual"), "sequential", id="few clients, no written-out passes"),
        pytest.param(without(with_clients(SMALL, vectorised=12), "manual"), "vectorised", id="12 clients without them"),
        pytest.param(without(SMALL, "manual", "vectorised"), "sequential", id="nothing else can"),
        pytest.param(replace(SMALL, operations=9, differentiated=4), "sequential", id="autograd between the passes"),
        pytest.param(
            replace(without(with_clients(SMALL, vectorised=62), "manual"), recurrent=True), "sequential", id="recurrent"
        ),
        pytest.param(WIDE, "span", id="full batches of a wide first layer"),
        pytest.param(without(WIDE, "span"), "manual", id="a wide first layer without the shortcut"),
        pytest.param(replace(WIDE, first=(10, 784), parameters=7_850, activations=794), "manual", id="a narrow one"),
        pytest.param(replace(WIDE, steps=1), "manual", id="one step saves no product"),
        pytest.param(GPU, "vectorised", id="GPU"),
        pytest.param(without(GPU, "vectorised"), "sequential", id="GPU, vmap does not support it"),
        pytest.param(
            replace(without(WIDE, "vectorised", "manual"), device="cuda"), "span", id="GPU, only the shortcut applies"
        ),
        pytest.param(with_clients(GPU, vectorised=1), "sequential", id="GPU, one client at a time"),
    ],
)
def test_the_table(facts, expected):
    choice = choose(facts)
    assert choice.engine == expected and choice.reason.startswith(f"{expected}: estimated ")
    assert "\n" not in choice.reason and all(reason in choice.reason for reason in facts.cannot.values())


def test_the_reason_has_the_estimates_of_the_others_and_says_a_common_cause_once():
    """200 + 40 * 3 + 0.0025 * 6,830 + 0.00006 * 10 * 4,810 microseconds of sequential, and so on."""
    choice = choose(replace(SMALL, cannot=dict.fromkeys(["span", "vectorised", "compiled"], "its layers")))
    assert choice.reason == (
        "manual: estimated 0.13 ms for a local step of a client (sequential 0.34 ms); not span, vectorised, compiled: "
        "its layers"
    )
    assert "vectorised 0.38 ms with 5 clients at once" in choose(SMALL).reason


@pytest.mark.cpu
@pytest.mark.parametrize(
    "factory, shape, local, cohort, expected",
    [
        (mlp(64, 64), (64,), LocalSGD(batch_size=10), 10, "manual"),
        (mlp(64, 64), (64,), LocalSGD(batch_size=10), 1000, "vectorised"),
        (mlp(64, 64, nn.GELU), (64,), LocalSGD(batch_size=10), 100, "vectorised"),
        (mlp(784, 2048), (1, 28, 28), LocalSGD(epochs=5), 480, "span"),
        (partial(LeNet5, 10), (1, 28, 28), LocalSGD(batch_size=10), 10, "manual"),
        (partial(LeNet5, 10), (1, 28, 28), LocalSGD(batch_size=10), 1000, "manual"),
        (partial(LeafCNN, 62), (1, 28, 28), LocalSGD(batch_size=20), 180, "manual"),
    ],
    ids=["MLP", "MLP, many", "GELU", "W1", "W2", "W2, many", "W3"],
)
def test_networks_have_the_engines_of_the_measured_table(factory, shape, local, cohort, expected):
    """docs/performance.md has their times."""
    network = Network(factory, shape)
    federation = SyntheticFederation(cohort, input=shape, classes=network.output_shape[0], samples=50)
    assert choice_of(network, federation, local, Division(cohort)).engine == expected


def test_facts_are_of_the_client_with_the_median_number_of_samples():
    network = Network(mlp(), (36,))
    federation = SyntheticFederation(5, input=(36,))
    federation.num_samples_N = np.array([0, 3, 9, 300, 0])
    facts = facts_of(network, federation, LocalSGD(epochs=2, batch_size=4), Division(5))
    assert (facts.samples, facts.batch, facts.steps) == (9, 4, 2 * 3)
    assert (facts.calls, facts.parameters, facts.activations) == (3, 36 * 8 + 8 + 8 * 10 + 10, 36 + 8 + 8 + 10)
    assert (facts.device, facts.first, facts.differentiated, facts.recurrent) == ("cpu", (8, 36), 0, False)
    assert facts.cannot.pop("compiled").startswith("with runtime.compile: auto, it trains only networks that manual")
    assert facts.cannot == {"span": "batches are smaller than a client's data"}
    whole = facts_of(network, federation, LocalSGD(epochs=2), Division(5))
    assert (whole.batch, whole.cannot.keys()) == (9, {"compiled"}), (
        "the client of 300, whom span cannot train, does not decide"
    )
    empty = facts_of(network, SyntheticFederation(2, input=(36,), samples=0), LocalSGD(), Division(2))
    assert empty.samples == 1


def test_batch_statistics_need_equal_clients():
    def norm():
        return nn.Sequential(nn.Linear(36, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))

    network, local = Network(norm, (36,)), LocalSGD(batch_size=4)
    reasons = [facts_of(network, uneven(sizes, (36,)), local, Division(3)).cannot for sizes in ([8, 8, 8], [8, 8, 9])]
    assert "vectorised" not in reasons[0] and "batches of one size" in reasons[1]["vectorised"]


@pytest.mark.cpu
def test_in_bf16_only_sequential_and_vectorised_apply():
    network = Network(mlp(), (36,), precision="bf16")
    cannot = facts_of(network, uneven([9, 9], (36,)), LocalSGD(epochs=3), Division(2)).cannot
    assert cannot.keys() == {"manual", "span", "compiled"}


class TestTogether:
    @pytest.mark.cpu
    @pytest.mark.parametrize(
        "division, expected",
        [
            (Division(200), {"sequential": 1, "span": 200, "manual": 1, "vectorised": 200}),
            (Division(10_000), {"sequential": 8, "span": 256, "manual": 8, "vectorised": 256}),
            (Division(200, True), dict.fromkeys(("sequential", "span", "manual", "vectorised"), 1)),
        ],
        ids=["a cohort", "a large cohort", "one client per host"],
    )
    def test_where_chunks_are_mixed_a_vmap_batch_has_the_clients_of_several(self, division, expected):
        network = Network(mlp(), (36,))
        network.memory = FakeMemory(10**9)
        assert {engine: division.together(engine, network) for engine in expected} == expected
        network = Network(mlp(), (36,))
        assert all(division.together(engine, network) == division.size(engine) for engine in expected)


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
    assert reason in why_not("vectorised", network, federation, LocalSGD(batch_size=4))
    assert why_not("vectorised", Network(mlp(), (36,)), federation, LocalSGD(batch_size=4)) is None
    choice = choice_of(network, federation, LocalSGD(batch_size=9), Division(1000))
    assert choice.engine != "vectorised" and reason in choice.reason.partition("not vectorised: ")[2]
    monkeypatch.setitem(ENGINES, "vectorised", replace(ENGINES["vectorised"], tried_steps=0))
    assert choice_of(network, federation, LocalSGD(batch_size=9), Division(1000)).engine == "vectorised"


def test_an_engine_that_trains_some_clients_is_not_refused():
    """`compiled` needs half a batch: clients with less are trained sequentially, and only all of them are a reason."""
    network, local = Network(mlp(), (36,)), LocalSGD(batch_size=16)
    assert why_not("compiled", network, uneven([3, 9, 20], (36,)), local) is None
    wanted = "a client has fewer samples than half of a batch of 16"
    assert why_not("compiled", network, uneven([1, 3, 5], (36,)), local) == wanted


def test_an_engine_that_is_not_the_best_is_not_tried(monkeypatch):
    """A trial under vmap imports `torch.func`, a second of CPU on each host."""
    monkeypatch.setitem(ENGINES, "vectorised", replace(ENGINES["vectorised"], train=pytest.fail))
    assert choice_of(Network(mlp(), (36,)), uneven([9], (36,)), LocalSGD(), Division(3)).engine != "vectorised"


def test_choices_are_equal_whatever_clocks_say(monkeypatch):
    """To the last digit of the estimates; in between, all clocks stand still or run wild."""

    def reason():
        network = Network(lambda: nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 10)), (64,))
        federation = SyntheticFederation(90, input=(64,), samples=50)
        return choice_of(network, federation, LocalSGD(batch_size=10), Division(90)).reason

    before, draw = reason(), np.random.default_rng(0)
    for clock in ("perf_counter", "process_time", "monotonic", "thread_time", "time"):
        monkeypatch.setattr(time, clock, lambda: 1e6 * draw.random())
        monkeypatch.setattr(time, f"{clock}_ns", lambda: int(1e15 * draw.random()))
    assert reason() == before != ""


def test_convolutions_count():
    """3 * 10 * 1e6 multiplications: 40 ps each in PyTorch, 22 line by line; as in PyTorch where autograd has them."""
    plain = replace(without(SMALL, "span", "vectorised", "compiled"), narrow=True)
    for by_lines, ps in ((True, 22), (False, 40)):
        facts = replace(plain, convolved=10**6, by_lines=by_lines)
        assert ENGINES["manual"].cost(facts, 1) - ENGINES["manual"].cost(plain, 1) == pytest.approx(30 * ps)
        assert ENGINES["sequential"].cost(facts, 1) - ENGINES["sequential"].cost(plain, 1) == pytest.approx(30 * 40)


@pytest.mark.cpu
@pytest.mark.parametrize("layer, by_lines", [(partial(nn.Conv2d, 1, 4, 3), True), (partial(nn.Conv1d, 8, 4, 3), False)])
def test_which_convolutions_are_written_out(layer, by_lines):
    shape = (1, 8, 8) if by_lines else (8, 8)
    network = Network(lambda: nn.Sequential(layer(), nn.Flatten(), nn.Linear(144 if by_lines else 24, 10)), shape)
    facts = facts_of(network, SyntheticFederation(5, input=shape), LocalSGD(batch_size=10), Division(5))
    assert facts.narrow and facts.by_lines == by_lines and facts.convolved > 0
