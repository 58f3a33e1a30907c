"""Secure sums in the round loop: the masks of uploads, and sums that too few clients reported for."""

from dataclasses import replace

import numpy as np

from cfl_ray.core.clients import Clients, RoundStats
from cfl_ray.core.secure_aggregation import SecureAggregation
from cfl_ray.core.state import State
from cfl_ray.population.population import Cohort
from cfl_ray.runtime.parts.loop_part import LoopPart


class MaskedUploads(LoopPart):
    """Masks the uploads of clients; selected clients that do not report have agreed on masks before."""

    def __init__(self, masks: SecureAggregation):
        self.masks = masks

    def clients(self, clients: Clients, cohort: Cohort | None) -> Clients:
        absent = np.zeros(0, np.int64) if cohort is None else cohort.absent
        return replace(clients, protection=replace(clients.protection, masks=self.masks, absent=absent))

    def end_round(self, stats: RoundStats, cohort: Cohort, before: State, after: State) -> None:
        if stats.lost_sums:
            stats.notes += stats.lost_sums
            stats.metrics["sums_lost"] = float(len(stats.lost_sums))
