"""Trial of a network before a run: it is built, called on two samples, and compared with another one of its factory."""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor, nn

from cfl_ray.core import global_generators
from cfl_ray.errors import ConfigError, some_of
from cfl_ray.models.factory import ModelRecipe
from cfl_ray.nn.fingerprints import fingerprint_of
from cfl_ray.nn.functional_dropout import Recording
from cfl_ray.nn.network import new_module
from cfl_ray.nn.places import layer_of
from cfl_ray.nn.unregistered import Unregistered, unregistered_in
from cfl_ray.plugins.calling import explained

_TRIES = 16  # seeds of passes in evaluation, if these draw random numbers
_ROUNDING = 1e-5  # of the largest value: the same pass computes different last digits if tensors lie elsewhere
_NAMED = 5  # names in a message
_listed = partial(some_of, most=_NAMED)


def tried(recipe: ModelRecipe, seed: int) -> ModelRecipe:
    """The recipe with what the trial found: warnings, and fingerprints of constant tensors.

    Raises ConfigError if clients cannot train the network, or if its parameters and buffers are not all of it.
    """
    module = _built(recipe, seed)
    _check_parameters(recipe, module)
    first, other = _built(recipe, seed), _built(recipe, seed + 1)
    warnings, buffers = _same_seed(recipe, first, module)
    drew = {training: _check_forward(recipe, module.train(training)) for training in (False, True)}
    _check_own_memory(recipe, first, other)
    _check_shapes(recipe, first, other)
    outside, of_other = unregistered_in(first), unregistered_in(other)
    constants = buffers | {
        name: tensor for name, tensor in outside.tensors.items() if _equal(tensor, of_other.tensors.get(name))
    }
    fingerprints = {name: fingerprint_of(tensor) for name, tensor in constants.items()}
    warnings += _unregistered(recipe, outside) or _check_batches(recipe, module.eval())
    _check_answers(recipe, first, other, drew)
    _check_gradient(recipe, module.train())
    return replace(recipe, warnings=tuple(warnings), constants=fingerprints)


def _built(recipe: ModelRecipe, seed: int) -> nn.Module:
    """The first module under a seed. Raises ConfigError for an error in the factory."""
    try:
        return new_module(recipe, seed, 0)
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(
            f"model {recipe.place} cannot be built with ({recipe.arguments}): {_explained(recipe, error)}"
        ) from error


def _explained(recipe: ModelRecipe, error: Exception) -> str:
    return explained(recipe.factory, error) + layer_of(error)


def _check_parameters(recipe: ModelRecipe, module: nn.Module) -> None:
    if not any(parameter.requires_grad for parameter in module.parameters()):
        raise ConfigError(f"model {recipe.place} has no parameter to train, expected at least 1")
    for name, parameter in module.named_parameters():
        if parameter.requires_grad and parameter.dtype != torch.float32:
            kind = str(parameter.dtype).removeprefix("torch.")
            cure = (
                "make it of a float32 parameter with a last axis of 2: torch.view_as_complex(parameter)"
                if parameter.is_complex()
                else "call .float(); runtime.precision sets what passes are computed in"
            )
            raise ConfigError(
                f"model {recipe.place}: the parameter {name} is {kind}, those that are trained must be float32; {cure}"
            )
        if parameter._post_accumulate_grad_hooks:
            raise ConfigError(
                f"model {recipe.place}: the parameter {name} has a hook of register_post_accumulate_grad_hook, which "
                "no engine calls, since gradients are not accumulated in parameters; use register_hook"
            )


_TOKENS = "the inputs are token ids, so name a model that begins with nn.Embedding, as in examples/text.py"


def _check_forward(recipe: ModelRecipe, module: nn.Module) -> bool:
    """Raises ConfigError for a pass that fails. Returns whether it draws random numbers, other than for dropout."""
    samples = "samples" if recipe.dtype.is_floating_point else f"{recipe.dtype} samples"
    mode = " in training mode" if module.training else ""
    try:
        with torch.no_grad(), global_generators.seeded(0), Recording() as dropouts:
            before = global_generators.states()
            outputs = module(recipe.samples())
            draws = before != global_generators.states()
    except Exception as error:
        embeds = any(isinstance(part, nn.Embedding | nn.EmbeddingBag) for part in module.modules())
        remedy = "; " + _TOKENS if not (recipe.dtype.is_floating_point or embeds) else ""
        raise ConfigError(
            f"model {recipe.place} does not take {samples} of shape {recipe.input_shape}{mode}: "
            f"{_explained(recipe, error)}{remedy}"
        ) from error
    if dropouts.calls and not module.training:
        _raise_dropout(recipe, module)
    if not isinstance(outputs, Tensor):
        _raise_outputs(recipe, outputs, mode)
    expected = (2, *(recipe.outputs or (recipe.num_classes,)))
    if tuple(outputs.shape) != expected:
        need = f"the data has {recipe.num_classes} classes: its output size must be {recipe.num_classes}"
        if recipe.outputs:
            need = f"the targets of the data need {expected}"
        raise ConfigError(f"model {recipe.place} answers 2 samples with shape {tuple(outputs.shape)}, but {need}")
    return draws


def _check_batches(recipe: ModelRecipe, module: nn.Module) -> list[str]:
    """A warning of a network that does not take one sample; none without. Raises ConfigError if it is three.

    Batches have any size: the last one of a client, and those of a test.
    """
    if problem := _problem_of_batch(recipe, module, 3):
        raise ConfigError(f"model {recipe.place} takes a batch of 2 samples, but {problem}; batches have any size")
    if problem := _problem_of_batch(recipe, module, 1):
        return [
            f"model {recipe.place} {problem}: a batch of one sample, such as a client's last one, may end the run; if "
            "the model calls squeeze(), write squeeze(dim)"
        ]
    return []


def _problem_of_batch(recipe: ModelRecipe, module: nn.Module, size: int) -> str | None:
    x = recipe.others()[torch.arange(size) % 2]
    try:
        with torch.no_grad(), global_generators.seeded(0):
            shape = tuple(module(x).shape)
    except Exception as error:
        return f"does not take a batch of {size}: {_explained(recipe, error)}"
    expected = (size, *(recipe.outputs or (recipe.num_classes,)))
    return None if shape == expected else f"answers a batch of {size} with shape {shape}, expected {expected}"


def _raise_dropout(recipe: ModelRecipe, module: nn.Module) -> NoReturn:
    outside = unregistered_in(module).modules
    unreached = [path for path, part in outside.items() if part.training and not _is_inside(path, outside)]
    if unreached:
        raise ConfigError(
            f"model {recipe.place} drops values in evaluation, since module.eval() does not reach {_listed(unreached)} "
            f"({type(outside[unreached[0]]).__name__}), in a list, a dict or another attribute that is no module: "
            "predictions would be random; use nn.ModuleList or nn.ModuleDict"
        )
    raise ConfigError(
        f"model {recipe.place} calls functional dropout in evaluation, where predictions would be random; write "
        "F.dropout(x, p, self.training)"
    )


def _raise_outputs(recipe: ModelRecipe, outputs: Any, mode: str) -> NoReturn:
    remedy = "return the tensor with the outputs"
    if mode:
        remedy = "leave out auxiliary outputs (torchvision: aux_logits=False), which the loss would not use"
    elif isinstance(outputs, Mapping):
        remedy = f"return one of its entries ({_listed([str(name) for name in outputs])})"
    raise ConfigError(
        f"model {recipe.place} answers with {type(outputs).__name__}{mode}, expected one tensor; {remedy}"
    )


def _agree(a: Tensor, b: Tensor) -> bool:
    """Whether values are equal up to rounding."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    if not (a.is_floating_point() or a.is_complex()):
        return torch.equal(a, b)
    largest = float(a.abs().nan_to_num(0, 0, 0).max()) if a.numel() else 0.0
    return torch.allclose(a, b, rtol=0, atol=_ROUNDING * largest, equal_nan=True)


def _check_gradient(recipe: ModelRecipe, module: nn.Module) -> None:
    trained = {name: parameter for name, parameter in module.named_parameters() if parameter.requires_grad}
    try:
        for _ in range(2):
            with global_generators.kept():
                outputs = module(recipe.samples())
            if not outputs.requires_grad:
                raise ValueError("its outputs have no gradient; do not use detach, no_grad or NumPy in forward")
            torch.autograd.grad(outputs.sum(), list(trained.values()), allow_unused=True)
    except Exception as error:
        raise ConfigError(f"model {recipe.place} cannot be trained: {_explained(recipe, error)}") from error
    if any(parameter.requires_grad != (name in trained) for name, parameter in module.named_parameters()):
        raise ConfigError(f"model {recipe.place} changes requires_grad of its parameters in forward, which must stay")


# ---- answers of two modules, and of one a second time


class _Answer(NamedTuple):
    """Of a pass: its outputs, whether it draws random numbers, and the buffers that it changes."""

    outputs: Tensor
    draws: bool
    changed: list[str]


def _check_answers(recipe: ModelRecipe, first: nn.Module, other: nn.Module, drew: dict[bool, bool]) -> None:
    """Raises ConfigError if answers depend on anything but samples, parameters, buffers and, in training, seeds.

    Both modules are new, and get all parameters and buffers of the first before a pass. So what differs then, and what
    answers differ by, is in none of them. Passes also compute what follows from parameters, such as weights of
    weight_norm. drew: whether the first pass of an earlier module drew random numbers, by whether it was in training.
    """
    state = _tensors(first)
    for training in (False, True):
        _restore(first, state)
        _restore(other, state)
        answer, again = _twice(recipe, first.train(training), 0)
        if not training and answer.changed:  # it may depend on samples of earlier passes
            _answer(recipe, first, 0, 3 * recipe.others() if recipe.dtype.is_floating_point else recipe.samples())
            again = _answer(recipe, first, 0)
        if not _agree(answer.outputs, again.outputs):
            _raise_changing(recipe, training, answer.changed or again.changed)
        if not training and again.draws:
            _check_draws(recipe, first, answer)
        outside = unregistered_in(first)
        # answers in evaluation are the same under another seed, unless the first pass draws buffers
        seed = 0 if training or answer.changed else 1
        # as many passes as of the first, if these change values that it holds
        other.train(training)
        of_other = _twice(recipe, other, seed)[0] if outside.tensors else _answer(recipe, other, seed)
        outside_of_other = unregistered_in(other)
        _check_outside(recipe, outside, outside_of_other)
        if not again.draws and (training or not answer.changed) and (drew[training] or answer.draws):
            raise ConfigError(
                f"model {recipe.place} draws random numbers in its first forward pass{' in training' * training}, and "
                "keeps them outside its buffers: other processes would draw others, and the saved model lacks them; "
                "draw them in __init__, and write self.register_buffer(name, ...)"
            )
        if not _agree(answer.outputs, of_other.outputs):
            raise ConfigError(
                f"model {recipe.place} built twice answers the same samples differently, with the same parameters and "
                f"buffers{_causes(outside, outside_of_other)}: the saved model would not be the trained one; give such "
                "values as options, or keep them in a buffer (register_buffer)"
            )


def _answer(recipe: ModelRecipe, module: nn.Module, seed: int, x: Tensor | None = None) -> _Answer:
    """The answer to two samples with this seed of the global generators. x: the samples; None: `recipe.others()`."""
    buffers = {name: buffer.clone() for name, buffer in module.named_buffers()}
    try:
        with torch.no_grad(), global_generators.seeded(seed):
            before = global_generators.states()
            outputs: Tensor = module(recipe.others() if x is None else x)
            draws = before != global_generators.states()
    except Exception as error:
        values = "samples between 0 and 1" if recipe.dtype.is_floating_point else "samples of token 1"
        raise ConfigError(f"model {recipe.place} does not take {values}: {_explained(recipe, error)}") from error
    changed = [name for name, buffer in module.named_buffers() if not _equal(buffer, buffers.get(name), exact=True)]
    return _Answer(outputs.clone(), draws, changed)


def _twice(recipe: ModelRecipe, module: nn.Module, seed: int) -> tuple[_Answer, _Answer]:
    """The answers of two passes; of the second in training, with the buffers from before the first."""
    state = _tensors(module) if module.training else {}
    answer = _answer(recipe, module, seed)
    _restore(module, state)
    return answer, _answer(recipe, module, seed)


def _check_draws(recipe: ModelRecipe, module: nn.Module, answer: _Answer) -> None:
    """Raises ConfigError if predictions depend on random numbers."""
    for seed in range(1, _TRIES):
        if not _agree(answer.outputs, _answer(recipe, module, seed).outputs):
            raise ConfigError(
                f"model {recipe.place} answers the same samples differently in evaluation, because it draws random "
                "numbers there: predictions would not be those that were recorded; draw only in training: "
                "if self.training"
            )


def _raise_changing(recipe: ModelRecipe, training: bool, changed: list[str]) -> NoReturn:
    where = f"model {recipe.place} answers the same samples differently the second time, in"
    if training:
        raise ConfigError(
            f"{where} training, with the same parameters, buffers and seeds: its forward pass depends on Python state "
            "that it changes (a counter, a cache), or on a random generator of its own; then results depend on the "
            "process; draw with torch, and keep state in a buffer"
        )
    cause = "depends on Python state that it changes, or on a random generator of its own"
    if changed:
        cause = f"changes {_listed(changed)}; change buffers only in training: if self.training"
    raise ConfigError(f"{where} evaluation: its forward pass {cause}; then results depend on the process")


# ---- comparison of modules that the factory makes under the same seed, and under another


def _check_own_memory(recipe: ModelRecipe, first: nn.Module, other: nn.Module) -> None:
    """Raises ConfigError if two modules of the factory share a trained parameter."""
    of_other = dict(other.named_parameters())
    for name, parameter in first.named_parameters():
        if not parameter.requires_grad or not parameter.numel():  # an empty tensor has no memory
            continue
        if name in of_other and of_other[name].data_ptr() == parameter.data_ptr():
            raise ConfigError(
                f"model {recipe.place} returns a module with the same parameter {name} in every call, so that all "
                "models would be one: build a new module in the factory, or return copy.deepcopy(module)"
            )


def _check_shapes(recipe: ModelRecipe, first: nn.Module, other: nn.Module) -> None:
    shapes, others = ({name: t.shape for name, t in _tensors(module).items()} for module in (first, other))
    if shapes != others:
        raise ConfigError(
            f"model {recipe.place} has parameters or buffers of other names or shapes in another call of its factory, "
            "with another seed; every call must give the same ones"
        )


def _same_seed(recipe: ModelRecipe, first: nn.Module, again: nn.Module) -> tuple[list[str], dict[str, Tensor]]:
    """Warnings of two modules made under the same seed, and the buffers outside rows. Raises ConfigError."""
    ours, theirs = _tensors(first), _tensors(again)
    differ = [name for name, tensor in ours.items() if not _equal(tensor, theirs.get(name), exact=True)]
    persistent, parameters = first.state_dict().keys(), dict(first.named_parameters())
    outside = {
        name: tensor
        for name, tensor in ours.items()
        if name not in parameters and not (tensor.dtype == torch.float32 and name in persistent)
    }
    draw = "draw with the global generator of PyTorch, NumPy or `random`, which have the seed of the run"
    if lost := [name for name in differ if name in outside]:
        raise ConfigError(
            f"model {recipe.place}: the buffer {lost[0]} differs between two modules made under the same seed, so it "
            f"would differ between processes; {draw}"
        )
    counters = {name for name, tensor in outside.items() if not tensor.ndim and not tensor.is_floating_point()}
    constant = {name: tensor for name, tensor in outside.items() if name not in counters or tensor.any()}
    if differ:
        return [
            f"model {recipe.place}: {_listed(differ)} differ{'s' * (len(differ) == 1)} between two modules made under "
            f"the same seed, so a run with the same seed has other results; {draw}"
        ], constant
    return [], constant


def _equal(tensor: Tensor, other: Tensor | None, exact: bool = False) -> bool:
    if other is None or tensor.shape != other.shape or tensor.dtype != other.dtype or tensor.layout != other.layout:
        return False
    if tensor.layout != torch.strided or tensor.is_quantized:
        tensor, other = ((t.dequantize() if t.is_quantized else t.to_dense()) for t in (tensor, other))
    if exact:
        return torch.equal(tensor, other) or bool(((tensor == other) | (tensor != tensor)).all())
    return _agree(tensor, other)


def _check_outside(recipe: ModelRecipe, outside: Unregistered, of_other: Unregistered) -> None:
    """Raises ConfigError for a tensor outside parameters and buffers that differs between modules."""
    differ = [
        name
        for name, tensor in outside.tensors.items()
        if name in of_other.tensors and not _equal(tensor, of_other.tensors[name])
    ]
    if not differ:
        return
    if any(name in outside.parameters or _is_inside(name, outside.modules) for name in differ):
        raise ConfigError(
            f"{_untrained(recipe, outside)}; since their values are drawn at random, a model that is loaded again "
            "would be another one"
        )
    are = "are tensors or arrays" if len(differ) > 1 else "is a tensor or array"
    raise ConfigError(
        f"model {recipe.place}: {_listed(differ)} {are} with other values in another call of the factory, and neither "
        "parameter nor buffer: the saved model lacks them and would predict something else; write "
        f"self.register_buffer({_own_name(differ[0])!r}, ...)"
    )


def _is_inside(path: str, outer: Iterable[str]) -> bool:
    return any(path.startswith((f"{other}.", f"{other}[")) for other in outer)


def _own_name(path: str) -> str:
    return path.rpartition(".")[2].partition("[")[0].rpartition(" ")[2]


def _causes(outside: Unregistered, of_other: Unregistered) -> str:
    """The numbers, texts and functions of two modules that differ, for messages; empty without any."""
    ours, theirs = ({name: f"{value:g}" for name, value in h.numbers.items()} | h.others for h in (outside, of_other))
    causes = [
        f"{name} is {ours[name]} and {theirs[name]}" for name in ours if theirs.get(name, ours[name]) != ours[name]
    ]
    return f" ({'; '.join(causes[:_NAMED])})" if causes else ""


def _unregistered(recipe: ModelRecipe, outside: Unregistered) -> list[str]:
    """A warning of parameters and buffers in modules that are not registered; none without any."""
    buffers = any(True for part in outside.modules.values() for _ in part.buffers())
    return [_untrained(recipe, outside)] if buffers or any(outside.parameters.values()) else []


def _untrained(recipe: ModelRecipe, outside: Unregistered) -> str:
    """The line for parameters that the module holds where PyTorch does not find them."""
    outer = [path for path in outside.modules if not _is_inside(path, outside.modules)]
    alone = [path for path in outside.parameters if not _is_inside(path, outer)]
    number = sum(outside.parameters.values())
    parameters = f"{number:,} parameters" if number else "tensors"
    modules = [f"{path} ({type(outside.modules[path]).__name__})" for path in outer]
    use = "nn.ModuleList or nn.ModuleDict" if outer else "nn.ParameterList or nn.ParameterDict"
    return (
        f"model {recipe.place}: PyTorch does not find {_listed([*modules, *alone])}, in a list, a dict or another "
        f"attribute that is no module: their {parameters} are not trained, averaged or saved; use {use}"
    )


# ---- tensors of a module


def _tensors(module: nn.Module) -> dict[str, Tensor]:
    """Copies of all parameters and buffers."""
    tensors = dict(module.named_parameters()) | dict(module.named_buffers())
    return {name: tensor.detach().clone() for name, tensor in tensors.items()}


@torch.no_grad()
def _restore(module: nn.Module, tensors: dict[str, Tensor]) -> None:
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if name in tensors and tensors[name].shape == tensor.shape:
            tensor.copy_(tensors[name])
