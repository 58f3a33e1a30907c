"""Progress of a delivery to a server: answers that are new, and the time that files take."""

import pytest

from cfl_ray.tracking import progress
from cfl_ray.tracking.progress import Counted, ServerProgress


def attempt(made, answers):
    """The progress of an attempt at an operation with this number of answers."""
    before = made.value
    made.begin()
    for _ in range(answers):
        Counted({}, made).copy()
    return made.value - before


def test_a_repeated_answer_is_no_progress():
    made = ServerProgress()
    assert [attempt(made, answers) for answers in (2, 1, 2, 3, 3)] == [2, 0, 0, 1, 0]
    made.keep()
    assert attempt(made, 2) == 2, "of the next operation"


def test_an_error_is_no_answer():
    made = ServerProgress()
    before = made.value
    with pytest.raises(KeyError):
        Counted({}, made).pop("absent")
    assert made.value == before


def test_deliveries_of_a_process_share_their_progress():
    one, other = ServerProgress(), ServerProgress()
    before = one.value
    assert attempt(other, 2) == 2 and one.value == before + 2


def test_a_file_may_take_its_seconds_on_a_slow_line_once(monkeypatch):
    """500 kB at 100 kB/s: 5 s."""
    now = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    made = ServerProgress()

    def values(seconds):
        start = made.value
        found = []
        with made.sending(500_000):
            began = now[0]
            for now[0] in (began + second for second in seconds):
                found.append(round(made.value - start, 3))
        return found

    assert values([1, 2]) == [0.2, 0.4]
    assert values([1, 2, 3, 5, 7]) == [0.0, 0.0, 0.2, 0.6, 0.6], "a second attempt has to get further"
    made.keep()
    assert values([1]) == [0.2]
