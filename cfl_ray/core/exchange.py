"""The models that are sent in an exchange, and the local training that clients do with them."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from torch import Tensor

from cfl_ray.core.local_sgd import LocalSGD, LocalStep
from cfl_ray.core.params import Columns
from cfl_ray.core.work import ClientState, Mixture, Objective, Proximal, Rows
from cfl_ray.plugins.calling import described


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
    """Objective and steps of local training in one exchange; by default, `Clients.local` on the client's loss."""

    sgd: LocalSGD | None = None  # None: `Clients.local`
    steps_M: np.ndarray | None = None  # local steps of each client; None: as `sgd` gives for its number of samples
    proximal: Sequence[Proximal[Sent]] = ()
    frozen_model: Sent | None = None  # its logits are added to those of the trained model (additive models, CAM)
    local_step: LocalStep | None = None  # a step of several gradients; None: the gradient of one batch
    objective: Objective | None = None  # a loss that uses features; None: the task's loss
    # a second model, passed to `local_step`, which may change it in place; the client state is then that of this model
    companion: Sent | None = None
    trace: int = 0  # number of leading steps whose mini-batch losses are returned (`Updates.step_loss_MS`)
    chained: bool = False  # each client starts from the result of the previous client; this is not federated averaging
    mixture: Mixture | None = None  # set by `Clients.train_mixture`: weights of the samples in the loss


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

    def as_tuple(self) -> tuple[Tensor, ...]:
        return tuple(self.tables)


def with_momentum_kept(
    local: LocalSGD, client_state: ClientState | None, keeps_momentum: bool
) -> tuple[LocalSGD, ClientState | None]:
    """Local training and client state that keep a persistent momentum buffer, without other state under "momentum"."""
    local = replace(local, persist=local.persist and keeps_momentum and local.momentum > 0)
    if local.persist and client_state is None:
        return local, ClientState("momentum", Columns(()), private=False)
    return local, client_state
