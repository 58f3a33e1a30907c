"""Verification of a trained method: the saved models of a few clients are tested as their users would test them.

Recorded scores come from the engines, whose network, memory layout and kernels are not those of a user of the saved
model. So models are built anew by the factory, loaded from what was saved, and tested by plain PyTorch on the clients'
test samples. If their scores are not the recorded ones, the outputs depend on something that is not saved, or that has
changed.
"""

from collections.abc import Iterator, Sequence
from copy import deepcopy
from functools import partial

import numpy as np
import torch
from torch import Tensor, nn

from cfl_ray.config import Experiment
from cfl_ray.core.serving import Serving
from cfl_ray.data.federation import TensorSamples
from cfl_ray.engine import scoring
from cfl_ray.engine.client_state import predicting_row
from cfl_ray.errors import NotReproduced
from cfl_ray.results.arrow_log import whole_batches
from cfl_ray.results.results import MethodResult
from cfl_ray.results.trained import TrainedMethod
from cfl_ray.run_directory import RunDirectory

_MOST_CLIENTS, _MOST_SAMPLES = 10, 4000  # clients that are tested; beyond the first only while their samples are few
_RELATIVE, _ABSOLUTE = 1e-3, 1e-4  # differences of losses that come from rounding
_COARSE = 3e-2  # relative, after a training before the test, and with products of less than float32
_FLIPS = 2.5  # samples whose prediction rounding may change, of which metrics that count samples are a mean
_METRIC = 0.02  # difference of a metric, relative to values above 1
_ROUNDINGS = 20  # times the rounding of a float32 pass, as a float64 pass shows it
_BATCH = 256
_CAUSES = (
    "what decides the outputs is not saved with the model, or has changed: a tensor that is not registered "
    "(register_buffer), a buffer that is not saved, or a layer whose result depends on the memory layout"
)


def verify(trained: TrainedMethod, result: MethodResult, experiment: Experiment, edited: Sequence[str] = ()) -> None:
    """Raises NotReproduced if models of a trained method do not give the scores that were recorded for clients.

    Nothing is verified if no recorded evaluation was in the round of the models, as in a live run, and without
    `evaluation.verify`. edited: the user's files that were edited since the run began.
    """
    if not experiment.evaluation.verify:
        return
    recorded_MV = _recorded(result, trained.round)
    task, wrong, tested = trained.task, list[str](), 0
    for client, recorded_V, serving, (x, y) in _chosen(trained, recorded_MV, experiment.evaluation.local_samples):
        tested += 1
        is_fine = serving.tune is None and experiment.runtime.precision == "float32"
        relative = _RELATIVE if is_fine else _COARSE
        model = trained.served_model(client, serving)
        found_V = _scores(trained, model, x, y)
        if _agree(found_V, recorded_V, len(y), relative):
            continue
        rounding_V = _ROUNDINGS * np.abs(found_V - _scores(trained, model, x, y, torch.float64))
        if _agree(found_V, recorded_V, len(y), relative, rounding_V):
            continue
        others = (_scores(trained, other, x, y) for other in _other_models(trained, serving, client))
        if any(_agree(other_V, recorded_V, len(y), relative) for other_V in others):
            continue  # rounding chose another one of models that are equally good for the client
        different = [
            f"{name} {found:.4g} (recorded: {recorded:.4g})"
            for name, found, recorded in zip(task.score_names, found_V, recorded_V, strict=True)
            if name in (task.score_names[0], task.score_names[-1])
        ]
        wrong.append(f"of client {client} are {' and '.join(different)}")
    if wrong:
        more = f", and so for {len(wrong) - 1} more of the {tested} clients tested" if len(wrong) > 1 else ""
        causes = f"edited since the run began: {', '.join(edited)}" if edited else _CAUSES
        raise NotReproduced(
            f"{trained.label}: the saved models do not give what was recorded in round {trained.round}: the scores "
            f"{wrong[0]}{more}; {causes}; evaluation.verify: false skips this test"
        )


def _recorded(result: MethodResult, round: int) -> np.ndarray:
    """The scores of the clients in a round, float64 (M, 1 + V): id, then the scores; M is 0 if it was not evaluated."""
    if result.directory is None:
        table = result.clients
        batches = table.to_batches() if table is not None else []
    else:
        batches, _, _ = whole_batches(RunDirectory(result.directory).client_metrics)
    of_round = (batch for batch in reversed(batches) if batch.num_rows and batch.column(0)[0].as_py() == round)
    found = next(of_round, None)
    columns = [] if found is None else [column.to_numpy(zero_copy_only=False) for column in found.columns[1:]]
    return np.column_stack(columns).astype(np.float64) if columns else np.zeros((0, 2))


def _chosen(
    trained: TrainedMethod, recorded_MV: np.ndarray, local_samples: int
) -> Iterator[tuple[int, np.ndarray, Serving, TensorSamples]]:
    """Clients with their recorded scores, models and test samples: first one of each cluster, then others."""
    recorded_MV = recorded_MV[~np.isnan(recorded_MV[:, -1])]  # the others were not tested
    ids_M = recorded_MV[:, 0].astype(np.int64)
    cluster_M = trained.state.assign_N[ids_M]
    place_M = np.zeros(len(ids_M), np.int64)  # of a client in its cluster
    for cluster in np.unique(cluster_M):
        place_M[cluster_M == cluster] = np.arange((cluster_M == cluster).sum())
    federation, samples = trained.present(), 0
    for at in np.argsort(place_M, kind="stable")[:_MOST_CLIENTS].tolist():
        client, serving = int(ids_M[at]), trained.serve(ids_M[at : at + 1])
        is_limited = federation.view != "holdout" and serving.is_personal
        x, y = federation.test(client, local_samples if is_limited else None)
        samples += len(y)
        if at and samples > _MOST_SAMPLES:
            return
        yield client, recorded_MV[at, 1:], serving, (x, y)


def _scores(
    trained: TrainedMethod, model: nn.Module, x: Tensor, y: Tensor, dtype: torch.dtype | None = None
) -> np.ndarray:
    """The scores (V,) of a model by plain PyTorch. dtype: of parameters and inputs; NaN if the model refuses it."""
    if dtype is not None and not x.is_floating_point():
        dtype = None
    try:
        if dtype is not None:
            model = deepcopy(model).to(dtype)
        with torch.no_grad():
            batches = [batch if dtype is None else batch.to(dtype) for batch in x.split(_BATCH)]
            outputs = torch.cat([model(batch) for batch in batches]).float()
        return scoring.values(trained.task, outputs, y)
    except Exception:
        if dtype is None:
            raise
        return np.full(len(trained.task.score_names), np.nan)


def _agree(
    found_V: np.ndarray, recorded_V: np.ndarray, samples: int, relative: float, rounding_V: np.ndarray | float = 0.0
) -> bool:
    """Whether scores differ by rounding alone. The last score is the loss, which every output decides."""
    size_V = np.maximum(np.abs(found_V), np.abs(recorded_V))
    bound_V = np.maximum(_METRIC, _FLIPS / samples) * np.maximum(size_V, 1.0)
    bound_V[-1] = _ABSOLUTE + relative * size_V[-1]
    with np.errstate(invalid="ignore"):  # of infinities
        near_V = np.abs(found_V - recorded_V) <= bound_V + np.nan_to_num(rounding_V)
    same_V = (found_V == recorded_V) | (~np.isfinite(found_V) & ~np.isfinite(recorded_V))
    return bool((near_V | same_V).all())


def _other_models(trained: TrainedMethod, serving: Serving, client: int) -> Iterator[nn.Module]:
    """The models that a client could have chosen instead of its own."""
    if serving.weight_MK is not None or serving.tune is not None:
        return
    state = serving.client_state
    value = None if state is None else trained.backend.client_state(state.name, client)
    view = partial(trained.view, client, lambda: trained.train(client))
    for row in range(min(len(serving.models_KP), max(trained.num_clusters, 1))):
        if row != serving.row_M[0]:
            yield trained.module(predicting_row(serving.models_KP[row], state, value, view), serving.frozen_P)
