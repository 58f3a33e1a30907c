"""The privacy of a method's run in progress: the key of its noise, and the accounts of clients and of samples."""

import os
import secrets
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cfl_ray.checkpoint.store import CheckpointStore
from cfl_ray.config.privacy import PrivacyConfig
from cfl_ray.core.clients import Clients, RoundStats
from cfl_ray.core.local_sgd import ExampleNoise
from cfl_ray.core.state import State
from cfl_ray.errors import RunError
from cfl_ray.population.population import Cohort
from cfl_ray.privacy.examples import ExampleAccount
from cfl_ray.privacy.noisy_sums import Noise, PrivateRun
from cfl_ray.privacy.privacy_plan import PrivacyPlan
from cfl_ray.run_directory import RunDirectory
from cfl_ray.runtime.participation import Membership
from cfl_ray.runtime.parts.loop_part import LoopPart, named, taken
from cfl_ray.system.files import open_private, read_file

_BYTES = 32
_SIGNATURES, _OF_SAMPLES = "server.privacy.signatures_N", "server.privacy."  # names of tensors; begin of the others'


def key_of(noise: str, seed: int, store: CheckpointStore | None) -> bytes:
    """The key of a run's noise. noise: as in the config."""
    if noise == "reproducible":
        return b"reproducible, not private" + seed.to_bytes(8, "little")
    return secrets.token_bytes(_BYTES) if store is None else _key(store)


class ClientPrivacy(LoopPart):
    """The privacy of the clients of a method's run: its plan, and its releases so far, none before round 1.

    The noise is drawn from the seed, if the plan says so, or from the key of the run. A process that continues the run
    draws the same noise, so a sum that is computed again is a single release. If cohorts amplify the privacy, they are
    drawn from the key, and requests to join or leave are refused.
    """

    trains_without_clients = True  # the sums have noise all the same

    def __init__(self, plan: PrivacyPlan, seed: int, store: CheckpointStore | None, membership: Membership):
        self.plan = plan
        self.run = PrivateRun(plan.privacy, Noise(key_of(plan.config.noise, seed, store)))
        self.ends_after = 0  # the round after which the budget ends the run early; 0: none
        if plan.sampling.kind != "all":
            membership.requests.why_fixed = "the account of privacy assumes cohorts of the clients of the start"
            membership.population.cohort_seed = self.run.noise.seed("cohort")

    def last_round(self, saved: int, rounds: int) -> int:
        last = self.plan.last_round(self.run.releases, saved, rounds)
        self.ends_after = last if last < rounds else 0
        return last

    def clients(self, clients: Clients, cohort: Cohort | None) -> Clients:
        return replace(clients, protection=replace(clients.protection, noise=self.run))

    def end_round(self, stats: RoundStats, cohort: Cohort, before: State, after: State) -> None:
        """Enters the releases of the round into the account. Raises RunError beyond the budget."""
        self.run.end_round()
        if not stats.evaluated:
            return
        epsilon, target = self.plan.epsilon(self.run.releases), self.plan.config.target_epsilon
        stats.metrics |= {"epsilon": epsilon, "clip_norm": self.run.norm}
        if target is not None and epsilon > target * 1.0001:
            raise RunError(
                f"the run has released more than its plan: epsilon {epsilon:.4g} after round {stats.round}, the "
                f"budget is {target:g}; the round is not saved"
            )
        if stats.round == self.ends_after:
            stats.notes.append(f"ends after round {stats.round}: the next one would exceed epsilon {target:g}")

    def to_checkpoint(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        signatures_N = torch.from_numpy(self.run.releases.signatures_N.copy())
        return {_SIGNATURES: signatures_N}, {"privacy": self.run.to_values()}

    def restore(self, tensors: dict[str, Tensor], values: dict[str, Any], state: State) -> None:
        self.run.restore(values.pop("privacy"), tensors.pop(_SIGNATURES).numpy().copy())


class SamplePrivacy(LoopPart):
    """The privacy of clients' samples in a method's run: the noise of their gradients, and the account of samples."""

    def __init__(self, config: PrivacyConfig, plan: ExampleAccount, seed: int, store: CheckpointStore | None):
        assert config.examples is not None
        key = key_of(config.noise, seed, store)
        self.noise = ExampleNoise(config.examples.noise_multiplier, config.examples.clip, key)
        self.account = ExampleAccount(plan.noise_multiplier, plan.delta, len(plan.account_N2))

    def clients(self, clients: Clients, cohort: Cohort | None) -> Clients:
        return replace(clients, local=replace(clients.local, examples=self.noise))

    def end_round(self, stats: RoundStats, cohort: Cohort, before: State, after: State) -> None:
        """Enters the steps of the round into the account."""
        for training in stats.example_steps:
            self.account.charge(*training)
        if stats.evaluated:
            epsilon_N = self.account.epsilon_N()
            stats.metrics["example_epsilon"] = float(epsilon_N.max())
            ids = np.arange(len(epsilon_N))
            stats.diagnostics.add("example_epsilon_of_clients", epsilon_N, ["clients"], ids)

    def to_checkpoint(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        return named(_OF_SAMPLES, self.account.to_tensors()), {}

    def restore(self, tensors: dict[str, Tensor], values: dict[str, Any], state: State) -> None:
        self.account.restore(taken(_OF_SAMPLES, tensors))


def _key(store: CheckpointStore) -> bytes:
    """The key in the method's directory. If there is none before the first checkpoint, a new key, which is written.

    A process that only reads the run, without a lease, writes nothing. Raises RunError if a run would go on without its
    key.
    """
    file = RunDirectory(store.directory).privacy_key
    key = read_file(file) or b""
    if len(key) == _BYTES:
        return key
    if store.lease.epoch and store.rounds():
        raise RunError(
            f"{file}: the key of this private run is absent or has {len(key)} bytes instead of {_BYTES}; with another "
            "key, a round that is computed again would have other noise, a second release that no account counts. Put "
            "the file back, or begin a new run"
        )
    key = secrets.token_bytes(_BYTES)
    if store.lease.epoch:
        _write(file, key)
    return key


def copy_key(source: Path, target: Path) -> None:
    """Copies the key of a private run to a run that begins with its rounds, so that cohorts and noise are the same."""
    if key := read_file(RunDirectory(source).privacy_key):
        _write(RunDirectory(target).privacy_key, key)


def _write(file: Path, key: bytes) -> None:
    with open_private(file, "wb") as out:
        out.write(key)
        os.fsync(out.fileno())
