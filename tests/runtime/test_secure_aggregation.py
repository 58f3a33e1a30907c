"""Runs with secure aggregation as a whole: resumption, lost sums, refusals."""

import pytest

from cfl_ray import Experiment, resume, simulate
from cfl_ray.errors import ConfigError, Interrupted
from cfl_ray.setup.prepare import prepare


def secure(**sections) -> Experiment:
    common = {
        "rounds": 3,
        "methods": [{"ifca": {"num_clusters": 2}}],
        "data": {"shift": {"kind": "rotated"}, "partition": {"clients": 12}},
        "model": "mlp",
        "cohort": {"fraction": 0.5, "dropout": 0.2},
        "secure_aggregation": {"neighbours": 4, "threshold": 0.25},
        "tracking": {"enabled": False},
        "runtime": {"engine": "sequential", "checkpoint_every": 1},
    }
    return Experiment(**common | sections)


def metrics(results, label="ifca"):
    return [{k: v for k, v in one.metrics.items() if k != "round_seconds"} for one in results[label].records]


def test_a_resumed_run_has_the_same_bits(tmp_path, monkeypatch):
    from cfl_ray.runtime.round_loop import RoundLoop

    real, seen = RoundLoop._save_and_close, []

    def dying(self, draft):
        if draft.round == 2:
            seen.append(self.state.models_KP)
            if len(seen) == 1:
                raise KeyboardInterrupt
        real(self, draft)

    whole = metrics(simulate(secure()))
    monkeypatch.setattr(RoundLoop, "_save_and_close", dying)
    with pytest.raises(Interrupted):
        simulate(secure(), tmp_path / "run")
    assert metrics(resume(tmp_path / "run", on_ray=False)) == whole
    assert seen[0].equal(seen[1])
    assert sum(one.get("clients_dropped", 0) for one in whole), "masks of clients that dropped out were removed"


def test_lost_sums_are_counted():
    found = metrics(simulate(secure(cohort={"fraction": 0.5, "dropout": 0.6}, secure_aggregation={"threshold": 1.0})))
    assert any(one.get("sums_lost") for one in found)


@pytest.mark.parametrize(
    "sections, message",
    [
        (
            {"methods": ["pacfl"]},
            "pacfl cannot be aggregated securely: its server reads descriptions of single clients",
        ),
        ({"methods": [{"fedavg": {"aggregation": "median"}}]}, "securely with aggregation median"),
        ({"secure_aggregation": {"bits": 22}}, "6 x levels / 2 = 12582912, a ring of 22 bits holds less than 2097152"),
        ({"privacy": {"noise_multiplier": 1.0}}, "privacy, and secure_aggregation: .* need a discrete Gaussian"),
        (
            {"clock": {"kind": "constant"}, "asynchronous": {"buffer": 2}},
            "secure_aggregation, and asynchronous.buffer 2: masks cancel among clients of the same round",
        ),
    ],
)
def test_refusals(sections, message):
    with pytest.raises(ConfigError, match=message):
        prepare(secure(**sections))
