"""The models that are sent in an exchange, and the local training that clients do with them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from torch import Tensor

from cfl_ray.core.client_program import HOOKS, ClientProgram, check_attributes, first_numbers
from cfl_ray.core.local_sgd import LocalSGD
from cfl_ray.core.params import Columns, ParamSpec
from cfl_ray.core.work import ClientState, Given, Proximal, Rows
from cfl_ray.plugins.calling import check_hooks, described, place_of


@dataclass(frozen=True)
class Sent:
    """Models that clients have received."""

    models_KP: Tensor
    row_M: np.ndarray | None = None  # int64 (M,): the row that each client uses; None after a broadcast, until `choose`
    # int64 (M, K): row of each client's version of each of the K models that were sent; None: all have the same version
    row_MK: np.ndarray | None = None

    def choose(self, row_M: np.ndarray) -> "Sent":
        """The same models, with `row_M` as the model that each client uses; no traffic."""
        row_M = np.asarray(row_M, np.int64)
        return replace(self, row_M=row_M if self.row_MK is None else self.row_MK[np.arange(len(row_M)), row_M])

    @property
    def num_models(self) -> int:
        """K, number of models that were sent."""
        return len(self.models_KP) if self.row_MK is None else self.row_MK.shape[1]


@dataclass(frozen=True)
class LocalTraining:
    """Program, proximal terms and steps of local training in one exchange; by default plain `Clients.local`."""

    sgd: LocalSGD | None = None  # None: `Clients.local`
    steps_M: np.ndarray | None = None  # local steps of each client; None: as `sgd` gives for its number of samples
    program: ClientProgram = ClientProgram()
    # by name, for the program: models that clients received, and numbers (M, ...) of the clients
    given: Mapping[str, Sent | np.ndarray | Tensor] = field(default_factory=dict)
    proximal: Sequence[Proximal[Sent]] = ()
    frozen_model: Sent | None = None  # its logits are added to those of the trained model (additive models, CAM)
    chained: bool = False  # each client starts from the result of the previous client; this is not federated averaging
    num_models: int | None = None  # K models that each client trains; set by `Clients.train_mixture`, None: one

    def __post_init__(self) -> None:
        if not isinstance(self.program, ClientProgram):
            raise TypeError(f"program must be an object of a subclass of ClientProgram, got {described(self.program)}")
        check_attributes(self.program)
        check_hooks(self.program, ClientProgram, HOOKS)
        if not isinstance(self.proximal, Sequence):
            raise TypeError(f"proximal must be a list, [Proximal(mu, anchor)], got {type(self.proximal).__name__}")
        if not isinstance(self.given, Mapping):
            raise TypeError(f"given must be a dict of models and numbers by name, got {described(self.given)}")

    def of_models(self, count: int, num_clients: int) -> "LocalTraining":
        """For entries (client, model), sorted by client, of clients that train `count` models each.

        Models that were broadcast, and of which none was chosen, become the model of each entry.
        """
        client_e, model_e = np.divmod(np.arange(num_clients * count), count)

        def sent(models: Sent) -> Sent:
            return models.choose(model_e) if models.row_M is None else replace(models, row_M=models.row_M[client_e])

        def value(name: str, given: Any) -> Sent | np.ndarray:
            return sent(given) if isinstance(given, Sent) else _numbers(name, given, num_clients)[client_e]

        return replace(
            self,
            steps_M=None if self.steps_M is None else np.asarray(self.steps_M)[client_e],
            given={name: value(name, given) for name, given in self.given.items()},
            proximal=[
                replace(
                    term.with_anchor(sent(term.anchor)),
                    factor_M=None if term.factor_M is None else term.factor_M[client_e],
                )
                for term in self.proximal
            ],
            frozen_model=None if self.frozen_model is None else sent(self.frozen_model),
            num_models=count,
        )


class ModelTables:
    """The distinct model tables of one exchange, each of which is sent once."""

    def __init__(self, *tables: Tensor) -> None:
        self.tables = list(tables)

    def rows(self, sent: Sent) -> Rows:
        if not isinstance(sent, Sent):
            raise TypeError(f"expected models that clients received, as clients.send returns, got {described(sent)}")
        if sent.row_M is None:
            raise ValueError("these models were broadcast; select the model of each client with sent.choose(row_M)")
        for index, table in enumerate(self.tables):
            if table is sent.models_KP:
                return Rows(index, sent.row_M)
        self.tables.append(sent.models_KP)
        return Rows(len(self.tables) - 1, sent.row_M)

    def given(self, how: LocalTraining, num_clients: int) -> Given:
        """The models and numbers that clients get for their program, with the models as rows of these tables."""
        proximal = tuple(term.with_anchor(self.rows(term.anchor)) for term in how.proximal if term.acts)
        models = {name: self.rows(value) for name, value in how.given.items() if isinstance(value, Sent)}
        numbers = {name: value for name, value in how.given.items() if not isinstance(value, Sent)}
        return Given(models, {name: _numbers(name, value, num_clients) for name, value in numbers.items()}, proximal)

    def as_tuple(self) -> tuple[Tensor, ...]:
        return tuple(self.tables)


def _numbers(name: str, value: Any, num_clients: int) -> np.ndarray:
    try:
        values_M = np.asarray(value, np.float32)
    except (TypeError, ValueError):
        raise TypeError(
            f"given {name!r} is {described(value)}, expected models that clients received, as clients.send returns, or "
            "numbers of each client"
        ) from None
    if values_M.shape[:1] != (num_clients,):
        raise ValueError(
            f"given {name!r} has the shape {values_M.shape}, expected one entry for each of {num_clients} clients"
        )
    return values_M


def with_numbers_kept(
    local: LocalSGD,
    client_state: ClientState | None,
    keeps_momentum: bool,
    program: ClientProgram,
    spec: ParamSpec,
) -> tuple[LocalSGD, ClientState | None]:
    """Local training, and the client state for what clients keep; without columns if they keep only numbers.

    They keep the numbers of the program under the name of its class, or a persistent momentum buffer under "momentum".
    """
    if program.kept_model and client_state is None:
        raise ValueError(
            f"{place_of(program)} has kept_model = {program.kept_model!r}: pass the client state that keeps this model "
            "to train, client_state=ClientState(...)"
        )
    local = replace(local, persist=local.persist and keeps_momentum and local.momentum > 0)
    if client_state is None and first_numbers(program, spec):
        return local, ClientState(type(program).__name__, Columns(()), private=False)
    if client_state is None and local.persist:
        return local, ClientState("momentum", Columns(()), private=False)
    return local, client_state
