"""The cluster configs are what Ray's launcher takes, and keep the token on."""

from pathlib import Path

import pytest
import yaml

FOLDER = Path(__file__).parents[2] / "cluster_configs"
FILES = sorted(FOLDER.glob("*.yaml"))


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_config_is_valid_for_ray(file):
    from ray.autoscaler._private.util import prepare_config, validate_config

    config = prepare_config(yaml.safe_load(file.read_text()))
    validate_config(config)
    starts = [line for line in config["head_start_ray_commands"] + config["worker_start_ray_commands"] if "ray start" in line]
    assert starts and all("RAY_AUTH_MODE=token" in line for line in starts)
    assert all("--dashboard-host=127.0.0.1" in line for line in starts if "--head" in line)


def test_there_is_one_for_this_machine_and_one_with_gpus():
    configs = [yaml.safe_load(file.read_text()) for file in FILES]
    assert any(config["provider"]["type"] == "local" for config in configs)
    gpus = [node["resources"].get("GPU", 0) for config in configs for node in config.get("available_node_types", {}).values()]
    assert max(gpus) >= 1


def test_every_override_shown_is_a_key_of_an_experiment():
    from cfl_ray import config

    shown = [word for file in FILES for word in file.read_text().replace("\\\n#", " ").split() if word.count("=") == 1 and word.startswith(("runtime.", "data.", "output"))]
    assert len(shown) >= 3
    config.load(None, shown)
