"""The port: what a method may ask of the clients of a round.

A method never sees a process, a file or a cluster. Each verb is one exchange; what crosses is booked in floats of 32 bits.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from cfl_ray.core.local import LocalSGD, Rule
from cfl_ray.core.params import Columns, ParamSpec
from cfl_ray.core.robust import Mean, NormClipping, aggregate
from cfl_ray.core.robust import Rule as Aggregation
from cfl_ray.core.updates import Ledger, Round, Updates
from cfl_ray.core.work import Address, Backend, Describe, Keep, Losses, Mix, MixPending, Outcome, Own, PullRows, Rows, TestClients, Train, Work

__all__ = ["Clients", "Keep", "Ledger", "Own", "Pull", "Round", "Sent", "Updates"]


@dataclass(frozen=True)
class Sent:
    """Models that clients have received. `row_M[i]` is the row client i works with; None after a broadcast, until `choose`."""

    models_KP: Tensor
    row_M: np.ndarray | None = None

    def choose(self, row_M: np.ndarray) -> "Sent":
        """Each client works with one of the models it has: no traffic."""
        return replace(self, row_M=np.asarray(row_M, np.int64))


@dataclass(frozen=True)
class Pull:
    """Adds (weight / 2) * ||w - to||^2 to the local objective, over `columns` (None: all trained ones).

    follow: the anchor moves too, by anchor <- anchor - follow * weight * (anchor - w) after `every` steps and after the last.
            The client then uploads the anchor; w stays with it.
    """

    weight: float
    to: Sent
    columns: Columns | None = None
    follow: float = 0.0
    every: int = 1

    @property
    def acts(self) -> bool:
        return bool(self.weight or self.follow) and (self.columns is None or self.columns.count > 0)


@dataclass(frozen=True)
class Clients:
    """The clients of this round, in a fixed order."""

    ids_M: np.ndarray  # int64: who they are
    size_M: np.ndarray  # int64: training samples n_i
    spec: ParamSpec
    local: LocalSGD
    backend: Backend = field(repr=False)
    seed: int
    number: int  # of the round
    books: Round = field(repr=False, default_factory=Round)
    measure: int = 0  # test images per client for P-local
    reachable: Callable[[], tuple[np.ndarray, np.ndarray]] | None = field(repr=False, default=None)  # ids and sizes of all that could take part
    aggregation: Aggregation = Mean()  # what stands for the mean wherever weights average results

    def __len__(self) -> int:
        return len(self.ids_M)

    def select(self, mask_M: np.ndarray) -> "Clients":
        """Those for which `mask_M` (bool or indices) holds; books go to the same round."""
        return replace(self, ids_M=self.ids_M[mask_M], size_M=self.size_M[mask_M])

    def all(self) -> "Clients":
        """Every client that is online and can be reached in this round, this cohort among them: for rounds that need everybody."""
        if self.reachable is None:
            return self
        ids, sizes = self.reachable()
        return replace(self, ids_M=ids, size_M=sizes)

    def weights(self, kind: str = "samples") -> np.ndarray:
        """Weight (M,) of each client in an average: its `samples`, or `uniform`."""
        return self.size_M.astype(np.float64) if kind == "samples" else np.ones(len(self))

    def first(self) -> np.ndarray:
        """Row 0 for every client."""
        return np.zeros(len(self), np.int64)

    # ---- sending

    def send(self, models_KP: Tensor, row_M: np.ndarray | None = None, *, columns: Columns | None = None) -> Sent:
        """Sends each client one model: row `row_M[i]` (None: row 0), or only some of its columns."""
        row_M = np.zeros(len(self), np.int64) if row_M is None else np.asarray(row_M, np.int64)
        if len(row_M) != len(self) or (len(row_M) and not 0 <= row_M.min() <= row_M.max() < len(models_KP)):
            raise ValueError(f"send: {len(self)} clients and {len(models_KP)} models, got rows {row_M}")
        self._down(self.spec.size if columns is None else columns.count)
        return Sent(models_KP, row_M)

    def broadcast(self, models_KP: Tensor, *, shared: Columns | None = None) -> Sent:
        """Sends every model to every client; columns that all models share cross once."""
        once = shared.count if shared and len(models_KP) else 0
        self._down(len(models_KP) * (self.spec.size - once) + once)
        return Sent(models_KP)

    def known(self, models_KP: Tensor) -> Sent:
        """Models that the clients have already, such as the common start or an earlier broadcast: no traffic."""
        return Sent(models_KP, self.first() if len(models_KP) == 1 else None)

    def upload(self, floats: int) -> None:
        """Books a few numbers per client that go along with an update."""
        self.books.ledger.up_bits += 32 * floats * len(self)

    def _down(self, floats: int) -> None:
        self.books.ledger.down_bits += 32 * floats * len(self)

    # ---- asking

    def train(
        self,
        start: Sent,
        *,
        mix: Tensor | None = None,
        pulls: Sequence[Pull] = (),
        own: Own | None = None,
        keep: Keep | Columns | None = None,
        mix_later: bool = False,
        beside: Sent | None = None,
        rule: Rule | None = None,
        local: LocalSGD | None = None,
        steps_M: np.ndarray | None = None,
        relay: bool = False,
        held: bool = True,
    ) -> Updates:
        """Every client trains on its own data from its row of `start`.

        mix:       weights (R, M), any scale >= 0. Sums form where the training happens; only (R, P) comes back.
        own:       columns taken from the client's memory where it has one, and kept there afterwards.
        keep:      columns of every client's result to bring back, (M, F): for methods that compare clients.
        mix_later: results stay where they were made until `Clients.mix` says, in this round, how to average them.
        beside:    frozen models whose logits are added to those of the trained one.
        rule:      how a step is made of gradients; None: the gradient of one batch.
        relay:     client j starts from client j-1's result: a chain, not federated averaging.
        held:      the client keeps this result as its model: what protocol P-local measures.
        """
        local, own = _persisting(local or self.local, own, held)
        keep = Keep(keep) if isinstance(keep, Columns) else keep
        private = own.columns if own and own.private else None
        mix = None if mix is None else _normalised(mix, len(self))
        tables = _Tables()
        work = Train(
            self._address(),
            self.ids_M,
            start=tables.rows(start),
            pulls=tuple(PullRows(pull.weight, tables.rows(pull.to), pull.columns, pull.follow, pull.every) for pull in pulls if pull.acts),
            beside=None if beside is None else tables.rows(beside),
            rule=rule,
            local=local,
            steps_M=local.steps_of(self.size_M, parts=rule.batches if rule else 1) if steps_M is None else np.asarray(steps_M, np.int64),
            mix=None if self._robust else mix,
            own=own,
            keep=keep,
            mix_later=mix_later or (self._robust and mix is not None),
            lengths=isinstance(self.aggregation, NormClipping),
            in_order=relay,
            measure=self.measure if held else 0,
            tables=tables.as_tuple(),
        )
        if mix is not None or mix_later:
            self.upload(self.spec.size - (private.count if private else 0))
        elif keep is not None:
            self.upload(keep.columns.count)
        outcome = self._run(work)
        self._note_training(outcome, held)
        if self._robust and mix is not None:
            found = aggregate(self.aggregation, self.backend, work, outcome, self.ids_M, mix)
            outcome = replace(outcome, sums=found.sums, mass_R=found.mass_R)
        return Updates(outcome, mix, private, work)

    def mix(self, updates: Updates, weight_RM: Tensor) -> Updates:
        """Averages the results of a `train(..., mix_later=True)` of this round; no further traffic. Clients without a sound result are left out."""
        mix, work = _normalised(weight_RM, len(self)), updates.training
        address = self._address()
        if self._robust:
            outcome = aggregate(self.aggregation, self.backend, work, updates.outcome, self.ids_M, mix)
        else:
            outcome = self._run(MixPending(address, self.ids_M, (), mix=mix, pending=work.address.exchange))
        return Updates(outcome, mix, updates.private, work)

    def losses(self, sent: Sent, *, max_samples: int | None = None, beside: Sent | None = None) -> np.ndarray:
        """float64 (M, K): mean training loss of each of the K models on each client's data (its first `max_samples`); inf where it is not a number.

        beside: frozen models whose logits are added to those of every model.
        """
        if not len(self):
            return np.zeros((0, len(sent.models_KP)))
        tables = _Tables()
        tables.rows(sent.choose(self.first()))
        work = Losses(
            self._address(),
            self.ids_M,
            num_models=len(sent.models_KP),
            max_samples=max_samples,
            beside=None if beside is None else tables.rows(beside),
            tables=tables.as_tuple(),
        )
        return np.nan_to_num(self._run(work).arrays["losses"], nan=np.inf, posinf=np.inf)  # argmin would take NaN for the least

    def accuracies(self, sent: Sent) -> np.ndarray:
        """float64 (M, K): accuracy of each of the K models on each client's TEST data: only to reproduce results that were made with this leak."""
        found_KM = []
        for k in range(len(sent.models_KP)):
            start = Rows(0, np.full(len(self), k))
            found_KM.append(self._run(TestClients(self._address(), self.ids_M, (sent.models_KP,), start=start)).arrays["scores"][:, 0])
        return np.nan_to_num(np.stack(found_KM, 1))

    def describe(
        self, function: Callable, anchor: Sent | None = None, *, sketch: int | None = None, floats: int | None = None, local: LocalSGD | None = None
    ) -> tuple[Tensor, np.ndarray]:
        """`function(client, anchor_P)` of each client as float32 (M, F), and bool (M,): False for a client that was left out.

        Results of different lengths are filled up with zeros.

        What the function may use of a client is `engine.oneclient.OneClient`.

        sketch: project the result to this many features where it is made (`core.sketch`); cosines survive within about 1/sqrt(F).
        floats: what a client uploads by the paper's count (None: the length of its result without projection).
        """
        if not len(self):
            return torch.zeros(0, sketch or 0), np.zeros(0, bool)
        tables = _Tables()
        work = Describe(
            self._address(),
            self.ids_M,
            function=function,
            anchor=None if anchor is None else tables.rows(anchor),
            sketch=sketch,
            local=local or self.local,
            tables=tables.as_tuple(),
        )
        arrays = self._run(work).arrays
        self.books.ledger.up_bits += 32 * int(arrays["floats"].sum() if floats is None else floats * len(self))
        return torch.from_numpy(arrays["features"]), arrays["ok"]

    @property
    def _robust(self) -> bool:
        return not isinstance(self.aggregation, Mean)

    def _address(self) -> Address:
        self.books.exchanges += 1
        return Address(self.seed, self.number, self.books.exchanges)

    def _run(self, work: Work) -> Outcome:
        outcome = self.backend.run(work)
        self.books.left_out.update({int(work.ids_M[i]): left for i, left in outcome.left_out.items()})
        return outcome

    def _note_training(self, outcome: Outcome, held: bool) -> None:
        ok_M = outcome.arrays["ok"]
        if not held:
            return
        self.books.train_loss.update(zip(self.ids_M[ok_M].tolist(), outcome.arrays["train_loss"][ok_M].tolist()))
        if "held" in outcome.arrays:
            self.books.held.update(zip(self.ids_M[ok_M].tolist(), map(tuple, outcome.arrays["held"][ok_M].tolist())))


class _Tables:
    """Collects the distinct model tables of one exchange, so that each crosses once."""

    def __init__(self):
        self.tables: list[Tensor] = []

    def rows(self, sent: Sent) -> Rows:
        if sent.row_M is None:
            raise ValueError("these models were broadcast: say which one each client works with, sent.choose(row_M)")
        for index, table in enumerate(self.tables):
            if table is sent.models_KP:
                return Rows(index, sent.row_M)
        self.tables.append(sent.models_KP)
        return Rows(len(self.tables) - 1, sent.row_M)

    def as_tuple(self) -> tuple[Tensor, ...]:
        return tuple(self.tables)


def _persisting(local: LocalSGD, own: Own | None, held: bool) -> tuple[LocalSGD, Own | None]:
    """Momentum persists where a client holds the result; it is kept beside what the client owns, or under a name of its own."""
    local = replace(local, persist=local.persist and held and local.momentum > 0)
    return local, Own("momentum", Columns(()), private=False) if local.persist and own is None else own


def _normalised(weight_RM: Tensor, num_clients: int) -> Mix:
    weight_RM = np.asarray(weight_RM, np.float64)
    if weight_RM.ndim != 2 or weight_RM.shape[1] != num_clients or not (weight_RM >= 0).all():
        raise ValueError(f"mix must be weights >= 0 of shape (R, {num_clients}), got shape {weight_RM.shape}")
    total_R = weight_RM.sum(1)
    out_E, client_E = np.nonzero(weight_RM)
    return Mix(len(weight_RM), out_E, client_E, weight_RM[out_E, client_E] / total_R[out_E], total_R)
