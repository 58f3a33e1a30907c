"""Estimate of what an experiment needs, before it runs: sizes, memory and traffic."""

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from cfl_ray import data
from cfl_ray.clock.virtual_time import Flights, VirtualTime
from cfl_ray.config import Experiment
from cfl_ray.core.state import State
from cfl_ray.data import FederationSummary
from cfl_ray.data.federation import Federation
from cfl_ray.data.synthetic import SyntheticFederation
from cfl_ray.errors import ConfigError
from cfl_ray.nn.network import Network
from cfl_ray.population.population import Population, count_of
from cfl_ray.run_directory.session_file import cluster_address
from cfl_ray.runtime.participation import drawn_cohort, wanted_clients
from cfl_ray.setup.checks import bytes_of_participants, compared_clients, why_not_engine
from cfl_ray.setup.dry_rounds import TrafficEstimate, traffic
from cfl_ray.setup.engine_choice import compute_device
from cfl_ray.setup.prepare import setup_on
from cfl_ray.setup.schedule import population_of
from cfl_ray.setup.setup import Setup
from cfl_ray.study.plan import StudyRun
from cfl_ray.system.machine import usable_cpus

_CLIENT_BYTES = 50  # peak server memory per client, measured with a million clients
_PROCESS_BYTES = 450e6  # memory of a process that has imported torch and Ray, measured with torch 2.15 and Ray 2.60
# engines of `auto` that train most networks, by whether hosts compute on a GPU; `span` is a shortcut for a few networks
_USUAL_ENGINES = {False: ("manual", "vectorised"), True: ("vectorised",)}


@dataclass(frozen=True)
class Estimate:
    """The sizes of a valid experiment, and the traffic of its methods."""

    setup: Setup  # on a stand-in for the federation
    federation: FederationSummary
    online: int  # clients before round 1
    cohort: int  # clients of a round, or of a server step in asynchronous rounds
    network: Network
    compared: dict[str, tuple[int, int]]  # (clients, bytes of their pairs), by method that compares pairs of clients
    traffic: dict[str, TrafficEstimate]  # by method
    seconds: dict[str, float]  # virtual seconds of a round, by method; empty without a clock
    # share of the selected clients that miss `clock.deadline`, by method; empty without a deadline
    late: dict[str, float]

    @property
    def model_bytes(self) -> int:
        return self.network.spec.size * 4

    def server_bytes(self, label: str, traffic: TrafficEstimate) -> float:
        _, pairs = self.compared.get(label, (0, 0))
        models = (traffic.models + 1) * 4 * self.model_bytes
        weights = 8 * traffic.mixed  # float32, before and after a round
        own = bytes_of_participants(self.setup, label, self.network.spec)
        return _PROCESS_BYTES + models + own + pairs + (_CLIENT_BYTES + weights) * self.federation.clients

    def host_bytes(self, traffic: TrafficEstimate) -> float:
        return _PROCESS_BYTES + (traffic.models * 3 + 6) * self.model_bytes

    @property
    def warnings(self) -> list[str]:
        """A line for each key that is valid but has no effect, or probably another effect than intended."""
        clients = self.federation.clients
        wanted = {label: getattr(method, "num_clusters", None) or 0 for label, method in self.setup.methods.items()}
        empty = [
            f"{label}.num_clusters ({number}) is more than the {clients} clients: some clusters stay empty"
            for label, number in wanted.items()
            if number > clients
        ]
        of_data = list(self.federation.warnings)
        return self.setup.warnings + of_data + empty + _unwritable(Path(self.setup.experiment.output).absolute())

    @property
    def missing_engines(self) -> list[str]:
        """A line for each usual engine of `auto` that can train the clients of none of the methods."""
        runtime = self.setup.experiment.runtime
        on_gpu = runtime.device == "cuda" or (runtime.device == "auto" and runtime.gpus_per_host > 0)
        engines = _USUAL_ENGINES[on_gpu] if runtime.engine == "auto" else ()
        return [
            f"engine {engine} does not apply: {reason}"
            for engine in engines
            if (reason := why_not_engine(self.setup, self.network, engine))
        ]


def _unwritable(output: Path) -> list[str]:
    """A warning if the output folder is not there and cannot be made; otherwise empty."""
    there = next(path for path in (output, *output.parents) if path.exists())
    if there.is_dir() and os.access(there, os.W_OK):
        return []
    return [f"output: {output} cannot be written: {there} is not a folder in which you can make files"]


def estimate(experiment: Experiment, summary: FederationSummary | None = None) -> Estimate:
    """Returns the estimate of an experiment. Raises ConfigError or DataError for an experiment that a run refuses.

    summary: the sizes of its federation, if they are known.
    """
    summary = summary or data.describe(experiment.data, experiment.seed, experiment.targets)
    setup = setup_on(experiment, _stand_in(summary, experiment.seed))
    check_machine(setup)
    online, network = len(population_of(experiment, summary.clients).online), setup.network()
    cohort = experiment.asynchronous.buffer or experiment.cohort.clients or count_of(experiment.cohort.fraction, online)
    compared = {
        label: (count, count**2 * method.pair_bytes)
        for label, method in setup.methods.items()
        if (count := compared_clients(setup, label))
    }
    sent = {
        label: traffic(
            method, summary.clients, cohort, network.spec, setup.local_of(label), summary.shape, setup.secure
        )
        for label, method in setup.methods.items()
    }
    timed = {label: time_of_a_round(setup, label) for label in setup.methods} if setup.clock else {}
    seconds = {label: seconds for label, (seconds, _) in timed.items()}
    late = {label: share for label, (_, share) in timed.items()} if setup.clock and setup.clock.deadline else {}
    return Estimate(setup, summary, online, cohort, network, compared, sent, seconds, late)


def time_of_a_round(setup: Setup, label: str) -> tuple[float, float]:
    """Returns the mean virtual seconds of a round, and the share of the selected clients that miss its deadline.

    Means over the method's first rounds, at most 20, without clients that join or leave.
    """
    federation, experiment, rounds = setup.federation, setup.experiment, min(setup.experiment.rounds, 20)
    time = setup.time_of(label, setup.network().spec, lambda ids: federation.num_samples_N[ids])
    assert time is not None
    population = population_of(experiment, federation.num_clients)
    if setup.asynchrony is not None:
        _play_server_steps(setup, time, population, rounds)
        return time.now / rounds, 0.0
    selected = missed = 0
    for round in range(1, rounds + 1):
        cohort, wanted = drawn_cohort(experiment.cohort, population, time.available(setup.availability), round)
        selected += len(cohort.ids_M)
        missed += time.wait_for(round, cohort, wanted).past_deadline
        time.end_round()
    return time.now / rounds, missed / max(selected, 1)


def _play_server_steps(setup: Setup, time: VirtualTime, population: Population, steps: int) -> None:
    """Advances the virtual time by so many steps of an asynchronous server, without training."""
    assert setup.asynchrony is not None
    experiment, flights = setup.experiment, Flights(setup.asynchrony, time)
    state = State(torch.zeros(1, 1), np.zeros(population.num_clients, np.int32))
    concurrency = experiment.asynchronous.concurrency or wanted_clients(experiment.cohort, population)
    for step in range(1, steps + 1):
        flights.next_cohort(step, state, concurrency, population, setup.availability, experiment.cohort.dropout)
        flights.advance(step, state, state)


def estimate_study(runs: Sequence[StudyRun]) -> list[tuple[StudyRun, Estimate]]:
    """Returns the estimates of a study's runs with its first seed. Raises ConfigError for a run that is not valid."""
    known: dict[str, FederationSummary] = {}
    estimates = []
    for run in runs:
        experiment = run.experiment
        if run.seed != runs[0].seed:
            continue
        try:
            key = json.dumps([experiment.data.model_dump(mode="json"), experiment.targets])
            if key not in known:
                known[key] = data.describe(experiment.data, experiment.seed, experiment.targets)
            estimates.append((run, estimate(experiment, known[key])))
        except ConfigError as error:
            raise type(error)(f"{run.name}: {error}") from error
    return estimates


def _stand_in(summary: FederationSummary, seed: int) -> Federation:
    """Returns a federation of these sizes whose samples are not generated."""
    shape = summary.shape
    classes = max(shape.num_classes, 2)
    federation = SyntheticFederation(
        summary.clients, input=shape.input, classes=classes, groups=1, samples=1, seed=seed
    )
    federation.shape, federation.num_samples_N = shape, summary.num_samples_N
    return federation


def check_machine(setup: Setup) -> None:
    """Raises ConfigError if this machine has no room for the hosts, or no GPU to compute on.

    No check if the run joins a cluster: its resources are not known in advance.
    """
    runtime = setup.experiment.runtime
    if cluster_address(runtime.address) is not None or runtime.backend != "ray":
        return
    from cfl_ray.runtime.on_ray.placement import host_count  # imports ray

    cpus = max(runtime.hosts or 0, usable_cpus())
    try:
        host_count(setup, {"CPU": cpus, "GPU": torch.cuda.device_count()})
    except ConfigError as error:
        raise ConfigError(f"{error}; to check for a cluster, name it: RAY_ADDRESS=HEAD:6379") from None
    compute_device(setup.experiment, has_gpu=bool(runtime.gpus_per_host))
