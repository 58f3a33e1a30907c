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

A client predicts with the newest theta after the aggregation; newcomers predict with theta. P-local measures v_i.

Deviations: a test keeps no W_i, and has the first s % of the samples (official code, TsingZ0/FedALA, a7a9b21: a test is
after the aggregation that begins the next training, also of clients that are not selected). The first repetition has
at most `first_passes`. Gradients of the passes have no dropout. In FL-bench (06e658b) the clients of a worker share one
W and one v.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from cfl_ray.core.clients import ClientData, ClientProgram, Clients, ClientState, Held, LocalTraining, ProgramClient
from cfl_ray.core.method import OneModel, option, weights_option
from cfl_ray.core.params import Columns, ParamSpec
from cfl_ray.core.rng import Draws, stream
from cfl_ray.core.serving import Serving
from cfl_ray.core.state import State

LAST = 10  # passes whose losses are compared


@dataclass(frozen=True)
class LocalAggregation:
    """The adaptive local aggregation of one client."""

    top: Columns
    eta: float
    share: float
    threshold: float
    first_passes: int
    batch_size: int | None

    def __call__(
        self, client: ClientData, theta_P: Tensor, v_P: Tensor, w_X: Tensor, is_first: bool, place: float
    ) -> tuple[Tensor, Tensor]:
        """The row t (P,) and the weights after the passes. place: of the part of the samples, 0 .. 1 of all places."""
        theta_X, v_X = self.top.of(theta_P).clone(), self.top.of(v_P)
        batches, losses, t_P = self.batches(len(client.y), place), list[float](), theta_P.clone()
        self.top.put(t_P, v_X + (theta_X - v_X) * w_X)
        for _ in range(self.first_passes if is_first else 1):
            for batch in batches:
                if batch is batches[-1] and is_first:
                    losses.append(client.loss(t_P, samples=batch))
                gradient_X = client.gradient(t_P, samples=batch, columns=self.top)
                w_X = (w_X - self.eta * gradient_X * (theta_X - v_X)).clamp(0, 1)
                self.top.put(t_P, v_X + (theta_X - v_X) * w_X)
            if len(losses) > LAST and np.std(losses[-LAST:]) < self.threshold:
                break
        return t_P, w_X

    def batches(self, samples: int, place: float) -> list[slice]:
        """The batches of the part of a client's samples."""
        count = max(int(self.share / 100 * samples), 1)
        first = min(int(place * (samples - count + 1)), samples - count)
        size = self.batch_size or count
        return [slice(at, min(at + size, first + count)) for at in range(first, first + count, size)]


@dataclass(frozen=True)
class Aggregated:
    """The received model after the aggregation, on the first part of the client's samples."""

    aggregation: LocalAggregation
    reads_data: ClassVar[bool] = True

    def __call__(self, received_P: Tensor, value: Tensor, client: ClientData) -> Tensor:
        v_P, (size, count) = value[: len(received_P)], (len(received_P), self.aggregation.top.count)
        w_X, is_first = value[size : size + count], not value[size + count + 1]
        return self.aggregation(client, received_P, v_P, w_X, bool(is_first), 0.0)[0]


@dataclass(frozen=True)
class StartsFromAggregation(ClientProgram):
    """Training starts from t. Given: the place of the part of the samples."""

    aggregation: LocalAggregation
    kept_model: ClassVar = "v"

    def keeps(self, spec: ParamSpec) -> Mapping[str, Tensor]:
        return {"weights": torch.ones(self.aggregation.top.count), "trained": torch.zeros(1), "adapted": torch.zeros(1)}

    def begin(self, client: ProgramClient, start_P: Tensor, held: Held) -> Tensor:
        if not held["trained"]:
            return start_P
        is_first, place = not held["adapted"], float(held["place"])
        t_P, held["weights"] = self.aggregation(client, start_P, held["v"], held["weights"], is_first, place)
        held["adapted"] = torch.ones(1)
        return t_P

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

    def round(self, state: State, clients: Clients, rng: Draws) -> State:
        # by client, so that it does not depend on the others of the cohort
        place_M = [stream(clients.seed, clients.round, 0, i, "place").random() for i in clients.ids_M.tolist()]
        program = StartsFromAggregation(self.aggregation_of(clients))
        updates = clients.train(
            clients.send(state.models_KP),
            client_state=self.own(clients),
            how=LocalTraining(program=program, given={"place": np.array(place_M)}),
            average=clients.weights(self.weights),
        )
        return state.advance(models_KP=updates.averaged(default=state.models_KP))

    def aggregation_of(self, clients: Clients) -> LocalAggregation:
        """ALA with the batches of local training, of the trained columns of the top layers."""
        top = clients.spec.top(self.layers).within(0, clients.spec.trained)
        return LocalAggregation(top, self.eta, self.share, self.threshold, self.first_passes, clients.local.batch_size)

    def own(self, clients: Clients) -> ClientState:
        """v_i and W_i."""
        return ClientState("personal", private=False, predicts=Aggregated(self.aggregation_of(clients)))

    def serve(self, state: State, clients: Clients) -> Serving:
        return Serving(state.models_KP, clients.first_row(), client_state=self.own(clients))
