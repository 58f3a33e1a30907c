"""A method whose results are checked."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from cfl_ray.core.clients import Clients
from cfl_ray.core.contract import check_phase, check_serving, check_state
from cfl_ray.core.method import Method, Start
from cfl_ray.core.rng import Draws
from cfl_ray.core.serving import Serving
from cfl_ray.core.state import State
from cfl_ray.errors import RunError, says_where
from cfl_ray.plugins.calling import described, is_user_file, place_of, raised_at


@dataclass(frozen=True)
class CheckedMethod:
    """Calls the steps of a method. Raises RunError, with the author's line, for a result that is not as agreed.

    columns: P, the length of a model's row.
    """

    method: Method[Any]
    columns: int

    def init(self, start: Start) -> State:
        return self._checked(self.method.init, start.num_clients, start)

    def round(self, state: State, clients: Clients, rng: Draws) -> State:
        return self._checked(self.method.round, len(state.assign_N), state, clients, rng)

    def serve(self, state: State, clients: Clients) -> Serving:
        serving: Serving = _noting(self.method.serve, state, clients)
        check_serving(serving, self.method.serve, len(clients), self.columns)
        return serving

    def join(self, state: State, clients: Clients) -> State:
        return self._checked(self.method.join, len(state.assign_N), state, clients)

    def drift(self, state: State, clients: Clients) -> State:
        return self._checked(self.method.drift, len(state.assign_N), state, clients)

    def leave(self, state: State, ids: np.ndarray) -> State:
        return self._checked(self.method.leave, len(state.assign_N), state, ids)

    def diagnose(self, state: State, clients: Clients) -> None:
        returned = _noting(self.method.diagnose, state, clients)
        if returned is not None:
            raise RunError(
                f"{place_of(self.method.diagnose)} returned {described(returned)}, expected nothing; "
                "report diagnostics with clients.record(name, value)"
            )

    def _checked(self, hook: Callable[..., Any], num_clients: int, *arguments: Any) -> State:
        after: State = _noting(hook, *arguments)
        check_state(after, hook, self.method.state_type, num_clients, self.columns)
        before = arguments[0].phase if isinstance(arguments[0], State) else None
        check_phase(after.phase, before, hook, self.method.name, self.method.phases)
        return after


def _noting(hook: Callable[..., Any], *arguments: Any) -> Any:
    """The result of a step. Adds a note with the author's line to its exceptions.

    A line of this package is noted only if the error names no place.
    """
    try:
        return hook(*arguments)
    except Exception as error:
        place = raised_at(hook, error)
        if place and (is_user_file(place[0]) or not says_where(error)):
            error.add_note(f"in {hook.__qualname__}, {place[0]}, line {place[1]}")
        raise
