"""One thread, as on a client host."""

import atexit
import contextlib
import functools
import gc
import os
import secrets
import shutil
import signal
import sys
import tempfile
from pathlib import Path

import pytest
from waiting import until

os.environ.setdefault("RAY_AUTH_MODE", "token")  # read when ray is imported
for name in ("COLUMNS", "LINES", "FORCE_COLOR", "NO_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE", "GITHUB_ACTIONS"):
    os.environ.pop(name, None)  # the terminal is not the user's: printed text has one width and no colours
os.environ["RAY_worker_niceness"] = "0"  # noqa: SIM112  on all clusters; Ray's default gives way to all other tests
os.environ.setdefault("OMP_NUM_THREADS", "1")  # also of processes that tests start: each core has a test
# The user's own folder; processes that tests start use it too.
OWN_HOME = None if "CFL_RAY_HOME" in os.environ else tempfile.mkdtemp(prefix="cfl_ray_home-")
if OWN_HOME:
    os.environ["CFL_RAY_HOME"] = OWN_HOME
    if not {"RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"} & os.environ.keys():
        # In a new home, where Ray makes it at the first start, each test process would make another at the same time.
        Path(OWN_HOME, "ray_token").write_text(secrets.token_hex(32))
        os.environ["RAY_AUTH_TOKEN_PATH"] = os.path.join(OWN_HOME, "ray_token")
# A process that a shell starts in the background ignores Ctrl-C, and so do all that it starts: tests interrupt these.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


# Folders of tests that take longest a file; xdist hands out files in this order, so that the workers end together.
LONGEST_FIRST = (
    "real",
    "tests",
    "jobs",
    "on_ray",
    "study",
    "runtime",
    "lifecycle",
    "results",
    "checkpoint",
    "benchmarks",
)
LONGEST_FIRST += ("cli", "setup", "methods", "tracking", "clock")
# With `-m slow`: files that take 40 seconds or more by themselves, waiting or computing; the rest fills what is left.
SLOW_LONGEST_FIRST = (
    *("real/test_mlflow.py", "real/test_slurm.py", "cluster_configs/test_slurm.py"),
    *("runtime/on_ray/test_state_memory.py", "runtime/on_ray/test_head_dies.py", "jobs/test_network.py"),
    *("study/test_processes.py", "jobs/test_hang.py", "runtime/on_ray/test_adapter_memory.py"),
    *("test_experiments.py", "engine/test_compiled.py", "runtime/on_ray/test_nodes.py"),
    *("runtime/on_ray/test_memory_monitor.py", "jobs/test_submit.py", "jobs/test_chaos.py"),
    *("tracking/test_mlflow_tracker.py", "nn/test_packages.py", "runtime/on_ray/test_live_run.py"),
    *("jobs/test_soak.py", "test_docs.py", "runtime/on_ray/test_same_figures.py", "real/test_raising.py"),
    "test_examples.py",
)
ON_A_CLUSTER = "tests/runtime/on_ray/"


def pytest_collection_modifyitems(config, items):
    is_slow = config.option.markexpr == "slow"
    place = {name: at for at, name in enumerate(SLOW_LONGEST_FIRST if is_slow else LONGEST_FIRST)}

    def name_of(path):
        return os.path.relpath(path, Path(__file__).parent) if is_slow else path.parent.name

    items.sort(key=lambda item: place.get(name_of(item.path), len(place)))
    for item in items if config.getoption("--device") == "cuda" else []:
        if item.get_closest_marker("cpu"):
            item.add_marker(pytest.mark.skip(reason="about what happens on a CPU"))


@pytest.hookimpl(optionalhook=True)  # of xdist
def pytest_xdist_make_scheduler(config, log):
    """Files with tests on one Ray cluster are of one worker, since each worker starts a cluster; slow ones are not."""
    if config.option.dist != "loadfile" or config.option.markexpr == "slow":
        return None
    from xdist.scheduler import LoadFileScheduling

    class FilesOfACluster(LoadFileScheduling):
        def _split_scope(self, nodeid):
            file = super()._split_scope(nodeid)
            return ON_A_CLUSTER if file.startswith(ON_A_CLUSTER) else file

    return FilesOfACluster(config, log)


def pytest_ignore_collect(collection_path, config):
    """Without slow tests, a file is not imported for `-m slow`."""
    is_test = collection_path.suffix == ".py" and collection_path.name.startswith("test_")
    if config.option.markexpr == "slow" and is_test and "mark.slow" not in collection_path.read_text():
        return True
    return None  # other rules decide


gc.disable()  # until all tests are collected: what is imported and collected until then stays


def pytest_collection_finish():
    gc.freeze()  # so that no later collection walks through it
    gc.set_threshold(50_000)  # as of the commands; with Python's 700, collections take a twentieth of the time
    gc.enable()


@pytest.hookimpl(tryfirst=True)
def pytest_unconfigure():
    gc.freeze()  # pytest collects twice at its end, for seconds
    if "triton" in sys.modules:  # which prints what is left
        atexit.register(gc.unfreeze)
    if OWN_HOME:
        shutil.rmtree(OWN_HOME, ignore_errors=True)


def pytest_addoption(parser):
    help = "device of the networks whose test names none (default: cpu); for tests/engine, tests/nn and tests/methods"
    parser.addoption("--device", choices=["cpu", "cuda"], default="cpu", help=help)
    parser.addoption("--threads", type=int, default=1, help="of this process; 1, as on a host (jobs/cpu_variants.py)")


@pytest.fixture(scope="session", autouse=True)
def device(request):
    """The device of the networks whose test names none."""
    from cfl_ray.nn.network import Network
    from cfl_ray.nn.precision import products_in

    device, defaults = request.config.getoption("--device"), Network.__init__.__defaults__
    as_in_a_run = products_in("float32") if device == "cuda" else contextlib.nullcontext()
    with pytest.MonkeyPatch.context() as patch, as_in_a_run:
        patch.setattr(Network.__init__, "__defaults__", (device, *defaults[1:]))
        yield device


@pytest.fixture(scope="session", autouse=True)
def threads(request):
    """One, as hosts have it: with several, sums in this process have other last bits."""
    import sklearn.cluster  # noqa: F401  loads an OpenMP of its own; only libraries that are loaded are limited
    import torch
    from threadpoolctl import threadpool_limits

    from cfl_ray.system.threads import one_thread  # imports torch, which the process without tests does not need

    count = request.config.getoption("--threads")
    with one_thread(), threadpool_limits(limits=count):
        torch.set_num_threads(count)
        yield


@pytest.fixture(scope="session", autouse=True)
def no_flush_to_the_disk():
    """A killed process loses nothing without it, and no test cuts the power; checkpoints and logs flush often."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda descriptor: None)
        yield


@pytest.fixture(scope="session", autouse=True)
def one_mlflow_store(tmp_path_factory):
    """MLflow takes seconds to create the tables of a store: the later ones are copies of the first.

    Returns the function that creates them.
    """
    from cfl_ray.tracking import mlflow

    create, first = mlflow._create_store, tmp_path_factory.mktemp("store") / "mlflow.db"

    def copy_or_create(path):
        is_new = not path.exists() and not path.with_name(f".{path.name}.new").exists()
        if is_new and first.exists():
            shutil.copy(first, path)
            return
        create(path)
        if is_new:
            shutil.copy(path, first)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mlflow, "_create_store", copy_or_create)
        yield create


@pytest.fixture(scope="session", autouse=True)
def drawing():
    """Runs draw no figures and no page, which take longer than they do, unless `with drawing()`; of some modules."""
    from cfl_ray.lifecycle import driver, recorder
    from cfl_ray.study import run

    places = (recorder, "write_figures"), (driver, "write_figures"), (driver, "report_at_the_end")
    functions = [(module, name, getattr(module, name)) for module, name in (*places, (run, "report_at_the_end"))]

    @contextlib.contextmanager
    def drawing(*modules):
        with pytest.MonkeyPatch.context() as patch:
            for module, name, function in functions:
                if not modules or module in modules:
                    patch.setattr(module, name, function)
            yield

    with pytest.MonkeyPatch.context() as patch:
        for module, name, _ in functions:
            patch.setattr(module, name, lambda *_: None)
        yield drawing


@pytest.fixture
def drawn(drawing):
    """The runs of a test draw their figures and their page."""
    with drawing():
        yield


@pytest.fixture(autouse=True)
def registry(monkeypatch):
    """Methods that a test defines are registered until it ends."""
    from cfl_ray.core.method import Method

    monkeypatch.setattr(Method, "registry", dict(Method.registry))


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    """No cluster and no MLflow server of the user's; MLflow itself sets its variable in a test before."""
    for name in ("RAY_ADDRESS", "RAY_JOB_ID", "MLFLOW_TRACKING_URI"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(name="until")
def _until():
    return until


@pytest.fixture
def figures():
    """Returns a function: results -> every metric of every round of every method, without the seconds."""
    from small_runs import figures

    return lambda results: {label: figures(method) for label, method in results.methods.items()}


@pytest.fixture
def experiment(tmp_path):
    """Makes a small experiment."""
    from small_runs import small_experiment

    return functools.partial(small_experiment, tmp_path)


@pytest.fixture(scope="module")
def module_experiment(tmp_path_factory):
    """The same with one output folder for a module, whose tests share hosts or a run."""
    from small_runs import small_experiment

    return functools.partial(small_experiment, tmp_path_factory.mktemp("module"))


@pytest.fixture(scope="session")
def finished_run(tmp_path_factory):
    """Run directory of `experiment(rounds=2)`, not to be changed."""
    from small_runs import small_experiment

    from cfl_ray import simulate

    folder = tmp_path_factory.mktemp("finished")
    simulate(small_experiment(folder, rounds=2), folder / "run")
    return folder / "run"


@pytest.fixture
def run_dir(finished_run, tmp_path):
    """A copy of the finished run, which is this user's."""
    from cfl_ray.config import load
    from cfl_ray.results.trust import sign_record

    folder = shutil.copytree(finished_run, tmp_path / "run")
    sign_record(folder, load(folder / "config.yaml"))
    return folder


@pytest.fixture
def notes():
    from small_runs import Notes

    return Notes


@pytest.fixture(autouse=True)
def replayed(monkeypatch):
    """The engine `compiled` carries out its operations one by one: compiling them takes up to a minute."""
    if (compiled := sys.modules.get("cfl_ray.engine.compiled")) is not None:
        from training_tasks import Replayed

        monkeypatch.setattr(compiled, "package_of", Replayed)
        monkeypatch.setattr(compiled, "why_no_package", lambda recording: None)
