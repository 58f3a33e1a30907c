"""The server: the round loop of one method. Plain Python, so that it runs in this process as well as inside a Ray actor."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from cfl_ray.core.clients import Clients, Ledger, Round
from cfl_ray.core.cohort import Change, Population
from cfl_ray.core.errors import UserError
from cfl_ray.core.method import Start
from cfl_ray.core.rng import Draws
from cfl_ray.core.work import Backend
from cfl_ray.data.federation import Federation
from cfl_ray.engine.network import Network
from cfl_ray.runtime.checkpoint import Checkpoint, CheckpointStore
from cfl_ray.runtime.evaluation import Evaluator, clustering, initial_scores, summarise
from cfl_ray.runtime.journal import Journal
from cfl_ray.runtime.lifecycle import Broken, Done, Evaluating, Finished, Lifecycle, Loaded, Plan, Running, Saving, Starting, Stopped, next_state
from cfl_ray.runtime.requests import Requests
from cfl_ray.runtime.setup import Setup
from cfl_ray.tracking import read_records


@dataclass(frozen=True)
class Report:
    """What the server says after a round (or, with round 0, after it has loaded)."""

    state: Lifecycle
    round: int
    metrics: dict[str, float] = field(default_factory=dict)
    notes: tuple[str, ...] = ()  # one line each, for the person who watches
    moved: tuple[tuple[int, int], ...] = ()  # (client, cluster) of every client whose cluster changed in this round
    time_ms: int = 0
    stop: bool = False  # somebody asked that the run end here

    @property
    def finished(self) -> bool:
        return isinstance(self.state, Finished)


class Server:
    """One method on one federation. `advance` performs states until a round is complete.

    Raises what the method raises; a checkpoint and the journal hold everything needed to go on in another process.
    session: names the driver's session, which a request to stop ends.
    """

    def __init__(self, setup: Setup, label: str, network: Network, backend: Backend, store: CheckpointStore | None, session: str = ""):
        self.experiment, self.whole, self.local, self.availability = setup.experiment, setup.federation, setup.local, setup.availability
        self.attackers = np.array(sorted(setup.attack.clients), np.int64)
        self.method, self.network, self.backend, self.store = setup.methods[label], network, backend, store
        experiment = self.experiment
        self.rule = self.method.rule
        self.plan = Plan(experiment.rounds, experiment.evaluation.every, experiment.runtime.checkpoint_every)
        self.evaluator = Evaluator(experiment.evaluation, self.whole, backend, experiment.seed)
        journal, recorded = Journal(store.directory if store else None), [record.round for record in read_records(store.directory)] if store else []
        self.requests = Requests(label, journal, self.whole, experiment.rounds, session, max(recorded, default=0))
        self.now: Lifecycle = Starting()
        self.saved = 0  # the last round that was
        self.report = Report(self.now, 0)

    # ---- the loop

    def advance(self) -> Report:
        """Goes on until the next round is complete: trained, evaluated and saved as planned."""
        if isinstance(self.now, Starting):
            round = self._load()
            self._enter(Loaded(round))
            return replace(
                self.report, state=self.now, notes=self.report.notes + ((f"goes on after round {round}",) if round else ()), stop=self._stops(round)
            )
        while True:
            perform = {Running: self._run, Evaluating: self._evaluate, Saving: self._save}[type(self.now)]
            number = self.now.round
            try:
                perform(number)
            except UserError as error:
                self._enter(Broken(str(error), self.saved))
                raise
            with self.requests.lock:  # who asks now that the run stop is heard before the next round, or told that it is one later
                self._enter(Done(stop=self._stops(number)))
            if isinstance(self.now, Finished | Stopped) or (isinstance(self.now, Running) and self.now.round > number):
                return self._report(number)

    def _enter(self, event) -> None:
        self.now = next_state(self.now, event, self.plan)
        self.requests.enters(self.now)

    def _stops(self, number: int) -> bool:
        return self.requests.stop_after is not None and number >= self.requests.stop_after

    def _report(self, number: int) -> Report:
        return Report(self.now, number, self.metrics, tuple(self.notes), tuple(self.moved), self.time_ms, self._stops(number))

    # ---- starting

    def _load(self) -> int:
        """Everything as it was after the newest checkpoint, or before round 1. Returns that round."""
        experiment, federation = self.experiment, self.whole
        changes = [Change(event.round, tuple(event.join), tuple(event.leave)) for event in experiment.schedule]
        self.population = Population(federation.num_clients, changes, experiment.seed)
        self.initial_P = self.network.new_model(experiment.seed, 0)
        self.ledger = Ledger()
        self.held_N2 = np.full((federation.num_clients, 2), np.nan, np.float32)  # P-local: accuracy and macro-F1 after the last own training
        checkpoint = self.store.load() if self.store else None
        self._use(self.requests.federation(checkpoint.round if checkpoint else 0))
        self._see(checkpoint.round if checkpoint else 0)
        self.requests.sees(self.population)
        if checkpoint is None:
            start = Start(federation.num_clients, self.network.spec, lambda index: self.network.new_model(experiment.seed, index), federation.shape.input)
            self.state = self.method.init(start)
            return 0
        self._restore(checkpoint)
        return checkpoint.round

    def _restore(self, checkpoint: Checkpoint) -> None:
        tensors, self.saved = dict(checkpoint.tensors), checkpoint.round
        self.held_N2 = tensors.pop("server.held_N2").numpy()
        self.state = self.method.State.join(tensors, checkpoint.values["state"])
        self.ledger = Ledger(**checkpoint.values["ledger"])
        for event in self.requests.journal.until(checkpoint.round):
            self.population.add(event.change, self.requests.federation(event.round).num_clients)
        self.population.advance(checkpoint.round)
        self.requests.taken_up(checkpoint.round)
        self.requests.sees(self.population)
        self.backend.restore(checkpoint.memory())
        report = checkpoint.values["report"]
        moved = tuple(map(tuple, report["moved"]))
        self.report = Report(self.now, checkpoint.round, report["metrics"], checkpoint.refused, moved, report["time_ms"])

    # ---- the states' effects

    def _run(self, number: int) -> None:
        began, self.notes, self.metrics = time.perf_counter(), [], {}
        self._take_up_requests(number)
        before_N = self.state.assign_N
        self.books = Round(ledger=self.ledger)
        self._come_and_go(number)
        cohort = self.experiment.cohort
        drawn = self.population.draw(number, cohort.fraction, cohort.clients, self.availability, cohort.dropout)
        if len(drawn.ids_M):
            clients = self._clients(drawn.ids_M, number, measure=self.experiment.evaluation.local)
            self.state = self.method.round(self.state, clients, Draws(self.experiment.seed, number))
        else:
            self.notes.append("nobody could be reached: a round without training")
        self._hold(list(self.books.held), list(self.books.held.values()))
        if drawn.dropped:
            self.metrics["clients_dropped"] = float(drawn.dropped)
        self._note_left_out(self.books)
        changed = np.flatnonzero(before_N != self.state.assign_N) if before_N is not self.state.assign_N else np.zeros(0, np.int64)
        self.moved = list(zip(changed.tolist(), self.state.assign_N[changed].tolist()))
        if self.books.train_loss:
            self.metrics["train_loss"] = float(np.mean(list(self.books.train_loss.values())))
        self.metrics["round_seconds"] = time.perf_counter() - began
        self.time_ms = time.time_ns() // 1_000_000

    def _use(self, federation: Federation) -> None:
        """Lets this server and all who work for it look at a federation that has grown."""
        self.whole = federation
        self.backend.use(federation)

    def _see(self, number: int) -> None:
        """Looks at the federation as it is in a round."""
        self.federation = self.evaluator.federation = self.whole.at(number)

    def _take_up_requests(self, number: int) -> None:
        """What was asked of this round joins its changes; newcomers get their place."""
        for event in self.requests.taken_up(number):
            self.population.add(event.change, self.requests.federation(number).num_clients)
        if (federation := self.requests.federation(number)) is not self.whole:
            self._use(federation)
            self.state = self.state.grown(federation.num_clients)
            more = federation.num_clients - len(self.held_N2)
            self.held_N2 = np.concatenate([self.held_N2, np.full((more, 2), np.nan, np.float32)])
            self.notes.append(f"the federation grew to {federation.num_clients} clients")

    def _come_and_go(self, number: int) -> None:
        self._see(number)
        came, gone = self.population.advance(number)
        self.requests.sees(self.population)
        if len(gone):
            self.state = self.method.leave(self.state, gone)
            self.backend.forget(gone)
            self._hold(gone, np.nan)
            self.notes.append(f"left: {_listed(gone)}")
        if len(came):
            self.state = self.method.join(self.state, self._clients(came, number))
            self.notes.append(f"joined: {_listed(came)}")
        changed = self.whole.changed(number)
        changed = changed[self.population.is_online_N[changed]]
        if len(changed):
            self.state = self.method.drift(self.state, self._clients(changed, number))
            self.notes.append(f"data changed: {_listed(changed)}")

    def _hold(self, ids: Sequence[int] | np.ndarray, held: object) -> None:
        """A new array, where any changes: a checkpoint compares with the one saved last."""
        if len(ids):
            self.held_N2 = self.held_N2.copy()
            self.held_N2[ids] = held

    def _note_left_out(self, books: Round) -> None:
        """One line for all that were left out for the same reason, once per round."""
        clients_of: dict[str, list[int]] = {}
        for client, left in sorted(books.left_out.items()):
            if self.books is books or self.books.left_out.get(client) != left:
                clients_of.setdefault(left.why, []).append(client)
        for why, clients in clients_of.items():
            self.notes.append(f"{_listed(np.array(clients)) if clients[1:] else f'client {clients[0]}'}: {why}; left out of this round")
        self.books.left_out.update(books.left_out)
        self.metrics |= {"clients_rejected": float(len(self.books.rejected)), "clients_late": float(len(self.books.late))}

    def _evaluate(self, number: int) -> None:
        settings, online = self.experiment.evaluation, self.population.online
        books = Round()
        clients = self._clients(self.evaluator.chosen(online), number, books=books)
        serving = self.method.serve(self.state, clients)
        found = self.evaluator.serving(serving, clients)
        self.metrics |= summarise(found) | clustering(self.method, self.state, online, self.federation.group_N)
        if settings.local:
            self.metrics |= self._held_accuracy(clients)
        honest = ~np.isin(clients.ids_M, self.attackers)
        if len(self.attackers) and honest.any():
            self.metrics["accuracy_honest"] = float(np.nanmean(found.accuracy_M[honest]))
        newcomers = np.isin(clients.ids_M, self.population.newcomers)
        if newcomers.any():
            self.metrics["newcomer_accuracy"] = float(np.nanmean(found.accuracy_M[newcomers]))
        if settings.tuned_epochs:
            tuned_M = self.evaluator.tuned(serving, clients, self.local).accuracy_M
            self.metrics["accuracy_tuned"] = float(np.nanmean(tuned_M))
            if newcomers.any():
                self.metrics["newcomer_accuracy_tuned"] = float(np.nanmean(tuned_M[newcomers]))
        self._note_left_out(books)
        share = 1e-6 / self.federation.num_clients  # from bits of all clients to Mbit per client of the federation
        self.metrics |= {"clients_online": float(len(online)), "mbit_down": self.ledger.down_bits * share, "mbit_up": self.ledger.up_bits * share}

    def _held_accuracy(self, clients: Clients) -> dict[str, float]:
        """P-local over all, clients that never trained with the initial model they hold, and over those that have trained."""
        held_M = self.held_N2[clients.ids_M, 0].astype(np.float64)
        trained = ~np.isnan(held_M)
        found = {"accuracy_local_trained": float(held_M[trained].mean())} if trained.any() else {}
        if not trained.all():
            held_M[~trained] = initial_scores(self.evaluator, self.initial_P, clients.select(~trained)).accuracy_M
        return found | {"accuracy_local": float(np.nanmean(held_M)), "trained_share": float(trained.mean())}

    def _save(self, number: int) -> None:
        if self.store is None:
            return
        tensors, scalars = self.state.split()
        tensors["server.held_N2"] = torch.from_numpy(self.held_N2)
        report = {"metrics": self.metrics, "moved": self.moved, "time_ms": self.time_ms}  # for a driver that is killed before it kept them
        values = {"state": scalars, "ledger": vars(self.ledger), "report": report}
        if remark := self.store.save(number, tensors, values, self.backend):
            self.notes.append(remark)
        self.saved = number

    def _clients(self, ids: np.ndarray, number: int, *, measure: bool = False, books: Round | None = None) -> Clients:
        images = 0 if not measure else 2**62 if self.federation.view == "holdout" else self.experiment.evaluation.local_images
        return Clients(
            np.asarray(ids, np.int64), self.federation.size_N[ids], self.network.spec, self.local, self.backend,
            self.experiment.seed, number, books or self.books, images, lambda: self._reachable(number), self.rule,
        )  # fmt: skip

    def _reachable(self, number: int) -> tuple[np.ndarray, np.ndarray]:
        """Ids and sizes of all clients online that are reachable in this round and do not fail in it."""
        cohort = self.experiment.cohort
        ids = self.population.draw(number, 1.0, None, self.availability, cohort.dropout).ids_M
        return ids, self.federation.size_N[ids]


def _listed(ids: np.ndarray) -> str:
    shown = ", ".join(map(str, ids[:8].tolist()))
    return f"clients {shown}" + (f" and {len(ids) - 8} more" if len(ids) > 8 else "")
