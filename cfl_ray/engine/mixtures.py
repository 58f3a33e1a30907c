"""E and M steps of clients that train, or predict with, a mixture of models (`core.work.Mixture`)."""

import numpy as np
import torch
from torch import Tensor

from cfl_ray.core.work import FitMixture, Mixture, Train
from cfl_ray.engine.open_chunk import Arrays, OpenChunk
from cfl_ray.errors import RunError
from cfl_ray.plugins.calling import call_plugin, described, place_of

_NOT_FINITE = "no finite responsibilities: its losses under all models are not finite"


def sample_weights(chunk: OpenChunk[Train], index: int) -> Tensor | None:
    """The weights (n,) of a client's samples in the loss of the model that its entry `index` trains.

    None: equal weights. The entries of a client share an E step.
    """
    work, mixture = chunk.work, chunk.work.mixture
    if mixture is None:
        return None
    if not chunk.responsibilities:
        _, first_u = np.unique(work.ids_M, return_index=True)
        loss_of = _losses(chunk, mixture, first_u.tolist())
        for first, (loss_nK, y_n) in loss_of.items():
            responsibility_nK = _responsibilities(mixture, loss_nK, y_n, mixture.weight_MK[first])
            chunk.responsibilities[chunk.client(first)] = responsibility_nK, y_n
    responsibility = chunk.responsibilities.get(chunk.client(index))
    if responsibility is None:
        return None  # its data are not valid: `training_task` returns no task
    if not torch.isfinite(responsibility[0]).all():
        chunk.exclude(index, f"its losses give {_NOT_FINITE}")
        return None
    if mixture.num_models == 1:
        return None  # all are 1
    return responsibility[0][:, int(work.start.row_M[index])].contiguous()


def after_training(chunk: OpenChunk[Train], arrays: Arrays) -> None:
    """Writes the mixture weights after the M step, and the uploads, of the entries with a valid update."""
    mixture = chunk.work.mixture
    if mixture is None:
        return
    valid = np.flatnonzero(arrays["valid"]).tolist()
    _write(mixture, {index: chunk.responsibilities[chunk.client(index)] for index in valid}, arrays)


def fit(chunk: OpenChunk[FitMixture]) -> Arrays:
    """Mixture weights of each client after some E and M steps."""
    work, arrays, responsibilities = chunk.work, chunk.empty(), {}
    for index, (loss_nK, y_n) in _losses(chunk, work.mixture, range(len(chunk))).items():
        weight_K = work.mixture.weight_MK[index]
        for _ in range(work.steps):
            responsibility_nK = _responsibilities(work.mixture, loss_nK, y_n, weight_K)
            weight_K = responsibility_nK.double().mean(0).numpy()
        if np.isfinite(weight_K).all():
            responsibilities[index] = responsibility_nK, y_n
        else:
            chunk.exclude(index, f"its losses give {_NOT_FINITE}")
    _write(work.mixture, responsibilities, arrays)
    return arrays


@torch.no_grad()
def _losses(
    chunk: OpenChunk[Train] | OpenChunk[FitMixture], mixture: Mixture, indices: "list[int] | range"
) -> dict[int, tuple[Tensor, Tensor]]:
    """Losses (n, K) and targets, on the CPU, of the clients with valid data. Models are loaded once."""
    parts = {index: samples for index in indices if (samples := chunk.samples(index))}
    losses: dict[int, list[Tensor]] = {index: [] for index in parts}
    for _, index, logits, y in chunk.outputs(parts, mixture.num_models):
        losses[index].append(chunk.network.task.loss(logits, y).cpu())
    return {index: (torch.stack(columns, 1), parts[index][1].cpu()) for index, columns in losses.items()}


def _responsibilities(mixture: Mixture, loss_nK: Tensor, y_n: Tensor, weight_K: np.ndarray) -> Tensor:
    """Responsibilities, float32 (n, K). A loss that is not a number counts as infinite."""
    loss_nK = loss_nK.float().nan_to_num(nan=torch.inf, posinf=torch.inf)
    prior_K, function = torch.from_numpy(weight_K).float(), mixture.responsibilities
    responsibility_nK = call_plugin(
        "function", function, loss_nK, y_n, prior_K, mixture.received, where=" of a mixture"
    )
    if not isinstance(responsibility_nK, Tensor) or responsibility_nK.shape != loss_nK.shape:
        raise RunError(
            f"function {place_of(function)} of a mixture returned {described(responsibility_nK)}, "
            "expected the responsibility of "
            f"each of {loss_nK.shape[1]} models for each of {len(loss_nK)} samples: shape {tuple(loss_nK.shape)}"
        )
    return responsibility_nK.float()


def _write(mixture: Mixture, responsibilities: dict[int, tuple[Tensor, Tensor]], arrays: Arrays) -> None:
    for index, (responsibility_nK, y_n) in responsibilities.items():
        arrays["mixture"][index] = responsibility_nK.double().mean(0).numpy()
        if mixture.upload is not None:
            arrays["mixture_upload"][index] = mixture.upload(responsibility_nK, y_n).reshape(-1).numpy()
