import inspect
import re
import subprocess
import sys
from dataclasses import dataclass

import cloudpickle
import numpy as np
import pytest
from torch import nn

from cfl_ray import Experiment, federation_from_arrays, simulate
from cfl_ray.core.method import Method, option
from cfl_ray.core.state import State
from cfl_ray.core.updates import RoundStats
from cfl_ray.errors import ConfigError
from cfl_ray.methods import resolve
from cfl_ray.methods.fedavg import FedAvg


class Plain:
    """The steps that every method must define; here they do nothing."""

    def init(self, start): ...
    def round(self, state, clients, rng): ...
    def serve(self, state, clients): ...


@pytest.fixture
def cls():
    @dataclass(frozen=True)
    class Example(Plain, Method, name="example"):
        """A method for tests. It has one option of every kind."""

        share: float = option(1, "a real number whose default is whole", low=0, high=1)
        count: int = option(3, "a whole number", low=1)
        most: int | None = option(None, "a whole number, or no limit", low=1)
        kind: str = option("a", "one of several", choices=("a", "b"))

    return Example


def test_registers_under_its_name(cls):
    assert Method.registry["example"] is cls and cls().name == "example"
    assert cls.summary() == "A method for tests. It has one option of every kind."


@pytest.mark.parametrize(
    "good", [{"share": 0.5}, {"share": 0}, {"share": 1}, {"count": 1}, {"most": None}, {"most": 5}, {"kind": "b"}]
)
def test_values_in_range_are_accepted(cls, good):
    assert {name: getattr(cls(**good), name) for name in good} == good


@pytest.mark.parametrize(
    "bad, message",
    [
        ({"share": 1.5}, "example.share: Input should be less than or equal to 1, got 1.5"),
        ({"share": float("nan")}, "example.share: Input should be less than or equal to 1, got nan"),
        ({"share": "x"}, "example.share: Input should be a valid number, got 'x'"),
        ({"share": True}, "example.share: Input should be a valid number, got True"),
        ({"count": 0}, "example.count: Input should be greater than or equal to 1, got 0"),
        ({"count": 2.5}, "example.count: Input should be a valid integer, got 2.5"),
        ({"count": None}, "example.count: Input should be a valid integer, got None"),
        ({"most": 2.5}, "example.most: Input should be a valid integer, got 2.5"),
        ({"most": 0}, "example.most: Input should be greater than or equal to 1, got 0"),
        ({"most": 10**30}, "example.most: a number is at most 9.223e+18, got 1e+30"),
        ({"kind": "c"}, "example.kind: Input should be 'a' or 'b', got 'c'"),
    ],
)
def test_other_values_are_rejected_with_the_range(cls, bad, message):
    with pytest.raises(ValueError) as error:
        cls(**bad)
    assert str(error.value) == message


def test_options_describe_themselves(cls):
    assert cls.options()[2] == {
        "name": "most",
        "type": "int | None",
        "default": None,
        "doc": "a whole number, or no limit",
        "source": "",
        "low": 1,
        "high": None,
        "choices": None,
    }
    assert [item["type"] for item in cls.options()][:4] == ["float", "int", "int | None", "str"]
    assert [item["name"] for item in cls.options()][4:] == [
        "aggregation",
        "server_optimizer",
        "norm",
        "local",
        "label",
    ], "options of all methods come last"


def test_every_method_takes_an_aggregation(cls):
    assert cls().aggregation_rule.name == "mean"
    assert cls(aggregation={"trimmed_mean": {"share": 0.2}}).aggregation_rule.share == 0.2
    with pytest.raises(ValueError, match="^example: unknown aggregation rule 'medain' .did you mean 'median'"):
        cls(aggregation="medain")
    with pytest.raises(TypeError):
        cls(0.5, 3, None, "a", "median")  # keyword-only, so that any method can have it


def test_a_method_for_the_mean_alone_says_why(cls):
    @dataclass(frozen=True)
    class Alone(cls, name="alone"):
        only_mean = "it averages nothing"

    assert Alone(aggregation="mean").aggregation_rule.name == "mean"
    assert "aggregation" not in [item["name"] for item in Alone.options()]
    with pytest.raises(ValueError, match="^alone.aggregation must be mean, got 'median': it averages nothing$"):
        Alone(aggregation="median")


def test_is_frozen(cls):
    with pytest.raises(AttributeError):
        cls().count = 4


def test_a_method_without_a_name_is_rejected_on_its_use():
    class Nameless(FedAvg):
        pass

    with pytest.raises(ConfigError, match=r'Nameless has no name; write `class Nameless\(FedAvg, name="nameless"\)`'):
        resolve([Nameless])
    with pytest.raises(ConfigError, match="Nameless has no name; write"):
        resolve([Nameless()])


def test_what_is_no_method_is_named():
    for entry, what in ((len, "len"), (5, "int 5"), (object(), "object")):
        with pytest.raises(ConfigError, match=f"methods: an entry is a name, .*, got {what}"):
            resolve([entry])
    with pytest.raises(ConfigError, match="method 'dict' is dict, not a subclass of cfl_ray.Method"):
        resolve([dict])
    with pytest.raises(ConfigError, match=r"method fedavg has no option 'name' \(did you mean 'label'\?\)"):
        resolve([{"fedavg": {"name": "other"}}])


def test_a_method_or_state_with_fields_that_is_no_dataclass_is_rejected():
    class Plain(FedAvg, name="plain"):
        share: float = 0.5

    class PlainState(State):
        seen_N: np.ndarray | None = None

    @dataclass(frozen=True)
    class Stateful(Method[PlainState], name="stateful"):
        pass

    for entry, error in (
        (Plain, "Plain declares share"),
        (Plain(), "Plain declares"),
        (Stateful, "PlainState declares se"),
    ):
        with pytest.raises(ConfigError, match=f"{error}.*, but is no dataclass; write @dataclass.frozen=True. above"):
            resolve([entry])


def test_a_users_method_is_rebuilt_from_a_pickle_with_its_name():
    """As on a host, which does not have the user's file."""

    @dataclass(frozen=True)
    class Mine(FedAvg, name="mine"):
        step: float = 0.5

    @dataclass(frozen=True)
    class Another(FedAvg, name="another"):
        __module__ = "only_here"  # a second file, which exists in this process alone

    load = "import pickle, sys; again = pickle.load(sys.stdin.buffer)"
    code = f"{load}; print(type(again).__name__, again.name, again.step)"
    done = subprocess.run([sys.executable, "-c", code], input=cloudpickle.dumps(Mine(step=0.25)), capture_output=True)
    assert done.stdout.split() == [b"Mine", b"mine", b"0.25"], done.stderr.decode()


def test_a_method_of_an_installed_package_is_found_by_its_entry_point(monkeypatch):
    @dataclass(frozen=True)
    class Theirs(Plain, Method, name="theirs"):
        """For tests."""

    points = {"theirs": lambda kind: Theirs, "wrong": lambda kind: 3}
    monkeypatch.setattr(
        "cfl_ray.plugins.registry.entry_points_of", lambda group: points if group == "cfl_ray.methods" else {}
    )
    assert isinstance(resolve(["theirs"])["theirs"], Theirs)
    with pytest.raises(ConfigError, match="method 'wrong' is a int, not a subclass of cfl_ray.Method"):
        resolve(["wrong"])
    with pytest.raises(ConfigError, match=r"unknown method 'their' \(did you mean 'theirs'\?\)"):
        resolve(["their"])


def test_a_hook_with_other_arguments_is_refused_with_its_signature():
    @dataclass(frozen=True)
    class Short(FedAvg, name="short"):
        def round(self, state, clients):
            return state

    line = inspect.getsourcelines(Short.round)[1]
    with pytest.raises(ConfigError) as error:
        resolve([Short()])
    expected = (
        f"Short.round ({__file__}, line {line}) is called with state, clients, rng: too many positional arguments"
    )
    assert str(error.value).endswith(f"{expected}; it takes (state, clients)")


@dataclass(frozen=True)
class Extrapolating(FedAvg, name="extrapolating"):
    factor: float = 0.0

    def round(self, state, clients, rng):
        after = super().round(state, clients, rng)
        return after.advance(models_KP=state.models_KP + self.factor * (after.models_KP - state.models_KP))


@pytest.mark.parametrize(
    "factor, note",
    [
        (1.0, None),
        (float("nan"), "returned models with numbers that are not finite, though updates"),
        (
            500.0,
            "returned models with negative variances of BatchNorm, .*: extrapolate only the first spec",
        ),
    ],
)
def test_a_method_that_breaks_models_is_named_once(factor, note, monkeypatch):
    draw = np.random.default_rng(0)
    data = federation_from_arrays(
        0.1 * draw.normal(size=(80, 4)).astype("float32"), np.arange(80) % 2, np.arange(80) // 20
    )
    settings = {"rounds": 3, "local": {"lr": 1e-6}, "cohort": {"fraction": 1.0}, "tracking": {"enabled": False}}

    def net(shape, classes):
        return nn.Sequential(nn.BatchNorm1d(4, momentum=0.1), nn.Linear(4, classes))

    said = []
    monkeypatch.setattr(RoundStats, "notes", property(lambda self: said, lambda self, value: None), raising=False)
    simulate(Experiment(data=data, model=net, methods=[Extrapolating(factor=factor)], **settings))
    found = {text for text in said if "returned models" in text}  # a trial says the same
    assert len(found) == bool(note) and all(re.search(f"Extrapolating.round .*{note}", text) for text in found)
