"""The commands on docs/clusters.md and cluster_configs/README.md name files, options and settings that exist."""

import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from cfl_ray import config

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "docs" / "clusters.md", ROOT / "cluster_configs" / "README.md"]


def lines(page: Path) -> list[str]:
    text = page.read_text()
    bash = "\n".join(re.findall(r"```bash\n(.*?)```", text, re.S)).splitlines()
    return bash + re.findall(r"^\$ (.*)$", "\n".join(re.findall(r"```console\n(.*?)```", text, re.S)), re.M)


ASSIGNMENT = re.compile(r"^[A-Z_]+=\S+ +")  # of a variable, before the program
COMMANDS = sorted({ASSIGNMENT.sub("", line) for page in PAGES for line in lines(page) if line})


def of(program: str) -> list[list[str]]:
    return [shlex.split(line)[1:] for line in COMMANDS if line.startswith(program + " ")]


def settings(words: list[str]) -> list[str]:
    return [word for word in words if re.match(r"[a-z_.]+=", word)]


def test_every_program_is_checked_below():
    programs = {shlex.split(line.lstrip("("))[0] for line in COMMANDS}
    assert programs == {"sbatch", "kubectl", "ray", "cfl-ray", "docker", "pip", "export", "umask", "python", "bash"}


def test_slurm_takes_the_options_and_the_settings():
    directives = re.findall(r"^#SBATCH --([a-z-]+)", (ROOT / "cluster_configs" / "slurm.sh").read_text(), re.M)
    assert len(of("sbatch")) == 2
    for words in of("sbatch"):
        place = words.index("cluster_configs/slurm.sh")
        options, (run, experiment, *overrides) = words[:place], words[place + 1 :]
        assert {option[2:].split("=")[0] for option in options} <= {*directives, "gpus-per-node"}
        assert run.startswith("/") and experiment == "mine.yaml" and config.load(None, overrides)


def test_files_that_kubectl_applies_exist_and_others_are_made():
    applied = [words for words in of("kubectl") if words[0] == "apply"]
    assert applied
    for _, option, path in applied:
        assert (ROOT / path / "kustomization.yaml" if option == "-k" else ROOT / path).is_file()
    made = {
        tuple(word for word in words[1:] if not word.startswith("--"))
        for words in of("kubectl")
        if words[0] == "create"
    }
    secrets = {("secret", "generic", name) for name in ("cfl-ray-token", "cfl-ray-key")}
    assert made == {*secrets, ("configmap", "cfl-ray-experiment")}
    cluster = yaml.safe_load((ROOT / "cluster_configs/kuberay/cluster/cluster.yaml").read_text())
    forwarded = {words[1] for words in of("kubectl") if words[0] == "port-forward"}
    assert forwarded == {f"service/{cluster['metadata']['name']}-head-svc"}  # the name that KubeRay gives it


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="needs kubectl")
def test_what_kubectl_creates_is_what_the_files_read(tmp_path):
    (tmp_path / "mine.yaml").write_text("rounds: 2\n")
    (tmp_path / ".ray").mkdir()
    (tmp_path / ".ray" / "auth_token").write_text("token")
    made = {}
    for line in COMMANDS:
        if line.startswith("kubectl create"):
            command = f"{line} --dry-run=client -o yaml".replace("$HOME", str(tmp_path))
            done = subprocess.run(["bash", "-c", command], cwd=tmp_path, capture_output=True, text=True, check=True)
            found = yaml.safe_load(done.stdout)
            made[found["metadata"]["name"]] = set(found["data"])
    # KubeRay reads the key auth_token of the Secret; the job mounts the ConfigMap as a folder
    assert made == {
        "cfl-ray-token": {"auth_token"},
        "cfl-ray-key": {"key"},
        "cfl-ray-experiment": {"experiment.yaml"},
    }
    job = (ROOT / "cluster_configs/kuberay/job.yaml").read_text()
    assert "/etc/cfl_ray/experiment.yaml" in job and "name: cfl-ray-experiment" in job
    for file in ("job.yaml", "cluster/cluster.yaml"):
        assert "{name: cfl-ray-key, key: key}" in (ROOT / "cluster_configs/kuberay" / file).read_text()


def test_commands_of_ray_exist_with_these_options():
    from ray.scripts.scripts import cli

    assert len(of("ray")) == 4
    for words in of("ray"):
        command, context = cli, None
        while hasattr(command, "commands"):
            context, name = command.make_context("ray", [], parent=context, resilient_parsing=True), words.pop(0)
            command = command.commands[name]
        given = command.make_context(name, list(words), parent=context).params  # raises for an unknown option
        if name == "start":
            continue
        entry = given["entrypoint"]
        program, *arguments = entry
        if program == "run-or-resume":
            assert config.load(None, settings(arguments)).output == "/mnt/cfl/runs"
        else:
            assert program == "python" and (arguments[0] == "-m" or (ROOT / arguments[0]).is_file())


def test_the_image_takes_the_build_arguments():
    dockerfile = (ROOT / "Dockerfile").read_text()
    builds = [words for words in of("docker") if words[0] == "build"]
    assert len(builds) == 2 and all(words[-1] == "." or "--build-arg" in words for words in builds)
    arguments = [words[words.index("--build-arg") + 1] for words in builds if "--build-arg" in words]
    assert arguments and all(f"ARG {word.split('=')[0]}=" in dockerfile for word in arguments)
    tags = {words[words.index("-t") + 1] for words in builds}
    used = {words[-1] for words in of("docker") if words[0] == "push"}
    assert used <= tags
    images = {
        image
        for file in (ROOT / "cluster_configs").rglob("*.yaml")
        for image in re.findall(r"image: (registry\S+)", file.read_text())
    }
    assert images <= tags


def test_settings_of_cfl_ray_are_valid_and_constraints_exist():
    for words in of("cfl-ray"):
        assert config.load(None, settings(words))
    listed = ["list", "--format=freeze", ">", "have.txt"]
    assert of("pip") == [["install", "-c", "cluster_configs/constraints.txt", "."], listed]
    assert (ROOT / "cluster_configs" / "constraints.txt").is_file()


def test_the_folder_without_internet_is_made_and_installed_by_files_that_exist():
    """Their options and what they do: test_offline.py."""
    ((script, folder, *_),), ((install,),) = of("python"), of("bash")
    assert (ROOT / script).is_file() and install == f"{folder}/install.sh"
    assert (ROOT / script).with_name("install.sh").is_file()


def test_variables_of_the_slurm_script_are_those_on_the_pages():
    text = "".join(page.read_text() for page in PAGES)
    script = (ROOT / "cluster_configs" / "slurm.sh").read_text()
    assert set(re.findall(r"CFL_RAY_(?!KUBERAY|DEBUG)[A-Z_]+", text)) <= set(re.findall(r"CFL_RAY_[A-Z_]+", script))


def test_symptoms_name_messages_that_exist():
    table = (ROOT / "docs" / "clusters.md").read_text().split("## When a job hangs")[1]
    sources = "".join(path.read_text() for path in (ROOT / "cfl_ray").rglob("*.py"))
    sources += (ROOT / "cluster_configs" / "slurm.sh").read_text()
    flat = re.sub(r'"\s+f?"', "", sources)
    for part in (
        "could not be placed within",
        "that takes this driver",
        "no client host is ready after",
        "is live already",
    ):
        assert part in table and part in flat, part
    assert "nodes joined" in table and "nodes joined" in flat


def test_the_readme_lists_every_file():
    page = PAGES[1].read_text()
    linked = {(PAGES[1].parent / target).resolve() for target in re.findall(r"\]\(([^)#]+)\)", page)}
    files = {path.resolve() for path in PAGES[1].parent.rglob("*") if path.is_file()}
    parts = {"README.md", "kustomization.yaml", "redis.yaml"}
    assert {path for path in files - linked if path.name not in parts} == set()
