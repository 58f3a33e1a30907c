"""Forward passes of a module that show what its definition does not: shapes, random draws, side effects."""

from collections.abc import Callable, Collection
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from cfl_ray.core import global_generators
from cfl_ray.core.params import ParamSpec
from cfl_ray.errors import ConfigError
from cfl_ray.nn import functional_dropout
from cfl_ray.nn.functional_dropout import DropoutCall
from cfl_ray.nn.layer_order import LayerOrder
from cfl_ray.nn.layers import AddressedDropout
from cfl_ray.nn.layout import inexact_functions
from cfl_ray.nn.plain import DenseGradients
from cfl_ray.nn.pooling import FastPooling
from cfl_ray.nn.side_effects import SideEffects

TRIAL_BATCHES = (2, 3)  # two sizes: they show which axis of an activation is the batch
_LARGER_BATCH = 20  # a third one, for modules that split large batches


@dataclass(frozen=True)
class TrialPasses:
    """Properties of a module seen in passes in training mode; equal for modules that differ by their weights alone."""

    output_shape: tuple[int, ...]  # of one sample
    last_layer: str  # name of the layer with trained parameters that is called last
    not_linear: frozenset[str]  # parameters as in `ParamSpec.not_linear`
    effects: SideEffects
    has_sparse_gradients: bool
    pools: bool  # whether it calls functions that `nn.pooling` replaces
    kept_dropouts: frozenset[str]  # dropout layers that are not replaced: they cannot have masks by sample
    sample_shapes: dict[str, tuple[int, ...] | None]  # of the activations of replaced ones; None: it is not called
    calls: tuple[DropoutCall, ...]  # of functional dropout whose masks engines draw
    # whether a pass draws from PyTorch's global generator: dropout of attention and recurrent layers, noise; also
    # dropout that cannot have masks by sample, because the first axis of its inputs is not the batch or passes differ
    random_forward: bool
    # whether outputs, float buffers or gradients depend on the other samples of a batch or their number, as with
    # BatchNorm, and with gradients of embeddings that are divided by how often a token occurs
    batch_statistics: bool
    # why only the sequential engine can train the network: a pass changes parameters, or buffers in another way than
    # BatchNorm; None if it does not
    side_effect: str | None
    inexact: frozenset[str]  # names of functions of the module that lose digits channels-last (`nn.layout`)


@torch.no_grad()
def tried(
    module: nn.Module,
    make: Callable[[Collection[str]], nn.Module],
    spec: ParamSpec,
    input_shape: tuple[int, ...],
    dtype: torch.dtype,
    wide: bool,
) -> tuple[nn.Module, TrialPasses]:
    """The module after its trial passes, which change its buffers, and what they show.

    make: returns a module like it, with these dropout layers as they are; the module that is returned may be one.
    wide: whether it may be computed channels-last. Raises ConfigError for a module that cannot be trained.
    """
    passes = _Trial(module, spec, input_shape, dtype)
    kept = frozenset(name for name, layer in passes.layers.items() if not layer.regular(list(TRIAL_BATCHES)))
    if kept:  # they stay nn.Dropout, which calls functional dropout
        module = make(kept)
        passes = _Trial(module, spec, input_shape, dtype)
    for layer in passes.layers.values():
        layer.end_trial()
    calls = tuple(passes.calls[0]) if not passes.draws and passes.have_masks() else ()
    random_forward = passes.draws or len(passes.calls[0]) > len(calls)
    changed = passes.effects.changed
    batch_statistics = (
        any(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in module.modules())
        or not changed.isdisjoint(spec.names[spec.num_params :])
        or (not changed and not random_forward and passes.mix_samples())
    )
    side_effect = passes.why_only_sequential()
    if passes.effects.inputs and isinstance(module, torch.jit.ScriptModule):
        raise ConfigError(
            "the model is TorchScript and writes to its inputs, which then have other values in the next "
            "epoch; clone them in forward, or give the module as it was before torch.jit"
        )
    with torch.enable_grad():
        inexact = inexact_functions(make(kept), samples(TRIAL_BATCHES[0], input_shape, dtype)) if wide else frozenset()
    return module, TrialPasses(
        passes.output_shape,
        passes.order.last_of(spec.layers),
        frozenset(passes.order.not_linear),
        passes.effects,
        passes.has_sparse_gradients,
        passes.pools,
        kept,
        {name: layer.sample_shape for name, layer in passes.layers.items()},
        calls,
        random_forward,
        batch_statistics,
        side_effect,
        inexact,
    )


def dropouts_of(module: nn.Module) -> dict[str, AddressedDropout]:
    """The dropout layers whose masks engines draw, by name."""
    return {name: part for name, part in module.named_modules() if isinstance(part, AddressedDropout)}


def samples(batch: int, input_shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Numbers from 0 to 1, or the token 1."""
    if not dtype.is_floating_point:
        return torch.ones(batch, *input_shape, dtype=dtype)
    return torch.rand(batch, *input_shape, dtype=dtype, generator=torch.Generator().manual_seed(0))


def with_gradient_hooks(module: nn.Module) -> list[str]:
    """Names of the parameters with hooks of `register_hook`, which change their gradients."""
    return [name for name, parameter in module.named_parameters() if parameter._backward_hooks]


class _Trial:
    """Two passes of a module in training mode, without dropout; its dropout layers stay in their trial."""

    def __init__(self, module: nn.Module, spec: ParamSpec, input_shape: tuple[int, ...], dtype: torch.dtype) -> None:
        self.module, self.spec, self.input_shape, self.dtype = module, spec, input_shape, dtype
        self.layers, self.order, self.effects = dropouts_of(module), LayerOrder(module), SideEffects()
        self.calls = list[list[DropoutCall]]()  # of functional dropout, by pass
        self.draws = self.draws_in_python = False  # random numbers; and of Python or NumPy
        self.has_sparse_gradients = self.pools = False
        for layer in self.layers.values():
            layer.trial = []
        frozen = [name for name, p in module.named_parameters() if not p.requires_grad]
        inputs = torch.zeros(TRIAL_BATCHES[0], *input_shape, dtype=dtype), self._others(TRIAL_BATCHES[1])
        with global_generators.kept():
            global_generators.seed_all(0)
            before = global_generators.states()
            for x in inputs:
                global_generators.seed_all(0)
                recording, dense, pooling = functional_dropout.Recording(), DenseGradients(), FastPooling()
                # these are told of each look at a tensor, and the observation looks at many
                with self.effects.observed(module, x), recording, dense, self.order, pooling:
                    outputs = module.train()(x)
                after = global_generators.states()
                self.draws |= before != after
                self.draws_in_python |= before[1:] != after[1:]
                self.output_shape = tuple(outputs.shape[1:])
                self.calls.append(recording.calls)
                self.has_sparse_gradients |= dense.calls > 0
                self.pools |= pooling.calls > 0
        if written := [name for name in frozen if name in self.effects.changed]:
            raise ConfigError(f"the model writes to its frozen parameter {written[0]}, which all clients share")

    def _others(self, batch: int) -> Tensor:
        """Other samples than zeros."""
        return samples(batch, self.input_shape, self.dtype)

    def _dense_gradients(self) -> AbstractContextManager[object]:
        return DenseGradients() if self.has_sparse_gradients else nullcontext()

    def have_masks(self) -> bool:
        """Whether functional dropout can have masks by sample."""
        calls = self.calls
        if not calls[0] or not functional_dropout.regular(calls, TRIAL_BATCHES):
            return False
        with functional_dropout.Recording() as recording:
            self.module(self._others(_LARGER_BATCH))
        same = functional_dropout.regular([calls[0], recording.calls], [TRIAL_BATCHES[0], _LARGER_BATCH])
        return same and not functional_dropout.repeated_backwards(self.module, self._others(TRIAL_BATCHES[0]))

    def mix_samples(self) -> bool:
        """Whether the outputs or gradients of samples in training depend on the others of the batch or their number."""
        x = self._others(TRIAL_BATCHES[1])
        with global_generators.kept(), functional_dropout.Recording(), self._dense_gradients():
            outputs, gradient = self._of_first_samples(x.clone())
            without_last, moved = self._of_first_samples(x[:-1].clone())
        far = 1e-3 * torch.linalg.vector_norm(gradient) + 1e-6  # false for NaN
        is_close = torch.allclose(outputs, without_last, rtol=1e-3, atol=1e-5, equal_nan=True)
        return not is_close or bool(torch.linalg.vector_norm(gradient - moved) > far)

    def _of_first_samples(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The outputs of all samples but the last of a trial batch, and the gradient of a weighted sum of them.

        The gradient is empty without a backward pass.
        """
        params = [parameter for parameter in self.module.parameters() if parameter.requires_grad]
        with torch.enable_grad():
            outputs = self.module(x)[: TRIAL_BATCHES[1] - 1]
            total = (outputs * samples(len(outputs), self.output_shape, torch.float32)).sum()
            try:
                grads = torch.autograd.grad(total, params, allow_unused=True, materialize_grads=True)
            except (RuntimeError, ValueError):  # its training says why
                grads = ()
        return outputs.detach(), torch.cat([torch.zeros(0), *(grad.reshape(-1).float() for grad in grads)])

    def _changed_by_backward(self) -> str | None:
        """A buffer that a backward pass changes, on a trial batch; None if there is none, or no backward pass."""
        params = [parameter for parameter in self.module.parameters() if parameter.requires_grad]
        with global_generators.kept(), functional_dropout.Recording(), self._dense_gradients(), torch.enable_grad():
            outputs = self.module(self._others(TRIAL_BATCHES[1]))
            before = {name: buffer.clone() for name, buffer in self.module.named_buffers()}
            with suppress(RuntimeError, ValueError):  # its training says why
                torch.autograd.grad(outputs.sum(), params, allow_unused=True)
        after = self.module.named_buffers()
        return next((name for name, buffer in after if not torch.equal(buffer, before[name])), None)

    def why_only_sequential(self) -> str | None:
        changed = self.effects.changed
        if self.draws_in_python:
            return "its forward pass draws from the global generator of NumPy or `random`"
        owners = dict(self.module.named_modules())
        if scripted := [name for name, part in owners.items() if isinstance(part, torch.jit.ScriptModule)]:
            return (
                f"{f'module {scripted[0]}' if scripted[0] else 'it'} is TorchScript, whose tensors cannot be replaced"
            )
        for name in self.spec.names[: self.spec.num_params]:
            if name in changed:
                return f"its forward pass changes the parameter {name}"
        if changed and (buffer := self._changed_by_backward()):
            return f"its backward pass changes the buffer {buffer}, as checkpoints do that repeat forward passes"
        if hooked := with_gradient_hooks(self.module):
            return f"its parameter {hooked[0]} has a gradient hook"
        for name, _ in self.module.named_buffers():
            replaced = name in self.effects.replaced
            owner = owners[name.rpartition(".")[0]]
            counts = isinstance(owner, nn.modules.batchnorm._NormBase)  # num_batches_tracked
            if replaced or (name in changed and name not in self.spec.names and not counts):
                return f"its forward pass {'replaces' if replaced else 'changes'} the buffer {name}"
        return None
