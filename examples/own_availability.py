"""Availability: clients take turns."""


def in_turns(clients, round, draw, turns=2, failing=0.0):
    """A client is reachable in every `turns`-th round, and then fails with a chance of its own."""
    return ((clients + round) % turns == 0) & (draw.random(len(clients)) >= failing)
