import itertools

import pytest

from cfl_ray.runtime.lifecycle import (
    Broken,
    Done,
    Evaluating,
    Failed,
    Finished,
    Loaded,
    Lost,
    Recovering,
    Running,
    RunPlan,
    Saving,
    Starting,
    Stopped,
    next_state,
)

PLAN = RunPlan(rounds=6, evaluate_every=2, checkpoint_every=3)
STATES = [
    Starting(),
    Running(1),
    Evaluating(2),
    Saving(3),
    Recovering("killed", 3),
    Finished(6),
    Failed("disk full", 3),
    Stopped(4),
]
LOST, LAST, BROKEN = Lost("killed", 3, 2), Lost("killed", 3, 0), Broken("bad config", 3)


TRANSITIONS = [
    (Starting(), Loaded(0), Running(1)),
    (Starting(), Loaded(4), Running(5)),
    (Starting(), Loaded(6), Finished(6)),
    (Recovering("killed", 3), Loaded(3), Running(4)),
    (Recovering("killed", 6), Loaded(6), Finished(6)),
    (Running(1), Done(), Running(2)),  # neither evaluated nor saved
    (Running(2), Done(), Evaluating(2)),
    (Running(3), Done(), Saving(3)),
    (Running(6), Done(), Evaluating(6)),
    (Evaluating(2), Done(), Running(3)),
    (Evaluating(6), Done(), Saving(6)),
    (Saving(3), Done(), Running(4)),
    (Saving(6), Done(), Finished(6)),
    (Running(1), Done(stop=True), Saving(1)),  # saved although the plan would not
    (Running(1), Done(save=True), Saving(1)),  # as what a checkpoint costs has it
    (Running(2), Done(save=True), Evaluating(2)),
    (Evaluating(2), Done(save=True), Saving(2)),
    (Saving(2), Done(save=True), Running(3)),  # not twice
    (Running(2), Done(stop=True), Evaluating(2)),
    (Evaluating(2), Done(stop=True), Saving(2)),
    (Saving(1), Done(stop=True), Stopped(1)),
    (Saving(3), Done(stop=True), Stopped(3)),
    (Saving(6), Done(stop=True), Finished(6)),  # nothing is left to be stopped
]


def test_transitions():
    for now, event, then in TRANSITIONS:
        assert next_state(now, event, PLAN) == then, (now, event)


def test_a_lost_server_recovers_while_retries_are_left():
    """In whatever state it was lost, a recovery included."""
    for now in STATES[:5]:
        assert next_state(now, LOST, PLAN) == Recovering("killed", 3)
        assert next_state(now, LAST, PLAN) == Failed("killed", 3)
        assert next_state(now, BROKEN, PLAN) == Failed("bad config", 3)


ENDED = Finished | Failed | Stopped
LEGAL = {(Starting, Loaded), (Recovering, Loaded), (Running, Done), (Evaluating, Done), (Saving, Done)}


def test_anything_else_is_an_error():
    """After the end: every event. Before it: of Loaded and Done, one of the two in each state."""
    illegal = [
        (now, event)
        for now, event in itertools.product(STATES, [Loaded(2), Done(), LOST, LAST, BROKEN])
        if isinstance(now, ENDED) or (not isinstance(event, Lost | Broken) and (type(now), type(event)) not in LEGAL)
    ]
    assert len(illegal) == 3 * 5 + 5
    for now, event in illegal:
        message = "after the run ended" if isinstance(now, ENDED) else "cannot happen in"
        with pytest.raises(ValueError, match=message):
            next_state(now, event, PLAN)


def test_every_round_runs_once_and_the_last_is_evaluated_and_saved():
    for rounds, every, saves in itertools.product((1, 5, 6), (1, 2, 4, 9), (1, 3, 9)):
        plan, seen = RunPlan(rounds, every, saves), []
        now = next_state(Starting(), Loaded(0), plan)
        while not isinstance(now, Finished):
            seen.append(now)
            now = next_state(now, Done(), plan)
        assert now == Finished(rounds)
        done = {
            kind: [state.round for state in seen if isinstance(state, kind)] for kind in (Running, Evaluating, Saving)
        }
        planned = range(1, rounds + 1)
        assert done[Running] == list(planned), plan
        assert done[Evaluating] == [round for round in planned if round % every == 0 or round == rounds], plan
        assert done[Saving] == [round for round in planned if round % saves == 0 or round == rounds], plan
        assert [state.round for state in seen] == sorted(state.round for state in seen)
