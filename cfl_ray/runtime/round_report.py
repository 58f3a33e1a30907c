"""The draft of a round, which its steps fill in, and the report made from it."""

import time
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from cfl_ray.config.client_ids import clients_in_words
from cfl_ray.core.clients import RoundStats
from cfl_ray.core.diagnostics import ReportedDiagnostic
from cfl_ray.core.events import ClusterEvent, phase_change
from cfl_ray.core.reassigned import Reassigned
from cfl_ray.core.state import State

# of a method's run. "running": the round is training; "stopped": ended on request after a round that is saved
Status = Literal["starting", "running", "evaluating", "saving", "finished", "stopped", "failed"]


@dataclass(frozen=True)
class RoundReport:
    """The metrics of a round, and the status after it. Round 0: before the first round."""

    status: Status
    round: int
    metrics: dict[str, float] = field(default_factory=dict)
    notes: tuple[str, ...] = ()  # one line each, shown to the user
    reassigned: Reassigned = field(default_factory=Reassigned.of)  # the clients whose cluster changed in this round
    scores_MV: np.ndarray | None = None  # float64: client, the task's metrics, loss of each client; None: not evaluated
    time_ms: int = 0
    stop: bool = False  # a request ends the run here
    numbers: tuple[str, ...] = ()  # names in `metrics` of the method's diagnostics
    diagnostics: tuple[ReportedDiagnostic, ...] = ()  # arrays since the last evaluated round; empty: not evaluated
    phase: str = ""  # of the method when the round began; empty: no round yet
    events: tuple[ClusterEvent, ...] = ()  # of clusters, and a change of the phase
    fallbacks: tuple[str, ...] = ()  # new reasons why the chosen engine did not train clients

    @property
    def finished(self) -> bool:
        """Whether all rounds are complete."""
        return self.status == "finished"


@dataclass
class RoundDraft:
    """A round in progress, to which its steps add their results."""

    round: int
    phase: str  # of the method, before the round
    stats: RoundStats
    metrics: dict[str, float] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    reassigned: Reassigned = field(default_factory=Reassigned.of)
    scores_MV: np.ndarray | None = None
    time_ms: int = 0
    numbers: list[str] = field(default_factory=list)
    fallbacks: list[str] = field(default_factory=list)
    began: float = field(default_factory=time.perf_counter)
    assign_before_N: np.ndarray | None = None  # clusters of the clients before the round

    def record_exclusions(self, stats: RoundStats) -> None:
        """Counts the excluded clients, and notes them: one note per reason, each exclusion once per round."""
        clients_of: dict[str, list[int]] = {}
        for client, exclusion in sorted(stats.excluded.items()):
            if self.stats is stats or self.stats.excluded.get(client) != exclusion:
                clients_of.setdefault(exclusion.reason, []).append(client)
        for reason, clients in clients_of.items():
            self.notes.append(f"{clients_in_words(clients)}: {reason}; left out of this round")
        self.stats.excluded.update(stats.excluded)
        self.metrics |= {
            "clients_rejected": float(len(self.stats.rejected)),
            "clients_late": float(len(self.stats.late)),
        }

    def end_training(self, cohort_size: int, state: State, known: set[str]) -> None:
        """Adds the results of the training and the time of its end. known: fallbacks that were reported before."""
        stats, before_N = self.stats, self.assign_before_N
        self.record_exclusions(stats)
        self.metrics |= {"cohort_size": float(cohort_size), "updates_rejected": float(len(stats.rejected))}
        if stats.train_loss:
            self.metrics["train_loss"] = float(np.mean(list(stats.train_loss.values())))
        self.fallbacks = sorted(stats.fallbacks - known)
        self.notes += [*self.fallbacks, *stats.lost_sums]
        if stats.lost_sums:
            self.metrics["sums_lost"] = float(len(stats.lost_sums))
        if before_N is not None and before_N is not state.assign_N:
            self.reassigned = Reassigned.between(before_N, state.assign_N)
        stats.events += phase_change(self.round, self.phase, state.phase)
        self.metrics["round_seconds"] = time.perf_counter() - self.began
        self.time_ms = time.time_ns() // 1_000_000

    def report(self, status: Status, stop: bool, diagnostics: tuple[ReportedDiagnostic, ...]) -> RoundReport:
        """The report of the complete round."""
        return RoundReport(
            status=status,
            round=self.round,
            metrics=self.metrics,
            notes=tuple(self.notes),
            reassigned=self.reassigned,
            scores_MV=self.scores_MV,
            time_ms=self.time_ms,
            stop=stop,
            numbers=tuple(self.numbers),
            diagnostics=diagnostics if self.scores_MV is not None else (),
            phase=self.phase,
            events=tuple(self.stats.events),
            fallbacks=tuple(self.fallbacks),
        )
