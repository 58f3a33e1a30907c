"""The states of a method's run, and a pure function from state and event to the next. The round loop does their work.

This is the state of running only; the phase of clustering is part of the method's `State`.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class RunPlan:
    """Rounds of a run, and which of them are evaluated and saved."""

    rounds: int
    evaluate_every: int = 1
    checkpoint_every: int | None = 1  # None: where `Done` says so

    def evaluates(self, round: int) -> bool:
        """Whether `round` is evaluated; the last one always is."""
        return round % self.evaluate_every == 0 or round == self.rounds

    def saves(self, round: int) -> bool:
        """Whether a checkpoint follows `round`; the last one always has one."""
        return round == self.rounds or (self.checkpoint_every is not None and round % self.checkpoint_every == 0)


@dataclass(frozen=True)
class Starting:
    """Nothing is loaded yet."""


@dataclass(frozen=True)
class Running:
    """`round` is training."""

    round: int


@dataclass(frozen=True)
class Evaluating:
    """`round` is complete and is being evaluated."""

    round: int


@dataclass(frozen=True)
class Saving:
    """The checkpoint after `round` is being written."""

    round: int


@dataclass(frozen=True)
class Recovering:
    """The server was lost; another one continues after `from_round`, the last round saved."""

    cause: str
    from_round: int


@dataclass(frozen=True)
class Finished:
    """All rounds are complete; `round` is the last one."""

    round: int


@dataclass(frozen=True)
class Stopped:
    """Ended on request after `round`, which is saved: a later session can continue."""

    round: int


@dataclass(frozen=True)
class Failed:
    """Cannot continue; the checkpoint of `from_round` is valid."""

    cause: str
    from_round: int


RunState = Starting | Running | Evaluating | Saving | Recovering | Finished | Stopped | Failed


@dataclass(frozen=True)
class Loaded:
    """The method state after `round` is loaded; 0 for a fresh start."""

    round: int


@dataclass(frozen=True)
class Done:
    """The work of the state is done."""

    stop: bool = False  # a request ends the run after this round
    save: bool = False  # a checkpoint is due


@dataclass(frozen=True)
class Lost:
    """The server process died; `saved_round` is the last round with a checkpoint."""

    cause: str
    saved_round: int
    retries_left: int


@dataclass(frozen=True)
class Broken:
    """An error that a retry would not cure."""

    cause: str
    saved_round: int


LifecycleEvent = Loaded | Done | Lost | Broken


def next_state(now: RunState, event: LifecycleEvent, plan: RunPlan) -> RunState:
    """The state after `event`. Raises ValueError where the event cannot happen in the state."""
    match now, event:
        case (Finished() | Stopped() | Failed(), _):
            raise ValueError(f"{event} after the run ended: {now}")
        case _, Lost(cause, saved_round, retries_left):
            return Recovering(cause, saved_round) if retries_left > 0 else Failed(cause, saved_round)
        case _, Broken(cause, saved_round):
            return Failed(cause, saved_round)
        case (Starting() | Recovering(), Loaded(round)):
            return Finished(round) if round >= plan.rounds else Running(round + 1)
        case Running(round), Done(stop, save):
            return Evaluating(round) if plan.evaluates(round) else _after_evaluation(round, stop, save, plan)
        case Evaluating(round), Done(stop, save):
            return _after_evaluation(round, stop, save, plan)
        case Saving(round), Done(stop):
            return _after_saving(round, stop, plan)
    raise ValueError(f"{event} cannot happen in {now}")


def _after_evaluation(round: int, stop: bool, save: bool, plan: RunPlan) -> RunState:
    return Saving(round) if stop or save or plan.saves(round) else _after_saving(round, stop, plan)


def _after_saving(round: int, stop: bool, plan: RunPlan) -> RunState:
    if round >= plan.rounds:
        return Finished(round)
    return Stopped(round) if stop else Running(round + 1)
