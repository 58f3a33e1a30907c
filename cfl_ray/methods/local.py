"""Local training: every client trains alone, without communication. A baseline that every federation should beat.

    w_i <- SGD_i(w_i), w_i = w_0 at first

A client trains in the rounds in which it is sampled, so its budget equals that of the sampled methods: T * R * E
epochs.

Deviations: none (there is no paper).
"""

from dataclasses import dataclass

from cfl_ray.core.clients import Clients, ClientState
from cfl_ray.core.method import Method, Start
from cfl_ray.core.rng import Draws
from cfl_ray.core.serving import Serving
from cfl_ray.core.state import State

PERSONAL = ClientState("personal")  # w_i, kept by the client


@dataclass(frozen=True)
class Local(Method[State], name="local"):
    """Every client trains alone on its own data."""

    untrained = "its model is its own, and begins untrained"

    only_mean = "it averages nothing"

    def init(self, start: Start) -> State:
        return State(models_KP=start.new_model(0)[None], assign_N=start.unassigned())

    def round(self, state: State, clients: Clients, rng: Draws) -> State:
        clients.train(clients.known_models(state.models_KP), client_state=PERSONAL)
        return state

    def serve(self, state: State, clients: Clients) -> Serving:
        return Serving(state.models_KP, clients.first_row(), client_state=PERSONAL)
