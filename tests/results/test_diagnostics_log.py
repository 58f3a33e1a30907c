"""Diagnostics of a run: in metrics, in the file of the method, in checkpoints, and as results read back."""

import json
import re
import struct
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from small_runs import simulate_until

from cfl_ray import load_run, resume, simulate
from cfl_ray.core.reported import Diagnostic, ReportedDiagnostic
from cfl_ray.errors import DataError, RunError
from cfl_ray.methods.ifca import IFCA
from cfl_ray.results.arrow_log import DiagnosticsLog, read_diagnostics, read_reassignments
from cfl_ray.results.comparison import compare_runs, format_table
from cfl_ray.run_directory import RunDirectory

DIAGNOSTICS = RunDirectory.diagnostics.name


@dataclass(frozen=True)
class Reporting(IFCA, name="reporting"):
    """IFCA that reports numbers and arrays: in every round, in the first one, and in evaluated ones."""

    def round(self, state, clients, rng):
        state = super().round(state, clients, rng)
        clients.record("tenth", clients.round / 10)
        if clients.round == 1:
            clients.record("distance", np.arange(len(clients) * (len(clients) - 1) // 2), ("clients", "clients"))
        clients.record("twice", lambda: [[clients.round, clients.round]], ("other", "more"))
        clients.record("same", [1.0, np.nan], ["other"])
        return state

    def diagnose(self, state, clients):
        clients.record("members", state.members_K, ["clusters"])
        clients.record("online", len(clients))


REPORTING = {  # ten rounds, of which 3, 6, 9 and 10 are evaluated; a checkpoint after every second one
    "methods": [Reporting(num_clusters=3)],
    "rounds": 10,
    "evaluation": {"every": 3},
    "runtime": {"checkpoint_every": 2},
}


@pytest.fixture
def reporting(experiment):
    return experiment(**REPORTING)


EVALUATED = [3, 6, 9, 10]


def shown(result):
    """{name: {round: value}} of a method; -1 for NaN."""
    return {
        name: {round: np.nan_to_num(one.value, nan=-1).tolist() for round, one in found.items()}
        for name, found in result.diagnostics.items()
    }


def test_what_a_run_records(reporting, tmp_path):
    result = simulate(reporting, tmp_path / "run")["reporting"]
    found = result.diagnostics
    assert shown(result)["tenth"] == {round: round / 10 for round in range(1, 11)}
    assert shown(result)["online"] == dict.fromkeys(EVALUATED, 12)
    # of arrays, the last of each name before an evaluated round, if it is another one
    assert list(found["distance"]) == [1] and found["distance"][1].value.shape == (9, 9)
    assert shown(result)["twice"] == {round: [[round, round]] for round in EVALUATED}
    assert list(found["same"]) == [3] and {*found["members"]} <= {*EVALUATED} and 3 in found["members"]
    assert found["members"][3].labels[0].tolist() == [0, 1, 2]
    # beside them, of every method with clusters
    scores = result.client_metrics()
    clusters = np.zeros(12, int) - 1
    for _, reassigned in read_reassignments(tmp_path / "run" / "reporting" / "reassignments.arrow"):
        clusters[reassigned.client_R] = reassigned.cluster_R
    last = scores[scores["round"] == 10].set_index("client")["accuracy"]
    for cluster in range(3):
        members = np.flatnonzero(clusters == cluster)
        size, score = (found[name][max(found[name])].value[cluster] for name in ("cluster_sizes", "cluster_accuracy"))
        assert size == len(members) and score == pytest.approx(last[members].mean(), rel=1e-6, nan_ok=True)
    # numbers are metrics
    lines = [json.loads(line) for line in (tmp_path / "run" / "reporting" / "metrics.jsonl").read_text().splitlines()]
    assert [line["tenth"] for line in lines] == [round / 10 for round in range(1, 11)]
    assert [line["round"] for line in lines if "online" in line] == EVALUATED
    frame = result.diagnostics_frame()
    assert list(frame.columns) == ["round", "tenth", "online"] and frame["online"].notna().sum() == 4
    assert shown(load_run(tmp_path / "run", reporting)["reporting"]) == shown(result)
    artifact = tmp_path / "run" / "reporting" / "artifacts" / DIAGNOSTICS
    assert artifact.read_bytes() == (tmp_path / "run" / "reporting" / DIAGNOSTICS).read_bytes()


def test_names_of_diagnostics_are_names_of_metrics(experiment, tmp_path):
    result = simulate(experiment(methods=["stocfl"], rounds=2), tmp_path / "run")["stocfl"]
    table = compare_runs([tmp_path / "run"], ["global_score", "objective"])
    assert table["global_score"].tolist() == [result.final["global_score"]] and result.final["global_score"] > 0
    assert table["objective"].tolist() == [result.final["objective"]]
    first_phase = simulate(experiment(methods=["autocfl"], rounds=5, seed=1), tmp_path / "other")["autocfl"]
    table_of_it = compare_runs([tmp_path / "other"], ["progress_variance"])  # of which the last round has none
    assert "progress_variance" not in first_phase.final
    assert table_of_it["progress_variance"].tolist() == [first_phase.last_numbers["progress_variance"]]
    page = (Path(__file__).parents[2] / "docs" / "metrics.md").read_text()
    (block,) = (text for text in re.findall(r"```python\n(.*?)```", page, re.S) if "diagnostics" in text)
    space = {"load_run": load_run, "RUN": tmp_path / "run"}
    exec(block, space)
    assert space["matrix"].axes == ("clusters", "clusters") and len({*space["matrix"].value.shape}) == 1
    assert list(space["frame"].columns) == ["round", "global_score", "objective"]
    assert format_table(table, "md").startswith("| method | runs | global_score | objective |")


def test_without_files_they_are_in_memory(reporting, whole):
    assert shown(simulate(reporting)["reporting"]) == whole[0]


@pytest.fixture(scope="module")
def whole(module_experiment, tmp_path_factory):
    """The diagnostics of an uninterrupted run, and the bytes of its file."""
    folder = tmp_path_factory.mktemp("whole")
    expected = shown(simulate(module_experiment(**REPORTING), folder / "run")["reporting"])
    return expected, (folder / "run/reporting" / DIAGNOSTICS).read_bytes()


@pytest.mark.parametrize("round", [1, 2, 3, 4, 6, 9])  # with and without a checkpoint, evaluated or after such a round
def test_a_crash_loses_none(round, reporting, whole, tmp_path):
    """The driver dies before it has recorded the report of the round, or goes on from a checkpoint before it."""
    folder = tmp_path / "run" / "reporting"
    simulate_until(round, reporting, tmp_path / "run")
    log = DiagnosticsLog(folder)
    kept = [batch for batch in log.log.open() if max(batch["round"].to_pylist()) < round]
    (folder / DIAGNOSTICS).unlink()  # and write again what was recorded of earlier rounds
    for batch in kept:
        log.log.append(batch)
    lines = (folder / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    (folder / "metrics.jsonl").write_bytes(b"".join(lines[: round - 1]))
    (folder / "end.json").unlink(missing_ok=True)
    assert shown(resume(tmp_path / "run", on_ray=False, experiment=reporting)["reporting"]) == whole[0]
    assert (folder / DIAGNOSTICS).read_bytes() == whole[1]


def test_a_name_of_a_metric_ends_the_run_with_a_clear_error(experiment):
    @dataclass(frozen=True)
    class Clashing(IFCA, name="clashing"):
        """For tests."""

        diagnosed: str = "accuracy"

        def diagnose(self, state, clients):
            clients.record(self.diagnosed, 1.0)

    for name in ("accuracy", "mbit", "rounds_to_target_local", "cluster_sizes", "accuracy_p10", "round"):
        method = Clashing(diagnosed=name)
        with pytest.raises(RunError, match=f"clashing: the diagnostic '{name}' has the name of a metric"):
            simulate(experiment(methods=[method], rounds=1))


def test_replays_and_equal_values_are_ignored(tmp_path):
    def add(log, round, value):
        diagnostic = Diagnostic(np.array(value, np.float32), ("clients",), (np.arange(len(value)),))
        log.add(round, {"y": 1.0}, [ReportedDiagnostic("x", round, diagnostic)])

    log, file = DiagnosticsLog(tmp_path), tmp_path / DIAGNOSTICS
    for round, value in ((1, [1]), (2, [1]), (3, [2, np.nan]), (3, [5]), (2, [7]), (4, [2, np.nan])):
        add(log, round, value)
    whole = file.read_bytes()
    found = [(one.name, one.round, one.diagnostic.value.tolist()) for one in read_diagnostics(file)]
    assert found[:2] == [("y", 1, 1.0), ("x", 1, [1.0])] and found[2][:2] == ("x", 3) and len(found) == 3
    for torn in (whole[:-1], whole[:-40]):
        file.write_bytes(torn)
        again = DiagnosticsLog(tmp_path)
        assert again.last["x"].round == 1
        add(again, 3, [2, np.nan])
        assert file.read_bytes() == whole


def test_a_file_of_another_form_is_named(tmp_path):
    with pa.ipc.new_stream(str(tmp_path / DIAGNOSTICS), pa.schema([("x", pa.int8())])):
        pass
    for read in (DiagnosticsLog, lambda folder: read_diagnostics(folder / DIAGNOSTICS)):
        with pytest.raises(DataError, match=r"diagnostics.arrow has columns \['x'\], expected \['round', 'name'"):
            read(tmp_path)


@pytest.mark.parametrize(
    "part, other", [(struct.pack("<ii", 0, 5), struct.pack("<ii", 0, 2**30)), (b"name", b"nam\xff")]
)
def test_a_damaged_file_is_an_error_and_not_the_end_of_the_process(part, other, tmp_path):
    """Offsets of texts outside of the file; a name of a column that is not UTF-8."""
    DiagnosticsLog(tmp_path).add(1, {"speed": 1.0}, [])
    file = tmp_path / DIAGNOSTICS
    before, _, after = file.read_bytes().rpartition(part)
    file.write_bytes(before + other + after)
    with pytest.raises(DataError, match=r"diagnostics.arrow is damaged \(.*\); remove it"):
        read_diagnostics(file)
