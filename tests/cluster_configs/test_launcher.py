"""The files of Ray's cluster launcher: valid for Ray and for the API of the cloud. No machine is started."""

import importlib.util
import json
import re
import subprocess
from pathlib import Path

import pytest
import yaml

from cfl_ray import config

FOLDER = Path(__file__).parents[2] / "cluster_configs"
FILES = sorted(FOLDER.glob("*.yaml"))
CLOUDS = [file for file in FILES if file.stem != "local"]
named = pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
clouds = pytest.mark.parametrize("file", CLOUDS, ids=lambda file: file.stem)


@named
def test_it_is_valid_for_ray(file):
    from ray.autoscaler._private.util import prepare_config, validate_config

    if "ssh_proxy_use_node_id" in file.read_text():
        pytest.importorskip("ray", minversion="2.60")
    prepared = prepare_config(yaml.safe_load(file.read_text()))
    validate_config(prepared)
    commands = prepared["head_start_ray_commands"] + prepared["worker_start_ray_commands"]
    starts = [command for command in commands if "ray start" in command]
    assert starts and all("RAY_AUTH_MODE=token" in command for command in starts)
    assert all("--dashboard-host=127.0.0.1" in command for command in starts if "--head" in command)


@clouds
def test_nothing_is_installed_when_a_node_starts(file):
    from ray.autoscaler._private.util import prepare_config

    prepared = prepare_config(yaml.safe_load(file.read_text()))  # Ray's defaults for this cloud install packages
    assert prepared["docker"]["image"] == "registry.example.com/cfl-ray:0.1.0-cuda"
    for key in ("setup_commands", "head_setup_commands", "worker_setup_commands"):
        assert prepared[key] == []


@clouds
def test_the_head_is_on_demand_and_workers_are_limited_spot_machines(file):
    settings = yaml.safe_load(file.read_text())
    head, worker = settings["available_node_types"]["head"], settings["available_node_types"]["gpu_worker"]
    spot = re.compile("spot|preemptible", re.I)
    assert spot.search(json.dumps(worker["node_config"])) and not spot.search(json.dumps(head["node_config"]))
    assert worker["min_workers"] == 0 < worker["max_workers"] <= settings["max_workers"]
    assert (head["resources"]["GPU"], worker["resources"]["GPU"]) == (0, 1)
    assert 0 < settings["idle_timeout_minutes"] <= 15 and settings["provider"]["cache_stopped_nodes"] is False


@clouds
def test_no_node_has_a_public_address(file):
    settings = yaml.safe_load(file.read_text())
    assert settings["provider"]["use_internal_ips"] and settings["auth"]["ssh_proxy_use_node_id"]
    assert all(place in settings["auth"]["ssh_proxy_command"] for place in ("%h", "%p"))
    assert not re.search("accessConfigs:|AssociatePublicIpAddress: true", file.read_text())


@clouds
def test_the_token_is_a_file_and_runs_outlive_the_cluster(file):
    settings = yaml.safe_load(file.read_text())
    assert settings["file_mounts"] == {"~/.ray/auth_token": "~/.ray/auth_token"}
    assert "-v /mnt/cfl:/mnt/cfl" in settings["docker"]["run_options"]
    assert "output=/mnt/cfl/runs" in file.read_text()
    for command in settings["initialization_commands"]:
        subprocess.run(["bash", "-n", "-c", command], check=True)


@clouds
def test_node_configs_are_valid_for_the_cloud(file):
    settings = yaml.safe_load(file.read_text())
    check = {"aws": _check_aws, "gcp": _check_gcp}[settings["provider"]["type"]]
    for node in settings["available_node_types"].values():
        check(node["node_config"])


def _check_aws(node: dict) -> None:
    """By the model of EC2's API that botocore has."""
    session = pytest.importorskip("botocore.session").get_session()
    from botocore.validate import ParamValidator

    operation = session.get_service_model("ec2").operation_model("RunInstances")
    report = ParamValidator().validate(node | {"MinCount": 1, "MaxCount": 1}, operation.input_shape)
    assert not report.has_errors(), report.generate_report()


def _check_gcp(node: dict) -> None:
    """By the description of Compute Engine's API that its client has: every key is known, and of the right kind."""
    found = importlib.util.find_spec("googleapiclient")
    if found is None:
        pytest.skip("needs google-api-python-client")
    file = Path(found.origin).parent / "discovery_cache" / "documents" / "compute.v1.json"
    schemas = json.loads(file.read_text())["schemas"]
    kinds = {"string": str, "boolean": bool, "integer": int, "array": list, "object": dict}

    def check(value, schema: dict, path: str) -> None:
        schema = schemas[schema["$ref"]] if "$ref" in schema else schema
        kind = int if schema.get("format") == "int64" else kinds[schema["type"]]
        assert isinstance(value, kind), f"{path}: {value!r} is no {schema['type']}"
        assert value in schema.get("enum", [value]), f"{path}: {value!r} is none of {schema['enum']}"
        if isinstance(value, list):
            for one in value:
                check(one, schema["items"], path)
        if isinstance(value, dict):
            for key, one in value.items():
                assert key in schema["properties"], f"{path}.{key} is unknown"
                check(one, schema["properties"][key], f"{path}.{key}")

    check(node, schemas["Instance"], "Instance")


def test_one_is_for_this_machine_and_the_others_have_gpus():
    kinds = {file.stem: yaml.safe_load(file.read_text())["provider"]["type"] for file in FILES}
    assert kinds == {"aws_gpu": "aws", "gcp_gpu": "gcp", "local": "local"}


@named
def test_the_overrides_in_its_comments_are_keys_of_an_experiment(file):
    words = file.read_text().replace("\\\n#", " ").split()
    shown = [word for word in words if word.count("=") == 1 and word.startswith(("runtime.", "data.", "output"))]
    experiment = config.load(None, shown)
    if file in CLOUDS:
        assert len(shown) == 5 and experiment.runtime.wait_for_hosts == 1800
        workers = yaml.safe_load(file.read_text())["available_node_types"]["gpu_worker"]
        most = workers["max_workers"] * workers["resources"]["GPU"]  # the hosts of the example fill all workers
        assert experiment.runtime.hosts * experiment.runtime.gpus_per_host == most
