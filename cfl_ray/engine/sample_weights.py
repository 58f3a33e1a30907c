"""The weights of clients' samples in the losses of their models, by the `weigh` of client programs."""

from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from cfl_ray.core.global_generators import seeded_for
from cfl_ray.core.work import Train, Weigh
from cfl_ray.engine import programs
from cfl_ray.engine.describing import frozen_logits
from cfl_ray.engine.failure import naming_client
from cfl_ray.engine.open_chunk import Arrays, OpenChunk, Row
from cfl_ray.engine.samples import Samples
from cfl_ray.engine.task import WeighedSamples
from cfl_ray.errors import RunError
from cfl_ray.plugins.calling import call_plugin, described, place_of

_NOT_FINITE = "its samples have weights that are not finite, as if their losses are infinite under all models"


def weighed(chunk: OpenChunk[Train], index: int) -> WeighedSamples | None:
    """The weights of a client's samples; None: equal weights. Excludes a client whose weights are not finite.

    The entries of a client share them.
    """
    work = chunk.work
    if not work.program.overrides("weigh"):
        return None
    first_m = _first_entries(work)
    if not chunk.weighed:
        chunk.weighed = _weigh(chunk, np.unique(first_m).tolist())
    found = chunk.weighed.get(int(first_m[index]))
    if found is not None and not found.is_finite:
        chunk.exclude(index, _NOT_FINITE)
    return found  # None: its data are not valid


def fit(chunk: OpenChunk[Weigh]) -> Arrays:
    """Mean weights of each client's samples after some calls of its program."""
    arrays = chunk.empty()
    for index, found in _weigh(chunk, range(len(chunk)), calls=chunk.work.steps).items():
        if found.is_finite:
            arrays["weights"][index] = found.mean_K
        else:
            chunk.exclude(index, _NOT_FINITE)
    return arrays


def _first_entries(work: Train) -> np.ndarray:
    """The position (m,) of the first entry of each entry's client in the chunk."""
    if work.num_models is None:
        return np.arange(len(work.ids_M))
    _, first_u, entry_m = np.unique(work.ids_M, return_index=True, return_inverse=True)
    return first_u[entry_m]


def _rows(work: Train | Weigh, index: int) -> Sequence[Row]:
    """The models that a client received to train."""
    if work.num_models is not None:
        return [(0, k) for k in range(work.num_models)]
    return [(work.start.table, int(work.start.row_M[index]))]


def _weigh(
    chunk: OpenChunk[Train] | OpenChunk[Weigh], indices: Iterable[int], calls: int = 1
) -> dict[int, WeighedSamples]:
    """By position, the weights of the clients with valid data, after `calls` calls of `weigh`."""
    parts = {index: samples for index in indices if (samples := chunk.samples(index))}
    losses = _losses(chunk, parts)
    return {index: _weighed(chunk, index, parts[index], loss_nK, calls) for index, loss_nK in losses.items()}


@torch.no_grad()
def _losses(chunk: OpenChunk[Train] | OpenChunk[Weigh], parts: Mapping[int, Samples]) -> dict[int, Tensor]:
    """Losses, float32 (n, K) on the CPU, of the clients' samples; infinite in place of NaN. Models are loaded once."""
    frozen = frozen_logits(chunk, {index: x for index, (x, _) in parts.items()})
    columns: dict[int, list[Tensor]] = {index: [] for index in parts}
    for _, index, outputs, y in chunk.outputs(parts, {index: _rows(chunk.work, index) for index in parts}):
        outputs = outputs if index not in frozen else outputs + frozen[index]
        columns[index].append(chunk.network.task.loss(outputs, y).cpu())
    return {
        index: torch.stack(listed, 1).float().nan_to_num(nan=torch.inf, posinf=torch.inf)
        for index, listed in columns.items()
    }


def _weighed(
    chunk: OpenChunk[Train] | OpenChunk[Weigh], index: int, samples: Samples, loss_nK: Tensor, calls: int
) -> WeighedSamples:
    program, before = chunk.work.program, programs.held_to_weigh(chunk, index)
    held, view = programs.on_cpu(before), programs.view_of(chunk, index, samples)
    for _ in range(calls):
        with (
            naming_client(view.client, "weighing its samples"),
            seeded_for(program, view.address, view.client, "weigh"),
        ):
            weight_nK = call_plugin("weigh", program.weigh, view, loss_nK.clone(), held, where=" of a client program")
        if not isinstance(weight_nK, Tensor) or weight_nK.shape != loss_nK.shape:
            raise RunError(
                f"{place_of(program)}: weigh returned {described(weight_nK)}, expected a weight of each of "
                f"{len(loss_nK)} samples for each of {loss_nK.shape[1]} models: shape {tuple(loss_nK.shape)}"
            )
    weight_nK = weight_nK.detach().float().cpu()
    if weight_nK.isfinite().all() and (least := float(weight_nK.min())) < 0:
        raise RunError(
            f"{place_of(program)}: weigh returned the weight {least:.4g} for a sample of client {view.client}; weights "
            "must be finite and at least 0 (clamp(min=0) removes negative ones of rounding)"
        )
    numbers = programs.numbers_in({name: held[name] for name in held.keys() - before.models.keys()}, program, "weigh")
    changed = {name: value for name, value in numbers.items() if not _same(value, before.numbers.get(name))}
    return WeighedSamples(weight_nK, changed)


def _same(value: Tensor, other: Tensor | None) -> bool:
    return other is not None and value.dtype == other.dtype and torch.equal(value, other)
