"""Checks of a method on a small federation: checkpoints, agreement of the engines, accuracy and traffic."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from federations import Stage, planted
from torch import nn

from cfl_ray.checkpoint.store import CheckpointStore
from cfl_ray.config import EvaluationConfig
from cfl_ray.core.local_sgd import LocalSGD
from cfl_ray.core.method import Method
from cfl_ray.core.state import State
from cfl_ray.core.work import Exclusion, Losses, Outcome, Work
from cfl_ray.runtime.evaluation import Evaluator

COHORTS = [[0, 1, 2, 5], [3, 4, 5, 6, 7], [1], [0, 2, 4, 7]]


def mlp() -> nn.Module:
    """340 parameters: 272 of the base, 68 of the head."""
    return nn.Sequential(nn.Flatten(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4))


def groups(engine: str = "sequential", federation=None, **local) -> Stage:
    """Eight clients in two groups that disagree about every label."""
    return Stage(federation or planted(), mlp, LocalSGD(**{"epochs": 3, "lr": 0.3} | local), engine)


def accuracy(one: Stage, method: Method, state: State, ids: Sequence[int] | None = None) -> np.ndarray:
    """P-server accuracy (M,), by the evaluator of a run."""
    clients = one.clients(ids)
    evaluator = Evaluator(EvaluationConfig(local_images=10**6), one.federation, one.backend, one.seed)
    return evaluator.scores(method.serve(state, clients), clients).accuracy_M


def row_accuracy(one: Stage, row_P: torch.Tensor, client: int) -> float:
    """Accuracy of one model on the client's test images, by PyTorch alone."""
    one.network.load(row_P)
    x, y = one.federation.test(client)
    return (one.network.module.eval()(x).argmax(1) == y).float().mean().item()


def assert_survives_an_interruption(make: Callable[[], Stage], method: Method, cohorts: Sequence, folder: Path):
    """Continuing from a checkpoint after any round gives the same state and client states, bit for bit."""
    whole = make()
    expected = whole.play(method, *cohorts)
    for after in range(1, len(cohorts)):
        one, store = make(), CheckpointStore(folder / str(after), "hash")
        tensors, scalars = one.play(method, *cohorts[:after]).to_checkpoint()
        store.save(after, tensors, scalars, one.backend)
        saved, again = CheckpointStore(folder / str(after), "hash").load(), make()
        again.backend.restore(saved.client_states())
        state = method.state_type.from_checkpoint(saved.tensors, saved.values)
        assert_equal(again.play(method, *cohorts[after:], state=state, first=after + 1), expected)
        found_states, expected_states = again.client_states, whole.client_states
        assert found_states.keys() == expected_states.keys()
        assert all(torch.equal(value, expected_states[key]) for key, value in found_states.items())


def assert_equal(found: State, expected: State):
    (tensors, scalars), (others, other_scalars) = found.to_checkpoint(), expected.to_checkpoint()
    assert scalars == other_scalars and tensors.keys() == others.keys()
    for name, value in tensors.items():
        assert value.dtype == others[name].dtype and torch.equal(value, others[name]), name


def assert_engines_agree(make: Callable[[str], Stage], method: Method, cohorts: Sequence = COHORTS[:3]):
    """Vectorised and sequential rounds end in the same models, clusters and client states, up to rounding."""
    one, other = make("sequential"), make("vectorised")
    expected, found = one.play(method, *cohorts), other.play(method, *cohorts)
    change = (expected.models_KP - method.init(one.start()).models_KP[:1]).abs().max()
    assert change > 1e-3 or one.client_states, "nothing was trained"
    assert torch.allclose(found.models_KP, expected.models_KP, rtol=0, atol=1e-5)
    assert np.array_equal(found.assign_N, expected.assign_N)
    found_states, expected_states = other.client_states, one.client_states
    assert found_states.keys() == expected_states.keys()
    assert all(torch.allclose(value, expected_states[key], rtol=0, atol=1e-5) for key, value in found_states.items())


def make_late_in_choices(one: Stage, client: int) -> None:
    """From now on this client takes too long whenever clients compare models by their losses, and only then."""
    in_time = one.backend.run

    def run(work: Work) -> Outcome:
        outcome = in_time(work)
        if not isinstance(work, Losses) or client not in work.ids_M:
            return outcome
        at = work.ids_M.tolist().index(client)
        outcome.arrays["losses"][at] = np.inf
        return replace(outcome, excluded={at: Exclusion("its part took too long", late=True)})

    one.backend.run = run


def floats(one: Stage) -> tuple[float, float]:
    """Traffic of the latest round in floats: (down, up)."""
    return one.stats.traffic.down_bits / 32, one.stats.traffic.up_bits / 32
