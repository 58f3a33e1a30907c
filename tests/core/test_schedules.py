"""Factors of the learning rate by their formulas, T = 8 rounds."""

import math

import pytest

from cfl_ray.core.schedules import resolve_schedule
from cfl_ray.errors import ConfigError

T = 8
CASES = {
    "step": ({"step": {"every": 3, "gamma": 0.1}}, lambda t: 0.1 ** ((t - 1) // 3)),
    "exponential": ({"exponential": {"gamma": 0.9}}, lambda t: 0.9 ** (t - 1)),
    "linear": ({"linear": {"floor": 0.2}}, lambda t: 1 - 0.8 * (t - 1) / T),
    "cosine": ("cosine", lambda t: (1 + math.cos(math.pi * (t - 1) / T)) / 2),
    "warmup": ({"warmup": {"length": 4}}, lambda t: min(t / 4, 1)),
}


@pytest.mark.parametrize("value, formula", CASES.values(), ids=CASES)
def test_formulas(value, formula):
    schedule = resolve_schedule("local.schedule", value)
    assert [schedule(t, T) for t in range(1, T + 1)] == pytest.approx([formula(t) for t in range(1, T + 1)])


def test_constant_is_none():
    assert resolve_schedule("local.schedule", "constant") is None


def test_own(tmp_path):
    (tmp_path / "rates.py").write_text("def half(t, total, base=2):\n    return base ** -t\n")
    assert resolve_schedule("local.schedule", {f"{tmp_path}/rates.py:half": {"base": 4}})(2, T) == 1 / 16
    with pytest.raises(ConfigError, match=r"half \(.*rates.py, line 1\) has no option 'bas' \(did you mean 'base'\?\)"):
        resolve_schedule("local.schedule", {f"{tmp_path}/rates.py:half": {"bas": 4}})
    with pytest.raises(ConfigError, match=r"returns -1 at 1 of 8, expected a number >= 0"):
        resolve_schedule("local.schedule", lambda t, total: -1)(1, T)
    with pytest.raises(ConfigError, match=r"rates.py, line 1\) failed: TypeError"):
        resolve_schedule("local.schedule", {f"{tmp_path}/rates.py:half": {"base": "x"}})(1, T)
    for value, option in (({"step": {"every": 0}}, "every"), ({"warmup": {"length": 0}}, "length")):
        with pytest.raises(ConfigError, match=f"option {option} of a schedule is at least 1, got 0"):
            resolve_schedule("local.schedule", value)(1, T)
    with pytest.raises(ConfigError, match="local.schedule must be a name, or one name with its options"):
        resolve_schedule("local.schedule", {"step": {}, "cosine": {}})
