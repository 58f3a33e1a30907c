"""The facts of a round that follow from its training, and its record."""

import time

import numpy as np

from cfl_ray.config.client_ids import clients_in_words
from cfl_ray.core.clients import RoundStats
from cfl_ray.core.events import phase_change
from cfl_ray.core.reassigned import Reassigned
from cfl_ray.core.reported import ReportedDiagnostic
from cfl_ray.core.state import State
from cfl_ray.population.population import Cohort
from cfl_ray.tracking import RoundRecord


def add_exclusions(stats: RoundStats, excluding: RoundStats) -> None:
    """Counts the excluded clients, and notes them: one note per reason, each exclusion once per round.

    excluding: the statistics of the exchanges that excluded them, those of the round itself or of its evaluation.
    """
    clients_of: dict[str, list[int]] = {}
    for client, exclusion in sorted(excluding.excluded.items()):
        if stats is excluding or stats.excluded.get(client) != exclusion:
            clients_of.setdefault(exclusion.reason, []).append(client)
    for reason, clients in clients_of.items():
        stats.notes.append(f"{clients_in_words(clients)}: {reason}; left out of this round")
    stats.excluded.update(excluding.excluded)
    stats.metrics |= {"clients_rejected": float(len(stats.rejected)), "clients_late": float(len(stats.late))}


def end_training(stats: RoundStats, cohort: Cohort, after: State, known_fallbacks: set[str]) -> None:
    """Adds the facts that follow from the training of the cohort, and the time at which it ended.

    after: the state after the training. known_fallbacks: those of earlier rounds, which are not noted again.
    """
    if cohort.dropped:
        stats.metrics["clients_dropped"] = float(cohort.dropped)
    add_exclusions(stats, stats)
    stats.metrics |= {"cohort_size": float(len(cohort.ids_M)), "updates_rejected": float(len(stats.rejected))}
    if stats.train_loss:
        stats.metrics["train_loss"] = float(np.mean(list(stats.train_loss.values())))
    stats.fallbacks -= known_fallbacks
    stats.notes += sorted(stats.fallbacks)
    if (before_N := stats.assign_before_N) is not None and before_N is not after.assign_N:
        stats.reassigned = Reassigned.between(before_N, after.assign_N)
    stats.events += phase_change(stats.round, stats.phase, after.phase)
    stats.metrics["round_seconds"] = time.perf_counter() - stats.began
    stats.time_ms = time.time_ns() // 1_000_000


def record_of(stats: RoundStats, diagnostics: tuple[ReportedDiagnostic, ...]) -> RoundRecord:
    """The record of a round."""
    return RoundRecord(
        stats.round,
        stats.metrics,
        stats.time_ms,
        stats.phase,
        tuple(stats.events),
        numbers=tuple(stats.numbers),
        reassigned=stats.reassigned,
        scores_MV=stats.scores_MV,
        diagnostics=diagnostics,
        notes=tuple(stats.notes),
        fallbacks=tuple(sorted(stats.fallbacks)),
    )
