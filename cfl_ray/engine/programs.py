"""Client programs on a host: what a client holds for its program, and the hooks outside of the local steps."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cfl_ray.core.client_program import ClientProgram, Held, as_numbers, first_numbers, lengths
from cfl_ray.core.work import Train
from cfl_ray.engine.client_state import starting_row, stored_numbers, with_client_state
from cfl_ray.engine.describing import ClientView
from cfl_ray.engine.failure import naming_client
from cfl_ray.engine.open_chunk import OpenChunk
from cfl_ray.engine.samples import Samples
from cfl_ray.engine.task import HeldByClient, TrainingResult, TrainingTask
from cfl_ray.errors import RunError
from cfl_ray.plugins.calling import call_plugin, described, place_of


def held_by(chunk: OpenChunk[Train], index: int) -> tuple[Tensor, HeldByClient]:
    """The row (P,) that a client's training starts from, before `begin`, and what the client holds for it."""
    work, value, spec = chunk.work, chunk.stored_value(index), chunk.network.spec
    program, given, received_P = work.program, work.given, chunk.on_device(work.start, index)
    models = {name: chunk.on_device(rows, index) for name, rows in given.models.items()}
    if program.kept_model:
        start_P, first_P = received_P, models.get(program.kept_model, received_P)
        models[program.kept_model] = with_client_state(first_P, work.client_state, value)
    else:
        start_P = starting_row(received_P, work.client_state, value)
    numbers = {name: torch.from_numpy(values_M)[index] for name, values_M in given.number_of.items()}
    kept, velocity = stored_numbers(value, work.client_state, first_numbers(program, spec), spec)
    held = HeldByClient(
        models,
        numbers | kept,
        tuple(term.of_client(index, chunk.on_device(term.anchor, index)) for term in given.proximal),
        frozen_P=chunk.frozen(index),
        velocity=velocity if work.local.persist else None,
    )
    return start_P, held


def begun(chunk: OpenChunk[Train], index: int, task: TrainingTask) -> TrainingTask:
    """The task after the program's `begin`."""
    if not task.program.overrides("begin"):
        return task
    held, start_P = _on_cpu(task), task.start_P.cpu()
    with naming_client(task.client, "beginning its program"):
        view = _view(chunk, index, (task.x, task.y))
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
    numbers = {}
    for name, value in held.items():
        number = as_numbers(value)
        if number is None:
            raise RunError(
                f"{place_of(task.program)}: after begin, held[{name!r}] is {described(value)}, expected numbers"
            )
        numbers[name] = number
    return replace(
        task, start_P=row_P.detach().to(start_P.dtype), held=replace(task.held, models=models, numbers=numbers)
    )


def finished(chunk: OpenChunk[Train], index: int, task: TrainingTask, result: TrainingResult) -> Held:
    """The tensors that the client holds after the program's `finish`, on the CPU, models as whole rows."""
    held = _on_cpu(task) | {name: value.cpu() for name, value in result.moved.items()}
    if task.program.overrides("finish"):
        with naming_client(task.client, "finishing its program"):
            view = _view(chunk, index, (task.x, task.y))
            received_P, row_P = chunk.model(chunk.work.start, index).clone(), result.row_P.cpu().clone()
            call_plugin("finish", task.program.finish, view, received_P, row_P, held, where=" of a client program")
    spec = chunk.network.spec
    kept = {name: first.numel() for name, first in first_numbers(task.program, spec).items()}
    for declared in (kept, lengths(task.program, "uploads", spec), lengths(task.program, "reports", spec)):
        held |= _checked(task.program, held, declared)
    return held


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


def _on_cpu(task: TrainingTask) -> Held:
    return {name: value.cpu().clone() for name, value in {**task.held.models, **task.held.numbers}.items()}


def _view(chunk: OpenChunk[Train], index: int, samples: Samples) -> ClientView:
    work = chunk.work
    steps = int(work.steps_M[index])
    return ClientView(
        chunk.client(index), *samples, chunk.network, work.address, work.local, chunk.train_one, steps=steps
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
