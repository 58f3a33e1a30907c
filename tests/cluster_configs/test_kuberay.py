"""The Kubernetes files: known fields, the token, not root, spot workers, limits. No Kubernetes is started.

`kuberay_fields.json` has the fields that the files use. With CFL_RAY_KUBERAY_CRDS, a folder of ray.io_rayclusters.yaml
and ray.io_rayjobs.yaml of a release, the same objects are validated by the definitions of KubeRay.
"""

import json
import os
import re
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from jsonschema import Draft202012Validator

from cfl_ray import config

FOLDER = Path(__file__).parents[2] / "cluster_configs" / "kuberay"
FIELDS = json.loads(Path(__file__).with_name("kuberay_fields.json").read_text())
OBJECTS = [
    pytest.param(found, id=f"{file.parent.name}/{file.stem}: {found['kind']}")
    for file in sorted(FOLDER.rglob("*.yaml"))
    if file.name != "kustomization.yaml"
    for found in yaml.safe_load_all(file.read_text())
]
CLUSTER = yaml.safe_load((FOLDER / "cluster" / "cluster.yaml").read_text())["spec"]
JOB = yaml.safe_load((FOLDER / "job.yaml").read_text())["spec"]
BOTH = pytest.mark.parametrize("cluster", [CLUSTER, JOB["rayClusterSpec"]], ids=["cluster", "job"])


def errors(found: dict, schema: dict) -> list[str]:
    return [
        f"{'.'.join(map(str, error.path))}: {error.message[:300]}"
        for error in Draft202012Validator(schema).iter_errors(found)
    ]


def pods(cluster: dict) -> list[dict]:
    groups = [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]
    return [group["template"]["spec"] for group in groups]


@pytest.mark.parametrize("found", OBJECTS)
def test_every_field_is_known(found):
    assert errors(found, FIELDS | {"$ref": f"#/$defs/{found['kind']}"}) == []


def test_a_misspelt_field_is_noticed():
    wrong = yaml.safe_load((FOLDER / "cluster" / "cluster.yaml").read_text())
    wrong["spec"]["workerGroupSpecs"][0]["template"]["spec"]["containers"][0]["resource"] = {}
    (error,) = errors(wrong, FIELDS | {"$ref": "#/$defs/RayCluster"})
    assert "'resource' was unexpected" in error


def strict(schema: dict[str, Any]) -> dict[str, Any]:
    """A Kubernetes schema as one of JSON Schema in which fields that it does not name are errors."""
    made = {key: strict(value) if isinstance(value, dict) else value for key, value in schema.items()}
    if schema.get("x-kubernetes-int-or-string"):
        made = {"type": ["integer", "string"]}
    if isinstance(schema.get("properties"), dict) and isinstance(schema.get("type"), str):
        made["properties"] = {key: strict(value) for key, value in schema["properties"].items()}
        made.setdefault("additionalProperties", bool(schema.get("x-kubernetes-preserve-unknown-fields")))
    return made


@pytest.mark.skipif(
    "CFL_RAY_KUBERAY_CRDS" not in os.environ, reason="needs KubeRay's definitions: CFL_RAY_KUBERAY_CRDS"
)
@pytest.mark.parametrize("found", [one for one in OBJECTS if one.values[0]["apiVersion"] == "ray.io/v1"])
def test_it_is_valid_by_the_definitions_of_kuberay(found):
    file = Path(os.environ["CFL_RAY_KUBERAY_CRDS"]) / f"ray.io_{found['kind'].lower()}s.yaml"
    (version,) = [one for one in yaml.safe_load(file.read_text())["spec"]["versions"] if one["name"] == "v1"]
    schema = strict(version["schema"]["openAPIV3Schema"])
    schema["properties"]["metadata"] = {"type": "object"}
    assert errors(found, schema) == []


@BOTH
def test_it_demands_the_token_of_a_secret_and_has_the_ray_of_the_image(cluster):
    assert cluster["authOptions"] == {"mode": "token", "secretName": "cfl-ray-token"}
    pinned = (FOLDER.parent / "constraints.txt").read_text()
    assert f"\nray=={cluster['rayVersion']}\n" in pinned
    assert not re.search(r"RAY_AUTH_TOKEN|auth_token:", "".join(path.read_text() for path in FOLDER.rglob("*.yaml")))


@BOTH
def test_the_head_is_on_demand_and_workers_are_a_limited_group_of_spot_nodes(cluster):
    (workers,) = cluster["workerGroupSpecs"]
    assert cluster["enableInTreeAutoscaling"] and workers["minReplicas"] == 0 < workers["maxReplicas"]
    assert cluster["headGroupSpec"]["rayStartParams"]["num-cpus"] == "0"
    head, worker = (
        pod["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"]
        for pod in pods(cluster)
    )
    (excluded,) = [term["matchExpressions"] for term in head]  # all of them hold, on a node without the label, too
    assert {one["operator"] for one in excluded} == {"NotIn"}
    one_of = [one for term in worker for one in term["matchExpressions"]]
    assert {one["operator"] for one in one_of} == {"In"} and len(one_of) == len(worker)
    assert [(one["key"], one["values"]) for one in excluded] == [(one["key"], one["values"]) for one in one_of]


@BOTH
def test_memory_and_gpus_are_reserved_and_all_nodes_share_a_folder(cluster):
    for pod in pods(cluster):
        (container,) = pod["containers"]
        assert container["resources"]["requests"] == container["resources"]["limits"]  # the last to be evicted
        assert {"name": "cfl", "mountPath": "/mnt/cfl"} in container["volumeMounts"]
        assert {"name": "cfl", "persistentVolumeClaim": {"claimName": "cfl-ray"}} in pod["volumes"]
        mounted = {mount["name"] for mount in container["volumeMounts"]}
        assert mounted == {volume["name"] for volume in pod["volumes"]}
    assert pods(cluster)[1]["containers"][0]["resources"]["limits"]["nvidia.com/gpu"] == 1
    claim = yaml.safe_load((FOLDER / "storage.yaml").read_text())
    assert claim["metadata"]["name"] == "cfl-ray" and claim["spec"]["accessModes"] == ["ReadWriteMany"]


def test_cluster_and_job_have_the_same_nodes():
    job = json.loads(json.dumps(JOB["rayClusterSpec"]))
    head = job["headGroupSpec"]["template"]["spec"]
    assert head["containers"][0]["volumeMounts"].pop()["mountPath"] == "/etc/cfl_ray"
    assert head["volumes"].pop() == {"name": "experiment", "configMap": {"name": "cfl-ray-experiment"}}
    assert job == CLUSTER


def test_the_job_runs_or_resumes_with_valid_settings_and_ends():
    program, run, experiment, *overrides = shlex.split(JOB["entrypoint"])
    assert program == "run-or-resume" and run.startswith("/mnt/cfl/") and experiment == "/etc/cfl_ray/experiment.yaml"
    settings = config.load(None, overrides)
    assert settings.output.startswith("/mnt/cfl/") and settings.runtime.wait_for_hosts == 1800
    (workers,) = JOB["rayClusterSpec"]["workerGroupSpecs"]
    assert settings.runtime.hosts * settings.runtime.gpus_per_host == workers["maxReplicas"]  # one GPU each
    cpus = float(workers["template"]["spec"]["containers"][0]["resources"]["limits"]["cpu"])
    assert settings.runtime.hosts * settings.runtime.cpus_per_host <= cpus * workers["maxReplicas"]
    assert JOB["shutdownAfterJobFinishes"] and JOB["backoffLimit"] > 0 and JOB["activeDeadlineSeconds"] > 0


def test_redis_is_for_the_cluster_alone_and_has_a_password():
    objects = list(yaml.safe_load_all((FOLDER / "redis" / "redis.yaml").read_text()))
    service, redis, policy = objects
    assert "type" not in service["spec"]  # inside the Kubernetes cluster
    (container,) = redis["spec"]["template"]["spec"]["containers"]
    assert "--requirepass" in container["command"][-1] and "secretKeyRef" in container["env"][0]["valueFrom"]
    (rule,) = policy["spec"]["ingress"]
    assert rule["from"] == [{"podSelector": {"matchLabels": {"ray.io/cluster": "cfl-ray"}}}]


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="needs kubectl")
def test_the_variant_with_redis_is_the_cluster_with_fault_tolerance():
    done = subprocess.run(["kubectl", "kustomize", FOLDER / "redis"], capture_output=True, text=True, check=True)
    made = {found["kind"]: found for found in yaml.safe_load_all(done.stdout)}
    assert errors(made["RayCluster"], FIELDS | {"$ref": "#/$defs/RayCluster"}) == []
    options = made["RayCluster"]["spec"].pop("gcsFaultToleranceOptions")
    assert made["RayCluster"]["spec"] == CLUSTER
    port = made["Service"]["spec"]["ports"][0]["port"]
    assert options["redisAddress"] == f"redis://{made['Service']['metadata']['name']}:{port}"
    secret = {"name": "cfl-ray-redis", "key": "password"}
    assert options["redisPassword"]["valueFrom"]["secretKeyRef"] == secret
    assert (
        made["StatefulSet"]["spec"]["template"]["spec"]["containers"][0]["env"][0]["valueFrom"]["secretKeyRef"]
        == secret
    )
