"""Power failures: what a checkpoint counts on is on the disk before it, and what is cut off is written again."""

import json
import os
import shutil

import pytest
from small_runs import simulate_until

from cfl_ray import resume, simulate
from cfl_ray.checkpoint.manifest import CheckpointManifest
from cfl_ray.lifecycle.recorder import MethodRecorder
from cfl_ray.results.arrow_log import whole_batches
from cfl_ray.run_directory import RunDirectory
from cfl_ray.setup.prepare import prepare
from cfl_ray.tracking import RunLog, read_info, read_records, run_log

CLIENT_METRICS = RunDirectory.client_metrics.name
DIAGNOSTICS = RunDirectory.diagnostics.name
REASSIGNMENTS = RunDirectory.reassignments.name
METRICS_LOG = RunDirectory.metrics.name
RECORD_FILES = [METRICS_LOG, REASSIGNMENTS, CLIENT_METRICS, DIAGNOSTICS]

SAVED, LAST = 4, 6  # the checkpoint from which the run goes on, and its last round before the failure


@pytest.fixture
def changing(experiment):
    """Clusters that change in every round; a checkpoint after rounds 2 and 4."""
    options = {"methods": [{"fesem": {"num_clusters": 3}}], "rounds": 8, "local": {"epochs": 1, "lr": 0.5}}
    return experiment(runtime={"checkpoint_every": 2, "engine": "manual"}, **options)


@pytest.fixture
def flushed(monkeypatch):
    """The size of each file and folder, by path, when it was last flushed."""
    sizes, fsync = {}, os.fsync

    def flushing(descriptor):
        fsync(descriptor)
        sizes[os.readlink(f"/proc/self/fd/{descriptor}")] = os.fstat(descriptor).st_size

    monkeypatch.setattr(os, "fsync", flushing)
    return sizes


@pytest.fixture
def stopped(changing, tmp_path):
    """(the folder of a method whose run was killed in round 6, the reports of rounds 1 to 5)."""
    return tmp_path / "run" / "fesem", simulate_until(LAST - 1, changing, tmp_path / "run")


def test_records_are_on_the_disk_before_the_checkpoint(changing, flushed, tmp_path, monkeypatch):
    """At the time of each manifest, every byte of the record files has been flushed."""
    checked, write = [], CheckpointManifest.write

    def writing(manifest, file):
        folder = file.parents[1]
        sizes = {
            str(folder / name): (folder / name).stat().st_size for name in RECORD_FILES if (folder / name).exists()
        }
        assert {name: flushed.get(name) for name in sizes} == sizes and str(folder) in flushed
        checked.append((manifest.round, len(sizes)))
        write(manifest, file)

    monkeypatch.setattr(CheckpointManifest, "write", writing)
    simulate(changing, tmp_path / "run")
    assert checked == [(2, 4), (4, 4), (6, 4), (8, 4)]


def test_all_records_are_on_the_disk_before_the_end_of_the_method(changing, flushed, tmp_path, monkeypatch):
    """A finished method is not continued, so nothing would write what a power failure cuts off its last round."""
    checked, write = [], run_log.write_json

    def writing(file, values):
        if file == RunDirectory(tmp_path / "run" / "fesem").end:
            sizes = {str(file.parent / name): (file.parent / name).stat().st_size for name in RECORD_FILES}
            checked.append({name: flushed.get(name) for name in sizes} == sizes)
        write(file, values)

    monkeypatch.setattr(run_log, "write_json", writing)
    simulate(changing.model_copy(update={"rounds": 2}), tmp_path / "run")
    assert checked == [True]


def synced(file):
    """The bytes of a file up to the round before the checkpoint: a power failure can cut what follows."""
    if file.suffix == ".arrow":
        batches, end, schema = whole_batches(file)
        sizes = {batch["round"][0].as_py(): batch.serialize().size for batch in batches}
        assert schema.serialize().size + sum(sizes.values()) == end == file.stat().st_size
        return schema.serialize().size + sum(size for round, size in sizes.items() if round < SAVED)
    lines = file.read_bytes().splitlines(keepends=True)
    return sum(len(line) for line in lines if json.loads(line)["round"] < SAVED)


@pytest.mark.parametrize("name", RECORD_FILES)
def test_a_file_cut_anywhere_is_made_whole_again(name, stopped, changing):
    """The run goes on from round 4 and does round 5 again: the file is as before, whichever others were cut.

    Tried at every seventh byte, and at the last twelve.
    """
    folder, reports = stopped
    setup = prepare(changing)
    whole = (folder / name).read_bytes()
    first = synced(folder / name)
    assert len(whole) - first > 20
    for cut in {*range(first, len(whole), 7), *range(len(whole) - 12, len(whole))}:
        os.truncate(folder / name, cut)
        run_log = RunLog(folder)
        run_log.start(read_info(folder))
        recorder = MethodRecorder(setup, "fesem", folder, run_log)
        for report in reports[SAVED - 1 :]:
            recorder.add(report)
        run_log.close()
        assert [record.round for record in read_records(folder)] == list(range(1, LAST)), cut
        assert (folder / name).read_bytes() == whole, cut


def test_a_run_whose_files_were_cut_goes_on_with_the_same_figures(stopped, changing, figures, tmp_path):
    folder, _ = stopped
    for name, cut in ((METRICS_LOG, 1), (REASSIGNMENTS, 300), (CLIENT_METRICS, 300), (DIAGNOSTICS, 300)):
        os.truncate(folder / name, (folder / name).stat().st_size - cut)
    found = resume(folder.parent, on_ray=False)
    shown = (folder / DIAGNOSTICS).read_bytes()
    shutil.rmtree(folder.parent)
    expected = simulate(changing, tmp_path / "expected")
    assert figures(found) == figures(expected)
    assert (tmp_path / "expected" / "fesem" / DIAGNOSTICS).read_bytes() == shown
