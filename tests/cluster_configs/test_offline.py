"""The folder that installs cfl_ray without internet: made from wheels here, and installed without an index."""

import os
import subprocess
import sys
import venv
from importlib.metadata import distributions
from pathlib import Path

import pytest
from wheels import make_project, make_wheel

OFFLINE = Path(__file__).parents[2] / "cluster_configs" / "offline"
NEEDS = {  # of the packages that exist: a version that the cluster has, or the latest
    "ray": ("2.60.0", ["click", 'aiohttp; extra == "default"']),
    "torch": ("2.13.0", ["nvidia-cudnn"]),
    "numpy": ("2.4.0", []),
    "click": ("8.2.0", []),
    "aiohttp": ("3.14.0", []),
    "nvidia-cudnn": ("9.1", []),
}


@pytest.fixture(scope="module")
def index(tmp_path_factory):
    """The environment of a machine whose index has these packages and a torch of the year before."""
    folder = tmp_path_factory.mktemp("index")
    for name, (version, requires) in NEEDS.items():
        extras = ["default"] if name == "ray" else []
        content = os.urandom(250_000) if name == "numpy" else b""
        make_wheel(folder, name, version, *extras, requires=requires, content=content)
    make_wheel(folder, "torch", "2.11.0", requires=["nvidia-cudnn"])
    make_project(folder / "project", "0.1.0", ["ray[default]>=2.52", "torch>=2.11", "numpy"])
    return clean() | {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(folder), "PROJECT": str(folder / "project")}


def clean() -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PIP_", "PYTHONPATH"))}
    return kept | {"PIP_CONFIG_FILE": os.devnull, "PIP_NO_CACHE_DIR": "1"}


def make(index, folder, *arguments):
    command = [sys.executable, OFFLINE / "make.py", folder, "--project", index["PROJECT"], *arguments]
    return subprocess.run(command, env=index, capture_output=True, text=True)


def names(folder: Path) -> set[str]:
    return {file.name.partition("-")[0] for file in folder.iterdir() if ".whl" in file.name}


def test_all_packages_of_an_empty_machine(index, tmp_path):
    done = make(index, tmp_path / "wheels")
    assert done.returncode == 0, done.stderr
    assert names(tmp_path / "wheels") == {"cfl_ray", "ray", "torch", "numpy", "click", "aiohttp", "nvidia_cudnn"}
    assert "7 packages in 7 files" in done.stdout


@pytest.mark.slow
def test_what_is_missing_is_installed_without_an_index(index, tmp_path):
    """On a machine with another torch, and with ray but not with what `ray[default]` needs."""
    have, folder, machine = tmp_path / "have.txt", tmp_path / "wheels", tmp_path / "machine"
    have.write_text("torch==2.11.0+cu128\nray==2.60.0\nclick==8.2.0\nnvidia-cudnn==9.1\n")
    done = make(index, folder, "--have", have, "--part", "100K")
    assert done.returncode == 0, done.stderr
    assert names(folder) == {"cfl_ray", "numpy", "aiohttp"}
    assert len(list(folder.glob("numpy*.part*"))) == 3 and max(file.stat().st_size for file in folder.iterdir()) <= 1e5

    venv.create(machine, with_pip=True)
    python = machine / "bin" / "python"
    there = ["torch==2.11.0", "ray", "click", "nvidia-cudnn"]
    subprocess.run([python, "-m", "pip", "install", "--quiet", "--no-deps", *there], env=index, check=True)

    def install():
        offline = clean() | {"PIP_INDEX_URL": "http://127.0.0.1:9/", "PYTHON": str(python)}
        return subprocess.run(["bash", folder / "install.sh"], env=offline, capture_output=True, text=True)

    part = next(folder.glob("numpy*.part001"))
    whole = part.read_bytes()
    part.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    refused = install()
    assert refused.returncode == 1 and part.name in refused.stdout + refused.stderr
    assert "are missing or damaged" in refused.stderr
    part.write_bytes(whole)
    done = install()
    assert done.returncode == 0, done.stderr
    (site,) = (machine / "lib").glob("*/site-packages")
    found = {one.name: one.version for one in distributions(path=[str(site)])}
    assert found.items() >= {"cfl-ray": "0.1.0", "numpy": "2.4.0", "aiohttp": "3.14.0", "torch": "2.11.0"}.items()


@pytest.mark.parametrize(
    "have, arguments, message",
    [
        ("torch @ file:///t.whl", [], "expected NAME==VERSION"),
        ("torch==1.0", [], "pip install failed"),
        ("", ["--part", "60 MB"], "expected a size such as 60M, got '60 MB'"),
    ],
)
def test_what_cannot_be_is_named(index, tmp_path, have, arguments, message):
    (tmp_path / "have.txt").write_text(have)
    done = make(index, tmp_path / "wheels", "--have", tmp_path / "have.txt", *arguments)
    assert done.returncode and message in done.stderr


def test_a_folder_with_files_is_kept(index, tmp_path):
    (tmp_path / "mine.txt").write_text("mine")
    done = make(index, tmp_path)
    assert (
        done.returncode and "is not empty" in done.stderr and [file.name for file in tmp_path.iterdir()] == ["mine.txt"]
    )
