"""Backends that a config chooses: the figures are those of any other."""

import gc

import pytest
import torch

import cfl_ray
from cfl_ray.engine.in_process import InProcessBackend
from cfl_ray.errors import ConfigError, RunError
from cfl_ray.runtime.session import InProcessSession
from cfl_ray.setup.prepare import prepare


class Counting(InProcessBackend):
    """Counts exchanges."""

    exchanges = 0

    def run(self, work):
        Counting.exchanges += 1
        return super().run(work)


def experiment(**runtime):
    return cfl_ray.Experiment(
        rounds=2,
        methods=["fedper"],
        data={"source": "synthetic", "synthetic_shape": [6], "partition": {"clients": 6}},
        model={"options": {"hidden": 4}},
        runtime={"engine": "manual", **runtime},
        tracking={"enabled": False},
    )


def figures(results) -> list:
    return [(one.round, one.metrics["accuracy"], one.metrics["train_loss"]) for one in results["fedper"].records]


def test_an_own_backend_carries_out_the_exchanges():
    expected = figures(cfl_ray.simulate(experiment()))
    Counting.exchanges = 0
    assert figures(cfl_ray.simulate(experiment(backend=Counting))) == expected
    assert Counting.exchanges >= 2 * 2  # training and test of two rounds


def test_run_without_ray_where_the_config_says_so(tmp_path):
    assert cfl_ray.run(experiment(backend="in_process"), tmp_path / "run").run_info["hosts"] == "this process"


def test_a_session_lasts_as_long_as_its_rounds_are_read():
    """Its settings, such as one thread, would end with it, and other sums would follow."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        rounds = InProcessSession(prepare(experiment()), None).rounds("fedper", print)
        gc.collect()
        assert [torch.get_num_threads() for _ in rounds] == [1, 1, 1]
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize(
    "backend, message",
    [
        ("rya", r"runtime.backend: unknown backend 'rya' \(did you mean 'ray'\?\)"),
        (
            dict,
            r"backend dict has no method 'changed'|backend dict failed",
        ),
        (len, "backend len is builtin_function_or_method, expected a class"),
    ],
)
def test_others_are_refused(backend, message):
    with pytest.raises(ConfigError, match=message):
        cfl_ray.simulate(experiment(backend=backend))


def test_a_backend_is_no_part_of_the_hash_and_is_recorded_by_reference():
    assert experiment(backend=Counting).config_hash == experiment().config_hash
    assert experiment(backend=Counting).to_dict()["runtime"]["backend"] == f"{__name__}.Counting"


def test_a_backend_that_returns_nothing_is_named():
    class Silent(InProcessBackend):
        def run(self, work):
            super().run(work)

    with pytest.raises(RunError, match=r"Silent \(.*test_backends.py, line .*\): run must return an Outcome, got None"):
        cfl_ray.simulate(experiment(backend=Silent))
