"""Each call of a tracker, a figure and the report raises: the run ends as it should, with its results and a note."""

import itertools
from contextlib import nullcontext

import pytest

from jobs.services import raising

pytestmark = pytest.mark.slow
KINDS = itertools.cycle(raising.ERRORS.items())
CASES = [(target, dict([next(KINDS)])) for target in raising.TARGETS]


@pytest.mark.parametrize("target, errors", CASES, ids=lambda given: getattr(given, "place", None) or next(iter(given)))
def test_a_run_is_whole(target, errors, drawing):
    """Figures, which take most of the time, are drawn where they are what raises, or what is sent."""
    with nullcontext() if target.tracker and "artifact" not in target.place else drawing():
        (_, counted), *outcomes = raising.tried(target, errors, all_calls=False)
    assert counted.is_whole and counted.warnings == []
    for what, outcome in outcomes:
        assert outcome.is_whole, (what, outcome)
        # two runs, of the method and of the comparison: that it failed, and what it lacks
        assert len(outcome.warnings) <= 4, outcome.warnings
    always = outcomes[-1][1]
    is_called = len(outcomes) > 1  # by a run that begins anew
    assert always.warnings or target.is_property or not is_called, "what failed is said"
