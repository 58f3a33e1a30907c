"""Federations whose clients hold a share of their training samples out for validation.

The rows are separated when samples are read: shards have the samples of both parts, so a share costs no disk, and the
same shards serve runs with and without one.
"""

import hashlib
from collections.abc import Hashable
from typing import Any

import numpy as np
import torch

from cfl_ray.data.federation import Federation, FederationView, TensorSamples
from cfl_ray.data.validation_share import ValidationShare
from cfl_ray.errors import DataError


class SplitFederation(FederationView):
    """`base`, whose clients hold a share of their training samples out for validation."""

    share: ValidationShare
    num_validation_N: np.ndarray
    _latest: "SplitFederation | None" = None  # the result of the last `at` in which `base` had changed

    def __init__(self, base: Federation, share: ValidationShare) -> None:
        super().__init__(base)
        self.share = share
        self.num_validation_N = share.counts(base.num_samples_N)
        self.num_samples_N = base.num_samples_N - self.num_validation_N
        self.group_N = base.group_N
        self.recipe = base.recipe | {"validation": [share.fraction, share.order, share.seed]}
        self._labels_of: dict[int, np.ndarray] = {}  # bool (C,) by client (label view)

    def __reduce__(self) -> tuple[Any, ...]:
        return SplitFederation, (self._base, self.share)

    @property
    def whole(self) -> Federation:
        return self._base

    @property
    def uri(self) -> str | None:
        """The folder of the shards of `base`; None if it has none."""
        return getattr(self._base, "uri", None)

    @property
    def content(self) -> str:
        return hashlib.sha256(f"{super().content} {self.recipe['validation']}".encode()).hexdigest()

    @property
    def notes(self) -> list[str]:
        """Those of `base`, and the sizes of the share."""
        held_N = self.num_validation_N
        line = f"{self.share.in_words}, {held_N.sum()} in all"
        if too_small := int((held_N == 0).sum()):
            line += f"; {too_small} of {len(held_N)} clients are too small for a share and have none"
        return [*super().notes, line]

    def at(self, round: int) -> Federation:
        base = self._base.at(round)
        if base is self._base:
            return self
        if self._latest is None or self._latest._base is not base:
            self._latest = SplitFederation(base, self.share)
        return self._latest

    @property
    def changed_in(self) -> dict[int, np.ndarray]:
        return self._base.changed_in

    def data_version(self, client: int) -> Hashable:
        return self._base.data_version(client), self.share

    def files_of(self, clients: np.ndarray) -> np.ndarray | None:
        return self._base.files_of(clients)

    def fetch(self, clients: np.ndarray) -> None:
        self._base.fetch(clients)

    def train(self, client: int) -> TensorSamples:
        return self._part(client, 0)

    def validation_samples(self, client: int) -> TensorSamples:
        return self._part(client, 1)

    def train_targets(self, client: int) -> torch.Tensor:
        y = self._base.train_targets(client)
        return y[self.share.rows(client, y.numpy())[0]]

    def _part(self, client: int, part: int) -> TensorSamples:
        x, y = self._base.train(client)
        rows = self.share.rows(client, y.numpy())[part]
        return x[rows], y[rows]

    def labels_of(self, clients: np.ndarray) -> np.ndarray | None:
        """The labels of the samples that are left for training, which the held-out samples do not decide."""
        if self._base.labels_of(clients) is None:
            return None
        for client in clients.tolist():
            if client not in self._labels_of:
                count_C = torch.bincount(self.train_targets(client), minlength=self.shape.num_classes)
                self._labels_of[client] = count_C.numpy() > 0
        return np.array([self._labels_of[client] for client in clients.tolist()])

    def num_test_samples(self, clients: np.ndarray) -> np.ndarray:
        if self.view == "holdout":
            return self._base.num_test_samples(clients)
        return super().num_test_samples(clients)

    def test(self, client: int, max_samples: int | None = None, seed: int = 0) -> TensorSamples:
        if self.view == "label":
            return super().test(client, max_samples, seed)
        return self._base.test(client, max_samples, seed)


def with_validation(federation: Federation, fraction: float, order: str, seed: int) -> Federation:
    """The federation with validation data: its own if it has some, otherwise a share of each client's samples.

    Raises DataError if no client has enough samples.
    """
    if federation.validation is not None:
        return federation
    split = SplitFederation(federation, ValidationShare(fraction, order, seed))
    if not split.num_validation_N.any():
        raise DataError(
            f"data.validation.fraction: {fraction:g} of the largest client's {federation.num_samples_N.max()} training "
            "samples is none; set a larger fraction, or leave out data.validation"
        )
    return split
