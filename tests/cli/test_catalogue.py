from cfl_ray.cli.catalogue import KINDS, PartKind
from cfl_ray.config import BuiltinKind
from cfl_ray.plugins.registry import Registry


def parts(kind: str) -> dict:
    return {part.name: part for part in KINDS[kind].parts()}


def test_every_part_has_a_description_and_comes_from_this_package():
    for name, kind in KINDS.items():
        found = list(kind.parts())
        assert [part.name for part in found] == kind.registry.names()
        assert all(part.description and part.origin == "cfl_ray" for part in found), name
        assert kind.registry.group.startswith("cfl_ray.")


def test_parameters_are_those_that_a_config_can_set():
    assert parts("shifts")["rotated"].parameters == "angles: [0, 90, 180, 270]"
    classes = "groups: null, classes_per_client: 2, classes_per_group: 3, share_alpha: null"
    assert parts("partitions")["classes"].parameters == classes
    assert parts("models")["mlp"].parameters == "hidden: 200"
    assert parts("aggregation")["trimmed_mean"].parameters == "share: 0.3"
    assert parts("attacks")["gaussian"].parameters == "fraction: 0.1, clients: null, from_round: 1, sigma: 1.0"
    assert parts("trackers")["csv"].parameters == "file: metrics.csv" and parts("trackers")["mlflow"].parameters == ""
    assert parts("methods")["local"].parameters == ""


def test_every_kind_that_the_config_declares_has_its_code():
    declared = {
        f"{kind}: {name}": entry
        for kind, one in KINDS.items()
        for name, entry in getattr(one.registry, "all", one.registry.builtin).items()
        if isinstance(entry, BuiltinKind)
    }
    without = {name for name, entry in declared.items() if not entry.code}
    assert without == {"clocks: none", "backends: ray", "backends: in_process"}  # the first: there is no virtual time
    assert {name: entry.load() for name, entry in declared.items() if name not in without}.keys() >= {
        "datasets: sea",
        "shifts: file.py:Name",
        "attacks: none",
        "trackers: wandb",
        "staleness: hinge",
    }


def test_an_installed_package_is_named_and_one_that_is_broken_says_why(monkeypatch):
    class Point:
        def __init__(self, name, value):
            self.name, self.value, self.dist = name, value, type("D", (), {"name": "their-package"})

        def load(self):
            if self.value is None:
                raise ImportError("no module")
            return self.value

    def theirs(labels, clients, draw, skew=2.0):
        """Their partition."""

    points = [Point("theirs", theirs), Point("broken", None)]
    monkeypatch.setattr("importlib.metadata.entry_points", lambda group: points if group == "their.group" else [])
    kind = PartKind(Registry("partition", {}, "their.group"), "own", "", "", given=("labels", "clients", "draw"))
    found = {part.name: part for part in kind.parts()}
    assert (found["theirs"].origin, found["theirs"].description) == ("their-package", "Their partition.")
    assert found["theirs"].parameters == "skew: 2.0"
    assert "of package their-package" in found["broken"].description and "no module" in found["broken"].description
