"""Wrong results of a user's method are errors at its own line, and newcomers have a place without its help."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from federations import Spoiled, Stage, linear, planted

from cfl_ray import Method, Serving, State
from cfl_ray.core.checked_method import CheckedMethod
from cfl_ray.core.rng import Draws
from cfl_ray.core.work import Losses
from cfl_ray.engine.failure import ClientFailure
from cfl_ray.errors import RunError
from cfl_ray.methods.fedavg import FedAvg


@pytest.fixture
def stage():
    return Stage(planted(6), linear)


def method(**given) -> Any:
    """A method with two models, of which `round`, `serve`, `join` ... return what is given."""

    @dataclass(frozen=True)
    class Given(Method[State], name="given"):
        """For tests."""

        def init(self, start):
            return given.get("init", State(torch.stack([start.new_model(k) for k in (0, 1)]), start.unassigned()))

        def round(self, state, clients, rng):
            return given.get("round", state)

        def serve(self, state, clients):
            return given.get("serve", Serving(state.models_KP, clients.first_row()))

        def leave(self, state, ids):
            return given.get("leave", state)

        def diagnose(self, state, clients):
            return given.get("diagnose")

    return Given()


def state(**changes) -> State:
    values = {"models_KP": torch.zeros(2, 68), "assign_N": np.zeros(6, np.int32)} | changes
    return State(**values)


STATES = [
    (None, "returned None, expected a State"),
    ([1, 2], "returned list of 2, expected a State"),
    (state(models_KP=np.zeros((2, 68))), r"models_KP as ndarray of float64 and shape \(2, 68\), .*\(K, 68\)"),
    (state(models_KP=torch.zeros(2, 67)), r"models_KP as Tensor of float32 and shape \(2, 67\), .*\(K, 68\)"),
    (state(models_KP=torch.zeros(2, 68).double()), "models_KP as Tensor of float64"),
    (state(assign_N=np.zeros(5, np.int32)), r"assign_N is ndarray of int32 and shape \(5,\), .*shape \(6,\)"),
    (state(assign_N=np.zeros(6)), "assign_N is ndarray of float64"),
    (
        state(assign_N=np.array([0, 1, -1, 2, 0, 0])),
        "assign_N with 2 as the cluster of client 3, expected -1 .. 1: there are 2 models",
    ),
]


@pytest.mark.parametrize("found, message", STATES)
@pytest.mark.parametrize("hook", ["init", "round", "leave"])
def test_a_state_that_is_none(stage, hook, found, message):
    checked_method = CheckedMethod(method(**{hook: found}), stage.network.spec.size)
    assert stage.network.spec.size == 68  # 16 x 4 + 4
    with pytest.raises(RunError, match=message) as error:
        if hook == "init":
            checked_method.init(stage.start())
        elif hook == "round":
            checked_method.round(state(), stage.clients(), Draws(0, 1))
        else:
            checked_method.leave(state(), np.array([1]))
    assert f"Given.{hook} (" in str(error.value) and "test_checked_method.py, line" in str(error.value)


@pytest.mark.parametrize(
    "found, message",
    [
        (torch.zeros(2, 68), r"returned Tensor of float32 and shape \(2, 68\), expected a Serving\(models_KP, row_M\)"),
        (Serving(torch.zeros(2, 68), np.zeros(4, int)), r"row_M is ndarray of int64 and shape \(4,\), .*shape \(6,\)"),
        (Serving(torch.zeros(2, 68), np.zeros(6)), "row_M is ndarray of float64"),
        (Serving(torch.zeros(2, 68), np.full(6, 2)), "row_M with 2 as the row of client 0, expected -1 .. 1"),
        (Serving(torch.zeros(68)[None, :5], np.zeros(6, int)), r"models_KP as Tensor of float32 and shape \(1, 5\)"),
        (
            Serving(torch.zeros(1, 68), np.zeros(6, int), frozen_P=torch.zeros(3)),
            r"frozen_P is Tensor of float32 and shape \(3,\), expected shape \(68,\)",
        ),
    ],
)
def test_a_serving_that_is_none(stage, found, message):
    checked_method = CheckedMethod(method(serve=found), stage.network.spec.size)
    with pytest.raises(RunError, match=message) as error:
        checked_method.serve(state(), stage.clients())
    assert "Given.serve (" in str(error.value) and "test_checked_method.py, line" in str(error.value)


@pytest.mark.parametrize("field", ["models_KP", "assign_N"])
def test_a_state_that_is_modified_in_place(stage, field):
    @dataclass(frozen=True)
    class InPlace(type(method()), name="in_place"):
        """For tests."""

        def round(self, state, clients, rng):
            getattr(state, field)[1] = 1
            return state.advance(phase="federate")

    with pytest.raises(RunError, match=f"InPlace.round .*, line .* modified {field} of the state before in place"):
        CheckedMethod(InPlace(), 68).round(state(), stage.clients(), Draws(0, 1))


@pytest.mark.parametrize("value, change", [([], "append(1)"), ({}, "update(a=1)"), (np.zeros(2), "fill(1)")])
def test_a_method_that_remembers_in_its_fields_is_refused(stage, value, change):
    @dataclass(frozen=True)
    class Remembering(type(method()), name="remembering"):
        seen: Any = None

        def round(self, state, clients, rng):
            eval(f"self.seen.{change}", {"self": self})
            return state

    checked_method = CheckedMethod(Remembering(seen=value), 68)
    with pytest.raises(RunError, match=r"Remembering.round .* changed seen of the method, which checkpoints miss"):
        checked_method.round(checked_method.init(stage.start()), stage.clients(), Draws(0, 1))


def test_right_results_pass_and_exceptions_note_the_authors_line(stage):
    checked_method = CheckedMethod(method(), 68)
    first = checked_method.init(stage.start())
    assert checked_method.round(first, stage.clients(), Draws(0, 1)) is first
    assert len(checked_method.serve(first, stage.clients()).row_M) == 6

    @dataclass(frozen=True)
    class Wrong(type(method()), name="wrong"):
        """For tests."""

        def round(self, state, clients, rng):
            return clients.send(state.models_KP, np.full(len(clients), 7))

    with pytest.raises(ValueError, match="6 clients and 2 models") as error:
        CheckedMethod(Wrong(), 68).round(first, stage.clients(), Draws(0, 1))
    line = Wrong.round.__code__.co_firstlineno + 1
    assert error.value.__notes__[0].endswith(f"Wrong.round, {__file__}, line {line}")


@pytest.mark.parametrize("error, noted", [(RunError("mine.py, line 3"), False), (ValueError("shapes"), True)])
def test_lines_of_this_package_are_noted_where_an_error_names_none(stage, monkeypatch, error, noted):
    def failing(*arguments, **options):
        raise error

    monkeypatch.setattr("cfl_ray.core.clients.Clients.weights", failing)
    with pytest.raises(type(error)) as found:
        CheckedMethod(FedAvg(), 68).round(CheckedMethod(FedAvg(), 68).init(stage.start()), stage.clients(), Draws(0, 1))
    assert [note.startswith("in FedAvg.round") for note in getattr(found.value, "__notes__", [])] == [True] * noted


class TestPhases:
    @staticmethod
    def method(**given):
        """Declares warmup -> cluster -> federate; begins in `warmup` where nothing else is given."""

        @dataclass(frozen=True)
        class Phased(type(method()), name="phased"):
            """For tests."""

            phases = {"warmup": ("cluster",), "cluster": ("federate",), "federate": ()}

            def init(self, start):
                return given.get("init", state(phase="warmup"))

            def round(self, state, clients, rng):
                return state.advance(phase=given["round"])

        return CheckedMethod(Phased(), 68)

    @pytest.mark.parametrize("before, after", [("warmup", "warmup"), ("warmup", "cluster"), ("cluster", "federate")])
    def test_declared_transitions_pass_and_so_does_staying(self, stage, before, after):
        found = self.method(round=after).round(state(phase=before), stage.clients(), Draws(0, 1))
        assert found.phase == after

    @pytest.mark.parametrize(
        "before, after, message",
        [
            ("warmup", "federate", "goes from phase 'warmup' to 'federate', but phased declares the phases warmup -> "),
            ("federate", "cluster", "goes from phase 'federate' to 'cluster', but phased .* -> federate; declare it"),
            ("warmup", "warm", r"goes from phase 'warmup' to 'warm', .*phases = {'warmup': \('warm',\), 'warm': \(\)}"),
        ],
    )
    def test_others_are_an_error_at_the_authors_line_that_names_both(self, stage, before, after, message):
        with pytest.raises(RunError, match=message) as error:
            self.method(round=after).round(state(phase=before), stage.clients(), Draws(0, 1))
        assert "Phased.round (" in str(error.value) and "test_checked_method.py, line" in str(error.value)

    def test_the_first_phase_is_any_that_is_declared(self, stage):
        assert self.method(init=state(phase="federate")).init(stage.start()).phase == "federate"
        with pytest.raises(RunError, match="in phase 'begin', but phased declares the phases warmup -> cluster -> fed"):
            self.method(init=state(phase="begin")).init(stage.start())

    def test_without_a_declaration_there_is_one_phase(self, stage):
        checked_method = CheckedMethod(method(init=state(phase="cluster")), 68)
        with pytest.raises(RunError, match=r"given declares the phases federate; .*phases = {'cluster': \(\)}"):
            checked_method.init(stage.start())

    @pytest.mark.parametrize(
        "declared", [{"cluster": "federate", "federate": ()}, {"cluster": ("federate",)}, ["cluster"]]
    )
    def test_a_declaration_that_is_none(self, declared):
        with pytest.raises(ValueError, match=r"Wrong.phases.* (must be a tuple of declared phases|must be a dict)"):
            type("Wrong", (Method,), {"phases": declared})


class TestDescribe:
    def test_any_numbers_are_a_vector(self, stage):
        found_MF, valid_M = stage.clients().describe(lambda client, anchor_P: np.ones((2, 3)))
        assert found_MF.shape == (6, 6) and found_MF.dtype == torch.float32 and valid_M.all()

    @pytest.mark.parametrize("result, came", [(None, "None"), ([], "list of 0"), ("x", "str 'x'")])
    def test_others_are_an_error_at_the_authors_line(self, stage, result, came):
        def function(client, anchor_P):
            return result

        with pytest.raises(ClientFailure) as error:
            stage.clients().describe(function)
        where = f"function ({__file__}, line {function.__code__.co_firstlineno}) of Clients.describe"
        assert str(error.value) == (
            f"client 0 failed while describing itself: function {where} returned {came}, "
            "expected a tensor or array of at least one number"
        )


class TestNewcomersWithoutARule:
    """Each model of the planted federation fits one group: groups disagree about every label."""

    def trained(self, stage) -> State:
        """A model per group, each trained by clients of that group alone; no client has a cluster yet."""
        rows = []
        for group in (0, 1):
            clients = stage.clients([group, group + 2])
            updates = clients.train(clients.send(stage.model()[None]), average=torch.ones(1, 2))
            rows.append(updates.averaged(default=stage.model()[None]))
        return State(torch.cat(rows), np.full(6, -1, np.int32))

    def test_join_the_model_with_the_least_loss_and_traffic_is_counted(self, stage):
        before = self.trained(stage)
        clients = stage.clients([4, 5])
        after = method().join(before, clients)
        assert after.assign_N.tolist() == [-1, -1, -1, -1, 0, 1]
        assert clients.stats.traffic.down_bits == 2 * 2 * 68 * 32 and clients.stats.traffic.up_bits == 2 * 32

    def test_who_has_a_cluster_keeps_it(self, stage):
        before = self.trained(stage).advance(assign_N=np.array([-1, -1, -1, -1, 1, -1], np.int32))
        assert method().join(before, stage.clients([4, 5])).assign_N[4:].tolist() == [1, 1]

    def test_one_model_needs_no_choice(self, stage):
        before = State(stage.model()[None], np.full(6, -1, np.int32))
        clients = stage.clients([4, 5])
        assert method().join(before, clients) is before and clients.stats.exchanges == 0

    def test_with_data_that_are_not_valid_it_stays_without_one(self):
        stage = Stage(Spoiled([5], 6), linear)
        assert method().join(self.trained(stage), stage.clients([4, 5])).assign_N[4:].tolist() == [0, -1]


def test_the_losses_are_one_exchange(stage, monkeypatch):
    asked = []
    run = stage.backend.run
    monkeypatch.setattr(stage.backend, "run", lambda work: asked.append(type(work)) or run(work))
    method().join(state(assign_N=np.full(6, -1, np.int32)), stage.clients([4, 5]))
    assert asked == [Losses]


def test_diagnostics_that_are_returned_would_be_lost(stage):
    checked_method = CheckedMethod(method(diagnose={"size": 1}), stage.network.spec.size)
    with pytest.raises(
        RunError, match=r"diagnose \(.*test_checked_method.py, line \d+\) returned dict.*clients.record"
    ):
        checked_method.diagnose(state(), stage.clients())
    CheckedMethod(method(), stage.network.spec.size).diagnose(state(), stage.clients())
