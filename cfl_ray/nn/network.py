"""The network of a process, into which rows (P,) of parameters and buffers are loaded."""

import copy
from collections.abc import Callable, Collection, Hashable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.func import functional_call

from cfl_ray.core import global_generators
from cfl_ray.core.params import Columns, ParamSpec
from cfl_ray.core.rng import torch_stream
from cfl_ray.core.tasks import CLASSIFICATION, Task
from cfl_ray.errors import ConfigError, RunError
from cfl_ray.nn import functional_dropout
from cfl_ray.nn.device_memory import DeviceMemory, copied_to, device_of
from cfl_ray.nn.layers import replace_layers
from cfl_ray.nn.layout import inexact_functions, suits_channels_last
from cfl_ray.nn.plain import DenseGradients, plain
from cfl_ray.nn.pooling import FastPooling
from cfl_ray.nn.precision import autocast
from cfl_ray.nn.shared import FrozenParameter
from cfl_ray.nn.splitmix import Keys, split
from cfl_ray.nn.trial_passes import TRIAL_BATCHES, TrialPasses, dropouts_of, samples, tried, with_gradient_hooks

_TEST_BATCH = 1024
_TEST_BATCH_CPU = 256  # activations of a small batch stay in the cache (twice as fast on a LeNet-5)


def _channels_last(x: Tensor) -> Tensor:
    """A copy with channels-last strides.

    Also for a single channel: both layouts are then the same in memory, so `Tensor.contiguous` keeps the strides, but
    kernels are selected by strides.
    """
    return torch.empty_like(x, memory_format=torch.channels_last).copy_(x)


def _laid_out(x: Tensor, channels_last: bool) -> Tensor:
    """The tensor itself if its memory has that layout, else a copy."""
    form = torch.channels_last if channels_last else torch.contiguous_format
    if x.stride() == torch.empty_like(x, device="meta", memory_format=form).stride():
        return x
    return torch.empty_like(x, memory_format=form).copy_(x)


def _with_copies(_: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Copies of the samples for a forward pass that writes to them."""
    return tuple(x.clone() for x in inputs)


def new_module(factory: Callable[[], nn.Module], seed: int, index: int) -> nn.Module:
    """The `index`-th independent initialisation under `seed`."""
    with global_generators.kept():  # initialisers of torch.nn draw from the global generator
        word = torch_stream(seed, -1, -1, index, "init").initial_seed()
        global_generators.seed_all(word, torch.cuda.is_available())
        return plain(factory())


def template_of(
    factory: Callable[[], nn.Module], seed: int, input_shape: tuple[int, ...], dtype: torch.dtype = torch.float32
) -> nn.Module | None:
    """The first module under `seed`, whose copies in `Network` share the memory of frozen parameters.

    None if no parameter is frozen, or if a parameter has gradient hooks, which copies lose.
    """
    module = new_module(factory, seed, 0)
    if all(parameter.requires_grad for parameter in module.parameters()) or with_gradient_hooks(module):
        return None
    x = samples(TRIAL_BATCHES[0], tuple(input_shape), dtype)
    if suits_channels_last(module) and not inexact_functions(new_module(factory, seed, 0), x):
        for parameter in module.parameters():
            if parameter.ndim == 4 and not parameter.requires_grad:
                parameter.data = _laid_out(parameter.data, channels_last=True)
    FrozenParameter.replace_in(module)
    return module


def _tied(module: nn.Module) -> dict[str, str]:
    """Further names of parameters and buffers that several modules have, or one by several names, with the first.

    A module that has several names itself is listed by its first alone.
    """
    first, further = dict[int, str](), dict[str, str]()
    for path, part in module.named_modules():
        own = {"remove_duplicate": False, "recurse": False}
        for name, tensor in [*part.named_parameters(path, **own), *part.named_buffers(path, **own)]:
            if first.setdefault(id(tensor), name) != name:
                further[name] = first[id(tensor)]
    return further


def _kind(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


_TRIALS: dict[Hashable, TrialPasses] = {}  # of this process, by `Network.key`


class Network:
    """A module whose trained parameters and float buffers are views into one flat row.

    factory:      builds the module; called once per independent initialisation.
    input_shape:  shape of one sample.
    dtype:        of the inputs: float32, or int64 for token ids.
    task:         the learning task.
    precision:    of the passes in training: float32, tf32 or bf16. Parameters are always float32.
    memory_share: of the device's memory that this process may use.
    seed:         of the run: frozen parameters are those of the first model under it.
    template:     a module of the factory with these frozen parameters; the network's module is a copy that shares their
                  memory. None: the factory builds the module.
    key:          equal for networks whose modules differ by their weights alone: a process makes the trial passes and
                  the graph of the first one on a device, as others would have the same. None: of each network.

    wide:          whether this device computes the convolutions faster channels-last.
    channels_last: the layout of images in the module's passes: channels-last if it is faster and as exact.
    dropouts:      dropout layers and calls of functional dropout whose masks engines draw, by name.
    dropout_calls: of these, the calls of functional dropout.

    The other public attributes that `__init__` does not explain are those of `TrialPasses`.
    """

    def __init__(
        self,
        factory: Callable[[], nn.Module],
        input_shape: tuple[int, ...],
        device: str = "cpu",
        dtype: torch.dtype = torch.float32,
        task: Task = CLASSIFICATION,
        precision: str = "float32",
        memory_share: float = 1.0,
        seed: int = 0,
        template: nn.Module | None = None,
        key: Hashable | None = None,
    ):
        self.task = task
        self.factory, self.input_shape, self.device = factory, tuple(input_shape), device_of(device)
        self.dtype, self.precision = dtype, precision
        self.memory = DeviceMemory(self.device, memory_share)
        self.key = None if key is None else (key, self.device.type)
        self.seed, self.template = seed, template
        self.module, trial, row_P = self._tried_module()
        self.output_shape, self.last_layer, self.inexact = trial.output_shape, trial.last_layer, trial.inexact
        self.random_forward, self.batch_statistics = trial.random_forward, trial.batch_statistics
        self.side_effect, self._trial = trial.side_effect, trial
        self._collect_dropouts()
        if trial.effects.inputs:
            self.module.register_forward_pre_hook(_with_copies)
        self._check_statistics()
        self.module.eval()
        self._check_layout(self.module, "after a forward pass")
        self.module.to(self.device)
        self.recurrent = any(isinstance(m, nn.RNNBase) for m in self.module.modules())
        self.params: list[Tensor] = [p for p in self.module.parameters() if p.requires_grad]
        self._trains = [
            (name, parameter, parameter.requires_grad) for name, parameter in self.module.named_parameters()
        ]
        self.channels_last = self.wide and not self.inexact
        self.flat = row_P.to(self.device)
        self._bind_to_flat()
        self.load(row_P)

    def _tried_module(self) -> tuple[nn.Module, TrialPasses, Tensor]:
        """The module after its trial passes, which change its buffers, what they show, and its row (P,) before them.

        Sets `tied`, `spec`, `wide`, and buffers that are not part of a row with their first values: `outside`, those of
        the factory, and `counters`, of all that may change in a forward pass, to which `load` resets them.
        """
        trial = _TRIALS.get(self.key)
        module = self._first_module(frozenset() if trial is None else trial.kept_dropouts)
        self.tied, spec = _tied(module), ParamSpec.of(module)
        row_P = spec.row_of(module)
        rest = {name: buffer.clone() for name, buffer in module.named_buffers() if name not in spec.names}
        masks = {f"{name}.mask" for name in dropouts_of(module)}
        self.outside = {name: buffer for name, buffer in rest.items() if name not in masks}
        self.wide = self.device.type == "cpu" and suits_channels_last(module)
        if trial is None:
            module, trial = tried(module, self._first_module, spec, self.input_shape, self.dtype, self.wide)
            if self.key is not None:
                _TRIALS[self.key] = trial
        changed = trial.effects.changed
        statistics = frozenset(spec.names[spec.num_params :])
        self.spec = replace(spec, constant=statistics - changed, not_linear=trial.not_linear)
        self.counters = {
            name: initial.to(self.device)
            for name, initial in rest.items()
            if not (initial.is_floating_point() or initial.is_complex()) or name in changed
        }
        return module, trial, row_P

    def _first_module(self, kept_dropouts: Collection[str]) -> nn.Module:
        """A module with the frozen parameters of the run."""
        module = new_module(self.factory, self.seed, 0) if self.template is None else copy.deepcopy(self.template)
        replace_layers(module, kept_dropouts)
        return module

    def _build(self, seed: int, index: int) -> nn.Module:
        module = new_module(self.factory, seed, index)
        replace_layers(module, self._trial.kept_dropouts)
        return module

    def _collect_dropouts(self) -> None:
        """Sets `dropouts` and `dropout_calls`."""
        layers = dropouts_of(self.module)
        for name, layer in layers.items():
            layer.sample_shape = self._trial.sample_shapes[name]
        self.dropout_calls = {f"call {number}": call.layer() for number, call in enumerate(self._trial.calls)}
        self.dropouts = {name: m for name, m in layers.items() if m.sample_shape is not None} | self.dropout_calls

    def new_model(self, seed: int, index: int) -> Tensor:
        """Row (P,) of the `index`-th independent initialisation under `seed`.

        Raises ConfigError if its trained parameters or buffers differ from those of the first model.
        """
        module = self._build(seed, index)
        self._check_layout(module, "in another call of its factory")
        return self.spec.row_of(module)

    def _check_layout(self, module: nn.Module, when: str) -> None:
        other = ParamSpec.of(module)
        if other != self.spec:
            ours, theirs = (dict(zip(spec.names, spec.shapes, strict=True)).items() for spec in (self.spec, other))
            name = sorted(ours ^ theirs, key=str)[0][0] if ours ^ theirs else "their order"
            raise ConfigError(
                f"the model has other trained parameters or buffers {when} ({name} differs); every call of the factory "
                "must give the same ones, with the same requires_grad, which stays"
            )

    def check_trained(self) -> None:
        """Raises RunError if passes in training have changed which parameters are trained."""
        for name, parameter, trains in self._trains:
            if parameter.requires_grad != trains:
                raise RunError(
                    f"the model's parameter {name} {'is no longer' if trains else 'is now'} trained (requires_grad is "
                    f"{parameter.requires_grad}, before the run {trains}): its forward pass changes requires_grad, "
                    "which must stay; set it in the factory"
                )

    def _check_statistics(self) -> None:
        """Raises ConfigError for a buffer that forward passes change, that is saved, and that no row can hold."""
        persistent = self.module.state_dict().keys()
        for name, initial in self.outside.items():
            numbers = initial.is_floating_point() or initial.is_complex()
            if numbers and name in self._trial.effects.changed and name in persistent:
                raise ConfigError(
                    f"forward passes change the model's buffer {name}, of {_kind(initial)}: it can only be averaged as "
                    "float32; register it as float32, or with persistent=False if it need not be saved"
                )

    @property
    def constants(self) -> dict[str, Tensor]:
        """The tensors of a state dictionary that are no part of a row, by name, on the CPU, with their first values."""
        persistent = self.module.state_dict().keys()
        return self.frozen | {name: buffer for name, buffer in self.outside.items() if name in persistent}

    @property
    def constant_buffers(self) -> dict[str, Tensor]:
        """The buffers outside the row that no forward pass changes, by name."""
        outside = self._trial.effects.changed.union(self.spec.names)
        return {name: buffer for name, buffer in self.module.named_buffers() if name not in outside}

    @property
    def frozen(self) -> dict[str, Tensor]:
        """The parameters that are not trained, by name, on the CPU; not copies."""
        return {name: p.detach().cpu() for name, p in self.module.named_parameters() if not p.requires_grad}

    @torch.no_grad()
    def why_not_batch_of(self, size: int) -> str | None:
        """The error of a forward pass in training mode on `size` samples; None if it succeeds."""
        module = self._first_module(self._trial.kept_dropouts).train()
        try:
            with global_generators.kept():
                module(torch.zeros(size, *self.input_shape, dtype=self.dtype))
        except ValueError as error:
            return str(error)
        return None

    def _bind_to_flat(self) -> None:
        """Makes trained parameters and float buffers views into `flat`; weights in channels-last layout are copies."""
        # parameters in another memory layout or memory, with their view into `flat`
        self.reordered: list[tuple[nn.Parameter, Tensor]] = []
        # float buffers that a forward pass replaces: module, name and view into `flat`
        self._replaced: list[tuple[nn.Module, str, Tensor]] = []
        views = self.spec.tensors(self.flat)
        for name, parameter in self.module.named_parameters():
            if not parameter.requires_grad:
                if parameter.ndim == 4:
                    parameter.data = _laid_out(parameter.data, self.channels_last)
            elif self.channels_last and parameter.ndim == 4:
                parameter.data = _channels_last(views[name])
                self.reordered.append((parameter, views[name]))
            elif name in self._trial.effects.replaced:
                parameter.data = views[name].clone()
                self.reordered.append((parameter, views[name]))
            else:
                parameter.data = views[name]
        for path, module in self.module.named_modules():
            for name, buffer in list(module.named_buffers(recurse=False, remove_duplicate=False)):
                full = f"{path}.{name}" if path else name
                full = self.tied.get(full, full)
                if full not in views:
                    continue
                if isinstance(module, torch.jit.ScriptModule):  # its buffers cannot be replaced
                    buffer.data = views[full]
                else:
                    module._buffers[name] = views[full]
                    if full in self._trial.effects.replaced:
                        self._replaced.append((module, name, views[full]))
        buffers = dict(self.module.named_buffers())
        self._counted = [
            (buffers[n], initial) for n, initial in self.counters.items() if n not in self._trial.effects.replaced
        ]

    @torch.no_grad()
    def load(self, row_P: Tensor) -> None:
        """Copies a row (P,) into the parameters and buffers, and resets buffers that are not part of a row."""
        self.flat.copy_(row_P)
        for parameter, view in self.reordered:
            parameter.copy_(view)
        for module, name, view in self._replaced:
            module._buffers[name] = view
        for buffer, initial in self._counted:
            buffer.copy_(initial)
        for name in self._trial.effects.replaced & self.counters.keys():
            path, _, own = name.rpartition(".")
            self.module.get_submodule(path)._buffers[own] = self.counters[name].clone()

    @torch.no_grad()
    def load_trained(self, trained: Tensor) -> None:
        """Copies trained parameters (trained columns,) into the network; buffers keep their values."""
        self.flat[: self.spec.trained].copy_(trained)
        for parameter, view in self.reordered:
            parameter.copy_(view)

    @torch.no_grad()
    def row(self) -> Tensor:
        """The present row (P,) of the network, not a copy."""
        for parameter, view in self.reordered:
            view.copy_(parameter)
        for module, name, view in self._replaced:
            if module._buffers[name] is not view:
                view.copy_(module.get_buffer(name))
                module._buffers[name] = view
        return self.flat

    def views(self, row_P: Tensor) -> list[Tensor]:
        """Views into a row, one per trained tensor in the order of `params`."""
        return list(self.spec.tensors(row_P).values())[: self.spec.num_params]

    def tensors_in(self, columns: Columns | None) -> list[int]:
        """Indices of the trained tensors inside `columns`."""
        starts = (0, *self.spec.ends)[: self.spec.num_params]
        if columns is None:
            return list(range(self.spec.num_params))
        return [i for i, start in enumerate(starts) if any(a <= start < b for a, b in columns.ranges)]

    def input(self, x: Tensor) -> Tensor:
        """Samples on the network's device, in the memory layout of its weights."""
        x = copied_to(self.device, x)
        return _channels_last(x) if self.channels_last and x.ndim == 4 else x

    def masks(self, keys: Keys, number: int | Tensor, samples: int) -> list[Tensor]:
        """Masks (m, samples, ...) of the dropout layers for batch `number` of the clients with these keys."""
        first = number * len(self.dropouts)
        return [layer.draw(split(keys, first + i), samples) for i, layer in enumerate(self.dropouts.values())]

    def without_cudnn(self) -> AbstractContextManager[None]:
        """Context for a forward pass that cuDNN's recurrent layers do not support: with a gradient in evaluation mode
        or under vmap, or with a seed, which does not reset their dropout.

        No effect on a CPU and on networks without recurrent layers.
        """
        if self.recurrent and self.device.type == "cuda":
            return torch.backends.cudnn.flags(enabled=False)
        return nullcontext()

    def dense_gradients(self) -> AbstractContextManager[object]:
        """Context for a forward pass in which functions with sparse gradients have dense ones."""
        return DenseGradients() if self._trial.has_sparse_gradients else nullcontext()

    def trained_outputs(self, x: Tensor, tensors: dict[str, Tensor] | None = None) -> Tensor:
        """Outputs (B, ...), float32, of a forward pass in training, in the network's precision.

        tensors: parameters, buffers and masks, as NAME.mask, that replace those of the module and the dropouts.
        """
        masked: AbstractContextManager[object] = nullcontext()
        if self.dropout_calls:
            names = [f"{name}.mask" for name in self.dropout_calls]
            own = [layer.mask for layer in self.dropout_calls.values()]
            masks = own if tensors is None else [tensors[name] for name in names]
            masked = functional_dropout.Masked(list(self.dropout_calls.values()), masks)
            tensors = None if tensors is None else {k: v for k, v in tensors.items() if k not in names}
        with autocast(self.precision, self.device), masked, self.dense_gradients():
            outputs = self.module(x) if tensors is None else self._called(tensors, x)
        return outputs.float()

    def _called(self, tensors: dict[str, Tensor], x: Tensor) -> Tensor:
        """The module's answer with these tensors in place of those of these names.

        Tied names are given here: `functional_call` gives a module of two names the tensors twice, and takes the first
        ones for its own afterwards.
        """
        tied = {name: tensors[first] for name, first in self.tied.items() if first in tensors}
        return cast(Tensor, functional_call(self.module, tensors | tied, (x,), tie_weights=False))

    @contextmanager
    def draws_from(self, seed: int) -> Iterator[None]:
        """Context in which the global generators have this seed; their states are restored at its end."""
        on_gpu = self.device.type == "cuda"
        with global_generators.kept([self.device] if on_gpu else []), self.without_cudnn():
            global_generators.seed_all(seed, on_gpu)
            yield

    def check_features(self) -> None:
        """Raises ConfigError unless a forward pass shows the inputs of the last layer, one row for each sample."""
        self.module.eval()
        with torch.no_grad(), self.kept_features() as features:
            self.module(self.input(samples(2, self.input_shape, self.dtype)))
        if len(features) != 1 or len(features[0]) != 2:
            raise ConfigError(
                f"the inputs of the last layer ({self.spec.layers[-1]}) are needed: a forward pass of 2 samples must "
                f"call it once, as a module, on 2 rows of features; it calls it on {len(features) or 'no'} "
                f"inputs{f' of shape {tuple(features[0].shape)}' if features else ''}"
            )

    def squashing(self) -> str:
        """The softmax or sigmoid from which the outputs come, and its place, in words; empty: from neither."""
        ends, layers = dict[str, Tensor](), dict(self.module.named_modules())
        hooks = [
            module.register_forward_hook(lambda module, inputs, output, name=name: ends.update({name: output}))
            for name, module in layers.items()
            if isinstance(module, nn.Softmax | nn.Sigmoid)
        ]
        self.module.eval()
        try:
            with torch.enable_grad():
                outputs = self.module(self.input(samples(2, self.input_shape, self.dtype)))
        finally:
            for hook in hooks:
                hook.remove()
        kind = {"SoftmaxBackward0": "softmax", "SigmoidBackward0": "sigmoid"}.get(type(outputs.grad_fn).__name__)
        place = next((f"layer {name!r}" for name, output in ends.items() if output is outputs), "its forward")
        return f"{kind} ({place})" if kind else ""

    @contextmanager
    def kept_features(self) -> Iterator[list[Tensor]]:
        """Context in which each forward pass adds the inputs of the last layer, (B, F), to a list."""
        features: list[Tensor] = []

        def keep(module: nn.Module, inputs: tuple[Any, ...]) -> None:
            if inputs and isinstance(inputs[0], Tensor) and inputs[0].ndim > 1:
                features.append(inputs[0].flatten(1))

        last = dict(self.module.named_modules())[self.spec.layers[-1]]
        if isinstance(last, torch.jit.ScriptModule):
            raise ConfigError(
                f"the inputs of the last layer ({self.spec.layers[-1]}) are needed, which TorchScript does not show; "
                "give the module as it was before torch.jit"
            )
        handle = last.register_forward_pre_hook(keep)
        try:
            yield features
        finally:
            handle.remove()

    @torch.no_grad()
    def evaluated(self, row_P: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        """Features (B, F) and outputs (B, *output_shape), float32, of a row in evaluation mode, which is not loaded.

        It may be called under vmap, and leaves the module in the mode in which it was.
        """
        was_training = self.module.training
        self.module.eval()
        try:
            with self.kept_features() as features, self.without_cudnn(), autocast(self.precision, self.device):
                outputs = self._called(self.spec.tensors(row_P), x)
        finally:
            self.module.train(was_training)
        return features[-1].float(), outputs.float()

    def evaluated_in_batches(self, row_P: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        """As `evaluated`, of any number of samples on a CPU."""
        with FastPooling():
            parts = [self.evaluated(row_P, self.input(part)) for part in x.split(_TEST_BATCH_CPU)]
        features, outputs = zip(*parts, strict=True)
        return torch.cat(features), torch.cat(outputs)

    @torch.no_grad()
    def logits(self, x: Tensor) -> Tensor:
        """Outputs (n, *output_shape) of the loaded row in evaluation mode."""
        self.module.eval()

        def outputs(batch: int) -> Tensor:
            with FastPooling() if self._trial.pools else nullcontext():
                return torch.cat([self.module(self.input(part)) for part in x.split(batch)])

        batch = _TEST_BATCH_CPU if self.device.type == "cpu" else _TEST_BATCH
        return self.memory.in_batches_of("test", batch, outputs)
