"""Client programs on a host: what a client holds for its program, and the hooks outside of the local steps."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cfl_ray.core.client_program import ClientProgram, Held, as_numbers, first_numbers, lengths
from cfl_ray.core.global_generators import seeded_for
from cfl_ray.core.params import ParamSpec
from cfl_ray.core.work import Given, Train, Weigh
from cfl_ray.engine.client_state import starting_row, stored_numbers, with_client_state, with_norms
from cfl_ray.engine.describing import ClientView
from cfl_ray.engine.failure import naming_client
from cfl_ray.engine.open_chunk import OpenChunk
from cfl_ray.engine.samples import Samples
from cfl_ray.engine.task import HeldByClient, TrainingResult, TrainingTask
from cfl_ray.errors import RunError, did_you_mean
from cfl_ray.plugins.calling import call_plugin, described, place_of


def held_by(chunk: OpenChunk[Train], index: int) -> tuple[Tensor, HeldByClient]:
    """The row (P,) that a client's training starts from, before `begin`, and what the client holds for it."""
    work, value = chunk.work, chunk.stored_value(index)
    program, received_P, (models, given) = work.program, chunk.on_device(work.start, index), _given_to(chunk, index)
    if program.kept_model:
        start_P = with_norms(received_P, work.client_state, value)
        first_P = models.get(program.kept_model, received_P)
        models[program.kept_model] = with_client_state(first_P, work.client_state, value)
    else:
        start_P = starting_row(received_P, work.client_state, value)
    first = first_numbers(program, chunk.network.spec)
    kept, velocity = stored_numbers(value, work.client_state, first, chunk.network.spec)
    held = HeldByClient(
        models,
        given | kept,
        tuple(term.of_client(index, chunk.on_device(term.anchor, index)) for term in work.given.proximal),
        frozen_P=chunk.frozen(index),
        velocity=velocity if work.local.persist else None,
    )
    return start_P, held


def held_to_weigh(chunk: OpenChunk[Train] | OpenChunk[Weigh], index: int) -> HeldByClient:
    """The models and numbers that a client holds before `weigh`: of several models, without what it keeps for each."""
    if isinstance(chunk.work, Train) and chunk.work.num_models is None:
        return held_by(chunk, index)[1]
    return HeldByClient(*_given_to(chunk, index))


def _given_to(chunk: OpenChunk[Any], index: int) -> tuple[Held, Held]:
    """The models and the numbers that a client gets for its program."""
    given: Given = chunk.work.given
    models = {name: chunk.on_device(rows, index) for name, rows in given.models.items()}
    return models, {name: torch.from_numpy(values_M)[index] for name, values_M in given.number_of.items()}


def begun(chunk: OpenChunk[Train], index: int, task: TrainingTask) -> TrainingTask:
    """The task after the program's `begin`."""
    if not task.program.overrides("begin"):
        return task
    held, start_P = on_cpu(task.held), task.start_P.cpu()
    with (
        naming_client(task.client, "beginning its program"),
        seeded_for(task.program, task.address, task.client, "begin"),
    ):
        view = view_of(chunk, index, (task.x, task.y))
        row_P = call_plugin("begin", task.program.begin, view, start_P.clone(), held, where=" of a client program")
    if not isinstance(row_P, Tensor) or row_P.shape != start_P.shape:
        raise RunError(
            f"{place_of(task.program)}: begin returned {described(row_P)}, expected a row of {len(start_P)} numbers"
        )
    models: Held = {}
    for name in task.held.models:
        value = held.pop(name, None)
        if not isinstance(value, Tensor) or value.shape != start_P.shape:
            raise RunError(
                f"{place_of(task.program)}: after begin, held[{name!r}] is {described(value)}, expected a row of "
                f"{len(start_P)} numbers"
            )
        models[name] = value.detach().to(start_P.dtype)
    numbers = numbers_in(held, task.program, "begin")
    return replace(
        task, start_P=row_P.detach().to(start_P.dtype), held=replace(task.held, models=models, numbers=numbers)
    )


def numbers_in(held: Held, program: ClientProgram, hook: str) -> Held:
    """The numbers that a hook has left in `held`. Raises RunError for anything else."""
    numbers = {}
    for name, value in held.items():
        number = as_numbers(value)
        if number is None:
            raise RunError(f"{place_of(program)}: after {hook}, held[{name!r}] is {described(value)}, expected numbers")
        numbers[name] = number
    return numbers


def finished(chunk: OpenChunk[Train], index: int, task: TrainingTask, result: TrainingResult) -> Held:
    """The tensors that the client holds after the program's `finish`, on the CPU, models as whole rows."""
    held = on_cpu(task.held) | {name: value.cpu() for name, value in result.moved.items()}
    before = set(held)
    if task.program.overrides("finish"):
        with (
            naming_client(task.client, "finishing its program"),
            seeded_for(task.program, task.address, task.client, "finish"),
        ):
            view = view_of(chunk, index, (task.x, task.y))
            received_P, row_P = chunk.model(chunk.work.start, index).clone(), result.row_P.cpu().clone()
            call_plugin("finish", task.program.finish, view, received_P, row_P, held, where=" of a client program")
    spec = chunk.network.spec
    kept = {name: first.numel() for name, first in first_numbers(task.program, spec).items()}
    declarations = kept, lengths(task.program, "uploads", spec), lengths(task.program, "reports", spec)
    _check_names(task.program, held, before.union(*declarations))
    for declared in declarations:
        held |= _checked(task.program, held, declared)
    return held


def reported(task: TrainingTask, spec: ParamSpec) -> Held:
    """The numbers that a client reports whose program does not change them from the first step on."""
    return _checked(task.program, on_cpu(task.held), lengths(task.program, "reports", spec))


def invalid_reason(program: ClientProgram, held: Mapping[str, Tensor], chunk: OpenChunk[Train]) -> str | None:
    """Reason why what a client keeps, uploads or reports is not valid; None if it is valid."""
    spec = chunk.network.spec
    names = [*first_numbers(program, spec), *lengths(program, "uploads", spec)]
    bad = next((name for name in names if not torch.isfinite(held[name]).all()), None)
    return None if bad is None else f"its {bad} has numbers that are not finite"


def report(program: ClientProgram, held: Mapping[str, Tensor], chunk: OpenChunk[Train]) -> dict[str, np.ndarray]:
    """The numbers that a client reports, by name of the array of the result."""
    return {
        f"report {name}": held[name].reshape(-1).numpy() for name in lengths(program, "reports", chunk.network.spec)
    }


def on_cpu(held: HeldByClient) -> Held:
    """Copies of the models, whole rows, and of the numbers, as `weigh`, `begin` and `finish` find them."""
    return {name: value.cpu().clone() for name, value in {**held.models, **held.numbers}.items()}


def view_of(chunk: OpenChunk[Train] | OpenChunk[Weigh], index: int, samples: Samples) -> ClientView:
    """The client as `weigh`, `begin` and `finish` see it."""
    work = chunk.work
    steps = int(work.steps_M[index]) if isinstance(work, Train) else 0
    return ClientView(
        chunk.client(index),
        *samples,
        chunk.network,
        work.address,
        work.local,
        chunk.train_one,
        steps=steps,
        engine=chunk.train_one.engine,
    )


def _check_names(program: ClientProgram, held: Mapping[str, Any], known: set[str]) -> None:
    """Raises RunError for a name that is new after `finish`: no later hook could read its value."""
    if unknown := next((name for name in held if name not in known), None):
        hint = did_you_mean(unknown, known) if known else "; they name nothing"
        raise RunError(
            f"{place_of(program)}: after finish, held has {unknown!r}, which keeps, uploads, reports and given do not "
            f"name, so that its value would be lost{hint}"
        )


def _checked(program: ClientProgram, held: Mapping[str, Any], declared: Mapping[str, int]) -> Held:
    """The declared values, float32. Raises RunError if one of them is missing or has another length."""
    values = Held()
    for name, length in declared.items():
        value = as_numbers(held.get(name))
        if value is None or value.numel() != length:
            raise RunError(
                f"{place_of(program)}: after finish, held[{name!r}] is {described(held.get(name))}, "
                f"declared are {length} numbers"
            )
        values[name] = value.float()
    return values
