"""Tasks: what a loss returns, by formula, and what is refused before a run."""

import pytest
import torch
from closeness import close

from cfl_ray.core.tasks import CLASSIFICATION, TASKS, Task, resolve_task
from cfl_ray.errors import ConfigError

DRAW = torch.Generator().manual_seed(0)
F, G = torch.randn(7, 3, generator=DRAW), torch.randn(7, 3, generator=DRAW)


def test_losses_of_each_sample():
    expected = ((F - G) ** 2).mean(1)
    assert close(TASKS.builtin["regression"].loss(F, G), expected, 1e-6)
    assert close(TASKS.builtin["regression"].loss(F[:, :1], G[:, 0]), (F[:, 0] - G[:, 0]) ** 2, 1e-6)
    y = (G > 0).float()
    s = torch.sigmoid(F)
    assert close(TASKS.builtin["multi_label"].loss(F, y), -(y * s.log() + (1 - y) * (1 - s).log()).mean(1), 1e-5)
    logits, tokens = torch.randn(7, 4, 5, generator=DRAW), torch.randint(5, (7, 4), generator=DRAW)
    p = logits.softmax(-1).gather(-1, tokens[..., None])[..., 0]
    assert close(TASKS.builtin["next_token"].loss(logits, tokens), -p.log().mean(1), 1e-5)


def test_tokens_of_minus_100_are_not_learned():
    """The loss of a sample is PyTorch's mean over its other tokens; without one it is 0."""
    logits, tokens = torch.randn(5, 4, 6, generator=DRAW), torch.randint(6, (5, 4), generator=DRAW)
    loss = TASKS.builtin["next_token"].loss
    whole = torch.nn.functional.cross_entropy(logits.transpose(1, 2), tokens, reduction="none").mean(1)
    assert torch.equal(loss(logits, tokens), whole)  # to the last bit without one
    for sample, ignored in enumerate(([], [0], [1, 2], [0, 1, 3])):
        tokens[sample, ignored] = -100
        expected = torch.nn.functional.cross_entropy(logits[sample], tokens[sample])
        assert close(loss(logits, tokens)[sample], expected, 1e-6)
    tokens[4] = -100
    logits.requires_grad_()
    loss(logits, tokens).sum().backward()
    assert loss(logits, tokens)[4] == 0 and not logits.grad[tokens == -100].any() and logits.grad[tokens >= 0].any()


def test_classification_is_pytorchs_cross_entropy_to_the_last_bit():
    y = torch.tensor([0, 1, 2, 0, 1, 2, 0])
    assert torch.equal(CLASSIFICATION.mean_loss(F, y), torch.nn.functional.cross_entropy(F, y))
    total = torch.nn.functional.cross_entropy(F, y, reduction="sum")
    assert torch.equal(CLASSIFICATION.total_loss(F, y), total)


def test_a_mapping_and_a_file(tmp_path):
    task = resolve_task({"loss": "huber", "metrics": ["mae"]})
    assert (task.targets, task.score_names, task.is_classification) == ("real", ("mae", "loss"), False)
    assert resolve_task({"loss": "cross_entropy"}).by_confusion
    file = tmp_path / "pinball.py"
    file.write_text(
        "import cfl_ray\n\n\ndef loss(f, y):\n    d = y.reshape(f.shape) - f\n"
        "    return (d * 0.9).maximum(d * -0.1).mean(1)\n\n\ntask = cfl_ray.Task(loss, 'real', name='pinball')\n"
    )
    own = resolve_task(f"{file}:task")
    assert (own.name, own.score_names) == ("pinball", ("mse", "mae", "r2", "loss"))
    assert own.loss(torch.zeros(1, 1), torch.ones(1)).item() == pytest.approx(0.9)
    assert resolve_task({"loss": f"{file}:loss", "targets": "real"}).loss is own.loss
    with pytest.raises(ConfigError, match=r"task.targets must say what the loss loss \(.*pinball.py, line 4\) is for"):
        resolve_task({"loss": f"{file}:loss"})


@pytest.mark.parametrize(
    "value, text",
    [
        ("regresion", "unknown task 'regresion'.*did you mean 'regression'"),
        ({"los": "mse"}, "task has no key 'los'.*did you mean 'loss'"),
        ({"metrics": ["mse"]}, "task needs a loss"),
        ({"loss": "mse", "metrics": ["accuracy"]}, "metric accuracy is for targets class, those of the task are real"),
        ({"loss": "mse", "metrics": ["mae", "mae"]}, "metric 'mae' is measured twice"),
        ({"loss": 3, "targets": "real"}, "task.loss 3 is int, expected a function"),
        (lambda: 3, "is int, expected a cfl_ray.Task"),
    ],
)
def test_what_is_refused(value, text):
    with pytest.raises(ConfigError, match=text):
        resolve_task(value)


def test_a_metric_of_the_task_is_not_measured_again():
    assert CLASSIFICATION.with_metrics(["macro_f1"]) == CLASSIFICATION
    assert CLASSIFICATION.with_metrics(["ece", "accuracy"]).score_names == ("accuracy", "macro_f1", "ece", "loss")
    with pytest.raises(ConfigError, match="'ece' is measured twice: accuracy, macro_f1, ece, ece; evaluation"):
        CLASSIFICATION.with_metrics(["ece", "ece"])
    with pytest.raises(ConfigError, match="'micro_f1' is measured twice"):
        Task(CLASSIFICATION.loss, metrics=("micro_f1", "micro_f1"))


def test_metrics_of_a_task_may_be_functions_and_names():
    def accuracy(outputs, targets):
        return 0.5

    task = Task(CLASSIFICATION.loss, metrics=(accuracy, "macro_f1"))
    assert task.score_names == CLASSIFICATION.score_names and task.metrics[0](F, G) == 0.5
    assert CLASSIFICATION.by_confusion and not task.by_confusion, "its accuracy is another one"
    with pytest.raises(ConfigError, match="its loss is str, expected a function"):
        Task("mse", "real")


def test_a_loss_is_tried_before_a_run():
    with pytest.raises(ConfigError, match=r"returns a tensor of shape \(\) for 3 samples, expected the loss of each"):
        Task(lambda f, y: f.mean(), "real").check((1,), ())
    with pytest.raises(ConfigError, match=r"returns \[nan.* for 3 samples, expected finite numbers"):
        Task(lambda f, y: f.sum(1).log() * torch.nan, "real").check((1,), ())
    with pytest.raises(ConfigError, match="without a gradient"):
        Task(lambda f, y: y, "real").check((1,), ())
    with pytest.raises(ConfigError, match=r"failed: RuntimeError.*outputs \(3, 1\) and targets \(3,\) of torch.f"):
        Task(lambda f, y: f @ f, "real").check((1,), ())


def test_a_loss_that_mixes_samples_by_broadcasting_is_refused():
    """(n, 1) - (n,) is (n, n), whose mean over one axis has the shape of a loss."""
    for axis in (0, 1):
        with pytest.raises(ConfigError, match=r"mixes samples.*outputs \(3, 1\) and targets \(3,\)"):
            Task(lambda f, y: ((f - y) ** 2).mean(axis), "real").check((1,), ())
    Task(lambda f, y: (f[:, 0] - y) ** 2, "real").check((1,), ())
    for name, outputs, target_shape in (
        ("classification", (4,), ()),
        ("regression", (2,), (2,)),
        ("multi_label", (3,), (3,)),
        ("next_token", (5, 7), (5,)),
    ):
        resolve_task(name).check(outputs, target_shape)
