"""FedALA: J. Zhang, Y. Hua, H. Wang, T. Song, Z. Xue, R. Ma, H. Guan. FedALA: Adaptive Local Aggregation for
Personalized Federated Learning. AAAI 2023, arXiv:2212.01197, Algorithm 1.

A client has its last local model v_i and weights W_i in 0 .. 1 of the columns of the top p layers, 1 at first.

    for every batch of a part of s % of its samples:                      the adaptive local aggregation (ALA)
        t <- v_i + (theta - v_i) W_i in the top layers, theta in all others
        W_i <- W_i - eta grad f(t) (theta - v_i), in 0 .. 1
    v_i <- SGD_i from t
    theta <- sum_i n_i v_i / sum_i n_i                                    over the cohort

The first time, these passes are repeated until the loss of the last batch has a standard deviation below `threshold`
over the last ten of them; later there is one pass. In its first round a client starts from theta. The part of the
samples is contiguous, with a random beginning.

A client predicts with the newest theta, mixed with v_i by its W_i. Newcomers predict with theta.

Deviations: W_i is adapted when a client trains, not when it is only tested (official code, TsingZ0/FedALA, a7a9b21: a
pass on the newest theta before each test, of clients that are not selected, too); the first repetition has at most
`first_passes`. Gradients of the passes have no dropout. In FL-bench (06e658b) the clients of a worker share one W and
one v.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from cfl_ray.core.clients import ClientProgram, Clients, ClientState, Held, LocalTraining, ProgramClient
from cfl_ray.core.method import OneModel, option, weights_option
from cfl_ray.core.params import Columns, ParamSpec
from cfl_ray.core.rng import Draws, stream
from cfl_ray.core.state import State

LAST = 10  # passes whose losses are compared


@dataclass(frozen=True)
class Mixed:
    """The received model, mixed in the top columns with the client's last model by its weights."""

    top: Columns

    def __call__(self, received_P: Tensor, value: Tensor) -> Tensor:
        v_P, w_X = value[: len(received_P)], value[len(received_P) :][: self.top.count]
        self.top.put(received_P, mixed(self.top.of(v_P), self.top.of(received_P), w_X))
        return received_P


@dataclass(frozen=True)
class AdaptiveLocalAggregation(ClientProgram):
    """Training starts from t. Given: where the part of the samples begins, 0 .. 1 of the possible beginnings."""

    top: Columns
    eta: float
    share: float
    threshold: float
    first_passes: int
    kept_model: ClassVar = "v"

    def keeps(self, spec: ParamSpec) -> Mapping[str, Tensor]:
        return {"weights": torch.ones(self.top.count), "trained": torch.zeros(1), "adapted": torch.zeros(1)}

    def begin(self, client: ProgramClient, start_P: Tensor, held: Held) -> Tensor:
        if not held["trained"]:
            return start_P
        theta_X, v_X, w_X = self.top.of(start_P), self.top.of(held["v"]), held["weights"]
        batches, losses, t_P = self.batches(client, float(held["place"])), list[float](), start_P.clone()
        self.top.put(t_P, mixed(v_X, theta_X, w_X))
        for _ in range(1 if held["adapted"] else self.first_passes):
            for batch in batches:
                if batch is batches[-1] and not held["adapted"]:
                    losses.append(client.loss(t_P, samples=batch))
                gradient_X = self.top.of(client.gradient(t_P, samples=batch))
                w_X = (w_X - self.eta * gradient_X * (theta_X - v_X)).clamp(0, 1)
                self.top.put(t_P, mixed(v_X, theta_X, w_X))
            if len(losses) > LAST and np.std(losses[-LAST:]) < self.threshold:
                break
        held["weights"], held["adapted"] = w_X, torch.ones(1)
        return t_P

    def batches(self, client: ProgramClient, place: float) -> list[slice]:
        """The batches of the part of the client's samples."""
        count = max(int(self.share / 100 * len(client.y)), 1)
        first = min(int(place * (len(client.y) - count + 1)), len(client.y) - count)
        size = client.local.batch_size or count
        return [slice(at, min(at + size, first + count)) for at in range(first, first + count, size)]

    def finish(self, client: ProgramClient, start_P: Tensor, row_P: Tensor, held: Held) -> None:
        held["trained"] = torch.ones(1)


@dataclass(frozen=True)
class FedALA(OneModel, name="fedala"):
    """Every client starts from its own mixture of the global and its last model, by weights that it learns."""

    layers: int = option(1, "p: upper layers that are mixed", source="paper", low=1)
    eta: float = option(1.0, "eta: learning rate of the weights W", source="paper", low=0)
    share: float = option(
        80.0, "s: percent of a client's samples on which W is adapted", source="paper", low=0, high=100
    )
    threshold: float = option(
        0.1, "standard deviation of ten losses that ends the first adaptation", source="official code", low=0
    )
    first_passes: int = option(100, "most passes of the first adaptation", source="ours", low=1, high=100_000)
    weights: str = weights_option()

    def top(self, spec: ParamSpec) -> Columns:
        """The trained columns of the top layers."""
        return spec.top(self.layers).within(0, spec.trained)

    def round(self, state: State, clients: Clients, rng: Draws) -> State:
        # by client, so that it does not depend on the others of the cohort
        place_M = [stream(clients.seed, clients.round, 0, i, "place").random() for i in clients.ids_M.tolist()]
        program = AdaptiveLocalAggregation(
            self.top(clients.spec), self.eta, self.share, self.threshold, self.first_passes
        )
        updates = clients.train(
            clients.send(state.models_KP),
            client_state=self.kept(clients.spec),
            how=LocalTraining(program=program, given={"place": np.array(place_M)}),
            average=clients.weights(self.weights),
        )
        return state.advance(models_KP=updates.averaged(default=state.models_KP))

    def kept(self, spec: ParamSpec) -> ClientState:
        """v_i and W_i."""
        return ClientState("personal", private=False, predicts=Mixed(self.top(spec)))


def mixed(v_X: Tensor, theta_X: Tensor, w_X: Tensor) -> Tensor:
    """The numbers v + (theta - v) W."""
    return v_X + (theta_X - v_X) * w_X
