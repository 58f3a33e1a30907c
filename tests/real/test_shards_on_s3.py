"""Shards in a bucket: they are prepared once, read by later runs, and give the same bits as local ones."""

import os

import pytest
from commands import call

from cfl_ray import simulate
from jobs.services import raising, servers

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(servers.missing(servers.S3)), reason=servers.missing(servers.S3) or "-"),
]


@pytest.fixture(scope="module")
def bucket():
    """URI of a folder in a bucket."""
    with servers.s3() as address, pytest.MonkeyPatch.context() as patch:
        for name, value in servers.s3_variables(address).items():
            patch.setenv(name, value)
        yield f"s3://{servers.BUCKET}/shards?endpoint_override={address}&scheme=http&region={servers.REGION}"


def stored():
    """The objects of the bucket, with the times of their last change."""
    import boto3

    objects = boto3.client("s3", endpoint_url=os.environ["MLFLOW_S3_ENDPOINT_URL"]).list_objects_v2(
        Bucket=servers.BUCKET
    )
    return {item["Key"]: (item["ETag"], item["LastModified"]) for item in objects["Contents"]}


def test_shards_are_written_once_and_are_those_of_a_local_folder(bucket, tmp_path, monkeypatch, capsys, figures):
    monkeypatch.setenv("CFL_RAY_CACHE", str(tmp_path / "cache"))
    changes = {"methods": ["fedavg", "ifca"], "rounds": 2, "tracking": {"enabled": False}}
    local = raising.experiment(tmp_path / "local", "", **changes)
    made = raising.experiment(tmp_path / "far", "", **changes)
    remote = made.model_copy(update={"data": made.data.model_copy(update={"shards": bucket})})
    assert remote.config_hash == local.config_hash
    file = tmp_path / "mine.yaml"
    file.write_text(remote.to_yaml())
    assert call(capsys, "prepare", file)[0] == 0
    first = stored()
    assert len(first) > 2 and call(capsys, "prepare", file)[0] == 0
    assert figures(simulate(remote, tmp_path / "run")) == figures(simulate(local))
    assert stored() == first, "they are reused"
    assert not (tmp_path / "far/shards").exists() and not list(tmp_path.glob("s3*"))
