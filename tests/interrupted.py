"""A run that is interrupted once."""

from torch import Tensor

from cfl_ray.runtime.round_loop import RoundLoop


def interrupt_once(monkeypatch, in_round: int) -> list[Tensor]:
    """Interrupts the next run before it saves this round. Returns the models after each attempt at the round."""
    real, models = RoundLoop._save_and_close, []

    def save_and_close(self, draft):
        if draft.round == in_round:
            models.append(self.state.models_KP)
            if len(models) == 1:
                raise KeyboardInterrupt
        real(self, draft)

    monkeypatch.setattr(RoundLoop, "_save_and_close", save_and_close)
    return models
