"""Privacy of single samples by DP-SGD: the account of each client, and its text for `cfl-ray check`.

Two data sets of a client are adjacent if one sample is removed. A local step is a Gaussian mechanism on a Poisson
sample of the data, with the rate q = B / n; the Renyi moments of a client's steps are composed.
"""

from functools import cache

import numpy as np
import torch
from torch import Tensor

from cfl_ray.config.privacy import ExamplesConfig
from cfl_ray.core.local_sgd import LocalSGD
from cfl_ray.errors import ConfigError
from cfl_ray.privacy.accounting import accountant


class ExampleAccount:
    """The number of steps of each client so far and their largest rate; part of every checkpoint."""

    def __init__(self, noise_multiplier: float, delta: float, num_clients: int) -> None:
        self.noise_multiplier, self.delta = noise_multiplier, delta
        self.account_N2 = np.zeros((num_clients, 2))  # steps, rate

    def charge(self, ids_M: np.ndarray, local: LocalSGD, num_samples_M: np.ndarray, steps_M: np.ndarray) -> None:
        """Adds local steps of these clients; `ids_M` has no duplicates."""
        more = int(ids_M.max(initial=-1)) + 1 - len(self.account_N2)
        if more > 0:
            self.account_N2 = np.concatenate([self.account_N2, np.zeros((more, 2))])
        rate_M = np.asarray(local.batch_of(num_samples_M)) / np.maximum(num_samples_M, 1)
        self.account_N2[ids_M, 0] += steps_M
        self.account_N2[ids_M, 1] = np.maximum(self.account_N2[ids_M, 1], rate_M)

    def to_tensors(self) -> dict[str, Tensor]:
        """The account, for a checkpoint."""
        return {"examples_N2": torch.from_numpy(self.account_N2.copy())}

    def restore(self, tensors: dict[str, Tensor]) -> None:
        """Restores the output of `to_tensors`."""
        self.account_N2 = tensors["examples_N2"].numpy().reshape(-1, 2).copy()

    def epsilon_N(self) -> np.ndarray:
        """Epsilon of each client, float64 (N,); 0 for a client that has not trained."""
        pairs, which_N = np.unique(self.account_N2, axis=0, return_inverse=True)
        values = [_epsilon(self.noise_multiplier, rate, int(steps), self.delta) for steps, rate in pairs.tolist()]
        return np.array(values)[which_N.reshape(-1)]


@cache
def _epsilon(noise_multiplier: float, rate: float, steps: int, delta: float) -> float:
    dp, moments = accountant()
    if steps:
        event = dp.GaussianDpEvent(noise_multiplier)
        moments.compose(event if rate >= 1 else dp.PoissonSampledDpEvent(rate, event), steps)
    return float(moments.get_epsilon(delta)) if steps else 0.0


def delta_of(wanted: float | None, num_samples_N: np.ndarray) -> float:
    """Delta of all clients; None: n^-1.1. Raises ConfigError unless it is below 1 / n, n of the largest client."""
    most = int(num_samples_N.max())
    delta = wanted or max(most, 2) ** -1.1
    if delta >= 1 / most:
        raise ConfigError(
            f"privacy.examples.delta must be below 1 / {most} samples of the largest client = {1 / most:.3g}, got "
            f"{delta:g}: a larger one would permit publishing a sample"
        )
    return delta


def describe(config: ExamplesConfig, label: str, account: ExampleAccount, rounds: int) -> list[str]:
    """The plan as lines of text. account: after all rounds, of clients that take part in every round."""
    epsilon_N = account.epsilon_N()
    low, high = int(epsilon_N.argmin()), int(epsilon_N.argmax())
    return [
        f"privacy of samples of {label}: epsilon {epsilon_N[high]:.3g} (client {high}), median "
        f"{np.median(epsilon_N):.3g}, {epsilon_N[low]:.3g} (client {low}) at delta {account.delta:.3g} after {rounds} "
        f"rounds of a client that takes part in each (add or remove one sample); noise multiplier "
        f"{config.noise_multiplier:g}, clip {config.clip:g}",
        "  the number of samples of a client counts as known; assignments and metrics are diagnostics: not private",
    ]
