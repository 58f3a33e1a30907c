"""Does pieces of exchanges: the same code in this process and inside a client host."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.nn.utils.rnn import pad_sequence

from cfl_ray.core.sketch import sketch
from cfl_ray.core.work import Combine, Describe, Keep, LeftOut, Losses, MixPending, PieceResult, Rows, TestClients, TestShared, Train, Work
from cfl_ray.data.federation import Federation
from cfl_ray.engine import span, testing, vectorised
from cfl_ray.engine.attack import Attack
from cfl_ray.engine.failure import named
from cfl_ray.engine.network import Network
from cfl_ray.engine.oneclient import OneClient
from cfl_ray.engine.owned import owned_value, owned_velocity, with_owned
from cfl_ray.engine.reduce import HostSums, PieceSums, combined, length
from cfl_ray.engine.sound import ANY, blank, data_flaw, update_flaw, value_flaw
from cfl_ray.engine.task import Pulled, Task, Trained

Lookup = Callable[[int, int], Tensor]  # (table, row) -> the model (P,)
Samples = tuple[Tensor, Tensor]  # x (n, *shape), y (n,)
Memory = dict[int, Tensor]  # position in the piece -> what the client has: columns it owns, or its result until it is mixed


@dataclass(frozen=True)
class Left:
    """What a piece leaves behind per client."""

    owned: Memory = field(default_factory=dict)
    pending: Memory = field(default_factory=dict)
    out: dict[int, LeftOut] = field(default_factory=dict)


@dataclass
class Worker:
    """Holds a network and the federation; does one piece at a time.

    engine: "sequential", "vectorised" (the clients of a piece together) or "span"; where the named one does not apply to a
            piece, the sequential one does it.
    """

    network: Network
    federation: Federation
    engine: str = "sequential"
    attack: Attack = Attack()

    def __post_init__(self):
        self.data = self.federation  # as it is in the round at work

    def run(self, work: Work, index_m: np.ndarray, row: Lookup, memory: Memory, sums: HostSums) -> tuple[PieceResult, Left]:
        """Does a piece: what it found, and what its clients keep of it. Weighted sums are added to `sums`.

        memory: what the clients own, or, where the work mixes pending results, those.
        """
        left = Left()
        self.data = self.federation.at(work.address.round)
        if isinstance(work, Train):
            arrays = self._train(work, row, memory, left, sums)
        elif isinstance(work, MixPending):
            arrays = self._mix_pending(work, memory, sums)
        elif isinstance(work, Combine):
            arrays = {"combined": combined(work, memory)}
        else:
            do = {Losses: self._losses, Describe: self._describe, TestClients: self._test_clients, TestShared: self._test_shared}
            arrays = do[type(work)](work, row, memory, left)
        return PieceResult(index_m, arrays, left.out), left

    # ---- training

    def _train(self, work: Train, row: Lookup, memory: Memory, left: Left, sums: HostSums) -> dict[str, np.ndarray]:
        arrays = self._blank(work)
        piece = PieceSums(work.mix) if work.mix is not None else None
        for trained in self._trained(work, row, memory, left):
            index, row_P, upload_P = trained.index, trained.row_P, trained.upload_P
            if flaw := self._flaw(trained):
                left.out[index] = LeftOut(flaw)
                continue
            arrays["ok"][index], arrays["train_loss"][index] = True, trained.train_loss
            if piece is not None:
                piece.add(index, upload_P)
            if work.keep is not None:
                start_P = _sent(work, index, row) if work.keep.change else None
                arrays["kept"][index], arrays["norm"][index] = _kept(work.keep, upload_P, start_P, work.address.seed)
            if work.lengths:
                arrays["length"][index] = length(work, upload_P, _sent(work, index, row))
            if work.own is not None:
                left.owned[index] = owned_value(work.own, trained)
            if work.mix_later:
                left.pending[index] = upload_P.cpu().clone()
            if work.measure:  # last: it may load another row into the network
                arrays["held"][index] = self._test_one(work, index, row, row_P, work.measure, Left())[:2]  # evaluation says what is wrong
        if piece is not None:
            sums.add(piece.rows, piece.mass)
        return arrays

    def _blank(self, work: Work) -> dict[str, np.ndarray]:
        return blank(work, self.federation.shape.num_classes)

    def _flaw(self, trained: Trained) -> str | None:
        """What is wrong with a result: it is left out then."""
        rows = [trained.row_P] if trained.anchor_P is None else [trained.row_P, trained.anchor_P]
        flaw = next((flaw for row_P in rows if (flaw := update_flaw(row_P, self.network.spec.trained))), None)
        if flaw is None and not np.isfinite(trained.train_loss):
            flaw = "a loss that is not finite"
        return flaw and f"its update has {flaw}"

    def _trained(self, work: Train, row: Lookup, memory: Memory, left: Left) -> Iterator[Trained]:
        if self.engine == "vectorised" and not work.in_order:
            tasks = {i: task for i in range(len(work.ids_M)) if (task := self._task(work, i, row, memory, left))}
            positions, stack = list(tasks), list(tasks.values())
            if len(stack) > 1 and vectorised.refusal(self.network, stack) is None:
                found = vectorised.train(self.network, stack)
                yield from (self._forged(work, replace(trained, index=positions[trained.index]), row) for trained in found)
                return
        before_P = None
        for index in range(len(work.ids_M)):
            task = self._task(work, index, row, memory, left)
            if task is None:
                continue
            if before_P is not None:
                task = replace(task, start_P=before_P)
            with named(task.client, "training"):
                trained = span.train_one(self.engine, self.network, task)
            trained = self._forged(work, replace(trained, index=index), row)
            if work.in_order and update_flaw(trained.upload_P, self.network.spec.trained) is None:
                before_P = trained.upload_P.clone()
            yield trained

    def _forged(self, work: Train, trained: Trained, row: Lookup) -> Trained:
        """With what an attacker uploads in place of its result."""
        client = int(work.ids_M[trained.index])
        if not self.attack.of(client, work.address):
            return trained
        return replace(trained, anchor_P=self.attack.upload(client, trained.upload_P, _sent(work, trained.index, row), work.address))

    def _task(self, work: Train | TestClients, index: int, row: Lookup, memory: Memory, left: Left) -> Task | None:
        client, samples = int(work.ids_M[index]), self._samples(work, index, left)
        if samples is None:
            return None
        x, y = samples
        mine, beside_P = memory.get(index), _beside(work, index, row)
        start_P = with_owned(row(work.start.table, int(work.start.row_M[index])), work.own, mine)
        if isinstance(work, TestClients):
            return Task(client, start_P, x, y, int(work.steps_M[index]), work.tune, work.address, beside_P=beside_P)
        pulls = tuple(
            Pulled(pull.weight, row(pull.anchor.table, int(pull.anchor.row_M[index])), pull.columns, pull.follow, pull.every) for pull in work.pulls
        )
        velocity = owned_velocity(mine, work.own, start_P) if work.local.persist else None
        return Task(client, start_P, x, y, int(work.steps_M[index]), work.local, work.address, pulls, work.rule, beside_P, velocity)

    def _samples(self, work: Work, index: int, left: Left) -> Samples | None:
        """Training data of a client, with the labels that it takes for true; None, and it is left out, where they are not sound."""
        client = int(work.ids_M[index])
        with named(client, "reading its data"):
            x, y = self.data.train(client)
            flaw = data_flaw(x, y, self.federation.shape)
        if flaw:
            left.out[index] = LeftOut(f"its data have {flaw}")
            return None
        return x, self.attack.labels(client, y, self.federation.shape.num_classes, work.address)

    def _mix_pending(self, work: MixPending, memory: Memory, sums: HostSums) -> dict[str, np.ndarray]:
        piece = PieceSums(work.mix)
        for index in sorted(memory):
            piece.add(index, memory[index])
        sums.add(piece.rows, piece.mass)
        return {"ok": np.isin(np.arange(len(work.ids_M)), list(memory))}

    # ---- looking

    @torch.no_grad()
    def _losses(self, work: Losses, row: Lookup, memory: Memory, left: Left) -> dict[str, np.ndarray]:
        arrays = self._blank(work)
        data = {i: samples for i in range(len(work.ids_M)) if (samples := self._samples(work, i, left))}
        if not data:
            return arrays
        sound = list(data)
        data = [(x[: work.max_samples], y[: work.max_samples]) for x, y in data.values()]
        x, y = torch.cat([x for x, _ in data]), torch.cat([y for _, y in data])
        sizes = [len(y) for _, y in data]
        offset = None if work.beside is None else self._beside_logits(Rows(work.beside.table, work.beside.row_M[sound]), row, [x for x, _ in data])
        for model in range(work.num_models):
            logits = self.network.logits_of(row(0, model), x)
            logits = logits if offset is None else logits + offset
            loss_B = cross_entropy(logits, y.to(logits.device), reduction="none").cpu()
            arrays["losses"][sound, model] = [part.mean().item() for part in loss_B.split(sizes)]
        return arrays

    def _beside_logits(self, beside: Rows, row: Lookup, parts: list[Tensor]) -> Tensor:
        """Logits of the models beside, each on its own client's samples; clients that share one are done together."""
        if len(np.unique(beside.row_M)) == 1:
            return self.network.logits_of(row(beside.table, int(beside.row_M[0])), torch.cat(parts))
        return torch.cat([self.network.logits_of(row(beside.table, int(model)), x) for model, x in zip(beside.row_M, parts)])

    def _describe(self, work: Describe, row: Lookup, memory: Memory, left: Left) -> dict[str, np.ndarray]:
        arrays = self._blank(work)
        features = [torch.zeros(0)] * len(work.ids_M)
        for index, client in enumerate(map(int, work.ids_M)):
            samples = self._samples(work, index, left)
            if samples is None:
                continue
            with named(client, "describing itself"):
                one = OneClient(client, *samples, self.network, work.address, work.local, self.engine)
                anchor = None if work.anchor is None else row(work.anchor.table, int(work.anchor.row_M[index]))
                vector = torch.as_tensor(work.function(one, anchor)).float().reshape(-1)
                vector = self.attack.upload(client, vector, torch.zeros_like(vector), work.address)
            arrays["floats"][index] = len(vector)
            features[index] = vector if work.sketch is None else sketch(vector, work.sketch, work.address.seed)
            if flaw := value_flaw(vector, ANY):
                left.out[index] = LeftOut(f"its signature has {flaw}")
            else:
                arrays["ok"][index] = True
        return arrays | {"features": pad_sequence(features, batch_first=True).numpy()}

    # ---- testing

    def _test_clients(self, work: TestClients, row: Lookup, memory: Memory, left: Left) -> dict[str, np.ndarray]:
        arrays = self._blank(work)
        for index in range(len(work.ids_M)):
            if work.tune is not None:
                task = self._task(work, index, row, memory, left)
                if task is None:
                    continue
                row_P = span.train_one(self.engine, self.network, task).row_P
            else:
                row_P = with_owned(row(work.start.table, int(work.start.row_M[index])), work.own, memory.get(index))
            arrays["scores"][index] = self._test_one(work, index, row, row_P, work.images, left)
        return arrays

    def _test_one(self, work: Work, index: int, row: Lookup, row_P: Tensor, images: int | None, left: Left) -> tuple[float, float, float]:
        """Accuracy, macro-F1 and mean loss of one model on one client's own test data; NaN where those are not sound."""
        client = int(work.ids_M[index])
        with named(client, "testing"):
            logits = self._predictor(work, index, row, row_P)
            x, y = self.data.test(client, images)
            if flaw := data_flaw(x, y, self.federation.shape, least=0):
                left.out[index] = LeftOut(f"its test data have {flaw}")
                return (np.nan,) * 3
            confusion_CC, loss_C = testing.confusion(logits, x, y, self.federation.shape.num_classes)
        return testing.scores(confusion_CC, loss_C)

    def _predictor(self, work: Work, index: int, row: Lookup, row_P: Tensor) -> testing.Logits:
        """How the client predicts: one model, one with another's logits added, or several that vote."""
        if vote := getattr(work, "vote", 0):
            return testing.vote(self.network, [row(0, model) for model in range(vote)])
        return testing.added(self.network, row_P, _beside(work, index, row))

    def _test_shared(self, work: TestShared, row: Lookup, memory: Memory, left: Left) -> dict[str, np.ndarray]:
        arrays = self._blank(work)
        for index, test_set in enumerate(work.ids_M.tolist()):
            x, y = self.data.test_set(test_set)
            if flaw := data_flaw(x, y, self.federation.shape, least=0):
                left.out[index] = LeftOut(f"its test set {test_set} has {flaw}")
                continue
            logits = self._predictor(work, index, row, row(work.start.table, int(work.start.row_M[index])))
            arrays["confusion"][index], arrays["loss"][index] = testing.confusion(logits, x, y, self.federation.shape.num_classes)
        return arrays


def _beside(work: Work, index: int, row: Lookup) -> Tensor | None:
    return None if work.beside is None else row(work.beside.table, int(work.beside.row_M[index]))


def _sent(work: Train, index: int, row: Lookup) -> Tensor:
    """The model that the server sent for a training, whatever the client owns."""
    return row(work.start.table, int(work.start.row_M[index]))


def _kept(keep: Keep, upload_P: Tensor, start_P: Tensor | None, seed: int) -> tuple[np.ndarray, float]:
    """What comes back of one client, and its length before any projection."""
    values = keep.columns.of(upload_P).cpu()
    if start_P is not None:
        values = values - keep.columns.of(start_P)
    norm = values.double().norm().item()
    return (values if keep.sketch is None else sketch(values, keep.sketch, seed)).numpy(), norm

