import json
import resource

import pytest

from cfl_ray.errors import DataError
from cfl_ray.run_directory import RunDirectory
from cfl_ray.tracking import RoundRecord, RunInfo, RunLog, read_end, read_info, read_records

METRICS_LOG = RunDirectory.metrics.name


def rounds(run_dir):
    return [record.round for record in read_records(run_dir)]


def start(run_dir, info):
    log = RunLog(run_dir)
    log.start(info)
    return log


def test_the_run_directory_holds_what_was_reported(tmp_path, info, record):
    log = start(tmp_path, info)
    for round in range(3):
        log.log(record(round))
    assert read_end(tmp_path) is None
    log.finish("FINISHED", {"rounds_to_target": 2})
    assert read_info(tmp_path) == info
    assert list(read_records(tmp_path)) == [record(0), record(1), record(2)]
    end = read_end(tmp_path)
    assert (end.status, end.summary.metrics, end.summary.round, end.summary.time_ms) == (
        "FINISHED",
        {"rounds_to_target": 2},
        2,
        record(2).time_ms,
    )


def test_the_end_says_why_it_came_early_and_which_round_is_kept(tmp_path, info):
    """Both are absent from the file of a run that made all its rounds and keeps the last."""
    log = start(tmp_path, info)
    log.log(RoundRecord(3, {"best_round": 2.0}))
    log.finish("FINISHED", {}, "stopped after round 3: for a reason")
    assert (read_end(tmp_path).reason, read_end(tmp_path).kept) == ("stopped after round 3: for a reason", 2)
    plain = start(tmp_path / "plain", info)
    plain.finish("FINISHED", {})
    assert not {"reason", "kept"} & json.loads(RunDirectory(tmp_path / "plain").end.read_text()).keys()
    assert (read_end(tmp_path / "plain").reason, read_end(tmp_path / "plain").kept) == ("", 0)


def test_rounds_replayed_after_a_crash_are_ignored(tmp_path, info, record):
    first = start(tmp_path, info)
    for round in range(5):
        first.log(record(round))
    second = start(tmp_path, RunInfo("other"))
    for round in range(3, 7):
        second.log(record(round))
    assert rounds(tmp_path) == [0, 1, 2, 3, 4, 5, 6]
    assert read_info(tmp_path) == info


def test_a_resumed_run_has_not_ended(tmp_path, info):
    start(tmp_path, info).finish("KILLED", {})
    start(tmp_path, info)
    assert read_end(tmp_path) is None


def test_an_incomplete_last_line_is_removed(tmp_path, info, record):
    for number, line in enumerate((b'{"round": 2, "ti', b'{"round": 2, "time_ms": 5, "accuracy": 1.0}')):
        run_dir = tmp_path / str(number)
        start(run_dir, info).log(record(1))
        assert rounds(run_dir) == [1], "a record is in the file when `log` returns"
        with (run_dir / METRICS_LOG).open("ab") as file:
            file.write(line)
        assert rounds(run_dir) == [1]
        start(run_dir, info).log(record(2))
        assert list(read_records(run_dir)) == [record(1), record(2)]


def test_a_damaged_line_is_named(tmp_path, info, record):
    start(tmp_path, info).log(record(1))
    with (tmp_path / METRICS_LOG).open("ab") as file:
        file.write(b"\0\0\0\n")
    with pytest.raises(DataError, match=f"{METRICS_LOG} is damaged at byte"):
        start(tmp_path, info)


def test_a_full_disk_leaves_complete_lines_and_logging_can_be_repeated(tmp_path, info, record):
    log = start(tmp_path, info)
    log.log(record(1))
    size = (tmp_path / METRICS_LOG).stat().st_size
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size + 10, limits[1]))  # room for a part of the next line
    try:
        with pytest.raises(OSError, match="No space left"):
            log.log(record(2))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert (tmp_path / METRICS_LOG).stat().st_size == size
    log.log(record(2))
    assert rounds(tmp_path) == [1, 2]


def test_a_directory_without_a_run_is_an_error(tmp_path):
    with pytest.raises(DataError, match=r"holds no run: run\.json is missing"):
        read_info(tmp_path)
