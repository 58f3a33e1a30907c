"""Rounds of a method without training, which count the numbers that its clients receive, train and upload.

A real round in this process counts the same traffic, except where it follows from the data (AutoCFL, CFL-GP, FedSoft,
FLUX, PACFL), but needs samples, which `check` does not read, and passes of the network, seconds for a large one.
No outcome of a real round says what the checks ask besides: gradients and batches of a local step, and what a client
keeps.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from types import CodeType
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from cfl_ray.clock.devices import Load
from cfl_ray.core.aggregation.rules import Mean
from cfl_ray.core.checked_method import CheckedMethod
from cfl_ray.core.client_program import Batch, ClientProgram, Forward, first_numbers
from cfl_ray.core.clients import Clients, RoundStats
from cfl_ray.core.describing import CheckedFunction
from cfl_ray.core.local_sgd import LocalSGD
from cfl_ray.core.method import Method, Start
from cfl_ray.core.params import ParamSpec
from cfl_ray.core.privacy import Protection
from cfl_ray.core.rng import Draws
from cfl_ray.core.secure_aggregation import SecureAggregation
from cfl_ray.core.state import State
from cfl_ray.core.versions import NotAsynchronous, Received, Versions
from cfl_ray.core.work import Describe, Losses, Outcome, Train, Weigh, Work
from cfl_ray.data.federation import DataShape
from cfl_ray.engine.client_state import ClientStateStore, KeepsClientStates
from cfl_ray.engine.local_steps import direction, scalar_loss
from cfl_ray.errors import UserError, counted
from cfl_ray.plugins.calling import place_of
from cfl_ray.privacy.noisy_sums import PrivateRun
from cfl_ray.system.threads import one_thread

FEW = 12  # clients of a trial of asynchronous rounds
Result = TypeVar("Result")
KEPT_WEIGHTS = "mixture weights"  # among the names of the values that a client keeps


@dataclass
class DryBackend(KeepsClientStates):
    """Backend that trains nothing, has no data, and counts the work it is given; every result consists of ones."""

    spec: ParamSpec
    shape: DataShape
    size: int = 0  # samples of every client, for `work`; 0: it is not counted
    # ---- counted
    most_clients: int = 0  # of an exchange
    deferred: set[int] = field(default_factory=set)  # number of clients of each exchange with deferred results
    client_states: ClientStateStore = field(default_factory=ClientStateStore)  # stays empty
    work: Counter[str] = field(default_factory=Counter)  # samples "trained", one for each gradient, and "tested"
    kept: dict[str, int] = field(default_factory=dict)  # floats that a client keeps between rounds, by name
    batches: set[tuple[int, int]] = field(default_factory=set)  # batch size (0: all samples), batches of a local step
    # names of the functions and programs that read the inputs of the last layer
    readers: set[str] = field(default_factory=set)

    def run(self, work: Work) -> Outcome:
        self._note(work)
        if self.size:
            self._count(work)
        arrays = {name: np.ones_like(array) for name, array in work.empty_result(self.shape.num_classes).items()}
        if isinstance(work, Describe):
            length = self.num_features(work)
            arrays["features"] = np.ones((len(work.ids_M), min(work.sketch or length, length)), np.float32)
            arrays["floats"] = np.full(len(work.ids_M), length)
        return Outcome(arrays, {}, None if work.averaging is None else np.zeros(work.averaging.num_rows))

    def _note(self, work: Work) -> None:
        """Notes clients, deferred results, batches, readers of features, and what a client keeps."""
        self.most_clients = max(self.most_clients, len(np.unique(work.ids_M)))
        if isinstance(work, Train):
            self.batches.add((work.local.batch_size or 0, work.program.batches_per_step))
            if work.defer_aggregation:
                self.deferred.add(len(work.ids_M))
            if _reads_features(work.program):
                self.readers.add(place_of(work.program))
            if (state := work.client_state) is not None:
                columns = self.spec.size if state.columns is None else state.columns.count
                floats = columns + work.kept_numbers + (self.spec.trained if work.local.persist else 0)
                self.kept[state.name] = work.models_per_client * floats
        elif isinstance(work, Describe) and isinstance(work.function, CheckedFunction):
            function = work.function.function
            self.batches.add((getattr(function, "batch_size", None) or 0, 1))
            if getattr(function, "reads_features", False):
                self.readers.add(place_of(function))
        if isinstance(work, Train | Weigh) and work.num_models and work.program.overrides("weigh"):
            self.kept[KEPT_WEIGHTS] = work.num_models

    def _count(self, work: Work) -> None:
        """Adds the samples that the clients train and test to `work`."""
        num_clients, tests = len(work.ids_M), int(work.frozen_model is not None)
        if isinstance(work, Train):
            cost, counted = int(work.cost_M(np.full(num_clients, self.size)).sum()), self._passes(work)
            self.work["trained"] += cost * counted.gradients
            self.work["tested"] += cost * counted.forwards
            tests += work.program.overrides("weigh")  # for each entry of a client and a model
        elif isinstance(work, Losses | Weigh):
            tests += len(work.tables[0])
        samples = min(work.max_samples or self.size, self.size) if isinstance(work, Losses) else self.size
        self.work["tested"] += num_clients * tests * samples

    def _passes(self, work: Train) -> "CountedGradient":
        """The gradients and forward passes of a local step, each on one batch."""
        program, w_P, given = work.program, torch.ones(self.spec.trained), work.given
        names = {*given.models, program.kept_model} - {""}
        numbers = {name: torch.ones(values_M.shape[1:]) for name, values_M in given.number_of.items()}
        held = {name: w_P.clone() for name in names} | numbers | first_numbers(program, self.spec)
        of_step, of_loss = CountedGradient(self.spec, self.shape), CountedGradient(self.spec, self.shape)
        if program.overrides("step"):
            direction(program, of_step, w_P, dict(held), 0)
        else:
            of_step.gradients = 1
        if _names(program, "loss", "forward"):
            scalar_loss(program, of_loss.batch(), held)
        of_step.forwards += of_step.gradients * of_loss.forwards
        return of_step

    def num_features(self, work: Describe) -> int:
        """Number of floats that the function of `work` returns: by its attribute `floats`, else as in a gradient."""
        floats = getattr(work.function, "floats", None)
        return self.spec.trained if floats is None else floats(math.prod(self.shape.input), self.shape.num_classes)

    def use(self, federation: Any) -> None:
        """No effect: results do not depend on data."""


def _reads_features(program: ClientProgram) -> bool:
    """Whether a program has a loss, whose batches have features, or a hook that names a function that returns them."""
    named = {"weigh": "features", "begin": "features", "step": "forward", "finish": "features"}
    return program.overrides("loss") or any(_names(program, hook, name) for hook, name in named.items())


def _names(program: ClientProgram, hook: str, name: str) -> bool:
    """Whether the code of a hook, or of an expression or function within it, has this name."""
    codes = [getattr(getattr(type(program), hook), "__code__", None)]
    for code in codes:  # grows by the codes within it
        if code is not None:
            if name in code.co_names:
                return True
            codes += [const for const in code.co_consts if isinstance(const, CodeType)]
    return False


@dataclass
class CountedGradient:
    """A gradient of ones, `core.client_program.Gradient`, which counts its calls and those of forward passes."""

    spec: ParamSpec
    shape: DataShape
    gradients: int = 0
    forwards: int = 0

    def __call__(self, w: Tensor, batch: int) -> Tensor:
        self.gradients += 1
        return torch.ones_like(w)

    def batch(self) -> Batch:
        """A batch of ones for a loss, whose forward passes count."""
        seen = self._ones()
        features, outputs = (ones.requires_grad_() for ones in (seen.features, seen.outputs))
        return Batch(
            features.sum() + outputs.sum(), features, outputs, seen.y, seen.real_B, lambda model: self.forward(model, 0)
        )

    def forward(self, w: Tensor | str, batch: int) -> Forward:
        self.forwards += 1
        return self._ones()

    def _ones(self) -> Forward:
        matrices = [shape for shape in self.spec.shapes[: self.spec.num_params] if len(shape) == 2]
        features = matrices[-1][-1:] if matrices else (1,)  # the inputs of a linear last layer
        y = torch.zeros(1, *self.shape.target_shape, dtype=torch.int64)
        return Forward(torch.ones(1, *features), torch.ones(1, *self.shape.outputs), y, torch.ones(1))


@dataclass(frozen=True)
class DryRounds:
    """The rounds of a method without training, and all that decides them."""

    method: Method[Any]
    num_clients: int
    cohort: int  # clients of a round
    local: LocalSGD
    spec: ParamSpec
    shape: DataShape
    rounds: int = 2  # most rounds that are played
    secure: SecureAggregation | None = None
    size: int = 1  # samples of every client

    def start(self, new_model: Callable[[int], Tensor]) -> Start:
        """The argument of `Method.init`."""
        return Start(self.num_clients, self.spec, new_model, self.shape.input, self.shape.outputs)

    def play(
        self,
        backend: DryBackend,
        private: PrivateRun | None = None,
        latecomers: bool = False,
        to_last_phase: bool = False,
    ) -> Iterator[tuple[State, RoundStats]]:
        """Yields the state and statistics after each round.

        The whole method is called: first state, rounds, and the models that clients predict with. Raises RunError for a
        result of the wrong type or shape; an exception of the method has a note that it arose in a trial. latecomers:
        try a client that joins after the rounds. to_last_phase: the first round of the method's last phase, but not
        round 1, is the last one; so there are at least two.
        """
        spec, cohort, size = self.spec, self.cohort, self.size
        last = max(self.rounds, 2) if to_last_phase else self.rounds
        with _noting_trial(f"{counted(self.num_clients, 'client')}, {cohort} in a round, whose results are all 1"):
            checked_method = CheckedMethod(self.method, spec.size)
            state = checked_method.init(self.start(lambda index: torch.zeros(spec.size)))
            for round in range(1, last + 1):
                stats = RoundStats()
                clients = Clients(
                    np.arange(cohort),
                    np.full(cohort, size),
                    spec,
                    self.local,
                    backend,
                    seed=0,
                    round=round,
                    stats=stats,
                    reachable=lambda waits: (np.arange(self.num_clients), np.full(self.num_clients, size)),
                    protection=Protection(private, self.secure),
                )
                phase, state = state.phase, checked_method.round(state, clients, Draws(0, round))
                yield state, stats
                if to_last_phase and round > 1 and not self.method.phases[phase]:
                    break
            if private is not None or self.secure is not None or self.local.examples is not None:
                # a round after a change of data may read other uploads
                checked_method.round(checked_method.drift(state, clients), clients, Draws(0, last))
            if latecomers:
                late = replace(clients, ids_M=np.array([self.num_clients - 1]), num_samples_M=np.array([size]))
                absent = checked_method.leave(state, late.ids_M)
                for before in (absent, checked_method.join(absent, late)):
                    checked_method.round(before, late, Draws(0, last))
            checked_method.serve(state, replace(clients, evaluated=True, stats=RoundStats()))


@contextmanager
def _noting_trial(what: str) -> Iterator[None]:
    """Context that adds a note to an exception of a method that it arose in a trial. what: of clients with results."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        error.add_note(f"in a trial before the run, without training: {what}")
        raise


def of_few(play: Callable[[DryRounds], Result], dry: DryRounds, few: int) -> Result:
    """The result of a trial with few clients; of one with all, if the method fails with few, as with more clusters."""
    try:
        return play(replace(dry, num_clients=few))
    except UserError:
        raise
    except Exception:
        return play(dry)


@dataclass(frozen=True)
class TrafficEstimate:
    """Traffic of a method in Mbit per client of the federation, as (download, upload), and the number of its models."""

    rounds: tuple[tuple[float, float], ...]  # the first rounds; the last one stands for all later rounds
    models: int  # cluster models after these rounds
    deferred: int  # results that stay in the object store until they can be averaged
    kept: dict[str, int]  # floats that a client keeps between rounds, by name
    clients: tuple[int, ...] = ()  # most clients of an exchange, in each of these rounds
    cohort: int = 0  # clients of a round

    def of_clients(self, uploads: float, unused: float) -> "TrafficEstimate":
        """The same if so many clients of a cohort upload, and so many others receive models alone.

        In rounds in which all clients take part, the same share of them uploads, and there are no others.
        """
        up = uploads / self.cohort
        down = (uploads + unused) / self.cohort
        shares = ((up if clients > self.cohort else down, up) for clients in self.clients)
        pairs = zip(self.rounds, shares, strict=True)
        return replace(self, rounds=tuple((sent[0] * share[0], sent[1] * share[1]) for sent, share in pairs))

    @property
    def mixed(self) -> int:
        """Number of models that a client mixes; 0 if it mixes none."""
        return self.kept.get(KEPT_WEIGHTS, 0)

    def total(self, rounds: int) -> float:
        """Mbit of a run of `rounds` rounds, download and upload."""
        return sum(map(sum, self.rounds)) + (rounds - len(self.rounds)) * sum(self.rounds[-1])


def traffic(dry: DryRounds) -> TrafficEstimate:
    """The traffic of a method, counted up to a round of its last phase."""
    mbit, clients, models, backend = [], [], 0, DryBackend(dry.spec, dry.shape)
    with one_thread():  # as the server
        for state, stats in dry.play(backend, to_last_phase=True):
            down, up = stats.traffic.down_bits, stats.traffic.up_bits
            mbit.append((down / dry.num_clients / 1e6, up / dry.num_clients / 1e6))
            clients.append(backend.most_clients)
            models, backend.most_clients = state.num_clusters, 0
    if isinstance(dry.method.aggregation_rule, Mean):
        deferred = max(backend.deferred, default=0)
    else:
        deferred = dry.cohort * backend.kept.get(KEPT_WEIGHTS, 1)  # a robust rule needs all results together
    return TrafficEstimate(tuple(mbit), models, deferred, backend.kept, tuple(clients), dry.cohort)


def load_of(dry: DryRounds) -> Load:
    """The work of a client in a round of the method's last phase, or in the last round if that comes before.

    The same clients take part in every round, so that all of them have the same work.
    """
    clients, size, backend = dry.cohort, dry.size, DryBackend(dry.spec, dry.shape, size=dry.size)
    with one_thread():  # as the server
        for _, stats in dry.play(backend, to_last_phase=True):
            bits, work = stats.traffic, dict(backend.work)
            backend.work.clear()
    once = int(dry.local.steps_of(np.array([size]))[0] * dry.local.batch_of(size))  # samples of the usual training
    return Load(
        bits.down_bits / clients,
        bits.up_bits / clients,
        work.get("trained", 0) / clients / once,
        work.get("tested", 0) / clients / size,
    )


def why_synchronous(dry: DryRounds) -> str:
    """Why rounds of the method cannot be asynchronous, by rounds without training; empty: they can.

    At least 12 clients, of which four take part in a round. Three rounds of the method's last phase are played, if it
    comes to that.
    """
    method, spec, count = dry.method, dry.spec, dry.num_clients
    if not isinstance(method.aggregation_rule, Mean):
        return f"aggregation {method.aggregation} compares results of clients that start from the same model"
    if method.only_synchronous:
        return method.only_synchronous
    models = ChangingBackend(spec, dry.shape)
    checked_method, first_KP = CheckedMethod(method, spec.size), models.random(FEW, spec.size)
    state = checked_method.init(dry.start(lambda k: first_KP[k % FEW] + k // FEW))
    versions, sizes = Versions(strict=True), np.ones(4, np.int64)
    left = 3
    for round in range(1, dry.rounds + 1):
        new = 2 + 2 * (round - 1) % (FEW - 2)
        ids = np.array([0, 1, new, new + 1])  # at first, two of them for the first time
        # all of them have received the version before the present version
        received = Received(versions, dict.fromkeys(range(count), round - 2), round - 1)
        clients = Clients(ids, sizes, spec, dry.local, models, seed=0, round=round, received=received)
        try:
            with _noting_trial(f"{counted(count, 'client')}, {len(ids)} in a round, whose results are random"):
                after = checked_method.round(state, clients, Draws(0, round))
        except NotAsynchronous as error:
            return str(error)
        versions.advance(round - 1, state, after, {round - 1})
        state, left = after, left - (not method.phases[after.phase])
        if not left:
            break
    return ""


@dataclass
class ChangingBackend(DryBackend):
    """A backend without training whose results are random, so that models change and clients differ."""

    draw: torch.Generator = field(default_factory=lambda: torch.Generator().manual_seed(0))

    def random(self, *shape: int) -> Tensor:
        """Standard normals."""
        return torch.randn(shape, generator=self.draw)

    def run(self, work: Work) -> Outcome:
        outcome = super().run(work)
        if "features" in outcome.arrays:
            outcome.arrays["features"] = self.random(*outcome.arrays["features"].shape).abs().numpy()
        if work.averaging is None:
            return outcome
        rows = np.unique(work.averaging.out_E).tolist()
        arrived_R = np.isin(np.arange(work.averaging.num_rows), rows).astype(float)
        return replace(outcome, means={row: self.random(self.spec.size) for row in rows}, arrived_R=arrived_R)
