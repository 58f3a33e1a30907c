"""The compiled engine: local steps as one program, made by PyTorch's compiler ahead of time, on a CPU.

Forward pass, loss, backward pass and the update of SGD, with momentum, weight decay and proximal terms, are recorded
as a list of operations (`nn.recording`), which is compiled once per machine (`nn.packages`). So neither autograd nor
PyTorch's calls take time between the operations, and elementwise work is done together; several short steps are one
program. Of other steps (own optimisers, steps of client programs, clipped gradients, moving anchors) the gradient is a
program, and the step is that of `manual`: operations on a row.

Masks of dropout are inputs of the program; other draws, as of attention, are from PyTorch's generator, as in
`sequential`. A batch that is not full is filled with samples of weight 0, so that one program serves all batches, or
a second one, for fewer samples, those that fit into it (`TrainingTask.last_batch`). Of a network that draws by itself
it is not filled: without a program of its size, it is computed operation by operation. The result equals that of
`sequential` up to rounding.
"""

import platform
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from cfl_ray.core.client_program import Need
from cfl_ray.engine import rule
from cfl_ray.engine.engine import Engine
from cfl_ray.engine.local_steps import LocalBatches, RowGradient, train_row
from cfl_ray.engine.task import TrainingResult, TrainingTask, lacking
from cfl_ray.errors import DataError, first_line
from cfl_ray.nn.network import Network
from cfl_ray.nn.recording import NotRecordable, RecordedCounts, RecordedFunction, record

_DOES = frozenset(Need) - {Need.LOSS, Need.BRANCHES, Need.EXAMPLES}
_KEPT = 16  # recordings of a network: one for each batch size


# Steps in one program, if each has few multiplications: then calls and the inputs of a step take part of its time.
_UNROLLED, _FEW_PRODUCTS = 5, 10_000_000
_FEW_SAMPLES = 2  # with which a network is recorded first
# Microseconds of an operation that is no product, and of a number that it makes; the share of products in the time of a
# step from which on compiling is not worth while.
_CALL, _NUMBER, _PRODUCTS_ALONE = 5, 1e-3, 0.8
# Attention is compiled as single operations, unless its matrices have more numbers: then PyTorch's kernel, which does
# not keep them, is faster.
_ATTENDED = 1 << 22


@dataclass(frozen=True)
class Steps:
    """The local steps of a program: their number, and the terms of each beside the gradient of the loss."""

    count: int
    momentum: bool
    decay: bool
    proximal: tuple[tuple[int, ...], ...]  # for each proximal term the numbers of its tensors

    @classmethod
    def of(cls, network: Network, task: TrainingTask) -> "Steps | None":
        """One step of a task; None if it is more than SGD with fixed proximal terms."""
        local, terms = task.local, task.held.proximal
        if local.optimizer is not None or local.clips or task.program.overrides("step"):
            return None
        if any(term.follow for term in terms):
            return None
        inside = tuple(tuple(network.tensors_in(term.columns)) for term in terms)
        return cls(1, bool(local.momentum), bool(local.weight_decay), inside)


@dataclass(frozen=True)
class Recorded:
    """The gradient of a batch of a network, or local steps, as a recording."""

    function: Callable[..., Sequence[Tensor]]
    recording: RecordedFunction
    further: tuple[Tensor, ...]  # further inputs: frozen parameters and constant buffers
    batch: int  # samples of a step
    steps: int  # at most 1: of a gradient or a step


Program = tuple[Recorded, Any]  # with its package
_RECORDED: WeakKeyDictionary[Network, dict[tuple[Any, ...], Recorded | str]] = WeakKeyDictionary()


def why_not(network: Network, tasks: Sequence[TrainingTask]) -> str | None:
    """Reason why this engine cannot train the network or, with tasks, these clients; None if it can."""
    if reason := _why_not_network(network) or lacking(tasks, _DOES):
        return reason
    for task in tasks:
        if task.held.frozen_P is not None:
            return "the logits of a frozen model are added"
        batch = task.local.batch_size
        if batch is None:
            return "a batch has all samples of a client, and so another size for each client"
        if 2 * task.size < batch:
            return f"a client has fewer samples than half of a batch of {batch}"  # one note, whatever the sizes
        for recorded in recordings_of(network, task):
            if isinstance(recorded, str):
                return recorded
    return None


def operations_of(network: Network, task: TrainingTask) -> list[int]:
    """The numbers of operations of the programs with which a task is trained."""
    return [len(one.recording.operations) for one in recordings_of(network, task) if isinstance(one, Recorded)]


def products_by_sample(network: Network, task: TrainingTask) -> int:
    """Multiplications of a step, for each sample of a batch; 0 if batches of fewer samples take as long."""
    first = recordings_of(network, task)[0]
    if isinstance(first, str) or (products := first.recording.counts.products) <= _FEW_PRODUCTS:
        return 0
    return products // first.batch


def why_not_here(network: Network, task: TrainingTask) -> str | None:
    """Reason why this machine cannot have the programs of a task; None if it has them, or nothing is known yet."""
    recorded = [one.recording for one in recordings_of(network, task) if isinstance(one, Recorded)]
    return next((reason for one in recorded if (reason := why_no_package(one))), None)


# `nn.packages` is imported when it is needed: it needs more than PyTorch and NumPy, which the other engines do not.


def package_of(recording: RecordedFunction) -> Any:
    """As `nn.packages.package_of`."""
    from cfl_ray.nn import packages

    return packages.package_of(recording)


def why_no_package(recording: RecordedFunction) -> str | None:
    """As `nn.packages.why_not`."""
    from cfl_ray.nn import packages

    return packages.why_not(recording)


def _why_not_network(network: Network) -> str | None:
    if network.device.type != "cpu":
        return "it computes on a CPU only"
    if network.precision == "bf16":
        return "in bf16, PyTorch's autocast decides what is computed in which precision"
    if network.recurrent:
        return "PyTorch's compiler is slower than the kernels of recurrent layers"
    if network.batch_statistics:
        return "batch statistics would include the samples that fill a batch"
    return network.side_effect


def recordings_of(network: Network, task: TrainingTask) -> list[Recorded | str]:
    """The recordings with which a task is trained; in place of one, the reason, a line, if there is none.

    They are of one step, or of the gradient of a batch, and then of a smaller batch, or of several steps.
    """
    steps, batch = Steps.of(network, task), task.local.batch_size
    assert batch is not None
    first = _recorded_of(network, task, steps, batch)
    if isinstance(first, str):
        return [first]
    second: Recorded | str = ""
    if first.recording.counts.products > _FEW_PRODUCTS:
        if 0 < task.last_batch < batch:
            second = _recorded_of(network, task, steps, task.last_batch)
    elif steps is not None and task.steps >= _UNROLLED and not network.random_forward:
        second = _recorded_of(network, task, replace(steps, count=_UNROLLED), batch)
    return [first, second] if isinstance(second, Recorded) else [first]  # the first one serves all batches


def _recorded_of(network: Network, task: TrainingTask, steps: Steps | None, batch: int) -> Recorded | str:
    kept = _RECORDED.setdefault(network, {})
    key = batch, task.y.dtype, tuple(task.y.shape[1:]), steps
    if key not in kept:
        if len(kept) >= _KEPT:
            kept.clear()
        few = _recorded(network, task, min(batch, _FEW_SAMPLES), steps)  # the whole batch may need much memory
        kept[key] = few if isinstance(few, str) else _recorded(network, task, batch, steps)
    return kept[key]


def _recorded(network: Network, task: TrainingTask, batch: int, steps: Steps | None) -> Recorded | str:
    count = 1 if steps is None else steps.count
    x = torch.zeros(count * batch, *network.input_shape, dtype=network.dtype)
    y, weight_B = task.y.new_zeros(count * batch, *task.y.shape[1:]), torch.ones(count * batch)
    masks = [mask[0] for mask in network.masks([0], 0, batch)] * count
    inputs = [network.flat.clone(), x, y, weight_B, *(mask.clone() for mask in masks)]
    function: Callable[..., Sequence[Tensor]] = partial(gradient, network)
    if steps is not None:
        trained = [network.flat[: network.spec.trained].clone() for _ in range(steps.momentum + len(steps.proximal))]
        inputs += [torch.zeros(count), torch.zeros(2 + len(steps.proximal)), *trained]
        function = partial(stepped, network, steps)
    network.module.train()
    try:
        with torch.no_grad(), network.draws_from(0):
            with sdpa_kernel(SDPBackend.MATH):
                recording, further = record(function, inputs)
            if recording.counts.attended > _ATTENDED:
                recording, further = record(function, inputs)
    except NotRecordable as error:
        return str(error)
    except RuntimeError as error:  # of a forward pass that needs other tensors than those of `functional_call`
        return first_line(error)[:120]
    return _why_no_gain(recording.counts) or Recorded(function, recording, further, batch, count)


def _why_no_gain(counts: RecordedCounts) -> str | None:
    if counts.convolved > counts.products:
        share = counts.convolved / (counts.convolved + counts.products)
        return f"{share:.0%} of its multiplications are convolutions, which take as long compiled"
    multiplying = counts.products * rule.PRODUCT
    share = multiplying / (multiplying + counts.calls * _CALL + counts.written * _NUMBER)
    if share > _PRODUCTS_ALONE:
        return f"about {share:.0%} of a step are few large matrix products, which take as long compiled"
    return None


def gradient(
    network: Network, row_P: Tensor, x_B: Tensor, y_B: Tensor, weight_B: Tensor, *masks: Tensor
) -> Sequence[Tensor]:
    """The gradient (trained columns,) of the weighted sum of the losses of a batch, and the sum.

    masks: of the dropout layers.
    """
    _, grads, loss = _by_tensor(network, network.spec.tensors(row_P), x_B, y_B, weight_B, masks)
    return torch.cat([part.reshape(-1) for part in grads]), loss


def stepped(
    network: Network, steps: Steps, row_P: Tensor, x_B: Tensor, y_B: Tensor, weight_B: Tensor, *others: Tensor
) -> Sequence[Tensor]:
    """The row after the steps, the sums of weighted losses, and the momentum if there is any.

    x_B, y_B, weight_B: batches of equal size, one after another.
    others: the masks of each batch, learning rates (steps,), numbers (momentum, weight decay, weights of the proximal
        terms), and then in trained columns the momentum if there is any, and the anchors.
    """
    count, layers = steps.count, len(network.dropouts)
    (rates, numbers, *held), masks = others[count * layers :], others[: count * layers]
    views = [list(network.views(row)) for row in held]
    velocity, anchors = (views[0], views[1:]) if steps.momentum else (None, views)
    tensors, losses = network.spec.tensors(row_P), []
    batches = zip(*(part.split(len(y_B) // count) for part in (x_B, y_B, weight_B)), strict=True)
    for number, (x, y, mean_B) in enumerate(batches):
        of_batch = masks[number * layers : (number + 1) * layers]
        w, step, loss = _by_tensor(network, tensors, x, y, mean_B, of_batch)
        if steps.decay:
            step = [g + numbers[1] * part for g, part in zip(step, w, strict=True)]
        for inside, weight, anchor in zip(steps.proximal, numbers[2:], anchors, strict=True):
            for i in inside:
                step[i] = step[i] + weight * (w[i] - anchor[i])
        if velocity is not None:
            velocity = step = [numbers[0] * v + g for v, g in zip(velocity, step, strict=True)]
        w = [part - rates[number] * g for part, g in zip(w, step, strict=True)]
        tensors |= dict(zip(tensors, w, strict=False))
        losses.append(loss)
    row_P = torch.cat([part.reshape(-1) for part in tensors.values()])
    return row_P, torch.stack(losses), *([torch.cat([v.reshape(-1) for v in velocity])] if velocity else [])


def _by_tensor(
    network: Network,
    tensors: Mapping[str, Tensor],
    x_B: Tensor,
    y_B: Tensor,
    weight_B: Tensor,
    masks: Sequence[Tensor],
) -> tuple[list[Tensor], list[Tensor], Tensor]:
    """The trained tensors, the gradients by them of the weighted sum of the losses of a batch, and the sum."""
    trained = [tensors[name].detach().requires_grad_() for name in network.spec.names[: network.spec.num_params]]
    given = {f"{name}.mask": mask for name, mask in zip(network.dropouts, masks, strict=True)}
    with torch.enable_grad():
        outputs = network.trained_outputs(x_B, {**tensors, **dict(zip(tensors, trained, strict=False)), **given})
        loss = (network.task.loss(outputs, y_B) * weight_B).sum()
        grads = list(torch.autograd.grad(loss, trained, materialize_grads=True))
    return [part.detach() for part in trained], grads, loss.detach()


def train(network: Network, tasks: Iterable[TrainingTask]) -> Iterator[TrainingResult]:
    """Trains each task in turn, from its own start. `why_not` must be None for them.

    Raises DataError if this machine cannot have a program: another engine would compute other last bits, so the work
    is left to other machines.
    """
    row_P = torch.empty(network.spec.size)
    for index, task in enumerate(tasks):
        programs = [_program(recorded) for recorded in recordings_of(network, task)]
        if (steps := Steps.of(network, task)) is None:
            yield train_row(_Gradient(network, task, row_P, programs), index)
        else:
            yield _Steps(network, task, steps, programs).result_of(index)


def _program(recorded: Recorded | str) -> Program:
    assert isinstance(recorded, Recorded)
    package = package_of(recorded.recording)
    if isinstance(package, str):
        raise DataError(
            f"{package}: engine compiled has no program on this machine ({platform.node()}); mend that, leave the "
            "machine out, or begin a new run with another runtime.engine"
        )
    return recorded, package


class _Inputs:
    """Batches of a client as the inputs of programs, of which each has batches of one size.

    programs: of one step or gradient, the largest with full batches.
    """

    def __init__(self, of: LocalBatches, programs: Sequence[Program]):
        self.of, self.programs = of, {program[0].batch: program for program in programs if program[0].steps == 1}
        self.full = max(self.programs)
        self._mean = {size: torch.full((size,), 1 / size) for size in self.programs}

    def samples(self, batch: int, full: bool = False) -> tuple[np.ndarray, Tensor]:
        """The samples of a batch of the present step, filled to the size of a program, and their weights in its loss.

        full: whether the program is that of full batches.
        """
        task, index = self.of.task, self.of.batches[batch]
        index_B = np.arange(len(task.y)) if index is None else np.asarray(index)
        real = len(index_B)
        size = self.full if full else self._size(real)
        if real < size:
            weight_B = torch.zeros(size)
            index_B = np.pad(index_B, (0, size - real), mode="edge")
            weight_B[:real] = 1 / real
        else:
            weight_B = self._mean[real] if real in self._mean else torch.full((real,), 1 / real)
        weight_n = task.held.weight_n
        return index_B, weight_B if weight_n is None else weight_B * weight_n[torch.from_numpy(index_B)]

    def _size(self, real: int) -> int:
        """The samples of the smallest program for a batch, or those of the batch if no program has them."""
        if self.of.network.random_forward:  # draws would differ from those of a larger batch
            return real
        return min(size for size in self.programs if size >= real)

    def outputs(
        self,
        row_P: Tensor,
        samples: tuple[np.ndarray, Tensor],
        others: Sequence[Tensor],
        batch: int,
        several: Program | None = None,
    ) -> Sequence[Tensor]:
        """The outputs of a program at a row on these samples, which begin with those of a batch of the present step.

        several: a program of several steps; None: that of one with these samples.
        """
        index_B, weight_B = samples
        program = several or self.programs.get(len(index_B))
        index = torch.from_numpy(index_B)
        x, y = (part.index_select(0, index) for part in (self.of.task.x, self.of.task.y))  # faster than x[index]
        inputs = [row_P, x, y, weight_B, *others]
        with self.of.draws(batch):
            if program is None:
                return self.programs[self.full][0].function(*inputs)
            outputs: Sequence[Tensor] = program[1].run([*inputs, *program[0].further])
            return outputs


class _Gradient(RowGradient):
    """Gradients by programs."""

    def __init__(self, network: Network, task: TrainingTask, row_P: Tensor, programs: Sequence[Program]):
        super().__init__(network, task, row_P, row_P[: network.spec.trained])
        self.inputs = _Inputs(self, programs)

    def of_batch(self, batch: int) -> list[Tensor]:
        samples = self.inputs.samples(batch)
        masks = self.masks(batch, len(samples[0]))
        g_P, loss = self.inputs.outputs(self.row, samples, masks, batch)
        self.losses.append(float(loss))
        return self.parts_of(g_P)


class _Steps(LocalBatches):
    """Local steps by programs: of one step, and of several if there are such."""

    def __init__(self, network: Network, task: TrainingTask, steps: Steps, programs: list[Program]):
        super().__init__(network, task)
        self.inputs, self.row = _Inputs(self, programs), task.start_P.clone()
        self.several = next((program for program in programs if program[0].steps > 1), None)
        local, terms = task.local, task.held.proximal
        trained = network.spec.trained
        self.numbers = torch.tensor([local.momentum, local.weight_decay, *(term.weight for term in terms)])
        kept = task.held.velocity
        self.velocity = [torch.zeros(trained) if kept is None else kept] if steps.momentum else []
        self.anchors = [term.anchor[:trained].contiguous() for term in terms]

    def result_of(self, index: int) -> TrainingResult:
        """Takes the steps, and returns the result of task `index`."""
        task, batches, number = self.task, self.task.batches(), 0
        while number < task.steps:
            several = self.several if task.steps - number >= _UNROLLED else None
            count = several[0].steps if several else 1
            self._take(several, range(number, number + count), batches)
            number += count
        loss = float(np.mean(self.losses[-task.tail :]))
        kept = self.velocity[0] if self.velocity and task.local.persist else None
        return self.result(index, self.row, loss, [], kept)

    def _take(self, several: Program | None, numbers: range, batches: Iterator[np.ndarray | None]) -> None:
        indices, weights, masks = [], [], []
        for _ in numbers:
            self.begin([next(batches) for _ in range(self.task.batches_per_step)])
            index_B, weight_B = self.inputs.samples(0, full=several is not None)
            indices.append(index_B)
            weights.append(weight_B)
            masks += self.masks(0, len(index_B))
        rates = torch.tensor([self.task.local.lr_at(number, self.task.steps) for number in numbers])
        others = [*masks, rates, self.numbers, *self.velocity, *self.anchors]
        samples = np.concatenate(indices), torch.cat(weights)
        self.row, losses, *self.velocity = self.inputs.outputs(self.row, samples, others, 0, several)
        self.losses += losses.tolist()


ENGINE = Engine(why_not, train, rule.compiled, tried_steps=_UNROLLED + 1)
