"""The rounds of a run."""

from dataclasses import dataclass


@dataclass(frozen=True)
class RunPlan:
    """Number of rounds of a run, and which rounds are always evaluated and saved."""

    rounds: int
    evaluate_every: int = 1
    checkpoint_every: int | None = 1  # None: as `CheckpointInterval` says

    def evaluates(self, round: int) -> bool:
        """Whether `round` is evaluated; the last round always is."""
        return round % self.evaluate_every == 0 or round == self.rounds

    def saves(self, round: int) -> bool:
        """Whether a checkpoint follows `round`; always true for the last round."""
        return round == self.rounds or (self.checkpoint_every is not None and round % self.checkpoint_every == 0)
