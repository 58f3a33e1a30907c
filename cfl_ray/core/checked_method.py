"""The contract of methods: results of a wrong type or shape are errors that name the author's line."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cfl_ray.core.clients import Clients
from cfl_ray.core.events import drawn
from cfl_ray.core.global_generators import is_users, seeded_for
from cfl_ray.core.method import Method, Start
from cfl_ray.core.params import ParamSpec
from cfl_ray.core.rng import Draws
from cfl_ray.core.serving import Serving
from cfl_ray.core.state import UNASSIGNED, State
from cfl_ray.core.work import Address
from cfl_ray.errors import RunError, says_where
from cfl_ray.plugins.calling import described, is_user_file, place_of, raised_at


@dataclass(frozen=True)
class CheckedMethod:
    """Calls the steps of a method. Raises RunError, with the author's line, for a result that is not as agreed.

    What a user's method, or a library that it calls, draws from global generators follows from seed and round.
    columns: P, the length of a model's row.
    """

    method: Method[Any]
    columns: int

    def init(self, start: Start) -> State:
        return self._checked(self.method.init, start)

    def round(self, state: State, clients: Clients, rng: Draws) -> State:
        after = self._checked(self.method.round, state, self._keeping(clients), rng)
        spec, hook = clients.spec, self.method.round
        if is_users(self.method) and (what := _why_invalid(after, spec)) and not _why_invalid(state, spec):
            clients.stats.notes.append(f"{place_of(hook)} returned models with {what}")
        return after

    def serve(self, state: State, clients: Clients) -> Serving:
        clients = self._keeping(clients)
        serving: Serving = _noting(self.method.serve, state, clients)
        _check_serving(serving, self.method.serve, len(clients), self.columns)
        return replace(serving, client_state=clients.with_norms(serving.client_state))

    def join(self, state: State, clients: Clients) -> State:
        return self._checked(self.method.join, state, self._keeping(clients))

    def drift(self, state: State, clients: Clients) -> State:
        return self._checked(self.method.drift, state, self._keeping(clients))

    def leave(self, state: State, ids: np.ndarray) -> State:
        return self._checked(self.method.leave, state, ids)

    def diagnose(self, state: State, clients: Clients) -> None:
        returned = _noting(self.method.diagnose, state, clients)
        if returned is not None:
            raise RunError(
                f"{place_of(self.method.diagnose)} returned {described(returned)}, expected nothing; "
                "report diagnostics with clients.record(name, value)"
            )

    def _keeping(self, clients: Clients) -> Clients:
        """The clients, which keep their normalisation layers if the method's option `norm` says so."""
        norms = self.method.kept_norms(clients.spec)
        return clients if norms is None else replace(clients, kept_norms=norms)

    def _checked(self, hook: Callable[..., Any], before: Start | State, *arguments: Any) -> State:
        """The state after a step, which has passed the checks."""
        if isinstance(before, State):
            num_clients, phase = len(before.assign_N), before.phase
        else:
            num_clients, phase = before.num_clients, None
        content = before.fingerprint() if isinstance(before, State) else {}
        options = _mutable_fields(self.method)
        after: State = _noting(hook, before, *arguments)
        if changed := [name for name, text in _mutable_fields(self.method).items() if options[name] != text]:
            raise RunError(
                f"{place_of(hook)} changed {', '.join(changed)} of the method, which checkpoints miss; what changes "
                "during a run is a field of the state, a subclass of State"
            )
        _check_state(after, hook, self.method.state_type, num_clients, self.columns)
        if isinstance(before, State) and (modified := dict(before.fingerprint().items() - content.items())):
            raise RunError(
                f"{place_of(hook)} modified {', '.join(modified)} of the state before in place, which checkpoints "
                "miss; modify a copy, and return it by state.advance"
            )
        _check_phase(after.phase, phase, hook, self.method.name, self.method.phases)
        return after


def _noting(hook: Any, *arguments: Any) -> Any:
    """The result of a step. Adds a note with the author's line to its exceptions.

    A line of this package is noted only if the error names no place.
    """
    start = next((each for each in arguments if isinstance(each, Start | Clients)), None)
    at = Address(0, -1, -1) if start is None else Address(start.seed, getattr(start, "round", -1), -1)
    try:
        with seeded_for(getattr(hook, "__self__", hook), at, -1, hook.__name__):
            return hook(*arguments)
    except Exception as error:
        place = raised_at(hook, error)
        if place and (is_user_file(place[0]) or not says_where(error)):
            error.add_note(f"in {hook.__qualname__}, {place[0]}, line {place[1]}")
        raise


def _mutable_fields(method: Method[Any]) -> dict[str, str]:
    """Fields of a user's method that can be changed in place: name -> content as text."""
    values = {item.name: getattr(method, item.name) for item in fields(method)} if is_users(method) else {}
    return {name: repr(value) for name, value in values.items() if isinstance(value, list | dict | set | np.ndarray)}


def _why_invalid(state: State, spec: ParamSpec) -> str:
    """Why models give invalid outputs; empty if they do not. Averages alone never make such models."""
    if not state.models_KP.isfinite().all():
        return "numbers that are not finite, though updates that are not finite are left out of averages"
    if any("running_var" in name for name in spec.names) and spec.columns("running_var").of(state.models_KP).min() < 0:
        return (
            "negative variances of BatchNorm, which make outputs NaN: extrapolate only the first spec.trained columns, "
            "and take the others from the average"
        )
    return ""


def _check_state(state: Any, hook: Callable[..., Any], state_type: type[State], num_clients: int, columns: int) -> None:
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
    if unsaved := state.unsaved():
        name, value = unsaved
        raise RunError(
            f"{where} a state whose {name} is {described(value)} ({type(value).__name__}), which a checkpoint does not "
            "keep; expected a tensor without gradient, an array of numbers in a field annotated as np.ndarray, or a "
            "plain value: None, bool, int, float, str, or a list, or a dict with keys of type str, of such values"
        )


def _check_phase(
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


def _check_serving(serving: Any, hook: Callable[..., Any], num_clients: int, columns: int) -> None:
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
