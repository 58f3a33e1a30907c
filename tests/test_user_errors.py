"""Exceptions of any class in any part of a user: one line names function, file and line; rounds are kept."""

import os
import re

import numpy as np
import pytest
from small_runs import PLANTED, Reports, merged

from cfl_ray import Experiment, federation_from_arrays, resume, run, simulate
from cfl_ray.engine.failure import naming_client
from cfl_ray.errors import Interrupted, RunError, UserError, class_and_text, counted, notes_of
from cfl_ray.plugins.calling import call_plugin
from cfl_ray.tracking import delivery, read_records

PARTS = """
import os
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

from cfl_ray import ClientProgram, LocalTraining, Method, State


class Unprintable(Exception):
    def __str__(self):
        raise RuntimeError("of __str__")


def fail():
    match os.environ.get("FAILS"):
        case "unprintable":
            raise Unprintable(lambda: 0)
        case "lines":
            raise TypeError("first line\\n  second line")
        case "torch":
            torch.zeros(3) @ torch.zeros(4)
        case "interrupt":
            raise KeyboardInterrupt


def metric(outputs, y):
    fail()
    return outputs.mean()


class Optimizer(torch.optim.SGD):
    def step(self, closure=None):
        fail()
        return super().step()


def loss(outputs, y):
    fail()
    return nn.functional.cross_entropy(outputs, y, reduction="none")


def schedule(t, total):
    fail()
    return 1.0


class Rule:
    def combine(self, values_nF, weight_n):
        fail()
        return values_nF.mean(0)


def availability(clients, round, draw):
    fail()
    return np.ones(len(clients), bool)


def staleness(tau):
    fail()
    return np.ones(len(tau))


def attack(value, sent, draw):
    fail()
    return value


class Server:
    def __call__(self, delta_P, moments):
        fail()
        return delta_P, ()


class Net(nn.Module):
    def __init__(self, shape, classes):
        super().__init__()
        self.layer = nn.Linear(shape[0], classes)

    def forward(self, x):
        fail()
        return self.layer(x)


def shift(x, y, group, draw):
    fail()
    return x, y


def partition(labels, clients, draw):
    fail()
    return np.array_split(np.arange(len(labels)), clients)


def failing_source():
    fail()
    return source()


def source():
    return {"x": np.ones((80, 6), np.float32), "y": np.arange(80) % 2}


@dataclass(frozen=True)
class InRound(Method[State], name="in_round"):
    def init(self, start):
        return start.one_model()

    def round(self, state, clients, rng):
        fail()
        return self.averaged(state, clients)

    def averaged(self, state, clients):
        updates = clients.train(clients.send(state.models_KP), average=clients.weights())
        return state.advance(models_KP=updates.averaged(default=state.models_KP))


def mean(client, row_P):
    fail()
    return client.x.mean(0)


@dataclass(frozen=True)
class InDescription(InRound, name="in_description"):
    def round(self, state, clients, rng):
        clients.describe(mean, clients.send(state.models_KP))
        return self.averaged(state, clients)


@dataclass(frozen=True)
class InServe(InRound, name="in_serve"):
    def round(self, state, clients, rng):
        return self.averaged(state, clients)

    def serve(self, state, clients):
        fail()
        return super().serve(state, clients)


@dataclass(frozen=True)
class Program(ClientProgram):
    hook: str

    def fails_in(self, hook):
        if hook == self.hook:
            fail()

    def keeps(self, spec):
        self.fails_in("keeps")
        return {"kept": torch.zeros(1)}

    def uploads(self, spec):
        self.fails_in("uploads")
        return {"kept": 1}

    def reports(self, spec):
        self.fails_in("reports")
        return {"kept": 1}

    def begin(self, client, start_P, held):
        self.fails_in("begin")
        return start_P

    def step(self, gradient, w, held, number):
        self.fails_in("step")
        return gradient(w, 0)

    def finish(self, client, start_P, row_P, held):
        self.fails_in("finish")
        held["kept"] = held["kept"] + 1


class OwnLoss(Program):
    def loss(self, batch, held):
        self.fails_in("loss")
        return batch.loss


@dataclass(frozen=True)
class InProgram(InRound, name="in_program"):
    hook: str = "begin"

    def round(self, state, clients, rng):
        program = (OwnLoss if self.hook == "loss" else Program)(self.hook)
        updates = clients.train(
            clients.send(state.models_KP), how=LocalTraining(program=program), average=clients.weights()
        )
        return state.advance(models_KP=updates.averaged(default=state.models_KP))


@dataclass(frozen=True)
class InServer(InRound, name="in_server"):
    how: str = "lines"
    driver: int = 0

    def round(self, state, clients, rng):
        if os.getpid() != self.driver:
            os.environ["FAILS"] = self.how
            fail()
        return self.averaged(state, clients)


class Tracker:
    def open(self, run_dir, info, after):
        self.fails_in("open")

    def log(self, record):
        self.fails_in("log")

    def close(self, end):
        self.fails_in("close")

    def __init__(self, method="log"):
        self.method = method

    def fails_in(self, method):
        if method == self.method:
            fail()
"""

SGD = {"epochs": 1, "batch_size": 20}
LATE = {  # parts that are called in every round, and the settings with which a run has them
    "metric": {"evaluation": {"metrics": ["parts.py:metric"]}},
    "optimizer": {"local": SGD | {"lr": 0.1, "optimizer": "parts.py:Optimizer"}},
    "loss": {"task": {"loss": "parts.py:loss", "targets": "class"}},
    "schedule": {"local": SGD | {"lr": 0.1, "schedule": "parts.py:schedule"}},
    "rule": {"methods": [{"fedavg": {"aggregation": "parts.py:Rule"}}]},
    "availability": {"cohort": {"fraction": 1.0, "availability": {"kind": "parts.py:availability"}}},
    "attack": {"attack": {"kind": "parts.py:attack", "clients": [1]}},
    "server": {"methods": [{"fedavg": {"server_optimizer": "parts.py:Server"}}]},
    "net": {"model": {"name": "parts.py:Net", "options": {}}},
    **{name: {"methods": [f"parts.py:{name}"]} for name in ("InRound", "InDescription")},
    "InServe": {"methods": ["parts.py:InServe"]},
    **{
        f"program, {hook}": {"methods": [{"parts.py:InProgram": {"hook": hook}}]}
        for hook in ("begin", "step", "loss", "finish", "keeps", "uploads", "reports")
    },
    "staleness": {
        "clock": {"kind": "lognormal"},
        "asynchronous": {"buffer": 2, "concurrency": 4, "staleness": {"kind": "parts.py:staleness"}},
    },
}
OF_CLIENTS = {"metric", "optimizer", "loss", "net", "InDescription"}
OF_CLIENTS |= {f"program, {hook}" for hook in ("begin", "step", "loss", "finish")}
FAILS = {"unprintable": "Unprintable: (with", "lines": "TypeError: first line second line", "torch": "RuntimeError: "}


@pytest.fixture
def parts(tmp_path, monkeypatch):
    (tmp_path / "parts.py").write_text(PARTS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FAILS", "")
    monkeypatch.setattr(delivery, "PAUSES_AT_END_SECONDS", (0.01,) * len(delivery.PAUSES_AT_END_SECONDS))
    return tmp_path


def experiment(changes, engine="sequential"):
    settings = {"rounds": 4, "methods": ["fedavg"], "runtime": {"engine": engine, "checkpoint_every": 1}}
    return Experiment(**merged(PLANTED, settings | changes))


class Failing(Reports):
    """From the end of a round on, the user's parts fail."""

    def __init__(self, how, after=2):
        super().__init__()
        self.how, self.after, self.notes = how, after, []

    def warn(self, text):
        self.notes.append(text)

    def round(self, label, report):
        super().round(label, report)
        if report.round == self.after:
            os.environ["FAILS"] = self.how


def flat(shape=(6,)):
    draw = np.random.default_rng(0)
    x = draw.normal(size=(80, *shape)).astype(np.float32)
    return federation_from_arrays(x, (x[:, 0] > 0).astype(int), np.arange(80) // 20)


def check_text(text, how, of_client=False):
    assert FAILS[how] in text
    assert "\n" not in text and text.isprintable()
    assert re.search(r"parts\.py, line \d+|\(line \d+\)", text) and "parts.py" in text
    assert not of_client or re.search(r"client \d+ failed while", text)


@pytest.mark.parametrize("number, part", list(enumerate(LATE)))
def test_a_run_ends_with_a_sentence_and_keeps_its_rounds(parts, number, part):
    how, data = [*FAILS][number % len(FAILS)], {"data": flat()} if part == "net" else {}
    of_run = experiment(LATE[part] | data, "auto" if number % 2 else "sequential")
    with pytest.raises(UserError) as found:
        simulate(of_run, run_dir="run", watcher=Failing(how))
    check_text(str(found.value), how, part in OF_CLIENTS)
    assert re.search(r"go on with: .*resume", f"{found.value}{notes_of(found.value)}")
    (folder,) = (file.parent for file in parts.glob("run/*/metrics.jsonl"))
    assert [record.round for record in read_records(folder)][:2] == [1, 2]
    os.environ["FAILS"] = ""
    again = resume("run", on_ray=False, **({"experiment": of_run} if data else {}))
    assert [record.round for record in next(iter(again.methods.values())).records] == [1, 2, 3, 4]


@pytest.mark.parametrize("engine", ["sequential", "manual", "vectorised"])
@pytest.mark.parametrize("part", ["loss", "net"])
def test_every_engine_names_client_function_file_and_line(parts, part, engine):
    of_run = experiment(LATE[part] | ({"data": flat()} if part == "net" else {}), engine)
    with pytest.raises(UserError) as found:
        simulate(of_run, watcher=Failing("lines"))
    check_text(str(found.value), "lines")


TABLE = {"source": "parts.py:source", "partition": {"kind": "iid", "clients": 4}, "test": {"view": "holdout"}}
AT_ONCE = {
    "shift": TABLE | {"shift": {"kind": "parts.py:shift", "groups": 2}},
    "partition": TABLE | {"partition": {"kind": "parts.py:partition", "clients": 4}},
    "source": TABLE | {"source": "parts.py:failing_source"},
}


@pytest.mark.parametrize("how", FAILS)
@pytest.mark.parametrize("part", [*AT_ONCE, *LATE])
def test_a_part_that_always_fails_is_named_before_the_run(parts, part, how, monkeypatch):
    changes = {"data": AT_ONCE[part]} if part in AT_ONCE else LATE[part]
    of_run = experiment(changes | ({"data": flat()} if part == "net" else {}))
    monkeypatch.setenv("FAILS", how)
    with pytest.raises(UserError) as found:
        simulate(of_run, run_dir="run")
    check_text(str(found.value), how)


@pytest.mark.parametrize("method, how", zip(["open", "log", "close"], FAILS, strict=True))
def test_a_tracker_that_fails_is_named_in_one_line_and_the_run_goes_on(parts, method, how):
    watcher = Failing(how, after=1)
    trackers = {"enabled": True, "trackers": [{"parts.py:Tracker": {"method": method}}]}
    os.environ["FAILS"] = how if method == "open" else ""
    result = simulate(experiment({"tracking": trackers}), run_dir="run", watcher=watcher)
    assert [record.round for record in result["fedavg"].records] == [1, 2, 3, 4]
    lines = [line for line in watcher.notes if FAILS[how] in line]
    assert lines and all("\n" not in line and line.isprintable() for line in lines)
    assert all("Tracker" in line and re.search(r"parts\.py.*line \d+", line) for line in lines)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["unprintable", "lines"])
def test_an_exception_in_a_round_on_ray_ends_the_run_with_a_sentence(parts, how):
    """The exception crosses processes; rounds in this one, before the run, are fine."""
    of_run = experiment({"methods": [{"parts.py:InServer": {"how": how, "driver": os.getpid()}}]})
    with pytest.raises(UserError) as found:
        run(of_run, "run")
    check_text(str(found.value), how)
    assert "round" in str(found.value) and not str(found.value).startswith("ray")


def test_an_interrupt_inside_a_part_is_one(parts):
    with pytest.raises(Interrupted, match="^stopped"):
        simulate(experiment(LATE["metric"]), run_dir="run", watcher=Failing("interrupt"))


# ---- texts of errors


class Unprintable(Exception):
    def __str__(self):
        raise RuntimeError("of __str__")


ERRORS = {
    "value": (ValueError("bad value"), "ValueError: bad value"),
    "lines": (TypeError("first\n   second\r\n"), "TypeError: first second"),
    "key": (KeyError("missing"), "KeyError: 'missing'"),
    "empty": (MemoryError(), "MemoryError"),
    "stop": (StopIteration(3), "StopIteration: 3"),
    "no text": (Unprintable(), "Unprintable: (without a readable text)"),
    "no pickle": (ValueError(lambda: 0), "ValueError: <function"),
    "surrogate": (ValueError("\udce4"), r"ValueError: \udce4"),
    "long": (ValueError("x" * 5000), f"ValueError: {'x' * 1000} ..."),
    "group": (ExceptionGroup("many", [ValueError("a"), KeyError("b")]), "ExceptionGroup: many (2 sub-exceptions)"),
}


@pytest.mark.parametrize("name", ERRORS)
def test_any_error_has_one_line(name):
    error, text = ERRORS[name]
    assert class_and_text(error).startswith(text)

    def part():
        raise error

    with pytest.raises(RunError) as found:
        call_plugin("part", part)
    assert text in str(found.value) and re.search(r"part \(.*test_user_errors.py, line \d+\)", str(found.value))
    with pytest.raises(RunError) as found, naming_client(3, "training"):
        part()
    assert f"client 3 failed while training: {text}" in str(found.value)
    assert re.search(r"\(part, .*test_user_errors.py, line \d+\)", str(found.value))


def test_a_number_has_its_noun_in_the_singular_or_plural():
    assert [counted(number, "round") for number in (0, 1, 2)] == ["0 rounds", "1 round", "2 rounds"]
    assert [counted(number, "class", "classes") for number in (1, 10)] == ["1 class", "10 classes"]
