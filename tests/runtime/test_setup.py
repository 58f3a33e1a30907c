"""What every process of a run starts from: which way of training it settles on."""

import json

import pytest

from cfl_ray.engine.choose import Choice
from cfl_ray.runtime.setup import engine_choice, prepare


@pytest.fixture
def choose(experiment):
    """Returns a function: what a run settles on where `engine` would be measured as the best, and whether it measured."""
    setup, asked = prepare(experiment(runtime={"engine": "auto"})), []

    def settle(engine: str) -> tuple[str, bool]:
        def measured():
            asked.append(engine)
            return Choice(engine, "measured")

        before = len(asked)
        return engine_choice(setup, "cpu", measured).engine, len(asked) > before

    return settle


def test_a_measurement_is_kept_beside_the_runs(choose, tmp_path):
    assert [choose("compiled"), choose("sequential")] == [("compiled", True), ("compiled", False)]
    (kept,) = json.loads((tmp_path / "engine-choices.json").read_text()).values()
    assert kept == ["compiled", "measured"]


@pytest.mark.parametrize("content", ["", "{", "\0" * 100])
def test_a_damaged_file_is_made_anew(choose, tmp_path, content):
    (tmp_path / "engine-choices.json").write_text(content)
    assert [choose("sequential"), choose("compiled")] == [("sequential", True), ("sequential", False)]


def test_one_that_cannot_be_kept_stops_nobody(choose, tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("cfl_ray.runtime.setup.write_json", full)
    assert [choose("sequential"), choose("compiled")] == [("sequential", True), ("compiled", True)] and not (tmp_path / "engine-choices.json").exists()
