"""The cluster configs are valid for Ray's launcher and use token authentication."""

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
    commands = config["head_start_ray_commands"] + config["worker_start_ray_commands"]
    starts = [command for command in commands if "ray start" in command]
    assert starts and all("RAY_AUTH_MODE=token" in command for command in starts)
    assert all("--dashboard-host=127.0.0.1" in command for command in starts if "--head" in command)


def test_one_is_for_this_machine_and_one_has_gpus():
    configs = [yaml.safe_load(file.read_text()) for file in FILES]
    assert any(config["provider"]["type"] == "local" for config in configs)
    nodes = [node for config in configs for node in config.get("available_node_types", {}).values()]
    assert max(node["resources"].get("GPU", 0) for node in nodes) >= 1


def test_every_override_in_the_comments_is_a_key_of_an_experiment():
    from cfl_ray import config

    shown = [
        word
        for file in FILES
        for word in file.read_text().replace("\\\n#", " ").split()
        if word.count("=") == 1 and word.startswith(("runtime.", "data.", "output"))
    ]
    assert len(shown) >= 3
    config.load(None, shown)
