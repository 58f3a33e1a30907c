"""Conversion of a checkpoint's content, except client states, to tensors and JSON values, and back."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch
from pydantic import BaseModel, ConfigDict, ValidationError
from torch import Tensor

from cfl_ray.checkpoint.store import Checkpoint
from cfl_ray.core.clients import Traffic
from cfl_ray.core.diagnostics import Diagnostic, ReportedDiagnostic
from cfl_ray.core.events import ClusterEvent
from cfl_ray.core.reassigned import Reassigned
from cfl_ray.core.state import State
from cfl_ray.errors import RunError
from cfl_ray.privacy.noisy_sums import PrivateRun
from cfl_ray.runtime.round_report import RoundReport

# names of tensors
_SIGNATURES = "server.privacy.signatures_N"
_REASSIGNED = ("server.reassigned.client_R", "server.reassigned.cluster_R")
_DIAGNOSTICS = "server.diagnostics."  # begins the names of the arrays that the method reported


class Part(Protocol):
    """A part of a run whose state is in its checkpoints, such as the moments of the server optimiser."""

    def to_tensors(self) -> dict[str, Tensor]:
        """The state. The tensors must not change afterwards: the next checkpoint is compared with them."""

    def restore(self, tensors: dict[str, Tensor]) -> None:
        """Restores the output of `to_tensors`. Raises KeyError, TypeError or ValueError for other tensors."""


class _Strict(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")


class _Traffic(_Strict):
    down_bits: int
    up_bits: int


class _Diagnostic(_Strict):
    name: str
    round: int
    axes: list[str]


class _Report(_Strict):
    metrics: dict[str, float]
    time_ms: int
    numbers: list[str]
    diagnostics: list[_Diagnostic]
    phase: str
    events: list[dict[str, Any]]
    fallbacks: list[str]


class _Values(_Strict):
    """The JSON values."""

    state: dict[str, Any]  # fields of the method's state that are not tensors
    traffic: _Traffic
    report: _Report
    frozen: str = ""
    constants: dict[str, list[str | float]] = {}
    privacy: dict[str, Any] = {}


@dataclass(frozen=True)
class Snapshot:
    """A method after a round. The report is sent again if the driver was killed before it recorded the round."""

    state: State
    traffic: Traffic
    local_scores_N2: np.ndarray  # float32: P-local of every client, NaN before its first training
    report: RoundReport  # with all diagnostics that are not recorded yet
    frozen: str = ""  # digest of the network's frozen parameters; empty if there are none
    # fingerprints of the network's buffers and other tensors that stay as the factory made them, by name
    constants: Mapping[str, list[str | float]] = field(default_factory=dict)

    def encoded(
        self, num_scores: int, parts: Mapping[str, Part], private_run: PrivateRun | None
    ) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """(tensors, JSON values), as `CheckpointStore.save` takes them.

        num_scores: of one client in the report. parts: by the beginning of the names of their tensors. private_run:
        None: sums have no noise.
        """
        tensors, scalars = self.state.to_checkpoint()
        for first, part in parts.items():
            tensors |= {f"{first}{name}": value for name, value in part.to_tensors().items()}
        tensors["server.local_scores_N2"] = torch.from_numpy(self.local_scores_N2)
        values: dict[str, Any] = {
            "state": scalars,
            "traffic": vars(self.traffic),
            "report": _report_values(self.report),
        }
        if private_run is not None:
            tensors[_SIGNATURES] = torch.from_numpy(private_run.releases.signatures_N.copy())
            values["privacy"] = private_run.to_values()
        if self.frozen:
            values["frozen"] = self.frozen
        if self.constants:
            values["constants"] = dict(self.constants)
        return tensors | _report_tensors(self.report, num_scores), values

    @classmethod
    def decoded(
        cls,
        checkpoint: Checkpoint,
        label: str,
        state_type: type[State],
        num_scores: int,
        parts: Mapping[str, Part],
        private_run: PrivateRun | None,
    ) -> "Snapshot":
        """The snapshot in a checkpoint; also restores `parts` and `private_run`. Raises RunError for another method."""
        tensors = dict(checkpoint.tensors)  # each part takes its tensors; the rest is the method's state
        try:
            values = _Values.model_validate(checkpoint.values)
            local_scores_N2 = tensors.pop("server.local_scores_N2").numpy()
            scores_MV = tensors.pop("server.scores_MV").numpy()
            report = _read_report(checkpoint.round, values.report, scores_MV, tensors)
            if private_run is not None:
                private_run.restore(values.privacy, tensors.pop(_SIGNATURES).numpy().copy())
            for first, part in parts.items():
                names = [name for name in tensors if name.startswith(first)]
                part.restore({name.removeprefix(first): tensors.pop(name) for name in names})
            state = state_type.from_checkpoint(tensors, values.state)
            count = len(state.assign_N)
        except (KeyError, TypeError, ValueError, OverflowError, AttributeError) as error:
            reason = str(error).partition("\n")[0] if isinstance(error, TypeError | ValidationError) else repr(error)
            raise RunError(f"it is no checkpoint of {label}: {reason}") from error
        if local_scores_N2.shape != (count, 2) or scores_MV.shape[1:] != (1 + num_scores,):
            raise RunError(
                f"it is no checkpoint of {label}: scores of shape {local_scores_N2.shape} and {scores_MV.shape} "
                f"for {count} clients"
            )
        traffic = Traffic(values.traffic.down_bits, values.traffic.up_bits)
        return cls(state, traffic, local_scores_N2, report, values.frozen, values.constants)


def _report_tensors(report: RoundReport, num_scores: int) -> dict[str, Tensor]:
    """The arrays of a report. num_scores: as in `Snapshot.encoded`."""
    scores_MV = np.zeros((0, 1 + num_scores)) if report.scores_MV is None else report.scores_MV
    tensors = {"server.scores_MV": torch.from_numpy(scores_MV)}
    changed = report.reassigned
    tensors |= zip(_REASSIGNED, map(torch.from_numpy, (changed.client_R, changed.cluster_R)), strict=True)
    for reported in report.diagnostics:
        tensors |= _diagnostic_tensors(reported)
    return tensors


def _report_values(report: RoundReport) -> dict[str, Any]:
    """The JSON values of a report, as `_Report` reads them."""
    return {
        "metrics": report.metrics,
        "time_ms": report.time_ms,
        "numbers": report.numbers,
        "diagnostics": [
            {"name": reported.name, "round": reported.round, "axes": list(reported.diagnostic.axes)}
            for reported in report.diagnostics
        ],
        "phase": report.phase,
        "events": [event.to_fields() for event in report.events],
        "fallbacks": report.fallbacks,
    }


def _read_report(round: int, values: _Report, scores_MV: np.ndarray, tensors: dict[str, Tensor]) -> RoundReport:
    """The report with these values; removes its other arrays from `tensors`. Raises ValueError for invalid arrays."""
    reassigned = Reassigned(*(tensors.pop(name).numpy() for name in _REASSIGNED))
    reassigned.check()
    return RoundReport(
        "starting",
        round,
        values.metrics,
        reassigned=reassigned,
        scores_MV=scores_MV if len(scores_MV) else None,
        time_ms=values.time_ms,
        numbers=tuple(values.numbers),
        diagnostics=tuple(_read_diagnostic(header, tensors) for header in values.diagnostics),
        phase=values.phase,
        events=tuple(map(ClusterEvent.from_fields, values.events)),
        fallbacks=tuple(values.fallbacks),
    )


def _diagnostic_tensors(reported: ReportedDiagnostic) -> dict[str, Tensor]:
    first, diagnostic = f"{_DIAGNOSTICS}{reported.name}.", reported.diagnostic
    labels = {f"{first}labels{axis}": torch.from_numpy(label) for axis, label in enumerate(diagnostic.labels)}
    return {f"{first}value": torch.from_numpy(diagnostic.value)} | labels


def _read_diagnostic(header: _Diagnostic, tensors: dict[str, Tensor]) -> ReportedDiagnostic:
    """The diagnostic in the output of `_diagnostic_tensors`, which is removed from `tensors`."""
    first = f"{_DIAGNOSTICS}{header.name}."
    labels = tuple(tensors.pop(f"{first}labels{axis}").numpy() for axis in range(len(header.axes)))
    value = tensors.pop(f"{first}value").numpy()
    return ReportedDiagnostic(header.name, header.round, Diagnostic(value, tuple(header.axes), labels))
