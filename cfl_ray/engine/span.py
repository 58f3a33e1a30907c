"""The span engine: an exact shortcut for full-batch training of networks that begin with a linear layer.

The gradient of the first layer's weights is dZ^T X, with X (n, D) the client's inputs and dZ (n, H) the gradient at the
layer's outputs. After any number of steps the weights are therefore a combination of the start, the anchors of proximal
terms and X:

    W = sum_j a_j W_j + C^T X           W_0 the start, W_j the anchors; C (n, H)
    Z = sum_j a_j (X W_j^T) + (X X^T) C

A step changes only the scalars a and the matrix C; X W_j^T and the Gram matrix X X^T are computed once. For n much
smaller than D, a step costs H n^2 instead of H n D, and the weights are computed once instead of in every step.
Momentum, weight decay and proximal terms are linear in the same terms. The result equals that of `sequential` up to
rounding.

The clients of a batch (`SpanBatch`) share two products. With B the samples of all clients, X W_0^T is one product for
all clients with the same start. A weighted sum of their changes is the other, without the weights of single clients:

    sum_i w_i (W_i - W_0) = sum_i w_i (a_i - 1) W_0 + C^T diag(w) X         C (B, H), X (B, D)

On a CPU, the steps between the products are computed client by client, on arrays that fit into the cache, with the
passes of the manual engine for the layers after the first. On a GPU, they are computed for all clients of a vmap batch
at once (`engine.span_together`), and a batch has as many clients as the memory allows.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cfl_ray.engine import rule, sequential
from cfl_ray.engine.chunks import limited_size
from cfl_ray.engine.engine import Engine
from cfl_ray.engine.local_steps import ProximalGradient, SGDUpdate
from cfl_ray.engine.rows import distinct, rows_on
from cfl_ray.engine.span_together import train_together
from cfl_ray.engine.task import TrainingResult, TrainingTask, lacking
from cfl_ray.engine.validation import WEIGHT_POWER, invalid_update_reason
from cfl_ray.engine.vmap_batches import in_batches
from cfl_ray.nn.network import Network
from cfl_ray.nn.passes import Passes, passes_of, why_no_passes

_MAX_SAMPLES_PER_INPUT = 0.5  # n / D up to which the shortcut can be faster
_MAX_OFFSET = 100.0  # norm of the mean sample, in deviations, up to which the outputs' deviations keep their digits
_BATCH_SAMPLES = 2048  # samples of all clients of a batch on a CPU; larger products are not faster


def why_not(network: Network, tasks: Sequence[TrainingTask]) -> str | None:
    """Reason why this engine cannot train the network or, with tasks, these clients; None if it can."""
    if network.precision == "bf16":
        return "in bf16, PyTorch's autocast decides what is computed in which precision"
    if reason := _network_without_shortcut(network):
        return reason
    weights = {tuple(term.weight for term in task.held.proximal) for task in tasks}
    if _together(network) and len(weights) > 1:
        return "the weights of proximal terms differ between clients"
    if reason := next((reason for task in tasks if (reason := _training_without_shortcut(task))), None):
        return reason
    if network.batch_statistics and any(_far_from_zero(task.x) for task in tasks):
        return f"with batch statistics, the inputs of a client are more than {_MAX_OFFSET:g} deviations from zero"
    return None


def _far_from_zero(x: Tensor) -> bool:
    """Whether the mean of the samples is so much larger than their deviations that the Gram matrix loses these.

    A normalisation with batch statistics removes the mean, and the digits that the Gram matrix keeps with it.
    """
    x_nD = x.flatten(1).double()
    mean_D = x_nD.mean(0)
    return bool(mean_D.square().sum() > _MAX_OFFSET**2 * (x_nD - mean_D).square().sum(1).mean())


def _network_without_shortcut(network: Network) -> str | None:
    """Reason why the first layer's weights are not a combination of start, anchors and inputs; None if they are."""
    if len(network.spec.shapes[0]) != 2:  # before its operations are recorded
        return "its first parameter is not the weights of a linear layer"
    if network.dropouts or network.random_forward:
        return "the forward pass has dropout, or draws other random numbers"
    if reason := why_no_passes(network):
        return reason
    if passes_of(network).graph.first_linear() is None:
        return "its first operation, which alone uses the samples, is not a linear layer with the first parameter"
    if _together(network) and network.spec.size > network.spec.trained:
        return "on a GPU it trains no network with buffers"
    return None


def _training_without_shortcut(task: TrainingTask) -> str | None:
    """Reason why local training is not full-batch SGD of several steps on few samples; None if it is."""
    if reason := lacking([task], frozenset()):
        return reason
    if task.steps <= 1:
        return "there is one local step"
    if task.local.augment or task.copies > 1:
        return "samples are augmented, and so other ones in every step"
    if (task.local.batch_size or len(task.y)) < len(task.y):
        return "batches are smaller than a client's data"
    if len(task.y) > _MAX_SAMPLES_PER_INPUT * task.x[0].numel():
        return f"a client has more samples than {_MAX_SAMPLES_PER_INPUT:g} times the inputs of the first layer"
    return None


def train(network: Network, tasks: Iterable[TrainingTask]) -> Iterator[TrainingResult]:
    """Trains each task, from its own start. `why_not` must be None for them."""
    for first, batch in batches(network, tasks):
        for index in range(len(batch.tasks)):
            yield TrainingResult(first + index, batch.row(index), batch.losses[index])


def _together(network: Network) -> bool:
    """Whether the steps are computed for all clients of a batch at once, as a vmap batch."""
    return network.device.type != "cpu"


def batches(network: Network, tasks: Iterable[TrainingTask]) -> Iterator[tuple[int, "SpanBatch"]]:
    """Trains all tasks in batches. Yields the number of the first task of a batch, and the batch."""
    if not _together(network):
        yield from _small_batches(network, list(tasks))
        return
    first = 0
    for members, batch in in_batches(network.memory, tasks, lambda members: SpanBatch(network, members), "span"):
        yield first, batch
        first += len(members)


def _small_batches(network: Network, tasks: Sequence[TrainingTask]) -> Iterator[tuple[int, "SpanBatch"]]:
    """Batches of a limited number of samples."""
    first, samples = 0, 0
    for index, task in enumerate(tasks):
        if index > first and samples + len(task.y) > _BATCH_SAMPLES:
            yield first, SpanBatch(network, tasks[first:index])
            first, samples = index, 0
        samples += len(task.y)
    if first < len(tasks):
        yield first, SpanBatch(network, tasks[first:])


class SpanBatch:
    """Trained clients. Their first-layer weights are kept as coefficients and computed on request.

    Arrays are transposed relative to the formulas above: the samples are the last axis, as in the manual engine.
    """

    def __init__(self, network: Network, tasks: Sequence[TrainingTask]):
        self.tasks, self.spec = tasks, network.spec
        self.shape = network.spec.shapes[0]  # (H, D)
        self.size = self.shape[0] * self.shape[1]  # the first layer's weights are the first columns of a row
        self.device = network.device
        self.terms = [_terms(network, task) for task in tasks]
        self.a: list[Tensor] = []
        self.losses: list[float] = []
        self.largest: dict[int, Tensor] = {}  # absolute values, by address of a row
        if not _together(network):
            self._train_one_by_one(network)
            return
        trained = train_together(network, tasks, self.terms)
        self.x_BD, self.c_HB, self.others_mP = trained.x_BD, trained.c_HB, trained.others_mQ
        self.a, self.losses = list(trained.a_mJ.cpu()), trained.loss_m.tolist()
        starts = [at * trained.width for at in range(len(tasks))]
        self.slices = [slice(start, start + len(task.y)) for start, task in zip(starts, tasks, strict=True)]

    def _train_one_by_one(self, network: Network) -> None:
        tasks = self.tasks
        self.x_BD = torch.cat([task.x.flatten(1) for task in tasks])
        ends = np.cumsum([len(task.y) for task in tasks]).tolist()
        self.slices = [slice(end - len(task.y), end) for end, task in zip(ends, tasks, strict=True)]
        self.c_HB = torch.empty(self.shape[0], len(self.x_BD))
        self.others_mP = torch.empty(len(tasks), network.spec.size - self.size)  # columns after the first weights
        passes, outputs = passes_of(network), self._outputs()
        with np.errstate(all="ignore"), torch.no_grad():
            for index, task in enumerate(tasks):
                frozen_BC = sequential.frozen_logits(network, task)
                self._train(index, passes, network, frozen_BC, outputs)

    def _first(self, row_P: Tensor) -> Tensor:
        """The first layer's weights (H, D) in a row, on the device."""
        return row_P[: self.size].to(self.device).view(self.shape)

    def _outputs(self) -> dict[tuple[int, int], Tensor]:
        """The first layer's outputs (H, n) of every client under its start and anchors, by client and row.

        A row is identified by its address in memory. A row that several clients use is multiplied once.
        """
        rows = [[row_P for row_P, _ in terms] for terms in self.terms]
        used = [(index, row_P) for index, of_client in enumerate(rows) for row_P, _ in distinct(of_client)]
        outputs: dict[tuple[int, int], Tensor] = {}
        for row_P, places in distinct([row_P for _, row_P in used]):
            indices = [used[place][0] for place in places]
            parts = [self.x_BD[self.slices[index]] for index in indices]
            split = product(self._first(row_P), self._joined(parts)).split([len(part) for part in parts], 1)
            outputs |= {(index, row_P.data_ptr()): output for index, output in zip(indices, split, strict=True)}
        return outputs

    def _joined(self, parts: Sequence[Tensor]) -> Tensor:
        """The samples of some clients in a tensor, without a copy if these are all clients."""
        return self.x_BD if len(parts) == len(self.tasks) else torch.cat(list(parts))

    def _train(
        self,
        index: int,
        passes: Passes,
        network: Network,
        frozen_BC: Tensor | None,
        outputs: Mapping[tuple[int, int], Tensor],
    ) -> None:
        """Trains one client: computes its coefficients and its other parameters."""
        task, part, terms = self.tasks[index], self.slices[index], self.terms[index]
        outputs_Hn = [outputs[index, row_P.data_ptr()].contiguous() for row_P, _ in terms]
        x_nD = self.x_BD[part]
        gram_nn = product(x_nD, x_nD)
        passes.row_P[self.size :].copy_(task.start_P[self.size :])
        w_P, g_P = passes.w_P[self.size :], passes.g_P[self.size :]
        proximal = [ProximalGradient.of_row(network, term, w_P, self.size) for term in task.held.proximal]
        decay = task.local.weight_decay + sum(weight for _, weight in terms)
        a = torch.tensor([1.0] + [0.0] * (len(terms) - 1))
        c_Hn = torch.zeros_like(outputs_Hn[0])
        moving = [a, c_Hn, w_P]
        velocity = [torch.zeros_like(values) for values in moving] if task.local.momentum else None
        update = SGDUpdate(task.local, velocity)
        y, frozen = task.y.numpy(), None if frozen_BC is None else frozen_BC.numpy()
        weight_n = None if task.held.weight_n is None else task.held.weight_n.numpy()
        for number in range(task.steps):
            z_Hn = product(c_Hn, gram_nn) if number else torch.zeros_like(c_Hn)  # the matrix is symmetric
            for a_j, output_Hn in zip(a.tolist(), outputs_Hn, strict=True):
                z_Hn.add_(output_Hn, alpha=a_j)
            loss, grad_Hn = passes.run_after_first(z_Hn.numpy(), y, frozen, weight_n)
            update.decay([g_P], [w_P])
            for term in proximal:
                term.add_to([g_P])
            step_a, step_Hn = a * decay, torch.from_numpy(grad_Hn)
            for j, (_, weight) in enumerate(terms[1:], 1):
                step_a[j] -= weight
            if decay:
                step_Hn.add_(c_Hn, alpha=decay)
            update.apply(moving, [step_a, step_Hn, g_P])
        self.c_HB[:, part] = c_Hn
        self.others_mP[index] = passes.row_P[self.size :]
        self.a.append(a)
        self.losses.append(float(loss))

    def row(self, index: int) -> Tensor:
        """The row (P,) of one client."""
        row_P = torch.empty(self.spec.size, device=self.device)
        first_HD = self._first(row_P)
        part = self.slices[index]
        first_HD.copy_(product(self.c_HB[:, part].contiguous(), self.x_BD[part].T))
        for a_j, (term_P, _) in zip(self.a[index].tolist(), self.terms[index], strict=True):
            first_HD.add_(self._first(term_P), alpha=a_j)
        row_P[self.size :] = self.others_mP[index]
        return row_P

    def invalid_reason(self, index: int) -> str | None:
        """Reason why the update of a client is not valid; None if it is valid.

        The first layer's weights are computed only if a bound on them is not below the limit:
        |W| <= sum_j |a_j| max |W_j| + max_h sum_n |C_nh| max |X|.
        """
        part = self.slices[index]
        bound = self.c_HB[:, part].abs().sum(1).max() * self.x_BD[part].abs().max()
        for a_j, (row_P, _) in zip(self.a[index], self.terms[index], strict=True):
            bound += a_j.abs() * self._largest(row_P)
        if bound.item() < 2**WEIGHT_POWER:  # false for NaN
            return invalid_update_reason(self.others_mP[index], self.spec.trained - self.size)
        return invalid_update_reason(self.row(index), self.spec.trained)

    def _largest(self, row_P: Tensor) -> Tensor:
        """The largest absolute value of the first layer's weights in a row."""
        if row_P.data_ptr() not in self.largest:
            low, high = torch.aminmax(self._first(row_P))
            self.largest[row_P.data_ptr()] = torch.maximum(-low, high)
        return self.largest[row_P.data_ptr()]

    def change(self, weights: Mapping[int, float]) -> Tensor:
        """Sum (P,) of w_i (W_i - start_i) over the clients i of `weights`, with the weights w_i."""
        indices = sorted(weights)
        weight_m = torch.tensor([weights[index] for index in indices], device=self.device)
        parts = [self.slices[index] for index in indices]
        whole = sum(part.stop - part.start for part in parts) == self.c_HB.shape[1]
        c_HB = self.c_HB if whole else torch.cat([self.c_HB[:, part] for part in parts], 1)
        x_BD = torch.cat([self.x_BD[part] * weights[index] for part, index in zip(parts, indices, strict=True)])
        change_P = torch.empty(self.spec.size, device=self.device)
        first_HD = self._first(change_P)
        first_HD.copy_(product(c_HB, x_BD.T))
        for row_P, coefficient in self._coefficients(weights):
            first_HD.add_(self._first(row_P), alpha=coefficient)
        starts_mP = rows_on(self.device, [self.tasks[index].start_P for index in indices], copies=False)[:, self.size :]
        change_P[self.size :] = weight_m @ (self.others_mP[indices] - starts_mP)
        return change_P

    def _coefficients(self, weights: Mapping[int, float]) -> list[tuple[Tensor, float]]:
        """Starts and anchors with their nonzero coefficients in the weighted sum of changes."""
        rows: dict[int, Tensor] = {}
        coefficients: dict[int, float] = defaultdict(float)
        for index, weight in weights.items():
            for number, (row_P, _) in enumerate(self.terms[index]):
                rows[row_P.data_ptr()] = row_P
                coefficients[row_P.data_ptr()] += weight * (self.a[index][number].item() - (number == 0))
        return [(rows[address], value) for address, value in coefficients.items() if value]


def _terms(network: Network, task: TrainingTask) -> list[tuple[Tensor, float]]:
    """The start and the anchors of the first layer's weights, with the weights of their proximal terms."""
    anchors = [(term.anchor, term.weight) for term in task.held.proximal if 0 in network.tensors_in(term.columns)]
    return [(task.start_P, 0.0), *anchors]


def product(a: Tensor, b: Tensor) -> Tensor:
    """The product a @ b.T.

    On a CPU with oneDNN if PyTorch has it: twice as fast as MKL (`torch.mm`) on AMD processors.
    """
    if _linear is None or a.device.type != "cpu":
        return torch.mm(a, b.T)
    return _linear(a, b, None, "none", [], "")


# PyTorch's matrix product with oneDNN; None if it is not available
_linear: Any = getattr(torch.ops.mkldnn, "_linear_pointwise", None) if torch.backends.mkldnn.is_available() else None


ENGINE = Engine(
    why_not,
    train,
    rule.span,
    together=True,
    train_sums=batches,
    chunk_size=partial(limited_size, chunks=60, most=24),
)
