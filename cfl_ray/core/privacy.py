"""The protection of the uploads of a round: noise on their sums, masks, or both.

`cfl_ray.privacy.noisy_sums` implements the noise, `core.secure_aggregation` the masks.
"""

from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from cfl_ray.core.local_sgd import ExampleNoise
from cfl_ray.core.params import Columns, ParamSpec
from cfl_ray.core.secure_aggregation import SecureAggregation, traffic
from cfl_ray.core.work import Address, Averaging, Clip, Outcome, SecureSum, Train
from cfl_ray.errors import ConfigError


class PrivacyError(ConfigError):
    """Raised for a method whose server reads more than sums with noise contain."""


class PrivateSums(Protocol):
    """The privacy of one method's run: `PrivateRun`, which documents these."""

    def clip(self, spec: ParamSpec, private: Columns | None) -> Clip: ...

    def fixed(self, averaging: Averaging, models: int, num_clients: int | None) -> Averaging: ...

    def in_ring(self, secure: SecureSum, columns: int) -> SecureSum: ...

    def noised(
        self, outcome: Outcome, averaging: Averaging, address: Address, columns: int, work: Train, sampled: bool
    ) -> Outcome: ...

    def charge(self, sampled: bool) -> None: ...

    def signatures_of(
        self, vectors_MF: Tensor, ids_M: np.ndarray, address: Address, what: str, sampled: bool
    ) -> Tensor: ...


@dataclass(frozen=True)
class Protection:
    """The protection of the uploads of a round's clients; by default none.

    Arguments of its methods: private: columns that are not uploaded. models: number that each client trains.
    """

    noise: PrivateSums | None = None  # None: sums have no noise
    masks: SecureAggregation | None = None  # None: uploads are not masked
    examples: ExampleNoise | None = None  # of the local steps, which alone protects single samples; None: none
    absent: np.ndarray = field(repr=False, default_factory=lambda: np.zeros(0, np.int64))  # selected, do not report
    sampled: bool = True  # True: the clients are the cohort that was drawn; False: all reachable clients

    def require_readable(self, values: str) -> None:
        """Raises PrivacyError if the server must not read these values of single clients."""
        if self.noise is not None:
            why = "privacy does not protect"
        elif self.masks is not None:
            why = "secure aggregation hides"
        elif self.examples is not None:
            why = "privacy.examples does not protect"
        else:
            return
        raise PrivacyError(
            f"its server reads {values} of single clients, which {why}; choose a method whose server only adds up"
        )

    def of_all_reachable(self) -> "Protection":
        """The protection if all reachable clients take part instead of the cohort."""
        return replace(self, absent=np.zeros(0, np.int64), sampled=False)

    def clip(self, spec: ParamSpec, private: Columns | None) -> Clip | None:
        """The clipping of a client's upload; None: uploads are not clipped."""
        return None if self.noise is None else self.noise.clip(spec, private)

    def sums(self, averaging: Averaging, num_clients: int, models: int) -> Averaging:
        """The sums with constant denominators, which private runs have in place of means."""
        if self.noise is None:
            return averaging
        return self.noise.fixed(averaging, models, None if self.sampled else num_clients)

    def masked(
        self,
        averaging: Averaging,
        address: Address,
        ids_M: np.ndarray,
        spec: ParamSpec,
        private: Columns | None,
        models: int,
    ) -> tuple[Averaging, SecureSum, tuple[int, int]]:
        """The sums and their `masks`, with the bits (down, up) of each client's keys, shares and masked vectors."""
        assert self.masks is not None
        averaging, secure = self.masks.of(averaging, address, ids_M, private, self.absent)
        columns = spec.size - (private.count if private else 0)
        if self.noise is not None:
            secure = self.noise.in_ring(secure, models * columns)
        return averaging, secure, traffic(secure, averaging.num_rows, columns)

    def noisy_sums(
        self, outcome: Outcome, averaging: Averaging, address: Address, spec: ParamSpec, work: Train
    ) -> Outcome:
        """The outcome with noise on its sums, which is charged to the privacy budget. work: what was clipped."""
        if self.noise is None:
            return outcome
        if self.masks is not None:  # the clients added the noise
            self.noise.charge(self.sampled)
            return outcome
        return self.noise.noised(outcome, averaging, address, spec.size, work, self.sampled)

    def noisy_features(self, outcome: Outcome, ids_M: np.ndarray, address: Address) -> Outcome:
        """The outcome with noise on the features of each client, which is charged to the privacy budget."""
        if self.noise is None:
            return outcome
        given_MF = torch.from_numpy(outcome.arrays["features"])
        noisy_MF = self.noise.signatures_of(given_MF, ids_M, address, "the updates", self.sampled)
        norm_M = noisy_MF.double().norm(dim=1).numpy()
        return replace(outcome, arrays=outcome.arrays | {"features": noisy_MF.numpy(), "norm": norm_M})
