"""The rules of the layout, kept by reading the source: imports, names, words, and how a method's file opens."""

import ast
import functools
import re
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest

import cfl_ray
from cfl_ray.core.method import Method
from cfl_ray.methods import REGISTRY

PACKAGE = Path(cfl_ray.__file__).parent
ROOT = Path(__file__).parents[1]
SOURCES = {path.relative_to(PACKAGE).as_posix(): path for path in sorted(PACKAGE.rglob("*.py"))}


@functools.cache
def parsed() -> dict[str, ast.Module]:
    return {name: ast.parse(path.read_text()) for name, path in SOURCES.items()}


METHOD_FILES = [name for name in SOURCES if name.startswith("methods/") and not name.endswith("__init__.py")]

ALLOWED = {  # package -> packages of ours that its modules may import, beside their own
    "errors": set(),
    "plugins": {"errors"},
    "system": {"errors"},
    "security": {"errors", "system"},
    "core": {"errors", "plugins", "system"},
    "population": {"errors", "plugins", "core"},
    "clustering": {"errors", "system", "core"},
    "methods": {"errors", "plugins", "core", "clustering"},
    "models": {"errors", "plugins", "core", "nn"},
    "run_directory": {"errors", "system", "security"},
    "config": {"errors", "plugins", "system", "security", "core", "run_directory"},
    "data": {"errors", "plugins", "system", "security", "core", "config"},
    "nn": {"errors", "system", "core"},
    "engine": {"errors", "plugins", "system", "core", "data", "nn"},
    "checkpoint": {"errors", "system", "core", "run_directory"},
    "tracking": {"errors", "plugins", "system", "security", "core", "config", "run_directory"},
    "report": {"errors", "system", "core", "tracking"},
    "privacy": {"errors", "core", "population", "config"},
    "clock": {"errors", "plugins", "core", "population", "config", "data"},
}
for package in ("setup", "results", "runtime", "lifecycle", "study", "cli"):  # each may import all of those before it
    ALLOWED[package] = set(ALLOWED)
FOREIGN = {  # package of others -> the only place that may import it
    "ray": "runtime/on_ray/",
    "mlflow": "tracking/mlflow",
    "wandb": "tracking/trackers.py",
    "matplotlib": "report/",
    "jinja2": "report/page.py",
    "typer": "cli/",
    "rich": "cli/",
}
LIGHT = ["cfl_ray.cli.commands", "cfl_ray.cli.printed_tables", "cfl_ray.cli.live_client", "cfl_ray.runtime.on_ray.ask"]
LIGHT += ["cfl_ray.runtime.on_ray.host_actor", "cfl_ray.runtime.on_ray.server_actor"]


@functools.cache
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


def modules_used(tree: ast.AST, known: dict[str, ast.AST]) -> set[str]:
    """The modules of ours that it imports: of `from package import name` the module of that name, else the package."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            found |= {name if name in known else node.module for name in names}
    return found & known.keys()


def top(name: str) -> str:
    return name.partition("/")[0]


def ours(tree: ast.AST) -> set[str]:
    """Packages directly below cfl_ray that it imports."""
    parts = {name.split(".")[1] for name in imports(tree) if name.startswith("cfl_ray.")}
    return {part for part in parts if (PACKAGE / part).is_dir()}


def modules() -> dict[str, ast.AST]:
    """Trees by dotted module name: the package, jobs and benchmarks."""
    trees = {f"cfl_ray/{name}": tree for name, tree in parsed().items()}
    for path in (path for folder in ("jobs", "benchmarks") for path in (ROOT / folder).rglob("*.py")):
        trees[path.relative_to(ROOT).as_posix()] = ast.parse(path.read_text())
    return {name.removesuffix(".py").removesuffix("/__init__").replace("/", "."): tree for name, tree in trees.items()}


def test_the_walk_sees_the_package():
    """The rules below hold for something: these modules exist and import what they are known to."""
    assert {
        "core/clients.py",
        "engine/worker.py",
        "runtime/on_ray/ray_backend.py",
        "methods/stocfl.py",
    } <= SOURCES.keys()
    assert "core" in ours(parsed()["methods/fedavg.py"]) and "data" in ours(parsed()["engine/worker.py"])
    assert any(name.split(".")[0] == "ray" for name in imports(parsed()["runtime/on_ray/ray_backend.py"]))


def test_layers():
    for name, tree in parsed().items():
        if "/" in name:
            assert ours(tree) <= ALLOWED[top(name)] | {top(name)}, f"{name} imports {ours(tree)}"
    assert {top(name) for name in SOURCES if "/" in name} == ALLOWED.keys()


def test_no_package_circles():
    """Whole packages do not import each other either, also for type checkers and inside functions."""
    uses: dict[str, set[str]] = defaultdict(set)
    for name, tree in parsed().items():
        if "/" in name:
            uses[top(name)] |= ours(tree) - {top(name)}
    assert "lifecycle" in uses["study"] and "results" in uses["runtime"]
    while leaves := [package for package, used in uses.items() if not used & uses.keys()]:
        for package in leaves:
            del uses[package]
    assert not uses, f"these packages import each other: {dict(uses)}"


def test_no_import_circles():
    """Also for type checkers and inside functions; jobs and benchmarks, whose modules have one name each, too."""
    trees = modules()
    assert {"jobs.chaos.network", "benchmarks.peers.bare"} <= trees.keys()
    for module in trees:
        if module.startswith(("jobs.", "benchmarks.")):
            stems = {path.stem for path in (ROOT / module.replace(".", "/")).parent.glob("*.py")}
            assert not stems & imports(trees[module]), f"{module} imports a neighbour without its package"
    uses = {module: modules_used(tree, trees) - {module} for module, tree in trees.items()}
    while leaves := [module for module, used in uses.items() if not used & uses.keys()]:
        for module in leaves:
            del uses[module]
    assert not uses, f"these import each other: {sorted(uses)}"


def test_only_one_place_knows():
    for package, place in FOREIGN.items():
        users = {
            name for name, tree in parsed().items() if any(found.split(".")[0] == package for found in imports(tree))
        }
        assert users, f"nothing imports {package}: remove the rule"
        assert all(name.startswith(place) for name in users), (package, users)


def test_only_one_place_knows_tensorboard():
    users = {name for name, tree in parsed().items() if "torch.utils.tensorboard" in imports(tree)}
    assert users == {"tracking/trackers.py"}
    assert not any(found.split(".")[0] == "tensorboard" for tree in parsed().values() for found in imports(tree))


PRIVATE_OF_RAY = re.compile(r"\bray([./]\w+)*[./](_(?!_)\w+|core\b)|\b(setup|default)_worker\.py\b")


def private_names_of_ray(tree: ast.AST) -> set[str]:
    """Private names of Ray that it imports, uses as attributes, or writes in texts other than docstrings."""
    docstrings = {
        id(node.body[0].value)
        for node in ast.walk(tree)
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)) and ast.get_docstring(node)
    }
    texts = set(imports(tree))
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            texts.add(ast.unparse(node))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings:
            texts.add(node.value)
    return {found[0] for text in texts if (found := PRIVATE_OF_RAY.search(text))}


@pytest.mark.parametrize(
    "code, private",
    [
        ("from ray._private import node", True),
        ("import ray.core.generated.common_pb2", True),
        ("from ray._raylet import GcsClient", True),
        ("from ray.autoscaler._private.util import prepare_config", True),
        ("from ray.experimental.internal_kv import _internal_kv_put", True),
        ("import ray; ray._private.node.Node", True),
        ("import_module('ray._private.node')", True),
        ("command = ['-m', 'ray._private.workers.default_worker']", True),
        ("path = root / 'ray/_private/workers'", True),
        ("path.with_name('setup_worker.py')", True),
        ("from ray.exceptions import RayError; ray.__version__; ray.util.scheduling_strategies", False),
        ("from cfl_ray.core import work; cfl_ray._MODULES", False),
    ],
)
def test_private_names_of_ray_are_seen(code, private):
    assert bool(private_names_of_ray(ast.parse(code))) == private


def test_only_one_module_uses_private_names_of_ray():
    users = {name for name, tree in modules().items() if private_names_of_ray(tree)}
    assert users == {"cfl_ray.runtime.on_ray.ray_internals"}


def test_tracking_and_reports_need_neither_torch_nor_ray():
    for name, tree in parsed().items():
        if top(name) in ("tracking", "report") and name != "tracking/trackers.py":
            assert not {found.split(".")[0] for found in imports(tree)} & {"torch", "ray"}, name


def test_requests_to_a_live_run_and_starting_hosts_do_not_wait_for_torch():
    heavy = "{'torch', 'sklearn', 'mlflow', 'matplotlib'} & set(sys.modules)"
    code = f"import sys, {', '.join(LIGHT)}; print({heavy})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"


def test_nothing_is_pickled_or_loaded_from_a_pickle():
    """Checkpoints are safetensors and JSON; a .pt file is only written where a user asks for it.

    What Ray serialises on its way is Ray's affair. A digest is of pickled bytes, which go nowhere else.
    """
    for name, tree in parsed().items():
        loaded = {found.split(".")[0] for found in imports(tree)}
        digested = {"cloudpickle"} if name == "plugins/content.py" else set()
        assert not loaded & {"pickle", "cloudpickle", "dill", "joblib", "shelve", "marshal"} - digested, name
        attributes = {ast.unparse(node) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
        allowed = {"torch.save"} if name == "results/export.py" else set()
        assert not attributes & {"torch.load", "torch.save"} - allowed, name


def test_nothing_draws_from_a_global_generator():
    """Only generators made for an address draw; code of users gets global ones that are seeded for it."""
    drawing = {"seed", "rand", "randn", "randint", "random", "choice", "shuffle", "permutation", "normal", "uniform"}
    torch_drawing = {"rand", "randn", "randint", "randperm", "bernoulli", "normal"}
    for name, tree in parsed().items():
        if name == "core/global_generators.py":
            continue
        assert "random" not in imports(tree), name
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                owner, verb = ast.unparse(node.func.value), node.func.attr
                assert not (owner in ("np.random", "numpy.random", "random") and verb in drawing), (
                    f"{name}:{node.lineno}"
                )
                addressed = any(keyword.arg == "generator" for keyword in node.keywords)
                assert not (owner == "torch" and verb in torch_drawing and not addressed), f"{name}:{node.lineno}"


def test_one_class_name_means_one_thing():
    places = defaultdict(list)
    for name, tree in parsed().items():
        for node in tree.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[node.name].append(name)
    assert not {name: where for name, where in places.items() if len(where) > 1}


def test_config_sections_end_in_config():
    from cfl_ray.config import ConfigSection, Experiment
    from cfl_ray.config.study import Study
    from cfl_ray.results.published import PublishedTable, PublishedTables

    def below(cls):
        return {cls, *(one for child in cls.__subclasses__() for one in below(child))}

    for cls in below(ConfigSection) - {ConfigSection, Experiment, Study, PublishedTables, PublishedTable}:
        assert cls.__name__.endswith("Config"), cls


def test_words():
    """Plain technical English: clients and users are named, not spoken of as persons."""
    wrong = re.compile(r"\b(nobody|everybody|somebody|anybody)\b", re.I)
    opening = re.compile(r"^(What|Who)\b")
    for name, tree in parsed().items():
        assert not wrong.search(SOURCES[name].read_text()), f"{name}: {wrong.search(SOURCES[name].read_text())[0]}"
        for node in ast.walk(tree):
            if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)) and (text := ast.get_docstring(node)):
                assert not opening.match(text), f"{name}: {text.splitlines()[0]}"


class TestMethodFiles:
    """One paper, one file."""

    def test_registers_one_method_named_like_the_file(self):
        for name in METHOD_FILES:
            classes = [node for node in parsed()[name].body if isinstance(node, ast.ClassDef)]
            registered = [keyword.value.value for node in classes for keyword in node.keywords if keyword.arg == "name"]
            assert registered == [Path(name).stem]
            assert REGISTRY[registered[0]].__module__ == f"cfl_ray.methods.{Path(name).stem}"
        assert set(REGISTRY) == {Path(name).stem for name in METHOD_FILES}

    def test_opens_with_its_source_and_its_deviations(self):
        source = r"arXiv:\d{4}\.\d{4,5}|doi:10\.\d{4,}/|https://doi\.org/10\.\d{4,}/|https://papers\.nips\.cc/|https://proceedings\.mlr\.press/|https://openaccess\.thecvf\.com/"
        for name in METHOD_FILES:
            text = ast.get_docstring(parsed()[name])
            cited = re.search(source, text) or "there is no paper" in text
            assert cited, f"{name} cites no arXiv number, DOI or proceedings, and does not say that there is no paper"
            deviations = re.search(r"^Deviations: (.+)", text, re.M)
            assert deviations and deviations[1].strip(), f"{name} does not say where it departs from its source"

    def test_explains_itself_and_its_options(self):
        for cls in REGISTRY.values():
            assert cls.summary().endswith(".") and issubclass(cls, Method)
            for option in cls.options():
                name = f"{cls.name}.{option['name']}"
                assert option["doc"], f"{name} has no meaning"
                assert option["source"], f"{name} does not say where its default comes from"
                bounded = option["low"] is not None or option["high"] is not None or option["choices"]
                checked = option["type"] == "bool" or option["name"] in (
                    "local",
                    "label",
                    "undo_normalize",
                    "private",
                )  # elsewhere
                assert bounded or checked, f"{name} takes anything"
