"""The interface between a round and the privacy of its run, which `cfl_ray.privacy.noisy_sums` implements."""

from typing import Protocol

import numpy as np
from torch import Tensor

from cfl_ray.core.params import Columns, ParamSpec
from cfl_ray.core.work import Address, Averaging, Clip, Outcome, SecureSum
from cfl_ray.errors import ConfigError


class PrivacyError(ConfigError):
    """A method whose server reads what sums with noise do not contain."""


class PrivateSums(Protocol):
    """The privacy of one method's run: `PrivateRun`, which documents these."""

    def clip(self, spec: ParamSpec, private: Columns | None) -> Clip: ...

    def fixed(self, averaging: Averaging, models: int, num_clients: int | None) -> Averaging: ...

    def in_ring(self, secure: SecureSum, columns: int) -> SecureSum: ...

    def noised(
        self, outcome: Outcome, averaging: Averaging, address: Address, columns: int, models: int, sampled: bool
    ) -> Outcome: ...

    def charge(self, sampled: bool) -> None: ...

    def signatures_of(self, vectors_MF: Tensor, ids_M: np.ndarray, address: Address, what: str) -> Tensor: ...
