"""The saved rounds of a method: state, record and parts of the loop as tensors and JSON values of a checkpoint."""

import json
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from pydantic import BaseModel, ConfigDict
from torch import Tensor

from cfl_ray.checkpoint.store import Checkpoint, CheckpointInterval, CheckpointStore
from cfl_ray.core.backend import ClientStateKey, ClientStateSource
from cfl_ray.core.events import ClusterEvent
from cfl_ray.core.reassigned import Reassigned
from cfl_ray.core.reported import Diagnostic, ReportedDiagnostic
from cfl_ray.core.state import State
from cfl_ray.errors import RunError
from cfl_ray.nn.fingerprints import in_words, is_same
from cfl_ray.plugins.calling import place_of
from cfl_ray.run_directory import RunDirectory
from cfl_ray.runtime.parts.loop_part import LoopPart
from cfl_ray.setup.setup import Setup
from cfl_ray.tracking import RoundRecord

# names of tensors
_OF_SERVER = "server."  # begins those that are not fields of the method's state
_REASSIGNED = ("server.reassigned.client_R", "server.reassigned.cluster_R")
_DIAGNOSTICS = "server.diagnostics."  # begins the names of the arrays that the method reported


class _Strict(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")


class _Diagnostic(_Strict):
    name: str
    round: int
    axes: list[str]


class _Record(_Strict):
    metrics: dict[str, float]
    time_ms: int
    numbers: list[str]
    diagnostics: list[_Diagnostic]
    phase: str
    events: list[dict[str, Any]]
    fallbacks: list[str]


class _Values(_Strict):
    """The JSON values, without those of the parts."""

    state: dict[str, Any]  # fields of the method's state that are not tensors
    report: _Record  # of the round
    frozen: str = ""  # digest of the network's frozen parameters; empty if there are none
    # fingerprints of the network's buffers and other tensors that stay as the factory made them, by name
    constants: dict[str, list[str | float]] = {}


@dataclass(frozen=True)
class CheckpointInMemory:
    """A pinned round of a run without files: the values, which do not change, not copies of them."""

    round: int
    tensors: dict[str, Tensor]
    values: dict[str, Any]
    states: list[tuple[ClientStateKey, Any]]
    refused: tuple[str, ...] = ()  # as in `Checkpoint`

    def client_states(self) -> Iterator[tuple[ClientStateKey, Any]]:
        return iter(self.states)


@dataclass(frozen=True)
class _StatesInMemory:
    """A `StateFile` that writes nothing: its entry has the values."""

    keys: Sequence[ClientStateKey]

    def write(self, values: Iterable[Tensor], again: bool = False) -> list[tuple[ClientStateKey, Any]]:
        return list(zip(self.keys, values, strict=True))


class SavedRounds:
    """Checkpoints of a method: its state after a round, the record of the round, and the state of the loop's parts.

    The record is sent again if the driver was killed before it recorded the round. store: None if no files are kept;
    then pinned rounds are in memory. remembered: those of another loop of the method.
    """

    def __init__(
        self,
        setup: Setup,
        label: str,
        columns: int,
        store: CheckpointStore | None,
        parts: Sequence[LoopPart],
        remembered: Mapping[int, CheckpointInMemory] | None = None,
    ):
        self.remembered = dict(remembered or {})
        self.setup, self.label, self.columns, self.store, self.parts = setup, label, columns, store, parts
        self.num_scores = len(setup.task.score_names)  # of one client
        self.interval = CheckpointInterval(setup.experiment.runtime.checkpoint_every)
        self.last = 0  # the last saved round; 0: none

    # ---- saving

    @property
    def keeps_files(self) -> bool:
        """Whether rounds are saved."""
        return self.store is not None

    def is_due(self, round: int, must_be: bool, unsaved: int) -> bool:
        """Whether this round is saved: it must be, the interval is over, or client states exceed their budget.

        unsaved: bytes of the client states that changed since the last saved round.
        """
        over_budget = unsaved > self.setup.experiment.runtime.state_budget
        return self.keeps_files and (must_be or over_budget or self.interval.is_due(round))

    def remember(
        self,
        round: int,
        state: State,
        record: Callable[[], RoundRecord],
        states: ClientStateSource,
        pinned: Collection[int],
    ) -> None:
        """In a run without files: keeps this round in memory if it is pinned, and forgets those that no longer are."""
        self.remembered = {earlier: kept for earlier, kept in self.remembered.items() if earlier in pinned}
        if round in pinned:
            (kept,) = states.write([_StatesInMemory(tuple(states.changed(everything=True)))])
            tensors, values = self._encoded(state, record())
            values = json.loads(json.dumps(values))  # in the types that a file gives
            self.remembered[round] = CheckpointInMemory(round, tensors, values, kept)

    def save(
        self, state: State, record: RoundRecord, states: ClientStateSource, pinned: Collection[int] = ()
    ) -> str | None:
        """Saves a round; the result as of `CheckpointStore.save`."""
        assert self.store is not None
        with self.interval.measured():
            RunDirectory(self.store.directory).sync_records()
            remark = self.store.save(record.round, *self._encoded(state, record), states, pinned)
        self.last = record.round
        return remark

    def _encoded(self, state: State, record: RoundRecord) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """(tensors, JSON values), as `CheckpointStore.save` takes them."""
        tensors, scalars = state.to_checkpoint()
        values: dict[str, Any] = {"state": scalars, "report": _record_values(record)}
        for part in self.parts:
            of_part, values_of_part = part.to_checkpoint()
            tensors, values = tensors | of_part, values | values_of_part
        if self.setup.frozen:
            values["frozen"] = self.setup.frozen
        if self.setup.recipe.constants:
            values["constants"] = dict(self.setup.recipe.constants)
        return tensors | _record_tensors(record, self.num_scores), values

    # ---- loading

    def restore(self, at: int | None = None) -> tuple[Checkpoint | CheckpointInMemory, State, RoundRecord] | None:
        """The newest usable checkpoint with its state and record, after the parts are restored; None: there are none.

        at: the round whose checkpoint is used instead. Raises RunError if none can be used.
        """
        found: tuple[Checkpoint | CheckpointInMemory, State, RoundRecord] | None = None
        if self.store is not None:
            found = self.store.load_as(lambda checkpoint: (checkpoint, *self._decoded(checkpoint)), at)
        elif at is not None:
            found = (kept := self.remembered[at], *self._decoded(kept))
        self.last = found[0].round if found else 0
        return found

    def _decoded(self, checkpoint: Checkpoint | CheckpointInMemory) -> tuple[State, RoundRecord]:
        """The state and record in a checkpoint. Raises RunError if it is not one of this method and model."""
        tensors, given = dict(checkpoint.tensors), dict(checkpoint.values)  # each reader takes what is its own
        state_type = self.setup.methods[self.label].state_type
        try:
            values = _Values.model_validate({name: given.pop(name) for name in _Values.model_fields if name in given})
            of_state = [name for name in tensors if not name.startswith(_OF_SERVER)]
            state = state_type.from_checkpoint({name: tensors.pop(name) for name in of_state}, values.state)
            record = _read_record(checkpoint.round, values.report, self.num_scores, tensors)
            for part in self.parts:
                part.restore(tensors, given, state)
            if unknown := [*tensors, *given]:
                raise ValueError(f"it has {', '.join(unknown)}, which the run does not have")
        except (KeyError, TypeError, ValueError, OverflowError, AttributeError) as error:
            reason = str(error).partition("\n")[0] if isinstance(error, TypeError | ValueError) else repr(error)
            raise RunError(f"it is no checkpoint of {self.label}: {reason}") from error
        self._check_network(values, state)
        return state, record

    def _check_network(self, values: _Values, state: State) -> None:
        """Raises RunError if the network is not that of the run."""
        recipe, frozen = self.setup.recipe, self.setup.frozen
        if values.frozen != frozen:
            raise RunError(
                f"the model's frozen parameters (digest {frozen or 'none'}) are not those of the run "
                f"(digest {values.frozen or 'none'}); its factory and model.weights must be as when the run began"
            )
        if (saved := state.models_KP.shape[-1]) != self.columns:
            raise RunError(
                f"the model {place_of(recipe.factory)} has {self.columns} trained parameters and "
                f"statistics, and the models of the run have {saved}; its code must be as when the run began"
            )
        now, then = recipe.constants, values.constants
        for name in sorted(now.keys() | then.keys()) if then else ():
            if not is_same(now.get(name, []), then.get(name, [])):
                raise RunError(
                    f"the model's constant {name} is {in_words(now.get(name))}, but {in_words(then.get(name))} in the "
                    "run; its factory, with the files and modules that it reads, must be as when the run began"
                )


def _record_tensors(record: RoundRecord, num_scores: int) -> dict[str, Tensor]:
    """The arrays of a record. num_scores: of one client."""
    scores_MV = np.zeros((0, 1 + num_scores)) if record.scores_MV is None else record.scores_MV
    tensors = {"server.scores_MV": torch.from_numpy(scores_MV)}
    changed = record.reassigned
    tensors |= zip(_REASSIGNED, map(torch.from_numpy, (changed.client_R, changed.cluster_R)), strict=True)
    for reported in record.diagnostics:
        tensors |= _diagnostic_tensors(reported)
    return tensors


def _record_values(record: RoundRecord) -> dict[str, Any]:
    """The JSON values of a record, as `_Record` reads them."""
    return {
        "metrics": record.metrics,
        "time_ms": record.time_ms,
        "numbers": record.numbers,
        "diagnostics": [
            {"name": reported.name, "round": reported.round, "axes": list(reported.diagnostic.axes)}
            for reported in record.diagnostics
        ],
        "phase": record.phase,
        "events": [event.to_fields() for event in record.events],
        "fallbacks": record.fallbacks,
    }


def _read_record(round: int, values: _Record, num_scores: int, tensors: dict[str, Tensor]) -> RoundRecord:
    """The record with these values; removes its arrays from `tensors`. Raises ValueError for invalid arrays."""
    scores_MV = tensors.pop("server.scores_MV").numpy()
    if scores_MV.shape[1:] != (1 + num_scores,):
        raise ValueError(f"a table of scores of shape {scores_MV.shape}, expected {1 + num_scores} columns")
    reassigned = Reassigned(*(tensors.pop(name).numpy() for name in _REASSIGNED))
    reassigned.check()
    return RoundRecord(
        round,
        values.metrics,
        values.time_ms,
        values.phase,
        tuple(map(ClusterEvent.from_fields, values.events)),
        numbers=tuple(values.numbers),
        reassigned=reassigned,
        scores_MV=scores_MV if len(scores_MV) else None,
        diagnostics=tuple(_read_diagnostic(header, tensors) for header in values.diagnostics),
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
