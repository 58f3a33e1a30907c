"""What users' methods and client programs draw from global generators follows from their random key."""

import random
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from cfl_ray import ClientProgram, Experiment, LocalTraining, federation_from_arrays, simulate
from cfl_ray.core import global_generators
from cfl_ray.errors import RunError
from cfl_ray.methods.fedavg import FedAvg

X = np.random.default_rng(0).normal(size=(120, 4)).astype(np.float32)
FEDERATION = federation_from_arrays(X, np.arange(120) % 3, np.arange(120) // 20)
NAMES = ("torch", "numpy", "random")


def drawn(name="torch") -> float:
    draws = {"torch": lambda: torch.rand(()).item(), "numpy": np.random.rand, "random": random.random}
    return 0.01 * float(draws[name]())


def models(method, engine="sequential"):
    runtime = {"engine": engine}
    settings = {
        "rounds": 2,
        "local": {"epochs": 1, "batch_size": 10},
        "tracking": {"enabled": False},
        "runtime": runtime,
    }
    experiment = Experiment(data=FEDERATION, methods=[method], cohort={"fraction": 1.0}, **settings)
    return simulate(experiment)["drawing"].trained.state.models_KP


def scaled(state, factor):
    return state.advance(models_KP=state.models_KP * (1 + factor))


def method_with(hook, name):
    """FedAvg with a draw in one of its hooks."""

    @dataclass(frozen=True)
    class Drawing(FedAvg, name="drawing"):
        def init(self, start):
            return scaled(super().init(start), drawn(name) if hook == "init" else 0)

        def round(self, state, clients, rng):
            if hook == "describe":
                feature_MF, _ = clients.describe(lambda client, anchor_P: torch.tensor([drawn(name)]))
                state = scaled(state, feature_MF.mean())
            return scaled(super().round(state, clients, rng), drawn(name) if hook == "round" else 0)

    return Drawing()


@pytest.mark.parametrize("hook", ["init", "round", "describe"])
@pytest.mark.parametrize("name", NAMES)
def test_a_method_that_draws_is_repeated(hook, name):
    before = global_generators.states()
    first_KP = models(method_with(hook, name))
    assert before == global_generators.states()
    drawn(name)
    assert torch.equal(first_KP, models(method_with(hook, name)))
    assert not torch.equal(first_KP, models(method_with("", name)))


HOOKS = {
    "begin": lambda self, client, start_P, held: start_P * (1 + drawn()),
    "loss": lambda self, batch, held: batch.loss * (1 + drawn("numpy")),
    "step": lambda self, gradient, w, held, number: gradient(w, 0) * (1 + drawn("random")),
    "weigh": lambda self, client, loss_nK, held: torch.ones_like(loss_nK) * (1 + drawn()),
    "finish": lambda self, client, start_P, row_P, held: held.update(kept=torch.tensor([drawn()])),
}


def method_of(hook):
    more = {"keeps": lambda self, spec: {"kept": torch.zeros(1)}} if hook == "finish" else {}
    more |= {"begin": lambda self, client, start_P, held: start_P * (1 + held["kept"])} if hook == "finish" else {}
    program = type("Program", (ClientProgram,), {hook: HOOKS[hook]} | more)()

    @dataclass(frozen=True)
    class Drawing(FedAvg, name="drawing"):
        def round(self, state, clients, rng):
            how = LocalTraining(program=program)
            updates = clients.train(clients.send(state.models_KP), how=how, average=clients.weights())
            return state.advance(models_KP=updates.averaged(default=state.models_KP))

    return Drawing()


@pytest.mark.parametrize("hook", HOOKS)
def test_a_client_program_that_draws_is_repeated(hook):
    first_KP = models(method_of(hook))
    drawn()
    assert torch.equal(first_KP, models(method_of(hook)))


@pytest.mark.parametrize("hook", ["loss", "step"])
def test_draws_for_several_clients_at_once_are_refused(hook):
    with pytest.raises(
        RunError, match="Program .*draws from a global generator in loss or step, .* for 2 clients at once"
    ):
        models(method_of(hook), engine="vectorised")
