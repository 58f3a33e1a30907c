"""Tables and progress lines as they are printed."""

import io
import re
import time

import pytest
from rich.console import Console

from cfl_ray.cli.live_client import RunStatus
from cfl_ray.cli.printed_tables import (
    comparison,
    end_line,
    metrics_line,
    print_table,
    seconds_a_round,
    show_status,
)
from cfl_ray.cli.progress import MAX_NOTES, Display, Pace
from cfl_ray.results.results import MethodResult, Results
from cfl_ray.tracking import RoundRecord


def console() -> Console:
    return Console(file=io.StringIO(), width=200)


def test_metrics_line_has_the_metrics_that_apply():
    assert metrics_line({"accuracy": 0.5, "num_clusters": 4.0, "ari": 1.0, "purity": 1.0}) == (
        "accuracy 0.500  clusters 4  ARI 1.000"
    )
    assert metrics_line({"accuracy": 0.5}) == "accuracy 0.500"


def test_a_run_ends_with_the_metrics_of_the_round_that_is_kept():
    first, last = (RoundRecord(round, {"accuracy": value}) for round, value in ((1, 0.9), (2, 0.5)))
    assert end_line(last, last) == "accuracy 0.500" and end_line(None, None) == "no evaluation"
    assert end_line(RoundRecord(2, last.metrics | {"best_round": 1.0}), first) == "accuracy 0.900  best round 1 of 2"


def rows_of(status: RunStatus) -> dict[str, str]:
    out = console()
    show_status(status, out)
    lines = [line.strip("│┃ ") for line in out.file.getvalue().splitlines() if "│" in line]
    return {name.strip(): value.strip() for name, value in (line.split("│", 1) for line in lines)}


def test_status_of_a_live_run():
    status = RunStatus(
        "digits",
        "live",
        30,
        {"fedavg": "finished", "stocfl": "at work"},
        waiting=1,
        method="stocfl",
        step="running",
        round=7,
        metrics={"accuracy": 0.75, "num_clusters": 4.0},
        evaluated=6,
        hosts=2,
        hosts_starting=0,
        nodes=1,
        clients_online=38,
        clients=40,
        seconds_per_round=1.25,
        seconds_left=180.0,
        last_fault="host 1 died",
        fault_age=7200.0,
        pending=["client 3 leaves before round 8"],
    )
    rows = rows_of(status)
    assert rows.pop("methods") == "fedavg finished, stocfl at work, 1 waiting"
    assert rows.pop("round") == "7 of 30" and rows.pop("accuracy") == "0.750 after round 6"
    assert rows.pop("hosts") == "2 on 1 node, 0 starting" and rows.pop("clients online") == "38 of 40"
    assert rows.pop("seconds per round") == "1.2, about 3 min left for this method"
    assert rows.pop("last fault") == "2.0 h ago: host 1 died"
    assert rows == {
        "current method": "stocfl (running)",
        "clusters": "4",
        "pending requests": "client 3 leaves before round 8",
    }


def test_status_of_a_run_that_is_not_live_shows_the_next_command():
    rows = rows_of(RunStatus("digits", "stopped", 30, {"fedavg": "begun"}, method="fedavg", next="cfl-ray resume RUN"))
    assert rows == {
        "methods": "fedavg begun",
        "last method": "fedavg",
        "round": "0 of 30",
        "resume with": "cfl-ray resume RUN",
    }


def test_without_a_terminal_about_ten_rounds_are_lines_and_notes_are_limited():
    out = console()
    with Display(out, rounds=30) as display:
        for round in range(1, 31):
            status = "finished" if round == 30 else "running"
            display.round("fedavg", RoundRecord(round, {"accuracy": round / 100}, status=status))
        display.round("fedavg", RoundRecord(31, {}, notes=tuple(f"note {n}" for n in range(MAX_NOTES + 2))))
    lines = out.file.getvalue().splitlines()
    assert lines[:10] == [f"fedavg round {round}/30  accuracy {round / 100:.3f}" for round in range(3, 31, 3)]
    assert len(lines) == 10 + MAX_NOTES + 1 and lines[-1] == "fedavg round 31: and 2 more notes"


LABELS = ["fedavg", "stocfl-tau=0.5", "stocfl-tau=0.6-weights=uniform", "stocfl-tau=0.6-weights=samples"]


@pytest.mark.parametrize("width", [40, 60, 72, 80, 100, 160])
def test_no_name_and_no_number_is_cut_off_in_a_narrow_terminal(width):
    metrics = {"accuracy": 0.975, "accuracy_local": 0.5, "ari": 1.0, "num_clusters": 4, "mbit_down": 12345.67}
    record = RoundRecord(1, {**metrics, "mbit_up": 0.0, "round_seconds": 0.0123})
    results = Results({label: MethodResult(label, [record], {}) for label in LABELS}, None)
    out = Console(file=io.StringIO(), width=width)
    print_table(comparison(results), out)
    printed = out.file.getvalue()
    assert "\N{HORIZONTAL ELLIPSIS}" not in printed and printed.count("12345.67") == len(LABELS)
    assert all(len(line) <= width for line in printed.splitlines())
    if "│" in printed:
        names = re.findall(r"^│ *(.*?) *│", printed, re.M)
        assert "".join(names) == "".join(LABELS)
    else:
        assert [line.strip() for line in printed.splitlines() if not line.startswith(" ")][1:] == LABELS


def test_metrics_that_some_runs_have_are_columns_of_these():
    metrics = {"accuracy": 0.5, "mbit_down": 1.0, "mbit_up": 1.0, "round_seconds": 0.1}
    others = {"accuracy_honest": 0.7, "virtual_seconds": 18.25}
    for more, shown in (({}, set()), (others, {"of honest\nclients", "virtual\nseconds"})):
        table = comparison(Results({"a": MethodResult("a", [RoundRecord(1, metrics | more)], {})}, None))
        cells = {str(column.header): list(column.cells) for column in table.columns}
        assert shown == {"of honest\nclients", "virtual\nseconds"} & cells.keys()
    assert cells["of honest\nclients"] == ["0.700"] and cells["virtual\nseconds"] == ["18.250"]


def test_metrics_that_the_config_asks_for_are_columns():
    metrics = {"accuracy": 0.5, "macro_f1": 0.4, "own_score": 0.25, "accuracy_std": 0.1, "accuracy_gini": 0.2}
    others = {"validation/own_score": 0.3, "mbit_down": 1.0, "mbit_up": 1.0, "round_seconds": 0.1}
    results = Results({"a": MethodResult("a", [RoundRecord(1, metrics | others)], {})}, None)
    cells = {str(column.header): list(column.cells) for column in comparison(results, ["own_score"]).columns}
    assert cells["own\nscore"] == ["0.250"]
    assert not {"macro_f1", "accuracy_std", "accuracy_gini", "validation/own_score"} & cells.keys()


def test_seconds_of_a_round_are_the_median_without_the_first():
    def records(*seconds):
        return [RoundRecord(round, {"round_seconds": one}) for round, one in enumerate(seconds, 1)]

    assert seconds_a_round(records(9.0, 1.0, 2.0, 4.0)) == 2.0
    assert seconds_a_round(records(9.0)) == 9.0
    assert seconds_a_round(records(9.0, 1.0, 2.0, 4.0)[2:]) == 3.0  # a run that was resumed


def test_the_time_left_is_estimated_without_the_first_round():
    """Rounds of 10, 2 and 4 seconds: 3 on average without the first. 7 rounds are left, and 10 of each other method."""
    pace = Pace(10)
    pace.begin("fedavg", 100.0)
    pace.add("fedavg", 110.0)
    assert pace.left_of_method("fedavg", 1) is None and pace.left_of_run("fedavg", 1, 2) is None
    pace.add("fedavg", 112.0)
    pace.add("fedavg", 116.0)
    assert pace.left_of_method("fedavg", 3) == 7 * 3.0
    assert pace.left_of_run("fedavg", 3, 2) == 7 * 3.0 + 2 * 10 * 3.0
    pace.begin("ifca", 200.0)
    pace.add("ifca", 210.0)
    pace.add("ifca", 215.0)
    assert pace.left_of_run("ifca", 2, 1) == 8 * 5.0 + 10 * (3.0 + 5.0) / 2


def test_lines_have_the_time_left(monkeypatch):
    now = [0.0]
    monkeypatch.setattr("cfl_ray.cli.progress.time.monotonic", lambda: now[0])
    out = console()
    with Display(out, rounds=3) as display:
        display.labels = ["fedavg", "ifca"]
        for label in display.labels:
            display.method(label, RoundRecord(0, {}))
            for round in (1, 2, 3):
                now[0] += 60.0
                status = "finished" if round == 3 else "running"
                display.round(label, RoundRecord(round, {"accuracy": 0.5}, status=status))
    assert out.file.getvalue().splitlines() == [
        "fedavg round 1/3  accuracy 0.500",
        "fedavg round 2/3  accuracy 0.500  about 60 s left, 4 min in all",
        "fedavg round 3/3  accuracy 0.500  about 3 min left in all",
        "ifca round 1/3  accuracy 0.500",
        "ifca round 2/3  accuracy 0.500  about 60 s left",
        "ifca round 3/3  accuracy 0.500",
    ]


def test_a_long_round_shows_its_step_and_a_short_one_does_not(monkeypatch, tmp_path):
    monkeypatch.setattr("cfl_ray.cli.progress.WATCH_SECONDS", 0.01)
    monkeypatch.setattr("cfl_ray.cli.progress.own_step", lambda run_dir: "evaluating")
    now = [0.0]
    monkeypatch.setattr("cfl_ray.cli.progress.time.monotonic", lambda: now[0])
    out = Console(file=io.StringIO(), width=200, force_terminal=True)

    def shown(display) -> str:
        time.sleep(0.1)
        return display.progress.tasks[0].fields["metrics"]

    with Display(out, rounds=3) as display:
        display.run_dir = tmp_path
        display.method("fedavg", RoundRecord(0, {}))
        now[0] = 9.0
        assert shown(display) == ""
        now[0] = 11.0
        assert shown(display) == "round 1: evaluating, 11 s so far"
        display.round("fedavg", RoundRecord(1, {"accuracy": 0.5}))
        assert shown(display) == "accuracy 0.500"
        display.run_dir, now[0] = None, 31.0  # nothing is known of the step
        assert shown(display) == "accuracy 0.500  round 2: 20 s so far"
        display.round("fedavg", RoundRecord(3, {"accuracy": 0.75}, status="finished"))
        now[0] = 99.0
        assert "so far" not in shown(display)
