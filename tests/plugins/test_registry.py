import pytest

from cfl_ray.errors import ConfigError
from cfl_ray.plugins import registry
from cfl_ray.plugins.registry import Registry


@pytest.fixture
def parts(monkeypatch):
    """A registry of 1 and 2, with an installed package that names `three`, `one` and one that cannot be imported."""

    def broken(kind):
        raise ConfigError(f"{kind} 'broken' of package p cannot be imported")

    installed = {"three": lambda kind: 3, "one": lambda kind: -1, "broken": broken}
    monkeypatch.setattr(registry, "entry_points_of", lambda group: installed if group == "cfl_ray.things" else {})
    return Registry("thing", {"one": 1, "two": 2}, "cfl_ray.things")


def test_a_name_is_this_packages_before_an_installed_ones(parts):
    assert [parts.find(name) for name in ("one", "two", "three")] == [1, 2, 3]
    assert parts.names() == ["one", "two", "broken", "three"]


def test_a_file_is_the_users(parts, tmp_path):
    (tmp_path / "mine.py").write_text("four = 4\n")
    assert parts.find(f"{tmp_path}/mine.py:four") == 4
    with pytest.raises(ConfigError, match="thing '.*mine.py:fuor': .*mine.py has no 'fuor'"):
        parts.find(f"{tmp_path}/mine.py:fuor")


def test_unknown_names_say_the_nearest(parts):
    with pytest.raises(ConfigError, match=r"^unknown thing 'thre' \(did you mean 'three'\?\)$"):
        parts.find("thre")
    with pytest.raises(ConfigError, match="^unknown thing 'zzz'; valid: broken, one, three, two$"):
        parts.find("zzz")
    with pytest.raises(ConfigError, match="thing 'broken' of package p cannot be imported"):
        parts.find("broken")


def test_an_object_made_in_python_is_the_part_itself(parts):
    assert parts.resolve("two") == 2 and parts.resolve(7) == 7
    with pytest.raises(ConfigError, match="thing '__main__.f.<locals>.Mine' is an object made in Python, which the"):
        parts.find("__main__.f.<locals>.Mine")  # as the record of a run names it
    for file in ("mine.npz", "mine.csv", "mine.h5", "mine.pt"):
        with pytest.raises(ConfigError, match=f"unknown thing '{file}'; valid"):
            parts.find(file)
    with pytest.raises(ConfigError, match="unknown thing 'mine.py': write mine.py:NAME, with the name of a function"):
        parts.find("mine.py")
