"""Vmap batches are as large as the memory allows, and neither their size nor a lack of memory changes a result."""

import gc
from dataclasses import replace

import numpy as np
import pytest
import torch
import training_tasks
from closeness import close
from fake_memory import FakeMemory, install
from federations import Spoiled, Stage, attack_of, linear, uneven
from torch import nn
from training_tasks import LONG, long_mlp, results, rows, with_fields

from cfl_ray.core.clients import ClientState, LocalTraining, Proximal
from cfl_ray.core.local_sgd import LocalSGD
from cfl_ray.core.work import Address
from cfl_ray.engine import sequential, span, span_together, vectorised
from cfl_ray.engine.attack import Attack
from cfl_ray.engine.describing import ClientView
from cfl_ray.engine.engines import ENGINES
from cfl_ray.engine.task import TrainingTask
from cfl_ray.engine.vmap_batches import DeviceMemoryError, kind_of, train_alone
from cfl_ray.engine.vmap_steps import VmapSteps
from cfl_ray.nn.device_memory import DeviceMemory, device_of
from cfl_ray.nn.network import Network

HONEST = Attack()


def norm():
    return nn.Sequential(nn.Linear(36, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))


def tasks_of(network: Network, count: int, local: LocalSGD = LocalSGD(epochs=3, lr=0.2)) -> list[TrainingTask]:
    """Three steps of clients with ten samples each, from one model."""
    return training_tasks.tasks_of(network, [10] * count, local, start_P=network.new_model(0, 0), steps=3)


def sequentially_by(monkeypatch: pytest.MonkeyPatch, train) -> None:
    """Makes `train` the training of the sequential engine."""
    monkeypatch.setattr(sequential, "train", train)
    monkeypatch.setitem(ENGINES, "sequential", replace(ENGINES["sequential"], train=train))


class TestSize:
    def test_is_the_free_memory_over_the_need_of_a_client(self, monkeypatch):
        """Four clients measure the need; then 0.7 of 2,000 bytes hold 14 clients of 100."""
        network, memory = Network(long_mlp, LONG), FakeMemory(2000, need=100)
        tasks = tasks_of(network, 40)
        expected = rows(vectorised, network, tasks)
        install(monkeypatch, memory, network)
        found = results(vectorised, network, iter(tasks))
        assert memory.batches == [4, 14, 14, 8] and memory.largest == 14
        assert [result.index for result in found] == list(range(40))
        assert close(torch.stack([result.row_P for result in found]), expected, 1e-6)
        assert len(list(vectorised.train(network, tasks))) == 40 and memory.batches[4:] == [14, 14, 12]

    def test_is_halved_where_a_stack_does_not_fit_and_remembered(self, monkeypatch):
        """Clients need three times what was measured: 20 of 2,000 bytes become 10, then 5."""
        network, memory = Network(long_mlp, LONG), FakeMemory(2000, need=70, hidden=3.0)
        tasks = tasks_of(network, 21)
        expected = rows(vectorised, network, tasks)
        install(monkeypatch, memory, network)
        assert close(rows(vectorised, network, tasks), expected, 1e-6)
        assert memory.batches == [4, 17, 8, 8] and memory.released == 1, "the last client is trained sequentially"
        assert close(rows(vectorised, network, tasks), expected, 1e-6)
        assert memory.batches[4:] == [8, 8, 5], "no larger one is tried again"

    def test_of_the_first_stack_is_halved_as_well(self, monkeypatch):
        network, memory = Network(long_mlp, LONG), FakeMemory(250, need=100)
        tasks = tasks_of(network, 5)
        install(monkeypatch, memory, network)
        assert len(list(vectorised.train(network, tasks))) == 5
        assert memory.batches == [4, 2, 2]

    @pytest.mark.cpu
    def test_has_no_limit_on_a_cpu(self):
        network = Network(long_mlp, LONG)
        assert network.memory.batch_size("any") is None and not network.memory.measurable
        list(vectorised.train(network, tasks_of(network, 40)))
        assert network.memory.largest == 40

    @pytest.mark.parametrize(
        "local", [LocalSGD(epochs=3, lr=0.1), LocalSGD(epochs=3, batch_size=4, lr=0.1, momentum=0.9)]
    )
    @pytest.mark.parametrize("sizes", [[10] * 12, [10, 3, 7, 16] * 3], ids=["equal", "unequal"])
    def test_changes_no_more_than_rounding(self, sizes, local):
        network = Network(long_mlp, LONG)
        tasks = training_tasks.tasks_of(network, sizes, local, start_P=network.new_model(0, 0), steps=6)
        expected = rows(vectorised, network, tasks)
        for most in (1, 2, 5):
            network.memory = memory = FakeMemory(10**9)
            memory.most, memory.device = most, network.device
            found = rows(vectorised, network, tasks)
            assert network.memory.largest == most and close(found, expected, 1e-6)

    def test_depends_on_what_decides_the_need(self):
        """Samples and batches are rounded up to a power of two."""
        network = Network(long_mlp, LONG)
        full, (batches,) = tasks_of(network, 1), tasks_of(network, 1, LocalSGD(batch_size=4, momentum=0.9))
        assert kind_of(full)[:2] == (16, 16) and kind_of([batches])[:2] == (16, 4)
        frozen = with_fields(full[0], frozen_P=full[0].start_P)
        assert len({kind_of(full), kind_of([batches]), kind_of([frozen])}) == 3

    @pytest.mark.parametrize("share, expected", [(1.0, 30 + 20 - 5), (0.25, 25 - 5), (0.01, 0)])
    def test_free_memory_is_what_is_free_or_reusable_within_the_share(self, share, expected, monkeypatch):
        for name, value in (("mem_get_info", (30, 100)), ("memory_allocated", 5), ("memory_reserved", 20)):
            monkeypatch.setattr(torch.cuda, name, lambda _, value=value: value)
        assert DeviceMemory(torch.device("cuda"), share).free() == expected


@pytest.mark.parametrize("engine", ["vectorised", "span"])
def test_samples_of_a_stack_are_freed_without_the_garbage_collector(engine):
    network = Network(long_mlp, LONG)
    tasks = tasks_of(network, 3)
    gc.collect()
    gc.disable()
    try:
        before = tensors_like((3, 10))
        if engine == "vectorised":
            vectorised.train_batch(network, tasks)
        else:
            span_together.train_together(network, tasks, [span._terms(network, task) for task in tasks])
        assert tensors_like((3, 10)) == before
    finally:
        gc.enable()


def tensors_like(shape: tuple[int, ...]) -> int:
    """Number of tensors of this shape: here, the labels of a stack."""
    return sum(type(found) is torch.Tensor and tuple(found.shape) == shape for found in gc.get_objects())


class TestOneClient:
    def test_that_does_not_fit_into_a_stack_is_trained_alone(self, monkeypatch):
        network, memory = Network(long_mlp, LONG), FakeMemory(100, need=101)
        tasks = tasks_of(network, 3)
        install(monkeypatch, memory, network)
        found = rows(vectorised, network, tasks)
        assert torch.equal(found, rows(sequential, network, tasks)) and memory.batches[-1] > 1

    @pytest.mark.parametrize("engine", ["sequential", "vectorised"])
    def test_that_does_not_fit_at_all_is_named_with_need_and_limit(self, engine, monkeypatch):
        stage = Stage(uneven([10] * 16, LONG), long_mlp, LocalSGD(epochs=3), engine)
        worker, memory = stage.backend.worker, FakeMemory(2**20, need=2**21)
        install(monkeypatch, memory, stage.network, worker)

        def train(network, tasks):
            memory.allocate(len(tasks))
            yield

        sequentially_by(monkeypatch, train)
        clients = stage.clients()
        with pytest.raises(
            DeviceMemoryError,
            match=r"client 0 does not fit into the memory of (cpu|cuda:0): training this one client, with 10 samples "
            r"and a model of 0.0 MiB, needs more than the 2.0 MiB that it had reached, and 1.0 MiB were free for this "
            r"process \(CUDA out of memory",
        ):
            clients.train(clients.send(stage.model()[None]), average=torch.ones(1, 16))

    def test_is_tried_again_without_the_samples_of_others(self, monkeypatch):
        stage = Stage(uneven([10] * 3, LONG), long_mlp, LocalSGD(epochs=3), "sequential")
        worker, train, cached = stage.backend.worker, sequential.train, []
        install(monkeypatch, FakeMemory(10**9), stage.network, worker)
        worker.samples.limit = 10**6

        def fails_with_samples(network, tasks):
            cached.append(worker.samples.used)
            if worker.samples.used:
                raise torch.OutOfMemoryError("CUDA out of memory.")
            yield from train(network, tasks)

        sequentially_by(monkeypatch, fails_with_samples)
        clients = stage.clients()
        updates = clients.train(clients.send(stage.model()[None]), average=torch.ones(1, 3))
        size = 10 * (36 * 4 + 8)
        assert updates.valid_M.all() and cached == [size, 0] * 3

    def test_does_not_begin_a_measurement_of_the_need(self):
        """After it, steps would not be recorded on a GPU."""
        memory, attempts = DeviceMemory(torch.device("cpu")), []

        def train(task):
            attempts.append(task)
            if len(attempts) == 1:
                raise torch.OutOfMemoryError("CUDA out of memory.")

        train_alone(memory, tasks_of(Network(long_mlp, LONG), 1)[0], train)
        assert len(attempts) == 2 and not memory.measuring


class TestChunksOfACall:
    """16 clients in 4 chunks of 4; the stacks hold clients of several chunks."""

    def outcome(
        self,
        engine: str,
        memory: FakeMemory | None = None,
        federation=None,
        attack: Attack = HONEST,
        factory=long_mlp,
        **what,
    ) -> tuple[torch.Tensor, torch.Tensor, np.ndarray, torch.Tensor | None]:
        """Means, losses, validity and features of a round."""
        stage = Stage(federation or uneven([10] * 16, LONG), factory, LocalSGD(epochs=3, lr=0.2), engine)
        worker, count = stage.backend.worker, stage.federation.num_clients
        worker.attack = attack
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(span, "_together", lambda network: True)
            if memory is not None:
                install(patch, memory, stage.network, worker)
            clients = stage.clients()
            sent = clients.send(torch.stack([stage.model(0), stage.model(1)]), np.arange(count) % 2)
            average = torch.stack([torch.arange(1.0, count + 1), torch.ones(count)])
            updates = clients.train(sent, how=LocalTraining(proximal=[Proximal(0.1, sent)]), average=average, **what)
            means = updates.averaged(default=torch.zeros(2, stage.network.spec.size))
        return means, torch.tensor(updates.train_loss_M), updates.valid_M, updates.features_MF if what else None

    @pytest.mark.parametrize("engine", ["vectorised", "span"])
    @pytest.mark.parametrize("attack", [HONEST, attack_of("sign_flip", {6})], ids=["honest", "attacked"])
    def test_are_trained_together_and_summed_one_by_one(self, engine, attack):
        expected, memory = self.outcome(engine, attack=attack), FakeMemory(10**9)
        found = self.outcome(engine, memory, attack=attack)
        honest = 15 if attack.clients and engine == "span" else 16
        assert memory.batches[:2] == [4, honest - 4], "the second stack has the clients of all other chunks"
        assert close(found[0], expected[0], 1e-6) and found[0].abs().max() > 0.1
        assert close(found[1], expected[1], 1e-6) and found[2].all()

    @pytest.mark.parametrize("engine", ["vectorised", "span"])
    def test_without_valid_clients_are_passed_over(self, engine):
        """Clients 4 to 7 are a chunk without any, clients 8 to 10 leave one."""
        federation = Spoiled([4, 5, 6, 7, 8, 9, 10], clients=16, samples=6)
        options = {"federation": federation, "factory": linear}
        memory = FakeMemory(10**9)
        found, expected = self.outcome(engine, memory, **options), self.outcome("sequential", **options)
        assert found[2].tolist() == [not 4 <= i <= 10 for i in range(16)] == expected[2].tolist()
        assert close(found[0], expected[0], 1e-5)
        assert memory.batches == [4, 5]

    @pytest.mark.parametrize("clients, stacks", [(3, [3]), (5, [4]), (1, [])])
    def test_of_one_client_are_stacked_with_others(self, clients, stacks):
        """Chunks of one client each; a client that is left is trained by the sequential engine."""
        memory, sizes = FakeMemory(10**9), [10] * clients
        found = self.outcome("vectorised", memory, federation=uneven(sizes, LONG))
        expected = self.outcome("sequential", federation=uneven(sizes, LONG))
        assert memory.batches == stacks and close(found[0], expected[0], 1e-5)

    def test_with_client_states_and_features(self):
        spec = Network(long_mlp, LONG).spec
        what = {"features": spec.all, "client_state": ClientState("head", spec.head)}
        found = self.outcome("vectorised", FakeMemory(10**9), **what)
        assert close(found[3], self.outcome("sequential", **what)[3], 1e-5)

    def test_with_batch_statistics_are_not_mixed(self):
        """Whether batches are equal is a question of a chunk, not of the memory."""
        memory = FakeMemory(10**9)
        self.outcome("vectorised", memory, factory=norm)
        assert memory.batches == [4, 4, 4, 4]


class TestStepsOnTheDevice:
    """On the meta device, tensors have no values to read, and an operation with a tensor elsewhere fails."""

    def test_of_vectorised_use_nothing_of_the_host(self):
        def cnn():
            return nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Dropout(0.5), nn.Linear(64, 3))

        network, start_P = Network(cnn, (1, 6, 6), "meta"), Network(cnn, (1, 6, 6)).new_model(0, 0)
        federation, local = uneven([10, 7], (1, 6, 6)), LocalSGD(epochs=3, batch_size=4, momentum=0.9, weight_decay=0.1)
        tasks = [TrainingTask(i, start_P, *federation.train(i), 6 + i, local, Address(0, 1, 1)) for i in range(2)]
        steps = VmapSteps(network, tasks)
        steps.take_all()
        assert steps.rows_mP.is_meta and steps.loss_m.is_meta and steps.plan.mask_key.is_meta
        steps.begin()
        steps.take(torch.zeros(1, dtype=torch.long, device="meta"))
        steps.plan.weight = torch.ones(steps.plan.weight.shape)
        with pytest.raises(RuntimeError, match="device"):
            steps.take_all()

    def test_of_span_use_nothing_of_the_host(self):
        network, here = Network(long_mlp, LONG, "meta"), Network(long_mlp, LONG)
        anchor = Proximal(0.1, here.new_model(0, 1), None)
        tasks = [with_fields(task, proximal=(anchor,)) for task in tasks_of(here, 3, LocalSGD(epochs=3, momentum=0.9))]
        found = span_together.train_together(network, tasks, [span._terms(network, task) for task in tasks])
        assert all(tensor.is_meta for tensor in (found.x_BD, found.c_HB, found.a_mJ, found.others_mQ, found.loss_m))

    def test_of_sequential_find_their_batches_there(self):
        """The indices of all batches are one copy, and those of the host."""
        (task,) = tasks_of(Network(long_mlp, LONG), 1, LocalSGD(epochs=2, batch_size=4))
        expected = [batch.tolist() for batch in task.batches()]
        there = list(task.batches_on(torch.device("meta")))
        assert all(batch.is_meta for batch in there) and [len(batch) for batch in there] == list(map(len, expected))
        with pytest.MonkeyPatch.context() as patch:
            copies, to = [], torch.Tensor.to
            patch.setattr(torch.Tensor, "to", lambda tensor, device: (copies.append(device), to(tensor, "cpu"))[1])
            there = list(task.batches_on(torch.device("meta")))
        assert [batch.tolist() for batch in there] == expected and len(copies) == 1
        (whole,) = tasks_of(Network(long_mlp, LONG), 1)
        assert list(whole.batches_on(torch.device("meta"))) == [None] * 3


class TestSamplesOfAPass:
    """Forward passes over many samples are made in smaller parts if the memory is too small for them."""

    @staticmethod
    def small(network: Network, most: int) -> list[int]:
        """Makes passes of more than `most` samples fail; returns the list of the sizes that were tried."""
        sizes, forward = [], network.module.forward

        def limited(x):
            sizes.append(len(x))
            if len(x) > most:
                raise torch.OutOfMemoryError("CUDA out of memory.")
            return forward(x)

        network.module.forward = limited
        return sizes

    @pytest.mark.cpu
    def test_in_a_test_are_halved_and_remembered(self):
        network = Network(long_mlp, LONG)
        network.memory.caches.append(lambda: dropped.append(True))
        x, dropped = torch.rand(300, *LONG), []
        expected, sizes = network.logits(x), self.small(network, 100)
        assert close(network.logits(x), expected, 1e-6) and len(dropped) == 2
        assert sizes == [256, 128, 64, 64, 64, 64, 44]
        sizes.clear()
        network.logits(x)
        assert sizes == [64, 64, 64, 64, 44] and len(dropped) == 2

    def test_in_a_gradient_are_halved(self):
        network, federation = Network(long_mlp, LONG), uneven([50], LONG)
        view = ClientView(0, *federation.train(0), network, Address(0, 1, 1), LocalSGD(), lambda task: None)
        start_P = network.new_model(0, 0)
        expected, sizes = view.gradient(start_P), self.small(network, 20)
        assert close(view.gradient(start_P, batch=40), expected, 1e-6)
        assert sizes == [40, 20, 20, 10]

    def test_of_which_one_is_too_much_raise(self):
        network = Network(long_mlp, LONG)
        self.small(network, 0)
        with pytest.raises(torch.OutOfMemoryError):
            network.logits(torch.rand(3, *LONG))


def test_a_gpu_has_its_number_like_the_tensors_on_it(monkeypatch):
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    assert [str(device_of(name)) for name in ("cpu", "cuda", "cuda:0")] == ["cpu", "cuda:1", "cuda:0"]
