"""Parts of the round loop: their hooks, their state in checkpoints, and what the loop knows of them."""

import json
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from small_runs import PLANTED, figures, interrupt_once, merged

from cfl_ray import Experiment, resume, simulate
from cfl_ray.checkpoint.manifest import _digest
from cfl_ray.errors import Interrupted, RunError
from cfl_ray.methods.fedavg import FedAvg
from cfl_ray.runtime import round_loop
from cfl_ray.runtime.parts.loop_part import LoopPart, named, taken
from cfl_ray.runtime.parts.of_experiment import parts_of


class Thrifty(LoopPart):
    """Trains only the clients with even ids, in all rounds with a halved rate, and ends the run before its last round.

    The number of trained clients so far is its state.
    """

    def __init__(self):
        self.trained, self.left = 0, []

    def last_round(self, saved, rounds):
        return rounds - 1

    def leave(self, ids):
        self.left += ids.tolist()

    def cohort(self, stats, state, draw):
        cohort = draw()
        return replace(cohort, ids_M=cohort.ids_M[cohort.ids_M % 2 == 0])

    def clients(self, clients, cohort):
        return clients if cohort is None else replace(clients, local=replace(clients.local, lr=clients.local.lr / 2))

    def end_round(self, stats, cohort, before, after):
        self.trained += len(cohort.ids_M)
        stats.diagnostics.add("trained_so_far", self.trained, (), cohort.ids_M)

    def to_checkpoint(self):
        return named("server.thrifty.", {"left": torch.tensor(self.left, dtype=torch.int64)}), {"thrifty": self.trained}

    def restore(self, tensors, values, state):
        self.trained, self.left = int(values.pop("thrifty")), taken("server.thrifty.", tensors)["left"].tolist()


@pytest.fixture
def with_part(monkeypatch):
    """The parts of each loop that is made from now on, which has one of the class `Thrifty` too."""
    made = []

    def parts(*arguments):
        made.append([*parts_of(*arguments), Thrifty()])
        return made[-1]

    monkeypatch.setattr(round_loop, "parts_of", parts)
    return made


def experiment(**changes) -> Experiment:
    common = {"rounds": 4, "methods": ["fedavg"], "schedule": [{"round": 2, "leave": [0]}]}
    return Experiment(**merged(PLANTED, common | changes))


def test_a_part_of_its_own_takes_part_by_its_hooks(with_part, monkeypatch):
    """Four even clients in round 1, of which client 0 leaves: 4 + 3 + 3 of the rounds 1 to 3; the fourth is not run."""
    seen, real = [], FedAvg.round
    monkeypatch.setattr(FedAvg, "round", lambda self, *given: seen.append(given[1].local.lr) or real(self, *given))
    found = simulate(experiment())["fedavg"]
    assert [metrics["cohort_size"] for _, metrics in figures(found)] == [4, 3, 3]
    assert found.last_numbers == {"trained_so_far": 10}
    assert with_part[0][-1].left == [0]
    assert seen[-3:] == [PLANTED["local"]["lr"] / 2] * 3


def test_its_state_is_that_of_the_checkpoint(with_part, tmp_path, monkeypatch):
    whole = simulate(experiment(runtime={"checkpoint_every": 1}))["fedavg"]
    interrupt_once(monkeypatch, in_round=3)
    with pytest.raises(Interrupted):
        simulate(experiment(runtime={"checkpoint_every": 1}), tmp_path / "run")
    resumed = resume(tmp_path / "run", on_ray=False)["fedavg"]
    assert figures(resumed) == figures(whole) and resumed.last_numbers == whole.last_numbers
    assert with_part[-1][-1].left == [0] and with_part[-1] is not with_part[-2]


@pytest.mark.parametrize("kind", ["tensors", "values"])
def test_a_checkpoint_of_a_part_that_the_run_lacks_is_refused(kind, tmp_path):
    """Parts decide bits, so the run cannot go on without one."""
    folder = tmp_path / "run/fedavg/checkpoints"
    with pytest.MonkeyPatch.context() as patch, pytest.raises(Interrupted):
        interrupt_once(patch, in_round=2)
        simulate(experiment(runtime={"checkpoint_every": 1}), tmp_path / "run")
    (file,) = folder.glob("*.json")
    manifest = json.loads(file.read_text())
    del manifest["sha256"]
    if kind == "tensors":
        manifest["tensors"]["server.thrifty.left"] = {"dtype": "int64", "shape": [0]}
    else:
        manifest["values"]["thrifty"] = 3
    file.write_text(json.dumps(manifest | {"sha256": _digest(manifest)}))
    with pytest.raises(RunError, match="it is no checkpoint of fedavg: it has (server.)?thrifty.*, which the run does"):
        resume(tmp_path / "run", on_ray=False)


def test_the_cohort_of_a_part_is_drawn_from_those_before_it():
    """Parts with x -> 2 x, then x -> x + 1, of a cohort of client 3: client 7."""

    class Doubled(LoopPart):
        def cohort(self, stats, state, draw):
            return replace(cohort := draw(), ids_M=2 * cohort.ids_M)

    class Next(LoopPart):
        def cohort(self, stats, state, draw):
            return replace(cohort := draw(), ids_M=cohort.ids_M + 1)

    loop = object.__new__(round_loop.RoundLoop)
    drawn = round_loop.Cohort(np.array([3]), 0)
    loop.membership = type("Drawing", (), {"cohort": staticmethod(lambda round: drawn)})
    loop.parts, loop.state = [Doubled(), Next()], None
    assert loop._cohort(round_loop.RoundStats(1)).ids_M.tolist() == [7]


def test_the_loop_has_no_word_of_its_parts():
    text = Path(round_loop.__file__).read_text().partition("class RoundLoop")[2]
    assert "LoopPart" in text and "trains_without_clients" in text, "the class is read"
    found = re.findall(
        r"priva\w*|noise|\bmask\w*|secure\w*|virtual\w*|asynchron\w*|\bstale\w*|diagnos\w*|moments", text
    )
    assert not found
