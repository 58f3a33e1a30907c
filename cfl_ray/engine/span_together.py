"""The steps of the span engine for many clients at once, for devices on which few large operations are fast.

The formulas are those of `engine.span`. Clients with fewer samples are padded: a padding sample is 0 and has weight 0,
so its column of C stays 0.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.func import grad_and_value, vmap

from cfl_ray.engine import sequential
from cfl_ray.engine.rows import ProximalRows, distinct, padded, rows_on
from cfl_ray.engine.task import TrainingTask
from cfl_ray.nn.graph import Parameter
from cfl_ray.nn.network import Network
from cfl_ray.nn.passes import passes_of

# Letters in addition to those of `core.params`: H outputs of the first layer, D its inputs, B padded samples of all
# clients, J the start and the anchors, Q parameters after the first layer's weights.


@dataclass(frozen=True)
class Coefficients:
    """Trained clients: the coefficients of their first-layer weights, and their other parameters."""

    x_BD: Tensor
    c_HB: Tensor
    a_mJ: Tensor
    others_mQ: Tensor
    loss_m: Tensor
    width: int  # samples of one client, with padding


def train_together(
    network: Network, tasks: Sequence[TrainingTask], terms: Sequence[Sequence[tuple[Tensor, float]]]
) -> Coefficients:
    """Trains all tasks together. terms: start and anchors of each client, with the weights of their proximal terms."""
    device, local = network.device, tasks[0].local
    x_mnD = padded([task.x.flatten(1) for task in tasks], device)
    gradient = _Rest(network, tasks, x_mnD.shape[1])
    z_mJnH = _outputs(network, terms, x_mnD)
    gram_mnn = torch.bmm(x_mnD, x_mnD.mT)
    weight_J = torch.tensor([weight for _, weight in terms[0]], device=device)  # 0 for the start
    decay = local.weight_decay + sum(weight for _, weight in terms[0])
    size = network.spec.ends[0]
    w_mQ = rows_on(device, [task.start_P for task in tasks])[:, size : network.spec.trained].contiguous()
    terms_of = zip(*(task.held.proximal for task in tasks), strict=True)
    proximal = [ProximalRows(network, of_clients, size) for of_clients in terms_of]
    a_mJ = torch.zeros(len(tasks), len(weight_J), device=device)
    a_mJ[:, 0] = 1
    c_mnH = torch.zeros_like(z_mJnH[:, 0])
    moving = [a_mJ, c_mnH, w_mQ]
    velocity = [torch.zeros_like(values) for values in moving] if local.momentum else None
    steps_m = torch.tensor([task.steps for task in tasks], device=device)
    last_m = torch.zeros(len(tasks), device=device)
    for number in range(max(task.steps for task in tasks)):
        z_mnH = torch.baddbmm((a_mJ[:, :, None, None] * z_mJnH).sum(1), gram_mnn, c_mnH)
        loss_m, step_mQ, step_mnH = gradient(w_mQ, z_mnH)
        if local.weight_decay:
            step_mQ = step_mQ.add(w_mQ, alpha=local.weight_decay)
        for term in proximal:
            term.add_to(step_mQ, w_mQ)
        step = [a_mJ * decay - weight_J, step_mnH.add(c_mnH, alpha=decay), step_mQ]
        active_m = number < steps_m
        last_m = torch.where(active_m, loss_m, last_m)
        if velocity is not None:
            torch._foreach_mul_(velocity, local.momentum)
            torch._foreach_add_(velocity, step)
            step = velocity
        for values, change in zip(moving, step, strict=True):
            values.sub_(change * (local.lr * active_m).view(-1, *[1] * (change.ndim - 1)))
    del gradient.gradient  # it refers to `gradient`: samples would stay until the garbage collector runs
    c_HB = c_mnH.flatten(0, 1).T.contiguous()
    return Coefficients(x_mnD.flatten(0, 1), c_HB, a_mJ, w_mQ, last_m, x_mnD.shape[1])


def _outputs(network: Network, terms: Sequence[Sequence[tuple[Tensor, float]]], x_mnD: Tensor) -> Tensor:
    """The first layer's outputs (m, J, n, H) under the start and the anchors of each client, by distinct rows."""
    shape = network.spec.shapes[0]
    z_mJnH = x_mnD.new_empty(len(terms), len(terms[0]), x_mnD.shape[1], shape[0])
    for j in range(len(terms[0])):
        for row_P, clients in distinct([of_client[j][0] for of_client in terms]):
            weight_HD = row_P[: network.spec.ends[0]].to(x_mnD.device).view(shape)
            if len(clients) == len(terms):
                z_mJnH[:, j] = x_mnD @ weight_HD.T
            else:
                index = torch.tensor(clients, device=x_mnD.device)
                z_mJnH[index, j] = x_mnD[index] @ weight_HD.T
    return z_mJnH


class _Rest:
    """Losses and gradients of all clients, from the first layer's outputs on."""

    def __init__(self, network: Network, tasks: Sequence[TrainingTask], width: int):
        self.task, spec = network.task, network.spec
        self.graph = graph = passes_of(network).graph
        first = graph.first_linear()
        assert first is not None
        self.first = first
        self.bias = next((used.index for used in first.references[2:] if isinstance(used, Parameter)), None)
        places = zip(spec.shapes[1:], spec.ends[:-1], spec.ends[1:], strict=True)
        size = spec.ends[0]
        self.columns = {
            number: (shape, start - size, stop - size) for number, (shape, start, stop) in enumerate(places, 1)
        }
        self.y_mn = padded([task.y for task in tasks], network.device)
        weights = [
            torch.full((len(y),), 1 / len(y)) if weight_n is None else weight_n / len(y)
            for y, weight_n in ((task.y, task.held.weight_n) for task in tasks)
        ]
        self.weight_mn = padded(weights, network.device)
        self.frozen_mnC = sequential.padded_frozen_logits(network, tasks)
        in_dims = (0, 0, 0, 0, None if self.frozen_mnC is None else 0)
        self.gradient = vmap(grad_and_value(self._loss, argnums=(0, 1)), in_dims=in_dims)

    def _loss(
        self, params: dict[int, Tensor], z_nH: Tensor, y_n: Tensor, weight_n: Tensor, frozen_nC: Tensor | None
    ) -> Tensor:
        """Loss of one client."""
        z_nH = z_nH if self.bias is None else z_nH + params[self.bias]
        logits_nC = self.graph.evaluated(self.first, z_nH, params)
        logits_nC = logits_nC if frozen_nC is None else logits_nC + frozen_nC
        return (self.task.loss(logits_nC, y_n) * weight_n).sum()

    def __call__(self, w_mQ: Tensor, z_mnH: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Losses (m,), and gradients at the other parameters (m, Q) and at the first layer's outputs (m, n, H)."""
        params = {number: w_mQ[:, a:b].unflatten(1, shape) for number, (shape, a, b) in self.columns.items()}
        (grads, grad_mnH), loss_m = self.gradient(params, z_mnH, self.y_mn, self.weight_mn, self.frozen_mnC)
        return loss_m, torch.cat([grads[number].flatten(1) for number in params] or [w_mQ[:, :0]], 1), grad_mnH
