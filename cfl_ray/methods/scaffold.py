"""SCAFFOLD: S. P. Karimireddy, S. Kale, M. Mohri, S. J. Reddi, S. U. Stich, A. T. Suresh. SCAFFOLD: Stochastic
Controlled Averaging for Federated Learning. ICML 2020, arXiv:1910.06378, Algorithm 1.

    y_i <- x;  K_i times:  y_i <- y_i - eta (g_i(y_i) - c_i + c)              c, c_i: 0 at first
    c_i+ = the gradient of f_i at x                                           option I
         = c_i - c + (x - y_i) / (K_i eta)                                    option II
    x <- x + eta_g mean of (y_i - x);   c <- c + sum of (c_i+ - c_i) / N      over the cohort; N: all clients

A client receives x and c and uploads y_i and c_i+ - c_i: 2 rows each way. It predicts with x; c_i stays with it. If all
clients take part in every round with equal numbers of steps, eta_g is 1 and option is II, c is (x_t - x_{t+1}) / (K
eta), which clients could compute from the models: 1 row each way would do. Statistics of batch normalisation are
averaged, and have no control variates.

Deviations: the paper has no momentum. Here it acts on the corrected gradient, and K_i in option II becomes a_i of
FedNova, the total weight of the gradients in y_i, so that c_i is a mean of gradients. Weight decay is a part of g_i,
and so of c_i in option II, but not of f_i in option I. Without momentum this is Algorithm 1. `correction: after_step`
is that of NIID-Bench (Xtra-Computing, 61b901a): the step of SGD with momentum, then -eta (c - c_i), and K_i in option
II. Its models are averaged by samples (`weights: samples`; c is not), and its variates cover the statistics of batch
normalisation. N counts all clients of the federation, also those whose scheduled round to join is still to come, and
those that left; what a client that left has added to c stays, and if it comes back, it adds to c once more: c is then
no mean of gradients, and the fixed point is not the optimum of the clients that are left. With `leavers: restart` c and
all c_i are 0 after a leave. Clients that are absent for a time, such as by `cohort.availability`, keep c_i. In FL-bench
(06e658b) c_i stays 0, so that c is added alone, and the fixed point is that of FedAvg.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from cfl_ray.core.clients import ClientProgram, Clients, Gradient, Held, LocalTraining, ProgramClient
from cfl_ray.core.method import Method, Start, option, weights_option
from cfl_ray.core.params import Columns, ParamSpec
from cfl_ray.core.rng import Draws
from cfl_ray.core.state import State
from cfl_ray.methods.fednova import accumulation


@dataclass(frozen=True)
class Corrected(ClientProgram):
    """The gradient, corrected by c - c_i. Given: c, and if they restart the number of restarts of the variates."""

    variates: str  # option I or II
    starts_at_c: bool  # c_i in the first round of a client: c, or 0
    after_step: bool  # the correction has no momentum
    momentum: float  # rho of the local training
    restarts: bool  # c_i from before the last restart is none
    only_tensors: ClassVar = True

    def keeps(self, spec: ParamSpec) -> Mapping[str, Tensor]:
        kept = {"c_i": torch.zeros(spec.trained), "rounds": torch.zeros(1)}
        return kept | ({"restarted": torch.zeros(1)} if self.restarts else {})

    def uploads(self, spec: ParamSpec) -> Mapping[str, int]:
        return {"change": spec.trained}

    def begin(self, client: ProgramClient, start_P: Tensor, held: Held) -> Tensor:
        if self.restarts and held["restarted"] != held["restarts"]:
            held["c_i"], held["rounds"] = torch.zeros_like(held["c_i"]), torch.zeros(1)
            held["restarted"] = held["restarts"].reshape(1)
        if self.starts_at_c and not held["rounds"]:
            held["c_i"] = held["c"][: client.spec.trained]
        return start_P

    def step(self, gradient: Gradient, w: Tensor, held: Held, number: Any) -> Tensor:
        correction = held["c"] - held["c_i"]
        if self.after_step:  # it enters the buffer once: v_k = rho v_{k-1} + g_k + (1 - rho) (c - c_i) for k > 0
            correction = correction * (1 - self.momentum * (number > 0))
        return gradient(w, 0) + correction

    def finish(self, client: ProgramClient, start_P: Tensor, row_P: Tensor, held: Held) -> None:
        counted = held["c_i"] if held["rounds"] or not self.starts_at_c else torch.zeros_like(held["c_i"])
        if self.variates == "I":
            after = client.gradient(start_P).cpu()
        elif not client.local.lr:  # no step, no gradient
            after = held["c_i"]
        else:
            a_i = accumulation(np.array([client.steps]), 0.0 if self.after_step else self.momentum, 0.0)[0]
            moved = (start_P - row_P)[: client.spec.trained] / (a_i * client.local.lr)
            after = held["c_i"] - held["c"][: client.spec.trained] + moved
        held["change"], held["c_i"], held["rounds"] = after - counted, after, held["rounds"] + 1


@dataclass(frozen=True, kw_only=True)
class ControlState(State):
    """The global model x, and N c."""

    sum_KP: Tensor  # float32 (1, P): the sum of c_i over the clients; 0 in columns that are not trained
    restarts: int = 0  # of the control variates


@dataclass(frozen=True)
class Scaffold(Method[ControlState], name="scaffold"):
    """One global model; control variates correct the drift of local training."""

    only_mean = "the control variate of the server is a sum of changes of those of the clients"
    needs_sgd = "option II takes the mean gradient from SGD steps of one learning rate"
    needs_fresh_momentum = "control variates are means of this round's gradients, and a kept buffer adds earlier ones"
    only_synchronous = "c is a sum over clients that received the same c"

    variates: str = option(
        "II",
        "how c_i is renewed: I: the gradient at the received model, one more pass over the data; II: the mean of the "
        "gradients of the local steps",
        source="paper's experiments",
        choices=("I", "II"),
    )
    correction: str = option(
        "gradient",
        "c - c_i is added to the gradient, before momentum, or after the step",
        source="paper; NIID-Bench: after_step",
        choices=("gradient", "after_step"),
    )
    newcomer: str = option(
        "zero",
        "c_i of a client in its first round: zero, or c, with which its first training has no correction",
        source="paper",
        choices=("zero", "c"),
    )
    leavers: str = option(
        "stay",
        "after clients left: their c_i stay in c, or all control variates restart at 0",
        source="ours",
        choices=("stay", "restart"),
    )
    eta_g: float = option(1.0, "eta_g: learning rate of the server", source="paper's experiments", low=0)
    weights: str = weights_option("uniform")

    def init(self, start: Start) -> ControlState:
        x_KP = start.new_model(0)[None]
        return ControlState(models_KP=x_KP, assign_N=start.one_cluster(), sum_KP=torch.zeros_like(x_KP))

    def round(self, state: ControlState, clients: Clients, rng: Draws) -> ControlState:
        trained = clients.spec.trained
        of_weights = Columns(((0, trained),))  # statistics of normalisation have no gradient, so no control variate
        x = clients.send(state.models_KP)
        c = clients.send(state.sum_KP / len(state.assign_N), columns=of_weights)
        # y_i <- y_i - eta (g_i(y_i) - c_i + c);  c_i+
        weight_RM = np.stack([clients.weights(kind) for kind in dict.fromkeys([self.weights, "uniform"])])
        momentum, restart = clients.local.momentum, self.leavers == "restart"
        program = Corrected(self.variates, self.newcomer == "c", self.correction == "after_step", momentum, restart)
        given = {"c": c} | ({"restarts": np.full(len(clients), float(state.restarts))} if restart else {})
        updates = clients.train(x, how=LocalTraining(program=program, given=given), average=weight_RM)
        # x <- x + eta_g mean of (y_i - x);  c <- c + sum of (c_i+ - c_i) / N
        rows = len(weight_RM)
        models_KP = updates.averaged(default=state.models_KP.repeat(rows, 1))[:1].clone()
        models_KP[:, :trained] = state.models_KP[:, :trained].lerp(models_KP[:, :trained], self.eta_g)
        change_RX = updates.uploaded("change", default=torch.zeros(rows, trained))
        sum_KP = state.sum_KP.clone()
        sum_KP[:, :trained] += updates.weight_R[-1] * change_RX[-1]
        return state.advance(models_KP=models_KP, sum_KP=sum_KP)

    def leave(self, state: ControlState, ids: np.ndarray) -> ControlState:
        state = super().leave(state, ids)
        if self.leavers == "stay":
            return state
        return state.advance(sum_KP=torch.zeros_like(state.sum_KP), restarts=state.restarts + 1)
