"""The server optimiser in the round loop: its moments between rounds."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch import Tensor

from cfl_ray.core.clients import Clients, RoundStats
from cfl_ray.core.server_optimizers import ServerMoments, ServerOptimizer
from cfl_ray.core.state import State
from cfl_ray.population.population import Cohort
from cfl_ray.runtime.parts.loop_part import LoopPart, named, taken

_TENSORS = "server.optimizer."


class ServerSteps(LoopPart):
    """Moves models by the steps of a server optimiser in place of their means."""

    def __init__(self, optimizer: ServerOptimizer):
        self.moments = ServerMoments(optimizer)

    def cohort(self, stats: RoundStats, state: State, draw: Callable[[], Cohort]) -> Cohort:
        self.moments.begin()
        return draw()

    def clients(self, clients: Clients, cohort: Cohort | None) -> Clients:
        return replace(clients, server_moments=self.moments)

    def to_checkpoint(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        return named(_TENSORS, self.moments.to_tensors()), {}

    def restore(self, tensors: dict[str, Tensor], values: dict[str, Any], state: State) -> None:
        self.moments.restore(taken(_TENSORS, tensors))
