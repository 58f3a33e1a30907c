"""The compiled engine. Its program is carried out operation by operation (`conftest.py`); a slow test compiles it."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from federations import uneven
from torch import nn
from training_tasks import (
    FLAT,
    IMAGE,
    Replayed,
    assert_same,
    mlp,
    rows,
    tasks_of,
    wide_cnn,
    with_batch_norm,
    with_dropout,
)

from cfl_ray import Experiment
from cfl_ray.core.client_program import ClientProgram
from cfl_ray.core.local_sgd import LocalSGD
from cfl_ray.core.optimizers import resolve_optimizer
from cfl_ray.core.params import Columns
from cfl_ray.core.schedules import resolve_schedule
from cfl_ray.core.tasks import TASKS
from cfl_ray.engine import compiled
from cfl_ray.engine.choice import Compiling, EngineChoice, choice_of, facts_of, median_task, with_last_batch
from cfl_ray.engine.engines import Division
from cfl_ray.engine.failure import may_be_machine
from cfl_ray.errors import ConfigError, DataError
from cfl_ray.nn.network import Network

pytestmark = pytest.mark.cpu
SGD = LocalSGD(batch_size=4, epochs=2, lr=0.3)
SIZES = (9, 12, 4, 3)  # the last batch of the first has one sample; the last client fills no batch


class Mixer(nn.Module):
    """Mixes the rows of an image, then its columns."""

    def __init__(self):
        super().__init__()
        self.rows, self.columns, self.norm = nn.Linear(6, 6), nn.Linear(6, 6), nn.LayerNorm(6)
        self.register_buffer("scale", torch.full((6,), 0.5))

    def forward(self, x_B):
        x_B = x_B[:, 0] * self.scale
        x_B = x_B + nn.functional.gelu(self.rows(x_B.mT)).mT
        return self.norm(x_B + nn.functional.gelu(self.columns(x_B))).mean(1)


class Attention(nn.Module):
    """An encoder layer, with a mask that is no buffer and, with dropout, draws of attention."""

    def __init__(self, dropout=0.0):
        super().__init__()
        self.layer, self.fc = nn.TransformerEncoderLayer(6, 2, 8, dropout, batch_first=True), nn.Linear(6, 3)
        self.causal = nn.Transformer.generate_square_subsequent_mask(6)

    def forward(self, x_B):
        return self.fc(self.layer(x_B[:, 0], src_mask=self.causal).mean(1))


class LoRA(nn.Module):
    """A frozen layer with a trained change of rank 2."""

    def __init__(self):
        super().__init__()
        self.body, self.down, self.up, self.fc = nn.Linear(6, 8), nn.Linear(6, 2), nn.Linear(2, 8), nn.Linear(8, 3)
        self.body.requires_grad_(False)

    def forward(self, x_B):
        return self.fc(torch.tanh(self.body(x_B) + self.up(self.down(x_B))))


class Tokens(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.fc = nn.Embedding(5, 6), nn.Linear(6, 5)

    def forward(self, x_B):
        return self.fc(torch.cumsum(self.embed(x_B), 1))


@pytest.mark.parametrize(
    "factory, shape",
    [
        (mlp, FLAT),
        (with_dropout, FLAT),
        (LoRA, FLAT),
        (Mixer, IMAGE),
        (Attention, IMAGE),
        (lambda: Attention(0.3), IMAGE),
    ],
    ids=["mlp", "dropout", "frozen body", "mixer", "attention", "attention with dropout"],
)
def test_it_equals_sequential_for_each_architecture(factory, shape):
    network = Network(factory, shape)
    assert_same(network, tasks_of(network, SIZES, SGD), compiled)


@pytest.mark.parametrize(
    "local",
    [
        LocalSGD(batch_size=4, epochs=2, momentum=0.9, weight_decay=0.01, persist=True),
        LocalSGD(batch_size=4, epochs=2, clip_norm=0.1, drop_last=True),
        LocalSGD(batch_size=4, epochs=2, step_schedule=resolve_schedule("local.step_schedule", "cosine")),
        LocalSGD(batch_size=4, epochs=2, lr=0.05),
    ],
    ids=["momentum", "clipped", "schedule", "adamw"],
)
def test_it_equals_sequential_for_each_kind_of_step(local, request):
    if request.node.callspec.id == "adamw":  # not where tests are collected: PyTorch's optimisers import its compiler
        local = replace(local, optimizer=resolve_optimizer("adamw", {"weight_decay": 0.1}))
    network = Network(with_dropout, FLAT)
    assert_same(network, tasks_of(network, SIZES, local, [(0.1, None), (0.05, None, 0.5, 2)]), compiled)


@pytest.mark.parametrize("few", [0, 10**9], ids=["one step", "five steps"])
def test_it_equals_sequential_for_steps_with_all_terms_of_sgd(few, monkeypatch):
    monkeypatch.setattr(compiled, "_FEW_PRODUCTS", few)
    network = Network(with_dropout, FLAT)
    head = Columns(((network.spec.ends[3], network.spec.trained),))
    local = replace(SGD, momentum=0.9, weight_decay=0.01, persist=True)
    local = replace(local, step_schedule=resolve_schedule("local.step_schedule", "cosine"))
    kept = torch.rand(network.spec.trained)
    assert_same(network, tasks_of(network, SIZES, local, [(0.1, None), (0.05, head)], velocity=kept), compiled)


def test_short_steps_are_taken_five_at_a_time(monkeypatch):
    network, runs = Network(mlp, FLAT), []
    monkeypatch.setattr(Replayed, "run", lambda self, inputs: runs.append(len(inputs[1])) or self.recording.run(inputs))
    rows(compiled, network, tasks_of(network, [14], SGD))
    assert runs == [5 * 4, 4, 4, 4], "samples of the programs in eight steps"
    monkeypatch.setattr(
        compiled, "_FEW_PRODUCTS", 2 * 4 * 6
    )  # less than those of the first layer, forward and backward
    rows(compiled, network, tasks_of(network, [14], SGD))
    assert runs[4:] == [4] * 8


@pytest.mark.parametrize(
    "factory, shape, local, sizes",
    [
        (Mixer, IMAGE, SGD, [4, 4, 2] * 2 + [4] * 6 + [4] * 2 + [4] * 2),
        (Mixer, IMAGE, replace(SGD, clip_norm=0.1), [4, 4, 2] * 2 + [4] * 6 + [4] * 2 + [4] * 2),
        (lambda: Attention(0.3), IMAGE, SGD, [4, 4] * 2 + [4] * 6 + [4] * 2),
    ],
    ids=["step", "gradient", "own draws"],
)
def test_last_batches_that_fit_have_a_second_program(factory, shape, local, sizes, monkeypatch):
    monkeypatch.setattr(compiled, "_FEW_PRODUCTS", 0)
    network, runs = Network(factory, shape), []
    monkeypatch.setattr(Replayed, "run", lambda self, inputs: runs.append(len(inputs[1])) or self.recording.run(inputs))
    assert_same(network, tasks_of(network, SIZES, local, last_batch=2), compiled)
    assert runs == sizes, "a last batch of one sample is filled to two, one of three to four, or none of them is"


def test_last_batches_without_a_recording_are_filled(monkeypatch):
    """For fewer samples the compiler may gain nothing."""
    monkeypatch.setattr(compiled, "_FEW_PRODUCTS", 0)
    recorded = compiled._recorded_of
    monkeypatch.setattr(compiled, "_recorded_of", lambda *of: "no gain" if of[3] == 2 else recorded(*of))
    network = Network(Mixer, IMAGE)
    tasks = tasks_of(network, SIZES, SGD, last_batch=2)
    assert len(compiled.recordings_of(network, tasks[0])) == 1
    assert_same(network, tasks, compiled)


def test_large_matrices_of_attention_are_left_to_pytorchs_kernel(monkeypatch):
    def kernels(limit):
        monkeypatch.setattr(compiled, "_ATTENDED", limit)
        network = Network(Attention, IMAGE)
        (recorded,) = compiled.recordings_of(network, *tasks_of(network, [4], SGD))
        return [call.name for call in recorded.recording.operations if "flash_attention" in call.name]

    matrices = 4 * 2 * 6 * 6  # samples, heads, rows of an image
    assert len(kernels(matrices)) == 0 and len(kernels(matrices - 1)) == 2, "forward and backward"


class Extrapolated(ClientProgram):
    """A gradient of the second batch, after a step on the first, and the losses of two steps."""

    batches_per_step = 2

    def step(self, gradient, w, held, number):
        return gradient(w - 0.1 * gradient(w, 0), 1) + gradient(w, 0)


def test_it_computes_the_steps_of_a_program():
    network = Network(lambda: Attention(0.3), IMAGE)
    assert_same(network, tasks_of(network, SIZES, SGD, program=Extrapolated(trace=2)), compiled)


def test_it_weights_samples_as_sequential_does():
    network = Network(mlp, FLAT)
    tasks = [replace(t, held=replace(t.held, weight_n=torch.rand(len(t.y)))) for t in tasks_of(network, SIZES, SGD)]
    assert_same(network, tasks, compiled)


def test_it_trains_tokens():
    network = Network(Tokens, (7,), dtype=torch.int64, task=TASKS.builtin["next_token"])
    draw = torch.Generator().manual_seed(0)
    tasks = [
        replace(task, x=torch.randint(5, (len(task.y), 7), generator=draw), y=torch.randint(5, (len(task.y), 7)))
        for task in tasks_of(Network(mlp, FLAT), SIZES, SGD)
    ]
    tasks = [replace(task, start_P=network.new_model(1, task.client)) for task in tasks]
    assert_same(network, tasks, compiled)


class Reads(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(6, 3)

    def forward(self, x_B):
        return self.fc(x_B) if x_B.sum() > 1e9 else self.fc(-x_B)


def masked(values_of):
    """A layer after inputs times values of them, which no operation of PyTorch computes."""

    class Masked(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(6, 3)

        def forward(self, x_B):
            return self.fc(x_B * values_of(x_B.detach()))

    return Masked


class LayerDrop(nn.Module):
    """Leaves out a layer at random."""

    def __init__(self):
        super().__init__()
        self.body, self.fc = nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x_B):
        return self.fc(x_B if torch.rand(()) < 0.5 else self.body(x_B))


def tries(x_B):
    try:
        return torch.tensor(x_B.tolist())
    except Exception:  # the error of the recorder, too
        return torch.ones(6)


class ByFrequency(nn.Module):
    """Gradients of embeddings that samples which fill a batch would change."""

    def __init__(self):
        super().__init__()
        self.embed, self.fc = nn.Embedding(5, 6, scale_grad_by_freq=True), nn.Linear(6, 3)

    def forward(self, x_B):
        return self.fc(self.embed(x_B.long().clamp(0, 4)).mean(1))


class Remembers(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc, self.seen = nn.Linear(6, 3), torch.zeros(6)

    def forward(self, x_B):
        self.seen.add_(1)
        return self.fc(x_B + 0 * self.seen)


@pytest.mark.parametrize(
    "factory, shape, local, reason",
    [
        (wide_cnn, IMAGE, SGD, "99% of its multiplications are convolutions"),
        (with_batch_norm, FLAT, SGD, "batch statistics would include the samples that fill a batch"),
        (Reads, FLAT, SGD, "its passes read values"),
        (masked(lambda x_B: torch.from_numpy(x_B.numpy())), FLAT, SGD, "its passes read values (numpy)"),
        (masked(lambda x_B: torch.tensor(np.asarray(x_B))), FLAT, SGD, "its passes read values (__array__)"),
        (masked(tries), FLAT, SGD, "its passes read values (tolist)"),
        (LayerDrop, FLAT, SGD, "its passes read values (aten::_local_scalar_dense)"),
        (ByFrequency, FLAT, SGD, "batch statistics would include the samples that fill a batch"),
        (Remembers, FLAT, SGD, "its passes change tensors that they are given"),
        (mlp, FLAT, LocalSGD(), "a batch has all samples of a client"),
        (mlp, FLAT, LocalSGD(batch_size=40), "a client has fewer samples than half of a batch of 40"),
    ],
)
def test_it_says_what_it_cannot_train(factory, shape, local, reason):
    network = Network(factory, shape)
    assert reason in compiled.why_not(network, tasks_of(network, [9], local))


def test_recurrent_layers_are_left_to_pytorch():
    network = Network(lambda: nn.Sequential(nn.Flatten(1), nn.Unflatten(1, (6, 1)), Last()), FLAT)
    assert "recurrent" in compiled.why_not(network, tasks_of(network, [9], SGD))


class Last(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(1, 3, batch_first=True)

    def forward(self, x_B):
        return self.lstm(x_B)[0][:, -1]


def test_a_machine_without_the_program_trains_nothing(monkeypatch):
    monkeypatch.setattr(compiled, "package_of", lambda recording: "PyTorch's compiler failed")
    network = Network(mlp, FLAT)
    with pytest.raises(DataError, match="compiler failed: engine compiled has no program on this machine") as caught:
        rows(compiled, network, tasks_of(network, SIZES, SGD))
    assert may_be_machine(caught.value), "on Ray, the host is left out"


# ---- the choice


def _chosen(compiling, factory=Attention, shape=IMAGE, sizes=(40, 40)):
    network, federation = Network(factory, shape), uneven(sizes, shape)
    return choice_of(network, federation, LocalSGD(batch_size=4), Division(2), compiling)


def test_auto_compiles_if_manual_cannot_train_the_network_and_the_time_is_saved():
    never = _chosen(Compiling("auto", 10))
    assert never.engine != "compiled" and "compiled: compiling takes 9 s of CPU or more, and saves 0." in never.reason
    assert _chosen(Compiling("auto", 10**6)).engine == "compiled"
    assert _chosen(Compiling("always", 1)).engine == "compiled"
    assert _chosen(Compiling("never", 10**6)).engine != "compiled"


def test_a_network_that_fails_to_compile_has_another_engine(monkeypatch):
    monkeypatch.setattr(compiled, "package_of", lambda recording: "PyTorch's compiler failed")
    other = _chosen(Compiling("always"))
    assert other.engine != "compiled" and "not compiled: PyTorch's compiler failed: engine" in other.reason
    assert _chosen(Compiling("always", tried=False)).engine == "compiled", "check compiles nothing"
    monkeypatch.setattr("cfl_ray.engine.compiled.why_no_package", lambda recording: "this machine has no compiler")
    assert "not compiled: this machine has no compiler" in _chosen(Compiling("always", tried=False)).reason


def test_auto_keeps_the_engine_of_networks_that_manual_trains():
    kept = _chosen(Compiling("auto", 10**9), mlp, FLAT)
    assert kept.engine != "compiled" and "it trains only networks that manual cannot" in kept.reason


def test_the_break_even_is_where_the_saved_time_equals_the_time_of_the_compiler():
    network, federation = Network(Attention, IMAGE), uneven([40, 40], IMAGE)
    facts = facts_of(network, federation, LocalSGD(batch_size=4), Division(2), Compiling("always"))
    costs = [compiled.rule.sequential(facts, 1), compiled.rule.vectorised(facts, 2), compiled.rule.compiled(facts, 1)]
    steps = 10  # of a client: 40 samples in batches of 4
    task = median_task(network, federation, LocalSGD(batch_size=4))
    one, five = compiled.operations_of(network, task)
    seconds = 9 + 0.018 * one + 9 + 0.018 * five
    least = int(seconds * 1e6 / steps / (min(costs[:2]) - costs[2]))
    less, more = _chosen(Compiling("auto", least)), _chosen(Compiling("auto", least + 1))
    assert less.engine != "compiled" and more.engine == "compiled" and five > 4 * one
    times = f"compiling takes about {seconds:.0f} s of CPU, once for each machine, and saves {seconds:.0f} s in this"
    assert f"not compiled: {times}" in less.reason and more.reason.endswith(f"; {times} experiment")


def test_a_second_program_is_made_if_the_experiment_saves_its_time(monkeypatch):
    monkeypatch.setattr(compiled, "_FEW_PRODUCTS", 0)
    network, federation = Network(Mixer, IMAGE), uneven([41, 42, 42, 43, 43, 43], IMAGE)
    local = LocalSGD(batch_size=4, epochs=3)
    task, configured = median_task(network, federation, local), EngineChoice("compiled", "compiled: as configured")
    (operations,) = compiled.operations_of(network, task)
    # two samples of a full batch are not computed for clients with last batches of one or two; one with three is saved
    # for all clients, which is as much, and the first is taken
    saved = 3 * (4 - 2) * 3 / 6 * compiled.products_by_sample(network, task) * 3e-5 / 1e6
    seconds = 9 + 0.018 * operations
    clients = int(seconds / saved)

    def choice(*compiling):
        return with_last_batch(configured, network, federation, local, Compiling(*compiling))

    less, more = choice("auto", clients), choice("auto", clients + 1)
    assert (less.last_batch, more.last_batch, choice("always", 1).last_batch) == (0, 2, 2)
    assert more.reason.endswith(f"last batches of at most 2 takes {seconds:.0f} s and saves {seconds:.0f} s")
    assert less.reason.endswith(f"last batches of at most 2 would take {seconds:.0f} s and save {seconds:.0f} s")
    equal = uneven([40, 44], IMAGE)
    assert with_last_batch(configured, network, equal, local, Compiling("always", 10**6)) == configured
    assert _chosen(Compiling("always"), sizes=[42, 42]).last_batch == 2


def test_never_to_compile_and_the_compiled_engine_exclude_each_other():
    with pytest.raises(ConfigError, match="engine: compiled needs a compiler"):
        Experiment.model_validate({"runtime": {"engine": "compiled", "compile": "never"}})


# ---- compiled

_SCRIPT = """
import sys
import torch
from training_tasks import FLAT, assert_same, rows, tasks_of, with_dropout
from cfl_ray.core.local_sgd import LocalSGD
from cfl_ray.engine import compiled, sequential
from cfl_ray.nn.network import Network
network = Network(with_dropout, FLAT)
tasks = tasks_of(network, [9, 12, 4, 3], LocalSGD(batch_size=4, epochs=2, lr=0.3))
trained = rows(compiled, network, tasks)
print("compiler" if any(name in sys.modules for name in ("torch._dynamo", "torch._inductor")) else "no compiler")
assert compiled.why_not(network, tasks) is None, "it was trained sequentially"
assert_same(network, tasks, compiled)
torch.save(trained, sys.argv[1])
"""


@pytest.mark.slow
def test_a_program_is_compiled_once_and_later_processes_load_it_without_the_compiler(tmp_path, monkeypatch):
    monkeypatch.setenv("CFL_RAY_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PYTHONPATH", f"{Path(__file__).parents[1]}:{Path(__file__).parents[2]}")
    trained, made = [], []
    for number in range(2):
        file = tmp_path / f"{number}.pt"
        done = subprocess.run([sys.executable, "-c", _SCRIPT, file], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        assert done.stdout.split("\n")[0] == "no compiler"
        trained.append(torch.load(file))
        made.append({path.name: path.stat().st_mtime_ns for path in (tmp_path / "cache/compiled").glob("*.so")})
    assert len(made[0]) == 2 and made[0] == made[1], "of one step, and of five"
    suffixes = sorted(path.suffix for path in (tmp_path / "cache/compiled").iterdir())
    assert suffixes == [".lock", ".lock", ".sha256", ".sha256", ".so", ".so"]
    assert torch.equal(*trained), "the same bits from run to run"
