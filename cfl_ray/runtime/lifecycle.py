"""Where a run stands: a small state and one pure function. The server performs the effect of a state and feeds back the event.

This machine is about running. Clustering has a phase of its own, in the method's `State`.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Plan:
    """What a run has to do."""

    rounds: int
    evaluate_every: int = 1
    checkpoint_every: int = 1

    def evaluates(self, round: int) -> bool:
        return round % self.evaluate_every == 0 or round == self.rounds

    def saves(self, round: int) -> bool:
        return round % self.checkpoint_every == 0 or round == self.rounds


@dataclass(frozen=True)
class Starting:
    """Nothing is loaded yet."""


@dataclass(frozen=True)
class Running:
    round: int


@dataclass(frozen=True)
class Evaluating:
    round: int


@dataclass(frozen=True)
class Saving:
    round: int


@dataclass(frozen=True)
class Recovering:
    """The server was lost; it goes on after `from_round`, the last one saved."""

    cause: str
    from_round: int


@dataclass(frozen=True)
class Finished:
    round: int


@dataclass(frozen=True)
class Stopped:
    """Ended on request after `round`, which is saved: another server can go on."""

    round: int


@dataclass(frozen=True)
class Failed:
    """Cannot go on; what was saved up to `from_round` is good."""

    cause: str
    from_round: int


Lifecycle = Starting | Running | Evaluating | Saving | Recovering | Finished | Stopped | Failed


@dataclass(frozen=True)
class Loaded:
    """The state after `round` stands ready: 0 for a fresh start."""

    round: int


@dataclass(frozen=True)
class Done:
    """The effect of the state was performed."""

    stop: bool = False  # somebody asked that this round be the last one


@dataclass(frozen=True)
class Lost:
    """The server process is gone; `saved_round` is the last good checkpoint."""

    cause: str
    saved_round: int
    retries_left: int


@dataclass(frozen=True)
class Broken:
    """Something that a retry would not mend."""

    cause: str
    saved_round: int


Happening = Loaded | Done | Lost | Broken


def next_state(now: Lifecycle, event: Happening, plan: Plan) -> Lifecycle:
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
        case Running(round), Done(stop):
            return Evaluating(round) if plan.evaluates(round) else _after_evaluation(round, stop, plan)
        case Evaluating(round), Done(stop):
            return _after_evaluation(round, stop, plan)
        case Saving(round), Done(stop):
            return _after_saving(round, stop, plan)
    raise ValueError(f"{event} cannot happen in {now}")


def _after_evaluation(round: int, stop: bool, plan: Plan) -> Lifecycle:
    return Saving(round) if stop or plan.saves(round) else _after_saving(round, stop, plan)


def _after_saving(round: int, stop: bool, plan: Plan) -> Lifecycle:
    if round >= plan.rounds:
        return Finished(round)
    return Stopped(round) if stop else Running(round + 1)
