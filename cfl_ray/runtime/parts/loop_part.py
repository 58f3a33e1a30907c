"""The hooks of a part of the round loop, and the names of a part's tensors in a checkpoint."""

from collections.abc import Callable
from typing import Any

import numpy as np
from torch import Tensor

from cfl_ray.core.clients import Clients, RoundStats
from cfl_ray.core.state import State
from cfl_ray.population.population import Cohort


class LoopPart:
    """A part of the round loop of a method; the hooks of this class change nothing.

    It is made before the newest checkpoint is restored. The parts are called in their order; parts add what they know
    of a round to its `RoundStats`.
    """

    trains_without_clients = False  # True: the method's round is called with an empty cohort too

    def last_round(self, saved: int, rounds: int) -> int:
        """The last round that this part permits, at most `rounds`. saved: the round that was restored; 0: none."""
        return rounds

    @property
    def kept_round(self) -> int:
        """The round whose models are those of the method; 0: the last round, unless another part names one."""
        return 0

    @property
    def pinned(self) -> frozenset[int]:
        """Rounds that are saved, and whose checkpoints stay."""
        return frozenset()

    def ends(self, round: int) -> str:
        """Why the method ends after the present round, although others are left; empty: it goes on."""
        return ""

    def leave(self, ids: np.ndarray) -> None:
        """Forgets clients that left before the round."""

    def cohort(self, stats: RoundStats, state: State, draw: Callable[[], Cohort]) -> Cohort:
        """Before the cohort: the clients of the round. draw: returns those of the parts before this one."""
        return draw()

    def reachable(self, round: int, ids: np.ndarray, waits: bool) -> np.ndarray:
        """The clients among the reachable `ids` that can take part if the method asks for all of them.

        waits: whether the round waits for them.
        """
        return ids

    def clients(self, clients: Clients, cohort: Cohort | None) -> Clients:
        """Around the exchanges: the clients as the method gets them. cohort: the cohort, if they are its clients."""
        return clients

    def end_round(self, stats: RoundStats, cohort: Cohort, before: State, after: State) -> None:
        """After the round, before it is evaluated. before, after: states around the training of the cohort."""

    def end_evaluation(self, stats: RoundStats) -> None:
        """After the evaluation of the round, if it has one."""

    def to_checkpoint(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """(tensors, JSON values) by names in the checkpoint; those of tensors begin with "server.".

        The tensors must not change afterwards: the next checkpoint is compared with them.
        """
        return {}, {}

    def restore(self, tensors: dict[str, Tensor], values: dict[str, Any], state: State) -> None:
        """Restores the output of `to_checkpoint`, which it removes from `tensors` and `values`.

        state: of the method. Raises KeyError, TypeError or ValueError for invalid tensors or values.
        """


def named(first: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors by names that begin with `first`."""
    return {f"{first}{name}": tensor for name, tensor in tensors.items()}


def taken(first: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The inverse of `named` for the tensors whose names begin with `first`, which are removed from `tensors`."""
    names = [name for name in tensors if name.startswith(first)]
    return {name.removeprefix(first): tensors.pop(name) for name in names}
