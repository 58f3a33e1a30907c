"""Client programs on a host: what a client holds for its program, and the hooks outside of the local steps."""

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from cfl_ray.core.client_program import ClientProgram, Held
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
    kept, velocity = stored_numbers(value, work.client_state, program.keeps(spec), spec.size)
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
    models = {name: held[name] for name in task.held.models}
    numbers = {name: value for name, value in held.items() if name not in models}
    return replace(task, start_P=row_P.detach(), held=replace(task.held, models=models, numbers=numbers))


def finished(chunk: OpenChunk[Train], index: int, task: TrainingTask, result: TrainingResult) -> Held:
    """The tensors that the client holds after the program's `finish`, on the CPU, models as whole rows."""
    held = _on_cpu(task) | {name: value.cpu() for name, value in result.moved.items()}
    if task.program.overrides("finish"):
        with naming_client(task.client, "finishing its program"):
            view = _view(chunk, index, (task.x, task.y))
            received_P, row_P = chunk.model(chunk.work.start, index).clone(), result.row_P.cpu().clone()
            call_plugin("finish", task.program.finish, view, received_P, row_P, held, where=" of a client program")
    spec = chunk.network.spec
    lengths: dict[str, int] = {name: first.numel() for name, first in task.program.keeps(spec).items()}
    for declared in (lengths, task.program.uploads(spec), task.program.reports(spec)):
        _check(task.program, held, declared)
    return held


def invalid_reason(program: ClientProgram, held: Mapping[str, Tensor], chunk: OpenChunk[Train]) -> str | None:
    """Reason why what a client keeps, uploads or reports is not valid; None if it is valid."""
    spec = chunk.network.spec
    names = [*program.keeps(spec), *program.uploads(spec)]
    bad = next((name for name in names if not torch.isfinite(held[name]).all()), None)
    return None if bad is None else f"its {bad} has numbers that are not finite"


def report(program: ClientProgram, held: Mapping[str, Tensor], chunk: OpenChunk[Train]) -> dict[str, np.ndarray]:
    """The numbers that a client reports, by name of the array of the result."""
    return {f"report {name}": held[name].reshape(-1).numpy() for name in program.reports(chunk.network.spec)}


def _on_cpu(task: TrainingTask) -> Held:
    return {name: value.cpu().clone() for name, value in {**task.held.models, **task.held.numbers}.items()}


def _view(chunk: OpenChunk[Train], index: int, samples: Samples) -> ClientView:
    work = chunk.work
    steps = int(work.steps_M[index])
    return ClientView(
        chunk.client(index), *samples, chunk.network, work.address, work.local, chunk.train_one, steps=steps
    )


def _check(program: ClientProgram, held: Mapping[str, Tensor], lengths: Mapping[str, int]) -> None:
    """Raises RunError if a declared value is missing or has another length."""
    for name, length in lengths.items():
        value = held.get(name)
        if not isinstance(value, Tensor) or value.numel() != length:
            raise RunError(
                f"{place_of(program)}: after finish, held[{name!r}] is {described(value)}, "
                f"declared are {length} numbers"
            )
