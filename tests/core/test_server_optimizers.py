"""Server optimisers against the formulas of their papers, and whose moments a model has."""

import numpy as np
import pytest
import torch
from closeness import close

from cfl_ray.core.server_optimizers import FedAdam, FedAvgM, ServerMoments, resolve_server_optimizer
from cfl_ray.errors import ConfigError, RunError

DELTAS = torch.randn(4, 5, generator=torch.Generator().manual_seed(0))
LR, B1, B2, TAU = 0.1, 0.8, 0.95, 0.01
SECOND = {  # v after a change, from v and the square of the change
    "fedadagrad": lambda v, square: v + square,
    "fedadam": lambda v, square: B2 * v + (1 - B2) * square,
    "fedyogi": lambda v, square: v - (1 - B2) * square * np.sign(v - square),
}


@pytest.mark.parametrize("name", SECOND)
def test_adaptive_formulas(name):
    optimizer = resolve_server_optimizer({name: {"lr": LR, "beta1": B1, "beta2": B2, "tau": TAU}})
    m, v, moments = np.zeros(5), np.full(5, TAU**2), None
    for delta in DELTAS:
        step, moments = optimizer(delta, moments)
        m = B1 * m + (1 - B1) * delta.double().numpy()
        v = SECOND[name](v, delta.double().numpy() ** 2)
        assert np.allclose(step, LR * m / (np.sqrt(v) + TAU), rtol=1e-5)


def test_momentum_formula():
    optimizer, m, moments = FedAvgM(lr=0.5, momentum=0.9), np.zeros(5), None
    for delta in DELTAS:
        step, moments = optimizer(delta, moments)
        m = 0.9 * m + delta.double().numpy()
        assert np.allclose(step, 0.5 * m, rtol=1e-5)


def test_trained_columns_move_and_buffers_are_the_mean():
    server = ServerMoments(FedAvgM(lr=2.0, momentum=0.0))
    server.begin()
    before, mean = torch.zeros(1, 3), torch.ones(1, 3)
    after = server.moved(server.next_average(), before, mean, {0}, trained=2)
    assert after.tolist() == [[2, 2, 1]]


class TestMoments:
    """Two averages of a round: clusters (rows) and a global model."""

    def play(self, server: ServerMoments, *tables: torch.Tensor, changed=None) -> list[torch.Tensor]:
        server.begin()
        out = []
        for table in tables:
            rows = set(range(len(table))) if changed is None else changed
            out.append(server.moved(server.next_average(), table, table + 1, rows, table.shape[1]))
        return out

    def test_follow_models_that_change_places(self):
        server = ServerMoments(FedAvgM(momentum=0.5))
        (first,) = self.play(server, torch.tensor([[0.0, 0.0], [5.0, 5.0]]))
        (second,) = self.play(server, first.flip(0))
        assert (second - first.flip(0)).tolist() == [[1.5, 1.5]] * 2, "0.5 * 1 + 1"

    def test_begin_anew_for_parts_of_a_split_and_new_models(self):
        server = ServerMoments(FedAvgM(momentum=0.5))
        (first,) = self.play(server, torch.zeros(1, 2))
        split = torch.cat([first, first, torch.full((1, 2), 9.0)])
        (second,) = self.play(server, split)
        assert (second - split).tolist() == [[1, 1]] * 3

    def test_stay_with_a_model_without_participants(self):
        server = ServerMoments(FedAvgM(momentum=0.5))
        (first,) = self.play(server, torch.tensor([[0.0, 0.0], [5.0, 5.0]]))
        (second,) = self.play(server, first, changed={0})
        assert torch.equal(second[1], first[1] + 1), "the mean that was given, without a step"
        third_before = torch.stack([second[0], second[1]])
        (third,) = self.play(server, third_before)
        assert close(third[1] - second[1], torch.full((2,), 1.5), 1e-6)

    def test_are_dropped_on_request(self):
        server = ServerMoments(FedAvgM(momentum=0.5))
        (first,) = self.play(server, torch.tensor([[0.0, 0.0], [5.0, 5.0]]))
        server.begin()
        server.forget(first[1:])
        second = server.moved(server.next_average(), first, first + 1, {0, 1}, 2)
        assert (second - first).tolist() == [[1.5, 1.5], [1, 1]]

    def test_of_equal_models_in_two_averages_are_apart(self):
        server = ServerMoments(FedAvgM(momentum=0.5))
        first, _ = self.play(server, torch.zeros(1, 2), torch.full((1, 2), 7.0))
        _, second = self.play(server, torch.full((1, 2), 9.0), first)
        assert (second - first).tolist() == [[1, 1]], "moments of the first average are not those of the second"

    def test_survive_a_checkpoint(self):
        one, other = ServerMoments(FedAdam()), ServerMoments(FedAdam())
        (first,) = self.play(one, DELTAS)
        other.restore(one.to_tensors())
        assert torch.equal(*(self.play(server, first)[0] for server in (one, other)))
        assert ServerMoments(FedAdam()).to_tensors() == {}

    def test_an_optimiser_without_moments_can_be_saved(self):
        one, other = (ServerMoments(lambda delta, moments: (0.5 * delta, ())) for _ in range(2))
        self.play(one, DELTAS)
        other.restore({name: value.clone() for name, value in one.to_tensors().items()})
        assert one.moments == other.moments and set(one.moments.values()) == {()}

    def test_a_wrong_step_in_a_round_names_the_optimiser(self):
        one = ServerMoments(lambda delta, moments: (delta[:1], ()))
        with pytest.raises(RunError, match="server_optimizer <lambda> .*test_server_optimizers.py, line .* a pair"):
            self.play(one, DELTAS)


@pytest.mark.parametrize(
    "value, text",
    [
        ("fedadm", "unknown server optimizer 'fedadm'.*did you mean 'fedadam'"),
        ({"fedadam": {"beta3": 1}}, "FedAdam has no option 'beta3'"),
        (lambda delta, moments: (delta.sum(), ()), r"must return a pair: .* of the change \(7,\); got \(one number"),
        (lambda delta, moments: None, "must return a pair: .*; got None"),
        (lambda delta, moments: delta, r"must return a pair: .*; got Tensor of float32 and shape \(7,\)"),
        (lambda delta, moments: (delta, [delta]), "must return a pair: .*; got "),
        (lambda delta, moments: (delta / 0, ()), "returned a step with values that are not finite"),
        (lambda delta, moments: (1 / 0, ()), "failed: ZeroDivisionError"),
    ],
)
def test_what_is_refused(value, text):
    with pytest.raises(ConfigError, match=text):
        resolve_server_optimizer(value)


@pytest.mark.parametrize("value", [{"fedadam": {"lr": 0}}, {"fedavgm": {"momentum": 1}}, {"fedyogi": {"beta2": -1}}])
def test_ranges(value):
    with pytest.raises(ValueError, match="must be"):
        resolve_server_optimizer(value)
