"""Local optimisers, learning-rate schedules and clipping: PyTorch's on one client, and every engine as `sequential`."""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from closeness import close
from federations import Stage, uneven
from training_tasks import by_torch, mlp, rows, tasks_of, with_batch_norm, with_fields

from cfl_ray.core.local_sgd import LocalSGD
from cfl_ray.core.optimizers import OPTIMIZERS, LocalOptimizer, resolve_optimizer
from cfl_ray.core.schedules import RateSchedule, cosine, resolve_schedule
from cfl_ray.core.work import Proximal
from cfl_ray.engine import manual, sequential, span, vectorised
from cfl_ray.nn.network import Network

NAMES = [name for name in OPTIMIZERS.names() if name != "sgd"]
COSINE = resolve_schedule("local.step_schedule", {"cosine": {"floor": 0.1}})


class TestSequentialIsTorch:
    @pytest.mark.parametrize("name", NAMES)
    def test_optimizers(self, name):
        local = LocalSGD(epochs=3, batch_size=4, lr=0.05, optimizer=resolve_optimizer(name, {}))
        network = Network(mlp, (6,))
        (task,) = tasks_of(network, [10], local)
        expected, _ = by_torch(mlp, network, task, lambda p: OPTIMIZERS.builtin[name](p, lr=0.05))
        assert close(rows(sequential, network, [task])[0], expected, 1e-5)
        assert (expected - task.start_P).abs().max() > 1e-3

    def test_options_a_proximal_term_a_step_schedule_and_clipping(self):
        optimizer = resolve_optimizer("adamw", {"weight_decay": 0.1, "betas": [0.8, 0.9]})
        local = LocalSGD(epochs=3, batch_size=4, lr=0.05, optimizer=optimizer, step_schedule=COSINE, clip_norm=0.3)
        network = Network(mlp, (6,))
        (task,) = tasks_of(network, [10], local, [(0.5,)])
        adamw = partial(torch.optim.AdamW, lr=0.05, weight_decay=0.1, betas=(0.8, 0.9))
        expected, _ = by_torch(mlp, network, task, adamw)
        assert close(rows(sequential, network, [task])[0], expected, 1e-5)

    @pytest.mark.parametrize("schedule", [None, COSINE])
    def test_clipped_sgd(self, schedule):
        """The gradient with its proximal term is clipped; momentum and weight decay come after, as in torch.optim."""
        local = LocalSGD(
            epochs=3, batch_size=4, lr=0.1, momentum=0.9, weight_decay=0.05, clip_norm=0.2, step_schedule=schedule
        )
        network = Network(mlp, (6,))
        (task,) = tasks_of(network, [10], local, [(0.5,)])
        expected, _ = by_torch(mlp, network, task)
        found = rows(sequential, network, [task])[0]
        assert close(found, expected, 1e-5)
        free = rows(sequential, network, [replace(task, local=replace(local, clip_norm=None))])[0]
        assert not close(free, found, 1e-3)


@pytest.mark.parametrize(
    "engine",
    [sequential, pytest.param(manual, marks=pytest.mark.cpu), vectorised, span],
    ids=lambda engine: engine.__name__[15:],
)
def test_clipping_at_infinity_is_none(engine):
    network = Network(mlp, (6,))
    plain = LocalSGD(epochs=3, lr=0.1, momentum=0.9, weight_decay=0.05)
    tasks = tasks_of(network, [3, 3], plain, [(0.5,)])
    endless = [replace(task, local=replace(plain, clip_norm=np.inf)) for task in tasks]
    assert torch.equal(rows(engine, network, tasks), rows(engine, network, endless))


@pytest.mark.parametrize("name", ["adam", "nadam", "adagrad", "rprop"])
@pytest.mark.parametrize(
    "engine",
    [sequential, pytest.param(manual, marks=pytest.mark.cpu), vectorised],
    ids=lambda engine: engine.__name__[15:],
)
def test_a_weight_without_a_gradient_stays_at_its_anchor(engine, name):
    """The first hidden unit is off for all samples: its weights have a proximal term only, which is 0 at its anchor.

    These optimisers divide a gradient by its size, and so make a whole step of a rest that is due to rounding.
    """
    network = Network(mlp, (6,))
    local = LocalSGD(steps=4, lr=0.05, optimizer=resolve_optimizer(name, {}))
    tasks, off = [], network.row().clone().zero_()
    network.views(off)[0][0], network.views(off)[2][:, 0] = 1, 1  # weights into the unit and out of it
    for task in tasks_of(network, [8, 8], local):
        start_P = task.start_P.clone()
        network.views(start_P)[1][0] = -100.0
        tasks.append(with_fields(task, start_P=start_P, proximal=(Proximal(0.3, start_P),)))
    found = rows(engine, network, tasks)
    for row_P, task in zip(found, tasks, strict=True):
        assert torch.equal(row_P[off > 0], task.start_P[off > 0])
        assert not close(row_P, task.start_P, 1e-3)


class TestVectorised:
    @pytest.mark.parametrize("name", NAMES)
    @pytest.mark.parametrize("factory", [mlp, with_batch_norm], ids=["mlp", "buffers"])
    def test_equals_sequential(self, name, factory):
        """Clients with fewer steps than others keep their models after them."""
        sizes = [8, 8] if factory is with_batch_norm else [12, 5, 9]
        local = LocalSGD(epochs=2, batch_size=4, lr=0.02, optimizer=resolve_optimizer(name, {}))
        network = Network(factory, (6,))
        tasks = tasks_of(network, sizes, local, [(0.3,)])
        assert vectorised.why_not(network, tasks) is None
        expected = rows(sequential, network, tasks)
        # the first steps of some divide two numbers close to 0
        assert close(rows(vectorised, network, tasks), expected, 2e-4)

    @pytest.mark.parametrize("clip_norm", [None, 0.2])
    @pytest.mark.parametrize("momentum", [0.0, 0.9])
    def test_schedules_and_clipping(self, clip_norm, momentum):
        local = LocalSGD(2, None, 4, 0.1, momentum, 0.05, step_schedule=COSINE, clip_norm=clip_norm)
        network = Network(mlp, (6,))
        tasks = tasks_of(network, [12, 5, 9], local, [(0.3,)])
        expected = rows(sequential, network, tasks)
        assert close(rows(vectorised, network, tasks), expected, 2e-5)
        if network.device.type == "cpu":
            assert close(rows(manual, network, tasks), expected, 2e-5)

    def test_refuses_what_rows_cannot_share(self):
        network = Network(mlp, (6,))
        own = LocalOptimizer(lambda params, lr: torch.optim.Adam(params, lr=lr))
        tasks = tasks_of(network, [12, 5], LocalSGD(batch_size=4, optimizer=own))
        assert "not known to treat every number by itself" in vectorised.why_not(network, tasks)
        scheduled = LocalSGD(batch_size=4, optimizer=resolve_optimizer("adam", {}), step_schedule=COSINE)
        assert "one learning rate for all clients" in vectorised.why_not(network, tasks_of(network, [12, 5], scheduled))
        assert vectorised.why_not(network, tasks_of(network, [5, 5], scheduled)) is None


@pytest.mark.cpu
def test_span_leaves_other_optimizers_to_the_sequential_engine():
    network = Network(mlp, (6,))
    (plain,) = tasks_of(network, [3], LocalSGD(epochs=3))
    assert manual.why_not(network, [plain]) is None and span.why_not(network, [plain]) is None
    for changes in ({"optimizer": resolve_optimizer("adam", {})}, {"step_schedule": COSINE}, {"clip_norm": 1.0}):
        task = replace(plain, local=replace(plain.local, **changes))
        assert span.why_not(network, [task])
        assert manual.why_not(network, [task]) is None


@pytest.mark.parametrize("engine", ["manual", "vectorised", "span"])
def test_a_worker_of_any_engine_trains_with_adam(engine):
    own = LocalOptimizer(lambda params, lr: torch.optim.Adam(params, lr=lr))
    found = []
    for name in ("sequential", engine):
        one = Stage(uneven([9, 4, 6]), mlp, LocalSGD(epochs=2, batch_size=4, lr=0.02, optimizer=own), name)
        clients = one.clients()
        updates = clients.train(clients.send(one.model()[None]), average=torch.ones(1, 3))
        found.append(updates.averaged(one.model()[None]))
    assert close(*found, 1e-4 if engine == "manual" else 0)


def test_a_step_schedule_is_a_function_of_the_step_alone():
    local = LocalSGD(lr=0.2, step_schedule=RateSchedule(cosine))
    assert [local.lr_at(step, 4) for step in range(4)] == [0.2 * cosine(t, 4) for t in range(1, 5)]
