"""The clients of a round as a method works with them: `Clients` with the settings of the experiment and the round."""

from dataclasses import dataclass

import numpy as np

from cfl_ray.core.clients import Clients, RoundStats
from cfl_ray.core.params import ParamSpec
from cfl_ray.core.server_optimizers import ServerMoments
from cfl_ray.core.work import Backend
from cfl_ray.runtime.membership import Membership
from cfl_ray.runtime.prepare import Setup

_NO_LIMIT = 2**62  # test samples of a client that has its own


@dataclass
class RoundClients:
    """Makes the `Clients` of one method."""

    setup: Setup
    label: str
    spec: ParamSpec
    backend: Backend
    membership: Membership
    server: ServerMoments | None

    def __call__(self, ids: np.ndarray, round: int, stats: RoundStats, *, test_locally: bool = False) -> Clients:
        """These clients in this round. test_locally: whether each tests its model after training (P-local)."""
        experiment, present = self.setup.experiment, self.membership.present
        own_tests = present.view == "holdout"
        test_samples = _NO_LIMIT if own_tests else experiment.evaluation.local_images
        return Clients(
            np.asarray(ids, np.int64),
            present.num_samples_N[ids],
            self.spec,
            self.setup.local_of(self.label).in_round(round, experiment.rounds),
            self.backend,
            experiment.seed,
            round,
            stats,
            local_test_samples=test_samples if test_locally else 0,
            reachable=lambda: self.membership.reachable(round),
            aggregation=self.setup.methods[self.label].aggregation_rule,
            server=self.server,
            num_scores=len(self.setup.task.score_names),
        )
