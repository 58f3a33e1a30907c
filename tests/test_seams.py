"""The rules of the layout, kept by reading the source: who may import what, how long a file may be, how a method's file opens."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

import cfl_ray
from cfl_ray.core.method import Method
from cfl_ray.methods import REGISTRY

PACKAGE = Path(cfl_ray.__file__).parent
SOURCES = {path.relative_to(PACKAGE).as_posix(): path for path in sorted(PACKAGE.rglob("*.py"))}
TREES = {name: ast.parse(path.read_text()) for name, path in SOURCES.items()}
METHOD_FILES = [name for name in SOURCES if name.startswith("methods/") and not name.endswith("__init__.py")]

ALLOWED = {  # package -> what of ours its modules may import, beside themselves
    "core": set(),
    "methods": {"core"},
    "models": {"core"},
    "data": {"core", "config"},
    "engine": {"core", "data"},
    "tracking": {"core", "config"},
    "report": {"core", "tracking"},
    "config.py": {"core", "sections", "attacks"},
    "attacks.py": {"sections"},
    "sections.py": {"core"},
    "tables.py": {"core", "runtime"},
}
FOREIGN = {  # package of others -> the only places that may import it
    "ray": ("runtime/",),
    "mlflow": ("tracking/mlflow.py",),
    "matplotlib": ("report/",),
    "typer": ("cli.py",),
    "rich": ("cli.py", "display.py", "forecast.py", "tables.py"),
}


def imports(tree: ast.AST) -> set[str]:
    """Dotted names of everything imported anywhere in it: in functions and under TYPE_CHECKING as well."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            found |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def top(name: str) -> str:
    return name.partition("/")[0]


def ours(tree: ast.AST) -> set[str]:
    """Packages and modules directly below cfl_ray that it imports."""
    parts = {name.split(".")[1] for name in imports(tree) if name.startswith("cfl_ray.")}
    return {part for part in parts if (PACKAGE / part).is_dir() or (PACKAGE / f"{part}.py").is_file()}


def functions(tree: ast.AST):
    return (node for node in ast.walk(tree) if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)))


def test_the_walk_sees_the_package():
    """The rules below hold for something: these modules exist and import what everybody knows they do."""
    assert {"core/clients.py", "engine/worker.py", "runtime/port.py", "methods/stocfl.py"} <= SOURCES.keys()
    assert "core" in ours(TREES["methods/fedavg.py"]) and "data" in ours(TREES["engine/worker.py"])
    assert any(name.split(".")[0] == "ray" for name in imports(TREES["runtime/port.py"]))


@pytest.mark.parametrize("name", SOURCES)
def test_layers(name):
    if top(name) in ALLOWED:
        assert ours(TREES[name]) <= ALLOWED[top(name)] | {top(name)}, f"{name} imports {ours(TREES[name])}"


def test_every_package_has_a_rule_or_is_the_runtime_or_above_it():
    unruled = {top(name) for name in SOURCES} - ALLOWED.keys()
    assert unruled <= {"runtime", "__init__.py", "__main__.py", "cli.py", "display.py", "forecast.py"}, unruled


@pytest.mark.parametrize("package", FOREIGN)
def test_only_one_place_knows(package):
    users = {name for name, tree in TREES.items() if any(found.split(".")[0] == package for found in imports(tree))}
    assert users, f"nothing imports {package}: remove the rule"
    assert all(name.startswith(FOREIGN[package]) for name in users), users


@pytest.mark.parametrize("name", [name for name in SOURCES if top(name) in ("tracking", "report")])
def test_what_reports_needs_neither_torch_nor_ray(name):
    assert not {found.split(".")[0] for found in imports(TREES[name])} & {"torch", "ray"}


def test_asking_a_live_run_and_beginning_hosts_do_not_wait_for_torch():
    code = "import sys, cfl_ray.cli, cfl_ray.tables, cfl_ray.runtime.live, cfl_ray.runtime.connect, cfl_ray.runtime.actors; print({'torch', 'sklearn', 'mlflow', 'matplotlib'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "set()\n"


def test_nothing_is_pickled_or_loaded_from_a_pickle():
    """Checkpoints are safetensors and JSON. What Ray serialises on its way is Ray's affair."""
    for name, tree in TREES.items():
        modules = {found.split(".")[0] for found in imports(tree)}
        assert not modules & {"pickle", "cloudpickle", "dill", "joblib", "shelve", "marshal"}, name
        attributes = {ast.unparse(node) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
        assert not attributes & {"torch.load", "torch.save"}, name


@pytest.mark.parametrize("name", SOURCES)
def test_length(name):
    limit = 150 if name in METHOD_FILES else 300
    lines = len(SOURCES[name].read_text().splitlines())
    assert lines <= limit, f"{name} has {lines} lines, the limit is {limit}: split it by idea"
    for function in functions(TREES[name]):
        length = function.end_lineno - function.lineno + 1
        assert length <= 60, f"{function.name} in {name} has {length} lines, the limit is 60"


@pytest.mark.parametrize("name", SOURCES)
def test_no_module_is_empty(name):
    assert ast.get_docstring(TREES[name]) or len(TREES[name].body) > 1, f"{name} says and does nothing"
    if not name.endswith("__init__.py"):
        assert len(TREES[name].body) > 1, f"{name} does nothing"


@pytest.mark.parametrize("name", SOURCES)
def test_nothing_draws_from_a_global_generator(name):
    """Only generators made for an address draw; `fork_rng` and `manual_seed` inside it are how torch.nn initialisers are given one."""
    drawing = {"seed", "rand", "randn", "randint", "random", "choice", "shuffle", "permutation", "normal", "uniform"}
    for node in ast.walk(TREES[name]):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            owner, verb = ast.unparse(node.func.value), node.func.attr
            assert not (owner in ("np.random", "numpy.random", "random") and verb in drawing), f"{name}:{node.lineno}"
            assert not (owner == "torch" and verb in {"rand", "randn", "randint", "randperm", "bernoulli", "normal"}
                        and not any(keyword.arg == "generator" for keyword in node.keywords)), f"{name}:{node.lineno}"  # fmt: skip
    assert "random" not in imports(TREES[name])


class TestMethodFiles:
    """One paper, one file."""

    @pytest.mark.parametrize("name", METHOD_FILES)
    def test_registers_one_method_named_like_the_file(self, name):
        registered = [
            keyword.value.value
            for node in TREES[name].body if isinstance(node, ast.ClassDef)
            for keyword in node.keywords if keyword.arg == "name"
        ]  # fmt: skip
        assert registered == [Path(name).stem]
        assert REGISTRY[registered[0]].__module__ == f"cfl_ray.methods.{Path(name).stem}"

    @pytest.mark.parametrize("name", METHOD_FILES)
    def test_opens_with_its_source_and_its_departures(self, name):
        text = ast.get_docstring(TREES[name])
        cited = re.search(r"arXiv:\d{4}\.\d{4,5}|doi:10\.\d{4,}/|https://doi\.org/10\.\d{4,}/|https://papers\.nips\.cc/", text) or "there is no paper" in text
        assert cited, f"{name} cites no arXiv number, DOI or proceedings, and does not say that there is no paper"
        departures = re.search(r"^Departures: (.+)", text, re.M)
        assert departures and departures[1].strip(), f"{name} does not say where it departs from its source"

    def test_every_file_is_registered_and_nothing_else(self):
        assert set(REGISTRY) == {Path(name).stem for name in METHOD_FILES}

    @pytest.mark.parametrize("cls", REGISTRY.values(), ids=REGISTRY)
    def test_explains_itself_and_its_options(self, cls):
        assert cls.summary().endswith(".") and issubclass(cls, Method)
        for option in cls.options():
            assert option["doc"], f"{cls.name}.{option['name']} has no meaning"
            assert option["source"], f"{cls.name}.{option['name']} does not say where its default comes from"
            bounded = option["low"] is not None or option["high"] is not None or option["choices"]
            assert bounded or option["type"] == "bool", f"{cls.name}.{option['name']} takes anything"
