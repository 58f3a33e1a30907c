import numpy as np
import pytest
import torch
from checksums import EARLY
from small_runs import PLANTED, figures, merged, metrics_of, simulate_until

from cfl_ray import Experiment, load_run, resume, simulate
from cfl_ray.data import federation_from_arrays
from cfl_ray.data.validation_share import ValidationShare
from cfl_ray.methods import REGISTRY
from cfl_ray.tracking.record import score_metrics_of, validation_metric

COUNT, SIZE = 8, 20  # clients, and samples of each
SHARE = ValidationShare(0.2, "random", 0)
SMALL = {
    "model": {"name": "mlp", "options": {"hidden": 6}},
    "local": {"epochs": 1, "batch_size": 5},
    "cohort": {"fraction": 1.0},
    "tracking": {"enabled": False},
    "runtime": {"engine": "manual"},
}


def federation(spoiled: bool, inputs: int = 4):
    """Clients whose validation samples are 1000 if `spoiled`, in the label view."""
    draw = np.random.default_rng(0)
    x, y = draw.standard_normal((COUNT * SIZE, inputs)).astype(np.float32), draw.integers(0, 3, COUNT * SIZE)
    for client in range(COUNT if spoiled else 0):
        rows = np.arange(client * SIZE, (client + 1) * SIZE)
        x[rows[SHARE.rows(client, y[rows])[1]]] = 1000.0
    x_test = draw.standard_normal((30, inputs)).astype(np.float32)
    owner = np.repeat(np.arange(COUNT), SIZE)
    return federation_from_arrays(x, y, owner, x_test=x_test, y_test=np.arange(30) % 3, view="label")


def assert_no_leak(methods, engine, rounds=2, inputs=4, **local):
    """Runs with and without spoiled validation samples: all but the metrics on validation data are equal."""
    schedule = [{"round": 2, "change": [{"clients": [1, 2], "data_of": [2, 1]}, {"clients": [3], "relabel": 1}]}]
    experiment = merged(SMALL, {"local": local}) | {
        "rounds": rounds,
        "methods": [{name: EARLY.get(name, {})} for name in methods],
        "schedule": schedule,
        "runtime": {"engine": engine},
        "evaluation": {"tuned_epochs": 1, "past": True, "verify": False, "every": rounds},
    }
    clean, spoiled = (
        simulate(Experiment(data={"federation": federation(spoiled, inputs), "validation": {}}, **experiment))
        for spoiled in (False, True)
    )
    for label, result in clean.methods.items():
        other = spoiled[label]
        for mine, its in zip(metrics_of(result), metrics_of(other), strict=True):
            assert mine.keys() == its.keys()
            differing = {name for name in mine if not np.array_equal(mine[name], its[name], equal_nan=True)}
            assert all(name.startswith("validation/") for name in differing), (label, differing)
        assert validation_metric("test_loss") in differing, "at the end, which is evaluated"
        assert torch.equal(result.trained.state.models_KP, other.trained.state.models_KP), label


def test_validation_samples_reach_no_model_signature_or_choice():
    assert_no_leak(["ifca", "fedem", "pacfl", "stocfl"], "manual")  # by loss, responsibilities, data, gradients


@pytest.mark.slow
def test_validation_samples_reach_no_method_and_no_engine():
    assert_no_leak(list(REGISTRY), "manual", rounds=3)
    for engine in ("sequential", "vectorised"):
        assert_no_leak(["ifca", "ditto"], engine)
    assert_no_leak(["fedavg", "ifca"], "span", inputs=64, batch_size=None, epochs=2)


def test_every_metric_of_an_evaluation_is_measured_on_both_parts():
    evaluation = {"tuned_epochs": 1, "metrics": ["micro_f1"], "every": 2}
    data = {"validation": {"fraction": 0.25}}
    experiment = Experiment(**merged(PLANTED, {"data": data, "evaluation": evaluation, "rounds": 3}))
    records = simulate(experiment)["fedavg"].records
    assert not any(name.startswith("validation/") for name in records[0].metrics)  # not evaluated
    expected = {"accuracy", "accuracy_std", "accuracy_p10", "accuracy_local", "accuracy_local_trained"}
    expected |= {"accuracy_tuned", "macro_f1", "micro_f1", "test_loss"}
    for record in records[1:]:
        of_validation = {name for name in record.metrics if name.startswith("validation/")}
        assert of_validation == {validation_metric(name) for name in expected} | {
            "validation/clients",
            "validation/samples",
        }
        assert expected <= record.metrics.keys()
        assert of_validation <= score_metrics_of(["accuracy", "macro_f1", "micro_f1"])
        assert record.metrics["validation/clients"] == 8 and record.metrics["validation/samples"] == 8 * 15  # 0.25 * 60


def test_a_metric_is_the_mean_over_the_clients_with_validation_data():
    x = np.random.default_rng(0).standard_normal((31, 3)).astype(np.float32)
    sizes = [20, 10, 1]
    owner = np.repeat(np.arange(3), sizes)
    data = {"federation": federation_from_arrays(x, np.arange(31) % 2, owner, x_test=x[:4], y_test=np.arange(4) % 2)}
    result = simulate(Experiment(data=data | {"validation": {}}, rounds=1, methods=["fedavg"], **SMALL))["fedavg"]
    final = result.final
    assert final["validation/clients"] == 2 and final["validation/samples"] == 6  # 0.2 * 20 + 0.2 * 10
    scores = []
    for client in (0, 1):
        inputs, y = result.validation(client)
        scores.append((result.personal_model(client)(inputs).argmax(1) == y).double().mean().item())
    assert final["validation/accuracy"] == pytest.approx(np.mean(scores))


def test_runs_without_validation_data_have_the_shards_of_runs_with_them(tmp_path):
    data = {"source": "digits", "partition": {"clients": 3, "samples": 30}, "shards": str(tmp_path / "shards")}
    common = SMALL | {"rounds": 1, "methods": ["fedavg"]}
    first = simulate(Experiment(data=data, **common))
    second = simulate(Experiment(data=data | {"validation": {}}, **common))
    assert len(list((tmp_path / "shards").glob("digits*"))) == 1
    assert "validation/accuracy" in second["fedavg"].final and "validation/accuracy" not in first["fedavg"].final


def test_a_resumed_run_has_the_same_metrics(tmp_path):
    changes = {"data": {"validation": {}}, "cohort": {"fraction": 0.5}, "rounds": 4}
    schedule = [{"round": 2, "join": [6, 7]}, {"round": 3, "leave": [0]}]
    experiment = Experiment(**merged(PLANTED, changes | {"schedule": schedule}), output=str(tmp_path))
    whole = simulate(experiment)["fedavg"]
    assert "validation/newcomer_accuracy" in whole.summary
    simulate_until(2, experiment, tmp_path / "run")
    resumed = resume(tmp_path / "run", on_ray=False)["fedavg"]
    assert figures(resumed) == figures(whole)
    loaded = load_run(tmp_path / "run")["fedavg"]
    assert loaded.final["validation/accuracy"] == whole.final["validation/accuracy"]
    assert loaded.to_frame()["validation/accuracy"].notna().all()
