"""The contract of methods: results of a wrong type or shape are errors that name the author's line."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cfl_ray.core.events import drawn
from cfl_ray.core.serving import Serving
from cfl_ray.core.state import UNASSIGNED, State
from cfl_ray.errors import RunError
from cfl_ray.plugins.calling import call_plugin, described, place_of


@dataclass(frozen=True)
class CheckedDescription:
    """A function given to `Clients.describe`, whose results are checked where it is called."""

    function: Callable[..., Any]

    @property
    def floats(self) -> Any:
        """The function's attribute `floats`, the numbers that a client uploads, if any; for `cfl-ray check`."""
        return getattr(self.function, "floats", None)

    def __call__(self, client: Any, anchor_P: Tensor | None) -> Tensor:
        returned = call_plugin("function", self.function, client, anchor_P, where=" of Clients.describe")
        try:
            vector = torch.as_tensor(returned).float().reshape(-1)
        except (TypeError, ValueError, RuntimeError):
            vector = torch.zeros(0)
        if not len(vector):
            raise RunError(
                f"function {place_of(self.function)} of Clients.describe returned {described(returned)}, "
                "expected a tensor or array of at least one number"
            )
        return vector


def check_state(state: Any, hook: Callable[..., Any], state_type: type[State], num_clients: int, columns: int) -> None:
    """Raises RunError if a method's `hook` returned a `state` that does not fit a federation of these sizes.

    columns: P.
    """
    where = f"{place_of(hook)} returned"
    if not isinstance(state, state_type):
        raise RunError(f"{where} {described(state)}, expected a {state_type.__name__}")
    models_KP, assign_N = state.models_KP, state.assign_N
    _check_models(where, models_KP, columns)
    if not isinstance(assign_N, np.ndarray) or assign_N.shape != (num_clients,) or assign_N.dtype.kind != "i":
        raise RunError(
            f"{where} a state whose assign_N is {described(assign_N)}, "
            f"expected a whole number for each of the {num_clients} clients: an int32 array of shape ({num_clients},)"
        )
    _check_rows(where, "assign_N", assign_N, len(models_KP), "the cluster of client", UNASSIGNED)


def check_phase(
    phase: Any, before: str | None, hook: Callable[..., Any], name: str, phases: Mapping[str, tuple[str, ...]]
) -> None:
    """Raises RunError if the method `name` does not declare the phase, or does not declare that it follows `before`.

    before: None for the first phase, which may be any of `phases`. A phase may follow itself.
    """
    known = isinstance(phase, str) and phase in phases
    if known and (before in (None, phase) or phase in phases.get(str(before), ())):
        return
    what = f"in phase {phase!r}" if before in (None, phase) else f"that goes from phase {before!r} to {phase!r}"
    first = phase if before is None else before
    cure = {str(first): (() if first == phase else (phase,)), str(phase): ()}
    raise RunError(
        f"{place_of(hook)} returned a state {what}, but {name} declares the phases {drawn(phases)}; "
        f"declare it in the class, e.g. phases = {cure}"
    )


def check_serving(serving: Any, hook: Callable[..., Any], num_clients: int, columns: int) -> None:
    """Raises RunError if a method's `serve` returned a `serving` that does not fit this number of clients."""
    where = f"{place_of(hook)} returned"
    if not isinstance(serving, Serving):
        raise RunError(f"{where} {described(serving)}, expected a Serving(models_KP, row_M)")
    _check_models(where, serving.models_KP, columns)
    row_M = serving.row_M
    if not isinstance(row_M, np.ndarray) or row_M.shape != (num_clients,) or row_M.dtype.kind not in "iu":
        raise RunError(
            f"{where} a Serving whose row_M is {described(row_M)}, expected the row of models_KP for each of the "
            f"{num_clients} clients asked for: an integer array of shape ({num_clients},)"
        )
    _check_rows(where, "row_M", row_M, len(serving.models_KP), "the row of client", -1)
    if serving.frozen_P is not None and tuple(serving.frozen_P.shape) != (columns,):
        raise RunError(
            f"{where} a Serving whose frozen_P is {described(serving.frozen_P)}, expected shape ({columns},)"
        )


def _check_models(where: str, models_KP: Any, columns: int) -> None:
    fits = isinstance(models_KP, Tensor) and models_KP.dtype == torch.float32 and models_KP.ndim == 2
    if not fits or models_KP.shape[1] != columns:
        raise RunError(
            f"{where} models_KP as {described(models_KP)}, "
            f"expected one row per model: a float32 tensor of shape (K, {columns})"
        )


def _check_rows(where: str, name: str, row_M: np.ndarray, count: int, what: str, least: int) -> None:
    if len(bad := np.flatnonzero((row_M < least) | (row_M >= count))):
        raise RunError(
            f"{where} {name} with {row_M[bad[0]]} as {what} {bad[0]}, expected {least} .. {count - 1}: "
            f"there are {count} models"
        )
