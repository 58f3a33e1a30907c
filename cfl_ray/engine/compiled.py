"""The compiled engine: the gradient of a batch as one program, made by PyTorch's compiler ahead of time, on a CPU.

Forward pass, loss and backward pass are recorded as a list of operations (`nn.recording`), which is compiled once per
machine (`nn.packages`). So neither autograd nor PyTorch's calls take time between the operations, and elementwise work
is done together. Masks of dropout are inputs of the program; other draws, as of attention, are from PyTorch's
generator, as in `sequential`. A batch that is not full is filled with samples of weight 0, so that one program serves
all batches, unless the network draws by itself: then it is computed without the program. The step itself is that of
`manual`: operations on a row. The result equals that of `sequential` up to rounding.
"""

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor

from cfl_ray.core.client_program import Need
from cfl_ray.engine import rule, sequential
from cfl_ray.engine.engine import Engine
from cfl_ray.engine.local_steps import RowGradient, train_row
from cfl_ray.engine.task import TrainingResult, TrainingTask, lacking
from cfl_ray.errors import first_line
from cfl_ray.nn.network import Network
from cfl_ray.nn.recording import NotRecordable, RecordedFunction, record

_DOES = frozenset(Need) - {Need.LOSS, Need.BRANCHES, Need.EXAMPLES}
_KEPT = 16  # recordings of a network: one for each batch size


@dataclass(frozen=True)
class Recorded:
    """The gradient of a batch of a network, as a recording."""

    function: Callable[..., Sequence[Tensor]]
    recording: RecordedFunction
    further: tuple[Tensor, ...]  # further inputs: frozen parameters and constant buffers
    batch: int  # samples


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
        if 2 * len(task.y) < batch:
            return f"a client has {len(task.y)} samples, less than half of a batch of {batch}"
        recorded = recorded_of(network, task)
        if isinstance(recorded, str):
            return recorded
        if reason := why_no_package(recorded.recording):
            return reason
    return None


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
    if os.environ.get("ATEN_CPU_CAPABILITY"):
        return "compiled programs use all instructions of the CPU, whatever runtime.cpu_capability says"
    return network.side_effect


def recorded_of(network: Network, task: TrainingTask) -> Recorded | str:
    """The recording for the batches of a task; the reason, a line, if there is none."""
    batch = task.local.batch_size
    assert batch is not None
    kept = _RECORDED.setdefault(network, {})
    key = batch, task.y.dtype, tuple(task.y.shape[1:])
    if key not in kept:
        if len(kept) >= _KEPT:
            kept.clear()
        kept[key] = _recorded(network, task, batch)
    return kept[key]


def _recorded(network: Network, task: TrainingTask, batch: int) -> Recorded | str:
    x = torch.zeros(batch, *network.input_shape, dtype=network.dtype)
    y, weight_B = task.y.new_zeros(batch, *task.y.shape[1:]), torch.ones(batch)
    masks = [mask[0] for mask in network.masks([0], 0, batch)]
    function = partial(gradient, network)
    network.module.train()
    try:
        with torch.no_grad(), network.draws_from(0):
            recording, further = record(function, [network.flat.clone(), x, y, weight_B, *masks])
    except NotRecordable as error:
        return str(error)
    except RuntimeError as error:  # of a forward pass that needs other tensors than those of `functional_call`
        return first_line(error)[:120]
    if recording.convolved > recording.products:
        share = recording.convolved / (recording.convolved + recording.products)
        return f"{share:.0%} of its multiplications are convolutions, which take as long compiled"
    return Recorded(function, recording, further, batch)


def gradient(
    network: Network, row_P: Tensor, x_B: Tensor, y_B: Tensor, weight_B: Tensor, *masks: Tensor
) -> Sequence[Tensor]:
    """The gradient (trained columns,) of the weighted sum of the losses of a batch, and the sum.

    masks: of the dropout layers.
    """
    tensors = network.spec.tensors(row_P)
    trained = [tensors[name].detach().requires_grad_() for name in network.spec.names[: network.spec.num_params]]
    given = {f"{name}.mask": mask for name, mask in zip(network.dropouts, masks, strict=True)}
    with torch.enable_grad():
        outputs = network.trained_outputs(x_B, tensors | dict(zip(tensors, trained, strict=False)) | given)
        loss = (network.task.loss(outputs, y_B) * weight_B).sum()
        grads = torch.autograd.grad(loss, trained, materialize_grads=True)
    return torch.cat([part.reshape(-1) for part in grads]), loss.detach()


def train(network: Network, tasks: Iterable[TrainingTask]) -> Iterator[TrainingResult]:
    """Trains each task in turn, from its own start. `why_not` must be None for them.

    If PyTorch's compiler fails, the tasks are trained sequentially.
    """
    row_P = torch.empty(network.spec.size)
    for index, task in enumerate(tasks):
        recorded = recorded_of(network, task)
        assert isinstance(recorded, Recorded)
        package = package_of(recorded.recording)
        if isinstance(package, str):
            (result,) = sequential.train(network, [task])
            yield replace(result, index=index)
        else:
            yield train_row(_Gradient(network, task, row_P, recorded, package), index)


class _Gradient(RowGradient):
    """Gradients by a package."""

    def __init__(self, network: Network, task: TrainingTask, row_P: Tensor, recorded: Recorded, package: Any):
        super().__init__(network, task, row_P, row_P[: network.spec.trained])
        self.recorded, self.package = recorded, package
        self.weight_n = task.held.weight_n
        self.mean_B = torch.full((recorded.batch,), 1 / recorded.batch)

    def of_batch(self, batch: int) -> list[Tensor]:
        task, size = self.task, self.recorded.batch
        index = self.batches[batch]
        real_B = np.arange(len(task.y)) if index is None else np.asarray(index)
        if self.network.random_forward and len(real_B) < size:
            size = len(real_B)  # draws of the network would differ from those of a full batch
        weight_B, short = self.mean_B[:size] * (self.recorded.batch / len(real_B)), size - len(real_B)
        if short:
            weight_B[-short:], real_B = 0, np.pad(real_B, (0, short), mode="edge")
        index_B = torch.from_numpy(real_B)
        if self.weight_n is not None:
            weight_B *= self.weight_n[index_B]
        inputs = [self.row, task.x[index_B], task.y[index_B], weight_B, *self.masks(batch, size)]
        with self.draws(batch):
            if size == self.recorded.batch:
                g_P, loss = self.package.run([*inputs, *self.recorded.further])
            else:
                g_P, loss = self.recorded.function(*inputs)
        self.losses.append(float(loss))
        return self.parts_of(g_P)


ENGINE = Engine(why_not, train, rule.compiled)
